"""What is traced: copies of a module without memory, and checks of what a trace would get wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.constant_propagation import ConstantPropagationMode
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.outputs import call_loss
from mpi4dl_nb.engines.graph.outside_state import restore_outside_state
from mpi4dl_nb.engines.graph.owners import collect_buffers, iterate_attributes
from mpi4dl_nb.engines.graph.repeatable import RepeatedRun
from mpi4dl_nb.engines.graph.watch_forward import ONE_AT_A_TIME, watch_forward

# Copies of a module without memory: the same names, shapes and classes, with fake tensors on the CPU.


def make_fake_copy(module: nn.Module, mode: FakeTensorMode, dtype: str, memo: Mapping[int, Any] = {}) -> nn.Module:
    """Return a copy whose weights and buffers have no memory; those of floating type have `dtype`.

    They are replaced before `deepcopy` would copy them. Other tensors of the module are copied with their numbers,
    except those in `memo`, that of `deepcopy`.
    """
    # `deepcopy` takes an object in its memo for copied already, and never looks into the real tensors. Tied weights
    # are one object and stay tied.
    memo = dict(memo)
    with mode:
        for tensor in [*module.parameters(), *module.buffers()]:
            kind = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
            twin = torch.empty_like(tensor.detach(), dtype=kind, device="cpu")
            is_weight = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(twin, requires_grad=tensor.requires_grad) if is_weight else twin
    return copy.deepcopy(module, memo)


def make_fake_tensor(mode: FakeTensorMode, spec: TensorSpec) -> Tensor:
    """Return a tensor without memory."""
    with mode:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")


# Checks before tracing: models that cannot be traced, and those that a trace would get wrong.
#
# A trace is made once and runs in every step. It contains the values that Python attributes had when it was made.
# Writes to attributes, and replacements of weights, are not repeated.


CUMULATIVE = float("inf")
"""Momentum that marks, in a trace, a batch norm whose statistics are the mean over all batches (momentum=None)."""


def check_modules(model: nn.Module, loss: Any = None) -> None:
    """Raise TraceError for modules that cannot be traced: compiled by torch.jit, or lazy ones without shapes yet.

    Gradient hooks are refused too, since a trace does not contain them, and a loss that is no function.
    """
    if not isinstance(model, nn.Module | torch.jit.ScriptFunction):
        raise TraceError(f"The model is {_describe_no_module(model)}")
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        called = loss.__name__ if isinstance(loss, type) else repr(loss)
        remedy = f"an instance of it, such as {called}()" if isinstance(loss, type) else "nn.CrossEntropyLoss()"
        raise TraceError(
            f"loss={called} is a {type(loss).__name__ if not isinstance(loss, type) else 'class'}, but must be a "
            f"function of the prediction and the labels: give {remedy}."
        )
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
        kept = collect_attributes(owner) if isinstance(owner, nn.Module) else {}
        if stale := [name for name, tensors in kept.items() if not all(tensor.is_leaf for tensor in tensors)]:
            raise TraceError(
                f"The {what} holds in its attribute {stale[0]} a result of an earlier run, with its gradient graph, "
                f"which is no constant. Remove it before ({what}.{stale[0]} = None); tensors to keep are parameters or "
                "buffers. (In place of torch.nn.utils.weight_norm, use that of torch.nn.utils.parametrizations.)"
            )
        if hooked := next(_find_hooked(owner), ""):
            raise TraceError(
                f"{hooked} of the {what} has a hook of its gradient, which ranks would not call: they train copies of "
                "weights by a trace of forward. Remove the hook, and compute the same in forward; the norm of all "
                "gradients is bounded by clip_norm."
            )


def _describe_no_module(given: object) -> str:
    """Return what was given in place of a model, and the remedy."""
    name = getattr(given, "__name__", type(given).__name__)
    if isinstance(given, type):
        return f"the class {name}, not a model made of it. Make one: {name}(...)."
    if isinstance(given, Mapping):
        return (
            f"a {name} of {len(given)} entries, not an nn.Module. If it is a state_dict, make the model, "
            "model.load_state_dict(it), and give the model."
        )
    if callable(given):
        return f"the function {name}, not an nn.Module. If it makes the model, call it: {name}(). Else put it in one."
    return f"a {name}, not an nn.Module. The order of arguments is (model, plan, ...)."


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
    if not isinstance(module, _BatchNorm) or module.num_batches_tracked is None:
        return False
    return module.track_running_stats and module.momentum is None


def check_side_effects(model: nn.Module, images: TensorSpec) -> None:
    """Raise TraceError if a run of the model has side effects that a trace does not repeat.

    These are changes of numbers in attributes, replaced weights or buffers, draws from Python's or NumPy's random
    generator, and whatever else makes two runs differ. A copy without memory runs twice: what only the first run sets,
    such as a remembered size, is accepted, but flags are not. A model that cannot run is skipped: tracing it reports
    the error.
    """
    # The first run may set up what later runs use, as `if self.size is None: self.size = x.shape` does: what it sets
    # stays. What the second run changes once more would change in every step.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    try:
        twin = make_fake_copy(model, mode, images.dtype)
        owners, whole = nn.ModuleDict({"model": twin}), make_fake_tensor(mode, images)
        held = collect_buffers(model)
        repeated = RepeatedRun(lambda log: _run_watched(owners, held, mode, log, twin, whole), "model")
        # numbers: new --first run--> before --second run--> (read below)
        new, memory = _collect_numbers(twin), _get_storages(twin)
        with restore_outside_state(model):
            repeated.rerun()
            before = _collect_numbers(twin)
            repeated.rerun()
            after, storages = _collect_numbers(twin), _get_storages(twin)
            repeated.settle()
    except Exception:
        return
    repeated.check_generators()
    if replaced := [name for name, storage in storages.items() if storage._cdata != memory[name]._cdata]:
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
    for name, value in after.items():
        was = before.get(name, value)
        if was is not value and was != value:  # a nan that stays is not equal to itself
            raise TraceError(
                f"The model changes its attribute {name} while it runs, from {was} to {value}. Ranks run "
                "what was traced once, with the number of then. Keep it in a buffer that counts, or change it outside."
            )
    repeated.check_operators()


def check_loss_repeats(
    model: nn.Module, loss: Callable[..., Any], images: TensorSpec, labels: TensorSpec, prediction: TensorSpec | None
) -> None:
    """Raise TraceError if the loss differs from call to call, for the same prediction; skip what cannot run.

    The model runs once, without memory, unless the spec of the `prediction` is given.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    try:
        called = make_fake_copy(loss, mode, images.dtype) if isinstance(loss, nn.Module) else loss
        owners = nn.ModuleDict({"loss": called} if isinstance(called, nn.Module) else {})
        truth = make_fake_tensor(mode, labels)
        if prediction:
            answer: Any = make_fake_tensor(mode, prediction)
        else:
            twin, whole = make_fake_copy(model, mode, images.dtype), make_fake_tensor(mode, images)
            both = nn.ModuleDict({"model": twin}), collect_buffers(model)
            with restore_outside_state(model, loss):
                answer = _run_watched(*both, mode, nullcontext(), twin, whole)
        held = collect_buffers(None, loss)
        run = partial(call_loss, called)
        repeated = RepeatedRun(lambda log: _run_watched(owners, held, mode, log, run, answer, truth), "loss")
        with restore_outside_state(model, loss):
            repeated.rerun()
            repeated.rerun()
            repeated.settle()
    except Exception:
        return
    repeated.check_generators()
    repeated.check_operators()


