"""Check in advance that the optimiser that a user's function makes does the same on ranks as in one process.

The optimiser is made with the model's real shapes. Steps are tried on a few small weights only, in float64.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, to_user_name
from mpi4dl_nb.engines.graph.traceability import has_hooks
from mpi4dl_nb.engines.train.optimisers import (
    Optimiser,
    ParameterSpec,
    collect_parameter_specs,
    make_on_rank,
    make_optimiser,
)

_STEPS = 3
_OF_EACH_GROUP = 2  # weights per rank and group with which steps are tried: a norm over two differs from that of one
_LARGEST = 1 << 20  # most elements of a weight with which steps are tried
_COUNTED = 1 << 22  # most elements of all weights together on which optimiser states are counted


def find_frozen(function: Optimiser, specs: Sequence[ParameterSpec]) -> frozenset[str]:
    """Return the ranks' names of the parameters that a function freezes when it makes the optimiser.

    Raises PlanError if the function makes no optimiser that can train the model (see `make_optimiser`), if the
    optimiser needs a closure, or if the function gives a parameter a gradient hook.
    """
    if not specs:
        return frozenset()
    named = {spec.name: spec.make_placeholder() for spec in specs}
    optimiser = make_optimiser(function, named)
    closure = inspect.signature(optimiser.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise PlanError(
            f"{type(optimiser).__name__} computes the loss again as it steps and couples all weights, but a rank has "
            "only those of its stage. Use an optimiser that works per parameter, such as SGD or AdamW."
        )
    if hooked := [name for name, weight in named.items() if has_hooks(weight)]:
        raise PlanError(
            f"The optimiser's function gives {format_names(hooked)} a hook of its gradient, which a rank would call "
            "with the part of it that it has of one micro-batch. Use made.register_step_pre_hook, which is called with "
            "the whole gradients before each step."
        )
    return frozenset(spec.key for spec in specs if spec.requires_grad and not named[spec.name].requires_grad)


def check_flags(specs: Sequence[ParameterSpec], own: Mapping[str, nn.Parameter]) -> None:
    """Raise PlanError if the user's own parameters are no longer frozen or trained as in `specs`, and restore that.

    `own` maps the ranks' names to the parameters of the user's model and loss, which `find_frozen` does not pass to the
    optimiser's function: one that reaches them nevertheless, as in a closure, changes nothing on ranks.
    """
    changed = [spec for spec in specs if own[spec.key].requires_grad != spec.requires_grad]
    for spec in changed:
        own[spec.key].requires_grad_(spec.requires_grad)
    if changed:
        names = format_names([spec.name for spec in changed])
        raise PlanError(
            f"The optimiser's function sets requires_grad of the model's own {names}, "
            "and not of the parameters that it is given, which ranks train. Freeze the model before it is given, or "
            "the function's argument: an argument called named_parameters is given (name, parameter) pairs."
        )


def check_groups(function: Optimiser, specs: Sequence[ParameterSpec], own: Mapping[str, nn.Parameter]) -> None:
    """Raise PlanError if the function groups the user's own parameters differently from equal ones on a rank.

    `own` maps the ranks' names to the parameters of the user's model and loss. A function that finds parameters by
    identity (`id(p) in ids`) finds only the user's own; on ranks all would silently be in the other group.
    """
    placeholders = {spec.name: spec.make_placeholder() for spec in specs}
    mine = {spec.name: own[spec.key] for spec in specs}
    requires = {name: weight.requires_grad for name, weight in mine.items()}
    try:
        # The function may freeze parameters, here the user's own: `requires_grad` is put back in any case.
        pairs = zip(_find_groups(function, placeholders).items(), _find_groups(function, mine).values(), strict=True)
        differing = [name for (name, on_rank), with_own in pairs if on_rank != with_own]
    finally:
        for name, weight in mine.items():
            weight.requires_grad_(requires[name])
    if differing:
        raise PlanError(
            f"The optimiser's function puts {format_names(differing)} into another group than that of the same "
            "parameter of your model: it looks for parameters by identity, as id(p) in ids does, and ranks have "
            "copies. Let it choose by name (an argument called named_parameters is given (name, parameter) pairs), "
            "position or shape."
        )


def _find_groups(function: Optimiser, named: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the index of each parameter's group; -1 if it is in none."""
    optimiser = make_optimiser(function, named)
    indices = {id(weight): index for index, group in enumerate(optimiser.param_groups) for weight in group["params"]}
    return {name: indices.get(id(weight), -1) for name, weight in named.items()}


