"""Checks of `torch.autograd.Function`: a trace has only the operators of its forward.

Ranks derive the gradient of these operators themselves. A function whose own backward computes the same gradient, such
as that of memory-efficient activations, is accepted; any other is refused.
"""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from keyword import iskeyword
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointFunction

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.constant_propagation import ConstantPropagationMode, disable_tracing
from mpi4dl_nb.engines.graph.exported_nodes import find_current_line

ONE_AT_A_TIME = threading.RLock()
"""Held while a model is traced or tried: that changes attributes of torch for all threads, and ranks may be threads."""


class _NullContext:
    """Replaces the context of a function whose backward is not called: it ignores every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@contextmanager
def _check_custom_functions(constants: ConstantPropagationMode) -> Iterator[None]:
    """Within the context, check each function that this thread calls; note in `constants` what backward recomputes.

    Raises TraceError for a function whose backward does not compute the gradient of its forward.
    """
    # `apply` is replaced for all threads, as it is an attribute of a class; ranks may be threads that train meanwhile.
    # Two threads that replace it at once would not restore it: the caller holds ONE_AT_A_TIME.
    thread = threading.get_ident()
    tried: list[Any] = []
    plain = inspect.getattr_static(torch.autograd.Function, "apply")  # not a Python function in torch 2.14

    def apply(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        if cls is CheckpointFunction and threading.get_ident() == thread:
            constants.recomputes = True
            # Its forward runs without gradients, its backward once more with them: the same as to call the function.
            # Where no argument requires a gradient, PyTorch computes none.
            run, _, *inputs = arguments
            graded = torch.is_grad_enabled() and any(isinstance(item, Tensor) and item.requires_grad for item in inputs)
            with torch.set_grad_enabled(graded):
                return run(*inputs)
        ours = cls.__module__.startswith(("torch.", "mpi4dl_nb."))
        if threading.get_ident() == thread and not ours and cls not in tried:
            tried.append(cls)  # `_check` calls `apply` again
            _check(cls, arguments)
            tried.remove(cls)
            # `apply` runs forward without gradients, which a trace does not see: it would take the mode that
            # `torch.no_grad()` within forward returns to for that of all that follows.
            return _call_forward(cls, arguments)
        return plain.__get__(None, cls)(*arguments, **keywords)

    def enter(hooks: Any) -> Any:
        if threading.get_ident() != thread:
            return plain_enter(hooks)
        # Whatever recomputes without a function of its own keeps less than autograd would, by such hooks. A trace keeps
        # nothing for backward: they are not called, or what they do would be in the trace as if forward did it.
        constants.recomputes = True
        return None

    def leave(hooks: Any, *error: Any) -> None:
        if threading.get_ident() != thread:
            plain_leave(hooks, *error)

    plain_enter, plain_leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    watched = patch.object(torch.autograd.Function, "apply", classmethod(apply))
    with watched, patch.multiple(saved_tensors_hooks, __enter__=enter, __exit__=leave):
        yield


def _check(cls: Any, arguments: tuple[Any, ...]) -> None:
    why, cause = "it is another one", None
    try:
        if _has_same_gradients(cls, arguments):
            return
    except Exception as error:
        why, cause = f"it could not be tried ({type(error).__name__}: {error})", error
    raise TraceError(
        f"{find_current_line()} calls {cls.__name__}, a torch.autograd.Function. A trace has what its forward "
        f"computes, and the gradient of that in place of its backward: {why}. Write what you mean in forward, such as "
        "x + (f(x) - x).detach() for a gradient that passes straight through."
    ) from cause


def _has_same_gradients(cls: Any, arguments: tuple[Any, ...]) -> bool:
    """Return whether backward computes the gradients of forward, for random numbers of similar shapes."""
    random = torch.Generator().manual_seed(0)

    def make_trial(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = list(argument.shape)
        if argument.numel() > 1 << 18:  # a few rows and columns of an image tell as much, in less time
            shape[2:] = [min(size, 8) for size in shape[2:]]
        if not argument.is_floating_point():
            return torch.randint(0, 2, shape, generator=random).to(argument.dtype)
        return torch.randn(shape, generator=random, dtype=torch.float64)

    with disable_tracing(), torch.enable_grad():
        trials = [make_trial(argument) for argument in arguments]
        theirs = _compute_gradients(cls.apply, trials)
        ours = _compute_gradients(lambda *these: _call_forward(cls, these), trials)

    def is_same(gradient: Tensor | None, other: Tensor | None) -> bool:
        if gradient is None or other is None:
            return gradient is other
        return torch.allclose(gradient, other, rtol=1e-8, atol=1e-10)

    return len(theirs) == len(ours) and all(map(is_same, theirs, ours))


def _call_forward(cls: Any, arguments: Sequence[Any]) -> Any:
    """Call a function's forward as ordinary code: autograd differentiates its operators, as on ranks."""
    # It takes a context as its first argument unless the class has a `setup_context` of its own.
    has_context = cls.setup_context is torch.autograd.Function.setup_context
    return cls.forward(*([_NullContext()] if has_context else []), *arguments)


