"""Load a training collectively: each rank reads what it holds, and nothing changes until all ranks have succeeded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.world import run_on_all
from mpi4dl_nb.engines.errors import CheckpointError, make_path
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.graph.owners import find_first_names, iterate_owners
from mpi4dl_nb.engines.images.shard_reader import SamplerState
from mpi4dl_nb.engines.program.update import OptimiserStep, list_weights
from mpi4dl_nb.engines.train.checkpoint_files import parse_dtype, read_manifest
from mpi4dl_nb.engines.train.checkpoint_folder import make_damaged_error
from mpi4dl_nb.engines.train.checkpoint_reader import STATE, Checkpoint, get_tensor_file
from mpi4dl_nb.engines.train.checkpoint_state import (
    check_optimiser_step,
    check_scheduler_state,
    check_scheduler_step,
    decode_value,
    make_optimiser_state,
)
from mpi4dl_nb.engines.train.optimisers import make_optimiser
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining


def open_checkpoint(path: Path, recipe: Recipe, identity: str | None = None) -> Checkpoint:
    """Open and verify the checkpoint at `path`, or the newest intact one of a training in that folder.

    `identity` is the id of the training that asks; see `find_own_checkpoints`. Raises CheckpointError.
    """
    with torch.random.fork_rng(devices=[]):  # the user's function that makes the optimiser may draw random numbers
        checkpoint = Checkpoint.open(path, partial(check_fits_recipe, recipe=recipe), identity=identity)
        check_fits_recipe(checkpoint, recipe)
    return checkpoint


def load(training: RankTraining, path: Path) -> Checkpoint:
    """Resume from the checkpoint at `path`, or the newest intact one of a training in that folder.

    Collective, between steps. The checkpoint may have been saved under any other plan. Every rank reads the files
    itself. Weights keep the dtypes of this plan; the loss scale is that of the checkpoint, if both use one. The
    training goes on under the checkpoint's id. Raises CheckpointError on every rank. The training is then unchanged on
    all ranks.
    """
    world = training.worker.world
    # Rank 0 chooses and verifies the checkpoint for all: ranks that chose for themselves could pick different ones.
    # Each rank then stages its state, and nothing is applied before `run_on_all` has shown that no rank failed.
    first = run_on_all(
        world,
        lambda: None if world.rank else open_checkpoint(path, training.recipe, training.identity),
        CheckpointError,
    )
    chosen, passed_over = world.all_gather(first and (first.path, first.passed_over))[0]
    checkpoint, tensors, descent = run_on_all(world, partial(_stage_state, training, chosen), CheckpointError)
    # From here on nothing can fail. But an interrupt may stop a rank half-way: until all is done, its count of updates
    # is that of no training, so that the weights are refused.
    training.worker.steps = 0
    with torch.no_grad():
        for held in (training.weights, training.buffers, training.kept):
            for name in held.keys() & tensors.keys():
                held[name].copy_(tensors[name])
    training.worker.optimiser_step, training.identity = descent, checkpoint.identity
    training.worker.steps, training.worker.seed = checkpoint.step + 1, checkpoint.manifest["seed"]
    return replace(checkpoint, passed_over=passed_over)


def _stage_state(training: RankTraining, path: Path) -> tuple[Checkpoint, dict[str, Tensor], OptimiserStep]:
    """Read this rank's weights and buffers, and make its optimiser and scheduler, without changing the training."""
    checkpoint = Checkpoint(path, read_manifest(path))
    tensors: dict[str, Tensor] = {}
    # Each rank reads what it holds under its own plan, from files that list everything by the model's names.
    rank_state = {**training.weights, **training.buffers, **training.kept}
    for owner, names in training.recipe.names.items():
        wanted = {held: name for name, held in names.on_ranks.items() if held in rank_state}
        tensors |= checkpoint.read_tensors(get_tensor_file(owner), wanted)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != rank_state[name].is_floating_point():
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {tensor.dtype} there, and {rank_state[name].dtype} here."
            )
    optimiser = training.make_optimiser()
    # A fresh one on the training's own weights: they get their saved values later, when all ranks have succeeded.
    descent = OptimiserStep(training.weights, optimiser, training.recipe.rules)
    if optimiser:
        by_id = {id(weight): name for name, weight in training.weights.items()}
        with checkpoint.translate_errors():
            state_dict = make_optimiser_state(
                optimiser, by_id, checkpoint.weight_states, partial(checkpoint.read_tensor, STATE)
            )
            optimiser.load_state_dict(state_dict)
            if checkpoint.manifest["precision"] == training.recipe.plan.precision:
                _restore_dtypes(optimiser, state_dict["state"])
    if optimiser and descent.scheduler:
        state = _read_scheduler_state(checkpoint, len(optimiser.param_groups))
        with checkpoint.translate_errors():
            check_scheduler_state(state, descent.scheduler)
            descent.scheduler.load_state_dict(state)
    scale = checkpoint.manifest["loss_scale"]
    if descent.scaled and scale is not None:
        descent.scale, descent.good_steps = scale, checkpoint.manifest["good_steps"]
    return checkpoint, tensors, descent


