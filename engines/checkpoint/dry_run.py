"""Whether a training could go on from the state of an optimiser and a scheduler: a step is tried, without memory.

Weights on PyTorch's meta device have shapes and types, but no memory. So have their gradients, and what an optimiser
keeps of them; what is a number for each weight, such as how often it has moved, stays one.

    the optimiser as it is made      a step fails: it cannot be tried so, and only sizes are looked at
    with the options that were read  a step fails: so would every step of the training
                                     what it keeps of each weight now is what must have been read
    and with the state               a step fails: so would every step of the training
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engines.checkpoint.json_values import check_like, check_scheduler_state, is_finite
from engines.checkpoint.manifest import MOST_STEPS
from engines.checkpoint.weight_state import get_class_name
from engines.program.update import Scheduler

__all__ = ["check_optimiser_step", "check_scheduler_step"]

_OWN = "torch.optim"


def check_optimiser_step(optimiser: torch.optim.Optimizer, made: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Compare what `state_dict_of` has made with what a fresh `optimiser` keeps, and try a step from it.

    `names` go by the weights' ids. Raises ValueError where a training would accept it and then fail in every step.
    """
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    kept = {index: (weights[index], names[id(weights[index])], held) for index, held in made["state"].items()}
    for weight, name, held in kept.values():
        for key, value in held.items():
            _check_size(value, weight, f"{name}/{key}")
    if not _can_step(lambda: _copy_to_meta(optimiser).step()):
        return
    after = _copy_to_meta(optimiser, made)
    _try_step(after.step, f"{get_class_name(optimiser)} with these options")
    usual = dict(enumerate(after.state.get(weight, {}) for group in after.param_groups for weight in group["params"]))
    is_own = type(optimiser).__module__.startswith(_OWN)
    for index, (_, name, held) in kept.items():
        _check_weight_values(held, usual[index], name, is_own)
    again = _copy_to_meta(optimiser, made)
    moved = [weight for group in again.param_groups for weight in group["params"]]
    for index, (_, _, held) in kept.items():
        again.state[moved[index]] = {key: _convert_like(value, usual[index].get(key)) for key, value in held.items()}
    _try_step(again.step, f"{get_class_name(optimiser)} from this state")


def check_scheduler_step(
    optimiser: torch.optim.Optimizer, made: Mapping[str, Any], scheduler: Scheduler, state: dict[str, Any], steps: int
) -> None:
    """Compare a scheduler's state with that of a fresh one, and try a step from it; `steps` the training has made.

    Raises ValueError as `check_moves`. That a scheduler has come to its end (`total_steps`) it says by itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler that steps without its optimiser
        fresh: Any = scheduler(_copy_to_meta(optimiser))
        check_scheduler_state(state, fresh)
        done, first = state.get("last_epoch", 0), getattr(fresh, "last_epoch", 0)  # those that are chained have none
        if not isinstance(done, int) or not 0 <= done <= first + steps:
            raise ValueError(f"{get_class_name(fresh)} has made {str(done)[:20]} steps, and the training {steps}")
        if not _can_step(fresh.step):
            return
        trial = _copy_to_meta(optimiser, made)
        paced: Any = scheduler(trial)
        _set_options(trial, made)
        paced.load_state_dict(copy.deepcopy(state))
        try:
            paced.step()
        except ValueError:
            return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{get_class_name(fresh)} cannot step from this state: {why}") from error
    for group in trial.param_groups:
        if not is_finite(group["lr"]):
            raise ValueError(f"{get_class_name(fresh)} steps from this state to a learning rate of {group['lr']}")


def _copy_to_meta(optimiser: torch.optim.Optimizer, made: Mapping[str, Any] | None = None) -> torch.optim.Optimizer:
    """A copy of it on the meta device, with the options of `made`; every weight has a gradient."""
    memo: dict[int, Any] = {}
    for group in optimiser.param_groups:
        for weight in group["params"]:
            empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            memo[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
    for kept in optimiser.state.values():
        memo |= {id(value): value.to("meta") for value in kept.values() if isinstance(value, Tensor) and value.dim()}
    copied = copy.deepcopy(optimiser, memo)
    for group in copied.param_groups:
        for weight in group["params"]:
            weight.grad = torch.empty_like(weight) if weight.requires_grad else None
    if made is not None:
        _set_options(copied, made)
    return copied


def _set_options(optimiser: torch.optim.Optimizer, made: Mapping[str, Any]) -> None:
    """But for those by which kernels are chosen, of which some are of GPUs alone: the numbers are the same."""
    for group, said in zip(optimiser.param_groups, made["param_groups"], strict=True):
        group.update({key: copy.deepcopy(said[key]) for key in said.keys() - {"params", "param_names"}})
        group.update(dict.fromkeys(group.keys() & {"fused", "foreach"}, False))


def _can_step(step: Callable[[], object]) -> bool:
    """Whether it can be done at all without memory: many an optimiser of others looks at its numbers."""
    try:
        step()
    except Exception:
        return False
    return True


def _try_step(step: Callable[[], object], what: str) -> None:
    try:
        step()
    except Exception as error:
        raise ValueError(f"{what} cannot step: {type(error).__name__}: {error}") from error


def _convert_like(value: Any, usual: Any) -> Any:
    """Where, and of the type that, the optimiser itself would have it: kernels take nothing else."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(usual, Tensor):
        return value.to(usual.device, usual.dtype)
    return value.to("meta") if value.dim() else value


def _check_size(value: Any, weight: Tensor, where: str) -> None:
    """The largest that optimisers keep is a square of one of the weight's sides."""
    most = max(weight.numel(), *(side**2 for side in weight.shape), 1)
    if isinstance(value, Tensor) and value.numel() > most:
        raise ValueError(f"{where} has the shape {tuple(value.shape)}, and its weight {tuple(weight.shape)}")


def _check_weight_values(held: Mapping[str, Any], usual: Mapping[str, Any], name: str, is_own: bool) -> None:
    """What is kept of one weight. An optimiser of others may keep some of it from a later step on only."""
    for key, value in held.items():
        where = f"{name}/{key}"
        if key in usual:
            check_like(value, usual[key], where)
            _check_tensor(value, usual[key], where)
        elif is_own:
            raise ValueError(f"{where} is none of what it keeps: {', '.join(usual) or 'nothing'}")
        if key == "step" and not 0 <= _to_float(value) <= MOST_STEPS:
            raise ValueError(f"{where} is {_to_float(value)}, which is no number of steps")


def _check_tensor(value: Any, usual: Any, where: str) -> None:
    if not isinstance(value, Tensor) or not isinstance(usual, Tensor):
        return
    if value.shape != usual.shape:
        raise ValueError(f"{where} has the shape {tuple(value.shape)} instead of {tuple(usual.shape)}")
    if _get_number_class(value) != _get_number_class(usual):
        raise ValueError(f"{where} is of type {value.dtype}, and here of type {usual.dtype}")
    if not value.dim() and not value.is_meta and not is_finite(value):
        raise ValueError(f"{where} is {value.item()}")


def _get_number_class(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _to_float(value: Any) -> float:
    """NaN where it is none."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta and not value.is_complex() else math.nan
    return value if isinstance(value, int | float) else math.nan