def check_scheduler(scheduler: object, made: torch.optim.Optimizer) -> None:
    """Raise PlanError unless `scheduler` makes a scheduler of the optimiser that can step once after each update."""
    if not callable(scheduler):
        kind = type(scheduler).__name__
        raise PlanError(
            f"scheduler is a {kind}, not a function. Ranks make it of their own optimiser: give a function of an "
            f"optimiser, such as partial(torch.optim.lr_scheduler.StepLR, step_size=10)."
        )
    try:
        paced: Any = scheduler(made)
    except Exception as error:
        raise PlanError(f"The scheduler cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(paced, ReduceLROnPlateau) or not isinstance(paced, LRScheduler):
        raise PlanError(
            f"scheduler makes a {type(paced).__name__}, but it is stepped once after each update, where nothing but "
            "the number of steps is known. Use another one of torch.optim.lr_scheduler."
        )
    if paced.optimizer is not made:
        raise PlanError(
            "scheduler paces another optimiser than the one that it is given, and the ranks' learning rates would not "
            "move. Use the function's argument, as in partial(torch.optim.lr_scheduler.StepLR, step_size=10)."
        )


@dataclass(frozen=True)
class _OptimiserTrial:
    """A trial of a user's function: the function, the model's parameters, and their initial values."""

    function: Optimiser
    specs: Sequence[ParameterSpec]
    state: Mapping[str, Tensor]

    def collect_options(self, held: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Return the group options of each weight in `held`, in the optimiser of a rank that holds these weights."""
        weights = {
            spec.key: nn.Parameter(self.state[spec.key].detach().to(spec.dtype), requires_grad=True)
            for spec in self.specs
            if spec.key in held
        }
        optimiser, keys = make_on_rank(self.function, self.specs, weights), {id(w): key for key, w in weights.items()}
        return {
            keys[id(weight)]: {name: value for name, value in group.items() if name not in ("params", "param_names")}
            for group in optimiser.param_groups
            for weight in group["params"]
        }

    def run_steps(self, held: Collection[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the weights in `held` before and after some steps along random gradients, the same in each trial."""
        specs = [replace(spec, dtype=torch.float64) if spec.dtype.is_floating_point else spec for spec in self.specs]
        moved = [(index, spec) for index, spec in enumerate(specs) if spec.key in held]
        weights = {spec.key: nn.Parameter(_make_random(spec, index, 1.0)) for index, spec in moved}
        before = {key: weight.detach().clone() for key, weight in weights.items()}
        optimiser = make_on_rank(self.function, specs, weights)
        for step in range(_STEPS):
            for index, spec in moved:
                # Weights with equally large gradients would hide a norm over all of them: sizes differ each time.
                size = 10.0 ** ((index + step) % 3 - 1)  # norms that change from step to step
                weights[spec.key].grad = _make_random(spec, index + (1 + step) * len(specs), size)
            _step(optimiser)
        return {key: (before[key], weight.detach()) for key, weight in weights.items()}

    def choose_sample(
        self, holdings: Iterable[Collection[str]], options: Mapping[str, Mapping[str, Any]]
    ) -> frozenset[str]:
        """Choose the smallest weights of each group on each rank, so that every rank and every group is represented."""
        # A coupling shows if two weights of one group lie on one rank and others elsewhere, so that two of each group
        # on each rank are enough. The smallest ones keep the trial short.
        small = sorted((spec for spec in self.specs if _count_elements(spec) <= _LARGEST), key=_count_elements)
        chosen: set[str] = set()
        for held in holdings:
            taken: list[str] = []
            for spec in small:
                if spec.key in held and taken.count(group := repr(options[spec.key])) < _OF_EACH_GROUP:
                    taken.append(group)
                    chosen.add(spec.key)
        return frozenset(chosen)


def check_on_ranks(
    function: Optimiser,
    specs: Sequence[ParameterSpec],
    state: Mapping[str, Tensor],
    holdings: Sequence[Collection[str]],
    must_step: bool,
) -> None:
    """Make and step the optimiser as each rank would, and compare it to one process.

    `holdings` are the weights that each rank trains. Raises PlanError if a weight has other options on a rank than in
    one process, if the weights' steps depend on each other across ranks, or if they are random.
    `must_step`: whether an optimiser that cannot step on this machine is an error. It is not for one that needs a GPU.
    """
    if not specs:
        return  # a model without weights trains nothing
    # Ranks that hold the same weights (tiles of a stage, replicas) are tried once.
    trial, distinct = _OptimiserTrial(function, specs, state), list(dict.fromkeys(map(frozenset, holdings)))
    #     whole                 one process with all weights: the options that each weight should have
    #     held in distinct      each rank with its own weights: must agree with `whole`, weight by weight
    #     few                   a sample of the weights; steps along the same gradients, together and rank by rank
    whole = trial.collect_options(frozenset().union(*distinct))
    for key, options in ((key, options) for held in distinct for key, options in trial.collect_options(held).items()):
        if other := [name for name, value in options.items() if not _is_same(value, whole[key].get(name))]:
            raise PlanError(
                f"The optimiser's function gives {key} {other[0]}={options[other[0]]!r} on a rank that has not all "
                f"weights, and {other[0]}={whole[key].get(other[0])!r} in one process. Let it choose by the names, "
                "positions or shapes of the parameters, not by their values, by chance, or by how often it was called."
            )
    few = trial.choose_sample(distinct, whole)
    if not few:
        return
    with torch.random.fork_rng(devices=[]):
        try:
            together = trial.run_steps(few)
        except PlanError:
            if must_step:
                raise
            return
        # Repeat the trial first: a random optimiser would otherwise be reported as one that couples weights.
        if len(holdings) > 1 and _find_differing(together, trial.run_steps(few)):
            raise PlanError(
                "The optimiser moves a weight otherwise when it steps again from the same start: it draws random "
                "numbers, and ranks that hold the same weight would draw others. Use one that follows the gradients."
            )
        for held in distinct:
            if far := _find_differing(together, trial.run_steps(few & held)):
                names = format_names([spec.name for spec in specs if spec.key in far])
                raise PlanError(
                    f"The optimiser moves {names} otherwise where it has not all weights of the model, and a rank has "
                    "only those of its stage. Use one that works per parameter, such as SGD or AdamW; the norm of all "
                    "gradients is bounded by clip_norm."
                )


def count_states(function: Optimiser, specs: Sequence[ParameterSpec]) -> int:
    """Return how many numbers the optimiser keeps per weight element after a step, rounded: momentum 1, Adam 2.

    They are counted on weights of the model's shapes, of about four million elements together, or on the smallest if
    all are larger. Raises PlanError if the optimiser cannot be made or cannot step.
    """
    frozen, left = find_frozen(function, specs), _COUNTED
    weights: dict[str, nn.Parameter] = {}
    trained = [spec for spec in specs if spec.requires_grad and spec.key not in frozen]
    for position, spec in enumerate(sorted(trained, key=_count_elements, reverse=True), 1):
        if _count_elements(spec) <= left or (not weights and position == len(trained)):
            weights[spec.key] = nn.Parameter(_make_random(spec, 0, 1.0))
            weights[spec.key].grad, left = torch.ones(spec.shape, dtype=spec.dtype), left - _count_elements(spec)
    if not weights:
        return 0
    optimiser = make_on_rank(function, specs, weights)
    _step(optimiser)
    # Scalars such as Adam's step count are no memory per element: `value.dim()` leaves them out.
    kept = (value for weight in weights.values() for value in optimiser.state.get(weight, {}).values())
    numbers = sum(value.numel() for value in kept if isinstance(value, Tensor) and value.dim())
    return round(numbers / sum(weight.numel() for weight in weights.values()))


def count_optimiser_states(optimiser: Optimiser, model: nn.Module | ModelGraph, loss: object = None) -> int:
    """Return `count_states` of the weights of a model and its loss, or of their graph. Raises PlanError.

    >>> count_optimiser_states(torch.optim.Adam, nn.Conv2d(3, 8, 3))
    2
    """
    if isinstance(model, nn.Module):
        return count_states(optimiser, collect_parameter_specs(model, loss, torch.float32))
    specs = [
        ParameterSpec(to_user_name(key), key, spec.shape, getattr(torch, spec.dtype), key in model.trainable)
        for key, spec in model.weights.items()
    ]
    return count_states(optimiser, specs)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and (one is other or one == other or repr(one) == repr(other))


def _step(made: torch.optim.Optimizer) -> None:
    try:
        made.step()
    except Exception as error:
        raise PlanError(
            f"The optimiser {type(made).__name__} cannot step: {type(error).__name__}: {error} (It was tried on the "
            "CPU; for one that works on GPUs only, say device='cuda'.)"
        ) from error


def _find_differing(
    one: Mapping[str, tuple[Tensor, Tensor]], other: Mapping[str, tuple[Tensor, Tensor]]
) -> frozenset[str]:
    """Return the weights of `other` that have moved differently from those of `one`. Equal nans count as equal."""

    def is_far(start: Tensor, end: Tensor, expected: Tensor) -> bool:
        if torch.allclose(end, expected, rtol=0, atol=0, equal_nan=True):
            return False
        # Relative to the weight's displacement, and far more than rounding in float32; `not <=` catches nans.
        return not (end - expected).norm() <= 1e-3 * max((end - start).norm(), (expected - start).norm())

    return frozenset(key for key, (start, end) in other.items() if is_far(start, end, one[key][1]))


def _make_random(spec: ParameterSpec, seed: int, size: float) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (size * torch.randn(spec.shape, generator=random, dtype=torch.float64)).to(spec.dtype)


def _count_elements(spec: ParameterSpec) -> int:
    return math.prod(spec.shape)
