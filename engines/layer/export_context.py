"""Context managers for a trace: they hide PyTorch's messages about its own graphs, and watch a model's forward."""

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
    """Wraps the model's `error` that ended a trace.

    PyTorch prints the partial graph of errors on which it can set `partial_fx_graph`; this class ignores it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    def __setattr__(self, name: str, value: object) -> None:
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


@contextmanager
def watch_forward(module: nn.Module, asked: ConstantPropagationMode) -> Iterator[None]:
    """Within the context, `asked` answers forward's reads of tensor values. Errors become TraceAbortedErrors."""
    asked.add_buffers(dict(module.named_buffers(remove_duplicate=False)))
    try:
        with asked, check_custom_functions():
            yield
    except Exception as error:
        raise TraceAbortedError(error) from error


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Within the context, PyTorch's exporter logs and warns nothing; warnings of the model itself still appear."""
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