def _compute_gradients(run: Callable[..., Any], given: list[Any]) -> list[Tensor | None]:
    """Return the gradients of randomly weighted results by the arguments, followed by the results."""
    # The weights of the results are random, so that two wrong gradients do not cancel each other, and seeded, so that
    # both sides have the same.
    leaves = [
        argument.clone().requires_grad_(argument.is_floating_point()) if isinstance(argument, Tensor) else argument
        for argument in given
    ]
    out = run(*(leaf * 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves))  # copies: `run` may write to them
    results = [tensor for tensor in (out if isinstance(out, tuple | list) else [out]) if isinstance(tensor, Tensor)]
    random = torch.Generator().manual_seed(1)
    weighted = [(tensor * torch.randn(tensor.shape, generator=random, dtype=torch.float64)).sum() for tensor in results]
    total = sum(weight for weight in weighted if weight.requires_grad)
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients = list(torch.autograd.grad(total, wanted, allow_unused=True)) if isinstance(total, Tensor) else []
    return [*gradients, *(tensor.detach().double() for tensor in results)]


# Context managers for a trace: they hide PyTorch's messages about its own graphs, and watch a model's forward.


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
def watch_forward(module: nn.Module, constants: ConstantPropagationMode) -> Iterator[None]:
    """Within the context, `constants` answers forward's reads of tensor values. Errors become TraceAbortedErrors."""
    constants.add_buffers(dict(module.named_buffers(remove_duplicate=False)))
    try:
        with constants, _check_custom_functions(constants):
            yield
    except Exception as error:
        raise TraceAbortedError(error) from error


@contextmanager
def quote_layer_names() -> Iterator[None]:
    """Within the context, PyTorch writes code for graphs whose layers have any name, such as "class".

    A graph's code is never run here, but PyTorch compiles it, and writes names into it as they are.
    """

    def format_target(base: str, target: str) -> str:
        for name in target.split("."):
            plain = name.isidentifier() and not iskeyword(name)
            base = f"{base}.{name}" if plain else f"getattr({base}, {name!a})"
        return base

    with patch.object(torch.fx.graph, "_format_target", format_target):
        yield


@contextmanager
def restore_module_stack() -> Iterator[None]:
    """Within the context, a module that raises an error does not confuse PyTorch's exporter if the error is caught.

    The exporter's tracer keeps a stack of the modules that are being called, and does not take off one that raises.
    """
    mode = get_proxy_mode()
    stack = getattr(mode.tracer, "module_stack", None) if mode else None
    before = dict(stack or {})
    try:
        yield
    except Exception:
        if stack is not None:
            stack.clear()
            stack.update(before)
        raise


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
            # Of recurrent layers, which list their weights in forward. Our own checks see what a trace would lose.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
            yield
    finally:
        for logger in talking:
            logger.disabled = False
