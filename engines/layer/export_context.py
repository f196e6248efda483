"""What PyTorch says of its own graphs while it traces a model stays away from the user's screen."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from engines.layer.constant_propagation import ConstantPropagationMode
from engines.layer.custom_functions import check_custom_functions

__all__ = ["TraceAbortedError", "silence_exporter", "watch_forward"]

_LOGGERS = ("torch.export", "torch._export", "torch.fx", "torch._dynamo", "torch._subclasses")


class TraceAbortedError(Exception):
    """A trace that an `error` of the model has ended. PyTorch prints the graph so far of errors that it can mark."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    def __setattr__(self, name: str, value: object) -> None:
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


@contextmanager
def watch_forward(module: nn.Module, asked: ConstantPropagationMode) -> Iterator[None]:
    """While a module's forward runs: `asked` answers what it asks of tensors. Its errors come as StoppedError."""
    asked.add_buffers(dict(module.named_buffers(remove_duplicate=False)))
    try:
        with asked, check_custom_functions():
            yield
    except Exception as error:
        raise TraceAbortedError(error) from error


@contextmanager
def silence_exporter() -> Iterator[None]:
    """While it lasts PyTorch's exporter logs and warns nothing; what the model itself warns is seen."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]
    talking = [logger for logger in loggers if not logger.disabled]
    for logger in talking:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            for name in _LOGGERS:
                warnings.filterwarnings("ignore", module=name.replace(".", r"\."))
            yield
    finally:
        for logger in talking:
            logger.disabled = False
