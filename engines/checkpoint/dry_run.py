"""Check by a trial step without memory that training can continue from the state of an optimiser and a scheduler.

Weights on PyTorch's meta device have shapes and dtypes, but no memory. The same holds for their gradients and for the
optimiser's state. Scalar state, such as the step count of a weight, keeps its value.

    trial step of                       if the step fails
    1. the optimiser as it was made     a trial is impossible: only sizes are checked
    2. ... with the saved options       every step of the training would fail, too
                                        (afterwards: its state shows what must have been saved)
    3. ... and with the saved state     every step of the training would fail, too
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


def check_optimiser_step(optimiser: torch.optim.Optimizer, made: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Compare `made` with the state that a fresh `optimiser` builds, and try a step from it.

    `made` is the result of `make_optimiser_state`; `names` maps ids of weights to names. Raises ValueError if
    `load_state_dict` would accept the state but every step would fail.
    """
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    kept = {index: (weights[index], names[id(weights[index])], held) for index, held in made["state"].items()}
    for weight, name, held in kept.values():
        # Optimisers' largest states have the weight's size, or are square matrices over one of its sides (Shampoo).
        most = max(weight.numel(), *(side**2 for side in weight.shape), 1)
        for key, value in held.items():
            if isinstance(value, Tensor) and value.numel() > most:
                raise ValueError(
                    f"{name}/{key} has the shape {tuple(value.shape)}, and its weight {tuple(weight.shape)}"
                )
    # Each trial uses its own copy, because a step changes the optimiser's state and its options.
    if not _can_step(lambda: _copy_to_meta(optimiser).step()):
        return
    after = _copy_to_meta(optimiser, made)
    _try_step(after.step, f"{get_class_name(optimiser)} with these options")
    usual = dict(enumerate(after.state.get(weight, {}) for group in after.param_groups for weight in group["params"]))
    is_own = type(optimiser).__module__.startswith("torch.optim")
    for index, (_, name, held) in kept.items():
        _check_weight_values(held, usual[index], name, is_own)
    # The state is put in place by hand: `load_state_dict` would move it to the device of the weights, which is "meta",
    # and a step could not read its own count then.
    again = _copy_to_meta(optimiser, made)
    moved = [weight for group in again.param_groups for weight in group["params"]]
    for index, (_, _, held) in kept.items():
        again.state[moved[index]] = {key: _convert_like(value, usual[index].get(key)) for key, value in held.items()}
    _try_step(again.step, f"{get_class_name(optimiser)} from this state")


def check_scheduler_step(
    optimiser: torch.optim.Optimizer, made: Mapping[str, Any], scheduler: Scheduler, state: dict[str, Any], steps: int
) -> None:
    """Compare a scheduler's `state` with that of a fresh one, and try a step from it.

    `steps` is the number of steps that the training has made. Raises ValueError as `check_optimiser_step`. The end of a
    schedule (`total_steps`) is not an error here: the scheduler itself reports it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler warns when it steps without its optimiser
        fresh: Any = scheduler(_copy_to_meta(optimiser))
        check_scheduler_state(state, fresh)
        done, first = state.get("last_epoch", 0), getattr(fresh, "last_epoch", 0)  # chained schedulers have none
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
        # Schedulers raise ValueError themselves when their schedule has ended: a valid state.
        except ValueError:
            return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{get_class_name(fresh)} cannot step from this state: {why}") from error
    for group in trial.param_groups:
        if not is_finite(group["lr"]):
            raise ValueError(f"{get_class_name(fresh)} steps from this state to a learning rate of {group['lr']}")


def _copy_to_meta(optimiser: torch.optim.Optimizer, made: Mapping[str, Any] | None = None) -> torch.optim.Optimizer:
    """Return a copy of `optimiser` on the meta device, with the options of `made`; trainable weights have gradients."""
    # Entries of `memo` replace tensors during the deep copy: no weight and no large state tensor is ever copied.
    # Zero-dimensional state keeps its value, because steps read it.
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
    """Copy the options of `made`, except those that choose kernels: some are for GPUs only; results are equal."""
    for group, said in zip(optimiser.param_groups, made["param_groups"], strict=True):
        group.update({key: copy.deepcopy(said[key]) for key in said.keys() - {"params", "param_names"}})
        group.update(dict.fromkeys(group.keys() & {"fused", "foreach"}, False))


def _can_step(step: Callable[[], object]) -> bool:
    """Return whether the step works without memory. Many third-party optimisers read values, which fails."""
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
    """Move `value` to the device and dtype that the optimiser itself uses: kernels take nothing else."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(usual, Tensor):
        return value.to(usual.device, usual.dtype)
    return value.to("meta") if value.dim() else value


def _check_weight_values(held: Mapping[str, Any], usual: Mapping[str, Any], name: str, is_own: bool) -> None:
    """Check the state of one weight. A third-party optimiser may create some of it in a later step only."""
    for key, value in held.items():
        where = f"{name}/{key}"
        if key in usual:
            like = usual[key]
            check_like(value, like, where)
            if isinstance(value, Tensor) and isinstance(like, Tensor):
                if value.shape != like.shape:
                    raise ValueError(f"{where} has the shape {tuple(value.shape)} instead of {tuple(like.shape)}")
                # The width of a dtype may differ, as with another precision; `load_state_dict` converts it.
                classes = [(each.is_floating_point(), each.is_complex()) for each in (value, like)]
                if classes[0] != classes[1]:
                    raise ValueError(f"{where} is of type {value.dtype}, and here of type {like.dtype}")
                if not value.dim() and not value.is_meta and not is_finite(value):
                    raise ValueError(f"{where} is {value.item()}")
        elif is_own:
            raise ValueError(f"{where} is none of what it keeps: {', '.join(usual) or 'nothing'}")
        if key == "step" and not 0 <= _to_float(value) <= MOST_STEPS:
            raise ValueError(f"{where} is {_to_float(value)}, which is no number of steps")


def _to_float(value: Any) -> float:
    """Return `value` as a float, NaN if it is not a real number."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta and not value.is_complex() else math.nan
    return value if isinstance(value, int | float) else math.nan
