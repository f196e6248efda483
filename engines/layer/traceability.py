"""Checks before tracing: models that cannot be traced, and those that a trace would get wrong.

A trace is made once and runs in every step. It contains the values that Python attributes had when it was made. Writes
to attributes, and replacements of weights, are not repeated.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from engines.errors import TraceError
from engines.layer.fake_model import make_fake_copy, make_fake_tensor
from engines.layer.graph import TensorSpec

__all__ = ["CUMULATIVE", "check_modules", "check_side_effects", "has_hooks", "make_traceable"]

CUMULATIVE = float("inf")
"""Momentum that marks, in a trace, a batch norm whose statistics are the mean over all batches (momentum=None)."""


def check_modules(model: nn.Module, loss: Any = None) -> None:
    """Raise TraceError for modules that cannot be traced: compiled by torch.jit, or lazy ones without shapes yet.

    Gradient hooks are refused too, since a trace does not contain them.
    """
    for what, owner in (("model", model), ("loss", loss)):
        if isinstance(owner, torch.jit.ScriptFunction):
            raise TraceError(_describe_scripted(what, owner))
        for name, module in owner.named_modules() if isinstance(owner, nn.Module) else ():
            if isinstance(module, torch.jit.ScriptModule):
                raise TraceError(_describe_scripted(f"{what}.{name}".rstrip("."), module))
        if lazy := [name for name, tensor in _iterate_tensors(owner) if is_lazy(tensor)]:
            raise TraceError(
                f"The {what} has lazy modules whose weights have no shape yet: {', '.join(lazy)}. Run it once before, "
                "such as model(torch.zeros(image_shape)), so that they get their shapes and first values."
            )
        if hooked := next(_find_hooked(owner), ""):
            raise TraceError(
                f"{hooked} of the {what} has a hook of its gradient, which ranks would not call: they train copies of "
                "weights by a trace of forward. Remove the hook, and compute the same in forward; the norm of all "
                "gradients is bounded by clip_norm."
            )


def _describe_scripted(what: str, owner: object) -> str:
    return (
        f"The {what} is a {type(owner).__name__} of torch.jit, into which torch.export cannot look. "
        "Give the nn.Module or function that it was made of."
    )


def _find_hooked(owner: object) -> Iterator[str]:
    """Yield the parameters with gradient hooks, and the modules with backward hooks."""
    if isinstance(owner, nn.Module):
        yield from (f"The parameter {name}" for name, weight in owner.named_parameters() if has_hooks(weight))
        for name, module in owner.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                yield f"The module {name or type(module).__name__}"


def has_hooks(weight: Tensor) -> bool:
    """Return whether a hook is called with the gradient of a weight."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def _iterate_tensors(owner: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(owner, nn.Module):
        yield from owner.named_parameters()
        yield from owner.named_buffers()


def make_traceable(model: nn.Module) -> nn.Module:
    """Return the model, or a copy with momentum CUMULATIVE where a batch norm reads its counter (momentum=None).

    The copy shares the weights and buffers.
    """
    if not any(map(_is_cumulative, model.modules())):
        return model
    twin: nn.Module = copy.deepcopy(model, {id(tensor): tensor for _, tensor in _iterate_tensors(model)})
    for module in filter(_is_cumulative, twin.modules()):
        module.momentum = CUMULATIVE  # type: ignore[assignment]
    return twin


def _is_cumulative(module: nn.Module) -> bool:
    counts = isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
    return counts and module.track_running_stats and module.momentum is None  # type: ignore[union-attr]


def check_side_effects(model: nn.Module, images: TensorSpec) -> None:
    """Raise TraceError if a run of the model has side effects that a trace does not repeat.

    These are changes of numbers in attributes, replaced weights or buffers, and draws from Python's or NumPy's random
    generator. A copy without memory runs twice: numbers that only the first run sets, such as a remembered size, are
    accepted, but flags are not. A model that cannot run is skipped: tracing it reports the error.
    """
    # The first run may set up what later runs use, as `if self.size is None: self.size = x.shape` does: what it sets
    # stays. What the second run changes once more would change in every step.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        twin = make_fake_copy(model, mode, getattr(torch, images.dtype))
        whole = make_fake_tensor(mode, images.shape, images.dtype)
        with mode, torch.no_grad(), torch.compiler.set_stance("force_eager"):
            # numbers: new --first run--> before --second run--> (read below)
            new, memory = dict(_iterate_numbers(twin)), _get_storages(twin)
            drew_first = _find_generators_used(lambda: twin(whole))
            before = dict(_iterate_numbers(twin))
            drew_again = _find_generators_used(lambda: twin(whole))
    except Exception:
        return
    if drawn := drew_first & drew_again:
        raise TraceError(
            f"The model draws random numbers by {' and '.join(sorted(drawn))} while it runs. Ranks run what was traced "
            "once, with the numbers of then. Draw them with torch (torch.rand, dropout), and choose with torch.where."
        )
    if replaced := [name for name, place in _get_storages(twin).items() if place._cdata != memory[name]._cdata]:
        raise TraceError(
            f"The model puts another tensor in the place of {replaced[0]} while it runs (by = or .data =), which ranks "
            "would not do. Change it after a step instead, or compute in forward what is needed of it."
        )
    for name, flag in before.items():
        if isinstance(flag, bool) and new.get(name, flag) != flag:
            raise TraceError(
                f"The model sets its attribute {name} from {new[name]} to {flag} in its first run, and may do another "
                "thing in that than later, which a trace of it does not. Run it once before: model(images)."
            )
    for name, number in _iterate_numbers(twin):
        if before.get(name, number) != number:
            raise TraceError(
                f"The model changes its attribute {name} while it runs, from {before[name]} to {number}. Ranks run "
                "what was traced once, with the number of then. Keep it in a buffer that counts, or change it outside."
            )


def _find_generators_used(run: Callable[[], object]) -> set[str]:
    """Return which random generators other than torch's a run draws from, and restore their states."""
    # The states are restored, so that a check does not change what the user draws next.
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 (the one that users may draw from)
    run()
    after = np.random.get_state()  # noqa: NPY002
    found = {"Python's random"} if random.getstate() != python else set()
    if after[2:] != arrays[2:] or not np.array_equal(after[1], arrays[1]):
        found.add("numpy.random")
    random.setstate(python)
    np.random.set_state(arrays)  # noqa: NPY002
    return found


def _get_storages(model: nn.Module) -> dict[str, torch.UntypedStorage]:
    """Return the storage of each weight and buffer."""
    return {name: tensor.untyped_storage() for name, tensor in _iterate_tensors(model)}


def _iterate_numbers(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the numbers in the attributes of all modules."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float):
                yield f"{prefix}.{name}".lstrip("."), value