def _restore_dtypes(optimiser: torch.optim.Optimizer, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Give the optimiser's numbers the dtypes in which they were saved: PyTorch loads them in those of the weights."""
    weights = list_weights(optimiser)
    for index, values in saved.items():
        held = optimiser.state[weights[index]]
        for name, value in values.items():
            now = held.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and value.is_floating_point():
                held[name] = value.to(now.device) if now.dtype != value.dtype and now.shape == value.shape else now


# Check that a checkpoint fits the model, loss, optimiser and scheduler, before anything is changed.


_SMALL = 1024  # tensors with up to this many elements are read and their values checked


def check_fits_recipe(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Check everything but the values of large tensors against what is to be trained. Raises CheckpointError."""
    graph = {**recipe.graph.weights, **recipe.graph.buffers}
    for owner, names in recipe.names.items():
        held = {name: (graph[key].shape, getattr(torch, graph[key].dtype)) for name, key in names.held.items()}
        kept = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in names.kept.items()}
        if held or kept or owner == "model":
            _check_shapes(checkpoint, owner, held | kept)
    ours = set(recipe.graph.trainable & recipe.graph.weights.keys())
    theirs = checkpoint.weight_states.keys()
    for what, differing in (("not trained there", ours - theirs), ("not trained here", theirs - ours)):
        if differing:
            raise CheckpointError(
                f"{checkpoint.path}: this checkpoint trains {len(theirs)} weights, and this training {len(ours)}: "
                f"{_describe_differences({what: differing})}. Give all weights the requires_grad that they had, or "
                "load the weights alone: safetensors.torch.load_file."
            )
    with checkpoint.translate_errors():
        needed = {f"{name}/{key}" for name, state in checkpoint.weight_states.items() for key in state.tensors}
    stored = checkpoint.read_shapes(STATE).keys()
    if needed != stored:
        differences = _describe_differences({"not in it": needed - stored, "of no weight": stored - needed})
        raise make_damaged_error(checkpoint.path, f"of {STATE}, {differences}")
    _check_optimisation(checkpoint, recipe, bool(ours))
    if checkpoint.feed is not None:
        with checkpoint.translate_errors():
            SamplerState.of(checkpoint.feed)


def _check_shapes(checkpoint: Checkpoint, owner: str, ours: Mapping[str, Any]) -> None:
    """Compare the tensors of the model or the loss with `ours`: (shape, dtype) by name. Raises CheckpointError."""
    file = get_tensor_file(owner)
    if file not in checkpoint.manifest["files"]:
        raise CheckpointError(f"{checkpoint.path}: it has no {file}. It is of a training whose {owner} had no weights.")
    with checkpoint.translate_errors():
        theirs = {name: (shape, parse_dtype(code)) for name, (shape, code) in checkpoint.read_shapes(file).items()}
    missing, unknown = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    # Dtypes may differ, as another precision is another plan; but a counter cannot become a weight.
    other = []
    for name in ours.keys() & theirs.keys():
        pairs = (theirs[name], ours[name])
        if len({(shape, dtype.is_floating_point) for shape, dtype in pairs}) > 1:
            kinds = [f"{shape}" if dtype.is_floating_point else f"{shape} of {dtype}" for shape, dtype in pairs]
            other.append(f"{name} {kinds[0]} instead of {kinds[1]}")
    if differences := _describe_differences({"not in it": missing, "not here": unknown, "of another shape": other}):
        agree = len(ours) - len(missing) - len(other)
        raise CheckpointError(
            f"{checkpoint.path}: this checkpoint is of another {owner}: of its {len(theirs)} tensors {agree} are those "
            f"of the {len(ours)} here; {differences}. Load it into the {owner} that it was saved from."
        )


def _describe_differences(names: Mapping[str, Collection[str]]) -> str:
    """Describe names by what is different about them; empty if there are none."""
    differences = ((what, sorted(differing)) for what, differing in names.items() if differing)
    return "; ".join(f"{len(differing)} {what}: {format_names(differing)}" for what, differing in differences)


def _check_optimisation(checkpoint: Checkpoint, recipe: Recipe, trains: bool) -> None:
    """Compare the classes of optimiser and scheduler, then check that both can continue from their saved state."""
    # Placeholders of all ranks' weights: a rank alone would only see those that it updates.
    placeholders = {spec.name: spec.make_placeholder() for spec in recipe.parameters}
    optimiser = make_optimiser(recipe.optimiser, placeholders) if trains else None
    paced = recipe.scheduler(optimiser) if recipe.scheduler and optimiser else None
    for what, fresh in (("optimiser", optimiser), ("scheduler", paced)):
        with checkpoint.translate_errors():
            stored = checkpoint.manifest[what]
            theirs = stored["kind"] if stored else "none"
        ours = type(fresh).__name__ if fresh else "none"
        if theirs != ours:
            raise CheckpointError(
                f"{checkpoint.path}: the {what} of this checkpoint is {str(theirs)[:40]}, and here it is {ours}. Train "
                "with the one that it was saved from; to begin another one, load the weights alone: "
                "safetensors.torch.load_file."
            )
    if optimiser:
        names = {id(placeholders[spec.name]): spec.key for spec in recipe.parameters}
        made_state = _check_optimiser_state(checkpoint, optimiser, names)
        if paced and recipe.scheduler:
            state = _read_scheduler_state(checkpoint, len(optimiser.param_groups))
            with checkpoint.translate_errors():
                check_scheduler_step(optimiser, made_state, recipe.scheduler, state, checkpoint.step)


def _check_optimiser_state(
    checkpoint: Checkpoint, optimiser: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Check that a fresh optimiser can continue from the saved state; return what `load_state_dict` would take.

    `names` maps the ids of the optimiser's weights to their names. Tensors of more than 1024 elements in the result are
    on the meta device. Raises CheckpointError.
    """
    shapes = checkpoint.read_shapes(STATE)

    def read_if_small(name: str) -> Tensor:
        shape, code = shapes[name]
        if math.prod(shape) <= _SMALL:
            return checkpoint.read_tensor(STATE, name)
        return torch.empty(shape, dtype=parse_dtype(code), device="meta")

    with checkpoint.translate_errors():
        state_dict = make_optimiser_state(optimiser, names, checkpoint.weight_states, read_if_small)
        check_optimiser_step(optimiser, state_dict, names)
    return state_dict


def _read_scheduler_state(checkpoint: Checkpoint, groups: int) -> dict[str, Any]:
    """Return the argument of `scheduler.load_state_dict` for `groups` groups of weights. Raises CheckpointError."""
    with checkpoint.translate_errors():
        state = decode_value(checkpoint.manifest["scheduler"]["state"])
        if not isinstance(state, dict):
            raise TypeError(f"the scheduler's state is a {type(state).__name__}")
        rates = state.get("base_lrs", [None] * groups)
        if isinstance(rates, list) and len(rates) != groups:
            raise CheckpointError(
                f"{checkpoint.path}: the scheduler has {len(rates)} learning rates, but there are {groups} groups of "
                "weights here. Make the optimiser with the groups that it had, on every rank."
            )
        return state


# Load a checkpoint into plain PyTorch in one process: the optimiser continues where the ranks stopped.
#
# model.load_state_dict(safetensors.torch.load_file(checkpoint / "model.safetensors"))
# optimiser.load_state_dict(optimiser_state(checkpoint, model, optimiser))


def optimiser_state(
    path: str | Path, model: nn.Module, optimiser: torch.optim.Optimizer, loss: nn.Module | None = None
) -> dict[str, Any]:
    """Return the argument of `optimiser.load_state_dict`; the optimiser may list its weights in any order.

    `optimiser` updates weights of `model` (and of `loss`). `path` is a checkpoint or a folder of checkpoints of one
    training. Of a folder the newest intact one is read, with a warning for each newer one that is damaged. Raises
    CheckpointError, also if the folder has the checkpoints of several trainings: then name one.

    >>> import tempfile, torch
    >>> from mpi4dl_nb import Cluster, Plan, Training, optimiser_state, resnet20_v1
    >>> model, folder = resnet20_v1(), tempfile.mkdtemp()
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     training = Training(model, Plan(split_size=2, spatial_size=0), cluster, (2, 3, 32, 32))
    ...     loss = training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     path = training.save(folder)
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimiser.load_state_dict(optimiser_state(folder, model, optimiser))
    """
    checkpoint = Checkpoint.open(make_path(path), lambda candidate: _check_owners(candidate, model, loss))
    checkpoint.warn_of_passed_over(stacklevel=2)
    _check_owners(checkpoint, model, loss)
    first = find_first_names(model, loss)  # of tied weights, the name under which the ranks know them
    names = {
        id(weight): first[prefix + name]
        for prefix, owner in iterate_owners(model, loss)
        for name, weight in owner.named_parameters()
    }
    stored = (checkpoint.manifest["optimiser"] or {}).get("kind", "none")
    if stored != (kind := type(optimiser).__name__):
        raise CheckpointError(f"{checkpoint.path}: its optimiser is {stored}, and this one is {kind}.")
    for weight in list_weights(optimiser):
        if id(weight) not in names:
            raise CheckpointError(
                f"The optimiser moves a tensor {tuple(weight.shape)} that is no weight of the model. Make it of "
                "model.parameters(), and of those of the loss if that is trained."
            )
    _check_optimiser_state(checkpoint, optimiser, names)
    with checkpoint.translate_errors():
        return make_optimiser_state(optimiser, names, checkpoint.weight_states, partial(checkpoint.read_tensor, STATE))


def scheduler_state(path: str | Path) -> dict[str, Any] | None:
    """Return the argument of `scheduler.load_state_dict`, or None if the training had no scheduler.

    `path`, warnings and errors are those of `optimiser_state`.

    >>> import tempfile
    >>> from functools import partial
    >>> import torch
    >>> from mpi4dl_nb import Cluster, Plan, Training, resnet20_v1, scheduler_state
    >>> halve, folder = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), tempfile.mkdtemp()
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     plan = Plan(split_size=2, spatial_size=0)
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32), scheduler=halve)
    ...     loss = training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     path = training.save(folder)
    >>> scheduler_state(folder)["last_epoch"]
    1
    """
    checkpoint = Checkpoint.open(make_path(path))  # all files are checked: this is the one `optimiser_state` reads
    checkpoint.warn_of_passed_over(stacklevel=2)
    with checkpoint.translate_errors():
        stored = checkpoint.manifest["scheduler"]
        return decode_value(stored["state"]) if stored else None


def _check_owners(checkpoint: Checkpoint, model: nn.Module, loss: nn.Module | None) -> None:
    for owner, module in (("model", model), ("loss", loss)):
        if module is not None:
            outlines = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}
            _check_shapes(checkpoint, owner, outlines)
