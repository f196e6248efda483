"""Load a training collectively: each rank reads what it holds, and nothing changes until all ranks have succeeded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engines.checkpoint.checkpoint_reader import STATE, Checkpoint, get_tensor_file
from engines.checkpoint.compatibility import check_fits_recipe, read_scheduler_state
from engines.checkpoint.json_values import check_scheduler_state
from engines.checkpoint.weight_state import make_optimiser_state
from engines.comm.collective_errors import run_on_all
from engines.errors import CheckpointError
from engines.layer.state_names import OWNERS
from engines.program.update import OptimiserStep
from engines.training import RankTraining, Recipe

__all__ = ["load", "open_checkpoint"]


def open_checkpoint(path: Path, recipe: Recipe) -> Checkpoint:
    """Open and verify the checkpoint at `path`, or the newest intact one of that folder. Raises CheckpointError."""
    with torch.random.fork_rng(devices=[]):  # the user's function that makes the optimiser may draw random numbers
        checkpoint = Checkpoint.open(path, partial(check_fits_recipe, recipe=recipe))
        check_fits_recipe(checkpoint, recipe)
    return checkpoint


def load(training: RankTraining, path: Path) -> Checkpoint:
    """Resume from the checkpoint at `path`, or the newest intact one of that folder. Collective, between steps.

    The checkpoint may have been saved under any other plan. Every rank reads the files itself. Weights keep the dtypes
    of this plan; the loss scale is that of the checkpoint, if both use one. Raises CheckpointError on every rank. The
    training is then unchanged on all ranks.
    """
    world = training.worker.world
    # Rank 0 chooses and verifies the checkpoint for all: ranks that chose for themselves could pick different ones.
    # Each rank then stages its state, and nothing is applied before `run_on_all` has shown that no rank failed.
    first = run_on_all(world, lambda: None if world.rank else open_checkpoint(path, training.recipe), CheckpointError)
    found, passed_over = world.all_gather(first and (first.path, first.passed_over))[0]
    checkpoint, tensors, descent = run_on_all(world, partial(_stage_state, training, found), CheckpointError)
    # From here on nothing can fail, so that no rank is left with half of the state.
    with torch.no_grad():
        for held in (training.weights, training.buffers, training.kept):
            for name in held.keys() & tensors.keys():
                held[name].copy_(tensors[name])
    training.worker.optimiser_step = descent
    training.worker.steps, training.worker.seed = checkpoint.step + 1, checkpoint.manifest["seed"]
    return replace(checkpoint, passed_over=passed_over)


def _stage_state(training: RankTraining, path: Path) -> tuple[Checkpoint, dict[str, Tensor], OptimiserStep]:
    """Read this rank's weights and buffers, and make its optimiser, without changing the training."""
    checkpoint = Checkpoint.from_path(path)
    found: dict[str, Tensor] = {}
    # Each rank reads what it holds under its own plan, from files that list everything by the model's names.
    own = {**training.weights, **training.buffers, **training.kept}
    for owner, names in training.recipe.names.items():
        said = {name: names.held.get(name, OWNERS[owner] + name) for name in names.names}
        wanted = {held: name for name, held in said.items() if held in own}
        found |= checkpoint.read_tensors(get_tensor_file(owner), wanted)
    for name, tensor in found.items():
        if tensor.is_floating_point() != own[name].is_floating_point():
            raise CheckpointError(f"{checkpoint.path}: {name} is {tensor.dtype} there, and {own[name].dtype} here.")
    return checkpoint, found, _restore_optimiser(checkpoint, training)


def _restore_optimiser(checkpoint: Checkpoint, training: RankTraining) -> OptimiserStep:
    """Return a fresh optimiser and scheduler with the saved state."""
    optimiser = training.recipe.make_optimiser(training.weights)
    # A fresh one on the training's own weights: they get their saved values later, when all ranks have succeeded.
    descent = OptimiserStep(training.weights, optimiser, training.recipe.rules)
    if optimiser:
        names = {id(weight): name for name, weight in training.weights.items()}
        with checkpoint.translate_errors():
            made = make_optimiser_state(
                optimiser, names, checkpoint.weight_states, partial(checkpoint.read_tensor, STATE)
            )
            optimiser.load_state_dict(made)
    if descent.scheduler:
        state = read_scheduler_state(checkpoint, len(descent.optimiser.param_groups))
        with checkpoint.translate_errors():
            check_scheduler_state(state, descent.scheduler)
            descent.scheduler.load_state_dict(state)
    scale = checkpoint.manifest["loss_scale"]
    if descent.scaled and scale is not None:
        descent.scale, descent.good_steps = scale, checkpoint.manifest["good_steps"]
    return descent
