"""Predict on all ranks together under the plan of a training: recipes, and the forward pass in evaluation mode."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.device import choose_autocast_type, choose_device, place_inputs, use_threads
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.joined_attention import join_attention
from mpi4dl_nb.engines.compiler.model_mixing import find_mixing
from mpi4dl_nb.engines.compiler.operand_types import check_operand_types, trace_in_fitting_type
from mpi4dl_nb.engines.compiler.operator_table import UserOps
from mpi4dl_nb.engines.compiler.steps import describe_steps
from mpi4dl_nb.engines.compiler.trace_cache import get_micro_batch_spec
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec
from mpi4dl_nb.engines.graph.trace import trace_inference
from mpi4dl_nb.engines.images.dataset import to_network_input
from mpi4dl_nb.engines.images.picture import crop_picture
from mpi4dl_nb.engines.images.picture_reader import Picture
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.program.worker import Inputs, Worker
from mpi4dl_nb.engines.train.recipe import Recipe, collect_state, sgd
from mpi4dl_nb.engines.train.training import choose_thread_count, copy_state_tensor, cut_inputs

Prediction = Mapping[int, Tensor]
"""A rank's parts of the predictions, by micro-batch, in host memory."""


def prepare_prediction(
    model: nn.Module, plan: Plan, image_shape: Sequence[int], device: str = "auto", with_state: bool = True
) -> Recipe:
    """Return the recipe by which ranks compute `model.eval()(images)`.

    `image_shape` is (N, C, H, W) of one batch of the plan. Ranks that train hold the weights: `with_state` is false
    for them. The model is not changed. Raises TraceError or PlanError if the model cannot run under the plan.
    """
    images = get_micro_batch_spec("images", TensorSpec(tuple(image_shape), plan.held_in), plan)
    graph = _trace(model, images, plan, device)
    if not graph.specs[graph.prediction].shape:
        raise TraceError(
            "The model answers with one number for all images, and a prediction has an entry for each. Let its forward "
            "return what it has for each image, and take the mean or the sum in the loss."
        )
    state = collect_state(model, None, graph) if with_state else {}
    recipe = Recipe(graph, plan, sgd, state, device, additions=UserOps.snapshot())
    recipe.check_programs()
    return recipe


def _trace(model: nn.Module, images: TensorSpec, plan: Plan, device: str) -> ModelGraph:
    def trace() -> ModelGraph:
        graph = trace_inference(model, images, plan.precision, choose_autocast_type(device))
        graph = join_attention(graph, plan.attention_keys)
        check_operand_types(graph)
        return graph

    return trace_in_fitting_type(plan.precision, trace)


def find_mixed_images(model: nn.Module, recipe: Recipe) -> str:
    """Return where `model.eval()` computes with several images at once; empty if nowhere, as far as its trace tells.

    `recipe` is that of its prediction.
    """
    images = recipe.graph.inputs["images"]

    def trace(times: int) -> ModelGraph:
        more = replace(images, shape=(times * images.shape[0], *images.shape[1:]))
        return _trace(model, more, recipe.plan, recipe.device)

    return find_mixing(trace, images.shape[0])[0]


class RankPrediction:
    """A prediction or an evaluation that a rank keeps between the notebook's calls."""

    def close(self) -> None:
        """Free what would outlive the object, such as open files."""