def _run_watched(
    owners: nn.Module, held: Mapping[str, Tensor], mode: FakeTensorMode, log: Any, run: Callable[..., Any], *given: Any
) -> Any:
    """Call a model or loss as a trace does: reads of numbers that follow from shapes or buffers are answered.

    `owners` are the copies without memory, `held` the user's own buffers, and `log` is a context of the call.
    """
    constants = ConstantPropagationMode(held)
    eager = torch.compiler.set_stance("force_eager")
    with ONE_AT_A_TIME, mode, torch.no_grad(), eager, watch_forward(owners, constants), log:
        return run(*given)


def _get_storages(model: nn.Module) -> dict[str, torch.UntypedStorage]:
    """Return the storage of each weight and buffer."""
    return {name: tensor.untyped_storage() for name, tensor in _iterate_tensors(model)}


def collect_attributes(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors in the attributes of all modules, other than weights and buffers, by the attribute's name.

    An attribute may be a list, tuple or dict of tensors.
    """
    attributes: dict[str, list[Tensor]] = {}
    for _, name, value, path in iterate_attributes(model):
        if name not in ("_parameters", "_buffers", "_modules"):
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            if tensors := [tensor for tensor in inner if isinstance(tensor, Tensor)]:
                attributes[path] = tensors
    return attributes


def _collect_numbers(model: nn.Module) -> dict[str, float]:
    """Return the numbers in the attributes of all modules."""
    return {path: value for _, _, value, path in iterate_attributes(model) if isinstance(value, int | float)}
