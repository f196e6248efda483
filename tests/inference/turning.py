"""A model computed tile after tile from tensors, in this thread: without ranks, pictures or bounds."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.loopback import make_loopback_worlds
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.graph.outputs import collect_tensors, get_prediction
from mpi4dl_nb.engines.inference.rank_predictor import prepare_prediction
from mpi4dl_nb.engines.inference.tile_passes import TilePasses
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.rng import CounterRNGMode
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.training import cut_inputs

ALONE = Plan(split_size=1, spatial_size=0, precision="float64")


def predict_alone(model: nn.Module, images: Tensor) -> Tensor:
    """What one process says, in evaluation mode; of several tensors the first. What it draws is drawn alike."""
    twin = copy.deepcopy(model).to(images.dtype).eval()
    with torch.no_grad(), CounterRNGMode(seed=0):
        return next(iter(collect_tensors(get_prediction(twin(images))).values()))


def set_head_biases(model: nn.Module, images: Tensor) -> nn.Module:
    """The same, with such biases of its `head` that every class wins at some pixels: else any answer would be right."""
    scores = predict_alone(model, images.double())
    with torch.no_grad():
        model.head.bias -= scores.mean((0, 2, 3))
    assert len(predict_alone(model, images.double()).argmax(1).unique()) > 1
    return model


def predict_in_turn(model: nn.Module, images: Tensor, grid: Grid) -> tuple[Tensor, int]:
    """The prediction, put together from tiles, and how many walks it took."""
    recipe = prepare_prediction(model, ALONE, images.shape)
    turns, known, walks = TilePasses(recipe.graph, grid), {}, 0
    state = {name: t.to(images.dtype) if t.is_floating_point() else t for name, t in recipe.state.items()}
    whole = torch.full(recipe.graph.specs[recipe.graph.prediction].shape, float("nan"), dtype=images.dtype)
    while True:
        totals, walks = {}, walks + 1
        for tile in range(grid.tiles):
            turn = turns.make_pass(tile, known)
            worker = Worker(turn.program, make_loopback_worlds(1)[0], state, state)
            parts = cut_inputs(turn.program, {"images": images})[0] if turn.window else {}
            with torch.no_grad():
                worker.run({0: {**known, **parts}})
            for each in turn.sums:
                totals[each.target] = totals.get(each.target, 0) + worker.peek(each.source)
            if turn.is_last:
                made = worker.peek(recipe.graph.prediction)
                place = turn.prediction.tile.to_slices(turn.prediction.tile.whole(0, 0)) if turn.prediction else ()
                whole[(..., *place)] = made
        known |= totals
        if turn.is_last:
            return whole, walks