class RankPredictor(RankPrediction):
    """One rank's weights and worker for forward passes; collective.

    The weights are those `held` by the ranks of a training (by the graph's names). A rank receives those that it lacks
    from other ranks, at their current values. Without `held`, the weights are copies of the recipe's.
    """

    def __init__(self, world: World, recipe: Recipe, held: Mapping[str, Tensor] | None = None) -> None:
        recipe.additions.register()
        self.world, self.recipe, self.held = world, recipe, held
        self.program = Compiler(recipe.graph, recipe.plan).compile_rank(world.rank)
        self.device = choose_device(recipe.device, world.rank)
        self.threads = choose_thread_count(recipe.plan, world.rank)
        wanted, specs = (*self.program.weights, *self.program.buffers), recipe.graph.specs
        state = find_state(world, recipe, held, wanted)
        shared = {name: tensor for name, tensor in (held or {}).items() if name not in recipe.graph.constants}
        tensors = {
            name: shared[name] if name in shared else copy_state_tensor(state[name], specs[name], self.device)
            for name in wanted
        }
        weights, buffers = (
            {name: tensors[name] for name in names} for names in (self.program.weights, self.program.buffers)
        )
        self.worker = Worker(self.program, world, weights, buffers, device=self.device, seed=recipe.seed)
        self.worker.step_labels = describe_steps(recipe.graph, recipe.plan, self.program)

    def cut(self, inputs: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """Return this rank's parts of the whole inputs of a step."""
        return cut_inputs(self.program, inputs)

    def predict(self, inputs: Inputs) -> Prediction:
        """Return this rank's parts of the predictions for its parts of the images.

        A prediction that all tiles share is returned by one rank only.
        """
        use_threads(self.threads)
        with torch.no_grad():
            self.worker.run(place_inputs(inputs, self.device))
        ways = {micro_batch: self.program.get_direction_program(micro_batch) for micro_batch in self.program.directions}
        prediction = {
            micro_batch: self.worker.micro_batch_states[micro_batch].values[way.prediction].cpu().contiguous()
            for micro_batch, way in ways.items()
            if way.prediction is not None and way.prediction_shard is not None
        }
        self.worker.restart({})  # frees the activations, which only a backward pass would need
        return prediction


def find_state(
    world: World, recipe: Recipe, held: Mapping[str, Tensor] | None, names: Iterable[str]
) -> Mapping[str, Tensor]:
    """Return the weights and buffers of these names: those `held` by the ranks, or else the recipe's; collective."""
    if held is None:
        return recipe.state
    # Constants that the model creates in its forward pass come with the graph; no rank holds them as weights.
    constants = recipe.graph.constants
    return {**fetch_tensors(world, held, [name for name in names if name not in constants]), **held, **constants}


def fetch_tensors(world: World, held: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Return the `wanted` tensors that this rank does not hold, each from the first rank that holds it; collective.

    Raises PlanError, on every rank, if no rank holds a tensor.
    """
    offered = world.all_gather(([name for name in wanted if name not in held], tuple(held)))
    asked = dict.fromkeys(name for lacking, _ in offered for name in lacking)
    owner = {name: rank for rank, (_, names) in reversed(list(enumerate(offered))) for name in names}
    if missing := [name for name in asked if name not in owner]:
        raise PlanError(f"No rank holds {missing[0]}, which the prediction reads. Make the training anew.")
    # Every tensor that any rank lacks is sent once, by the lowest rank that holds it, in one collective.
    offers = world.all_gather({name: held[name].detach().cpu() for name in asked if owner[name] == world.rank})
    return {name: offers[owner[name]][name] for name in offered[world.rank][0]}


def join_predictions(programs: Sequence[Program], parts: Sequence[Prediction], spec: TensorSpec) -> Tensor:
    """Assemble the prediction for a step's images from all ranks' `parts`; `spec` is that of one micro-batch."""
    count = programs[0].micro_batches
    shape = (count * spec.shape[0], *spec.shape[1:])
    whole = torch.empty(shape, dtype=next(tensor.dtype for prediction in parts for tensor in prediction.values()))
    for program, prediction in zip(programs, parts, strict=True):
        for micro_batch, tensor in prediction.items():
            # The part of the micro-batch's prediction that the rank holds, as a view into the whole.
            view, shard = whole.chunk(count)[micro_batch], program.get_direction_program(micro_batch).prediction_shard
            if shard:
                shard.fill(view, tensor)
            else:
                view.copy_(tensor)
    return whole


# A rectangle of a picture that serves as a model's whole input image, read window by window.

_MOST_SIDE_PX, _MOST_PX = 1 << 24, 1 << 40


@dataclass(frozen=True)
class PaddedRegion:
    """All of `picture`, with white below and at the right up to `size_px` (height, width) if the model needs that."""

    #     +-----------+...+
    #     |  picture  |   :      picture_px: what is asked for, and what is written
    #     |           |   :      size_px: what the model computes, for instance a multiple of 32; white is read as any
    #     +-----------+   :               other pixels, and never stored
    #     :               :
    #     +...............+
    picture: Picture
    size_px: tuple[int, int]

    @property
    def picture_px(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.picture.shape()

    def pad_to_multiple(self, px: int) -> PaddedRegion:
        """Return the region padded to multiples of `px` on both sides."""
        height, width = (-(-side // px) * px for side in self.picture_px)
        return replace(self, size_px=(height, width))

    def read_tile(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """Return the pixels of `tile` as (1, 3, h, w), from -1 to 1. Raises ImageError if they cannot be read."""
        pixels = self.picture.read(tile.rows.start, tile.cols.start, *tile.shape)
        part = to_network_input(pixels)
        return part[None].to(dtype, memory_format=torch.channels_last)


def make_padded_region(picture: Picture, box: Sequence[int] | None = None, level: int = 0) -> PaddedRegion:
    """Return the rectangle (y0, x0, height, width) in pixels of `level`, white outside the picture; None: all of it.

    Raises ImageError if the rectangle is empty, does not overlap the picture, or is larger than any slide.
    """
    top, left, (height, width) = 0, 0, picture.shape(level)
    if box is not None:
        try:
            top, left, height, width = box = tuple(map(index, box))
        except (TypeError, ValueError) as error:
            raise ImageError(f"region={box!r} must be four whole numbers of pixels: y0, x0, height, width.") from error
        if max(height, width) > _MOST_SIDE_PX or height * width > _MOST_PX:
            raise ImageError(
                f"region={box!r}: {height:,} x {width:,} px are more than any slide has. Ask for a smaller one."
            )
    cut = crop_picture(picture, top, left, height, width, level)
    return PaddedRegion(cut, cut.shape())


def prepare_region(
    model: nn.Module, region: PaddedRegion, precision: str = "float32", device: str = "auto"
) -> tuple[Recipe, PaddedRegion]:
    """Return the recipe of the model at the region's size, and the region, padded if the model needs that.

    Some models take only multiples of a power of two: powers up to 256 are tried. Raises the TraceError for the
    unpadded size if the model takes none of them.
    """
    plan = Plan(split_size=1, spatial_size=0, precision=precision)
    # torch logs on stderr what it cannot trace, besides raising the error; a refused size would look like a failure.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    refusals: list[TraceError] = []
    try:
        for px in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            padded = region.pad_to_multiple(px)
            if refusals and padded.size_px == region.size_px:
                continue
            try:
                return prepare_prediction(model, plan, (1, 3, *padded.size_px), device), padded
            except TraceError as error:
                refusals.append(error)
    finally:
        log.disabled = before
    raise refusals[0]
