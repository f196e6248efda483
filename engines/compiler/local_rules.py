"""Rules that run a node's own operator on the local values of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.places import (
    Place,
    Places,
    compute_local_shape,
    count_lead,
    drop_lead,
    get_sizes,
    keep_places,
    to_places,
)
from mpi4dl_nb.engines.geometry.tiles import Axes, Span, Tile
from mpi4dl_nb.engines.geometry.windows import Window
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec, find_ref_names
from mpi4dl_nb.engines.program.instructions import DEVICE, SEED
from mpi4dl_nb.engines.program.kernels import get_kernel, get_operator, has_kernel, register_kernel
from mpi4dl_nb.engines.program.rng import make_seeded_arguments, uses_generator

# Errors for operators that cannot run on tiles, and their remedies.


WHOLE_PX = 128 * 128
"""Maximum number of pixels of an image that each rank may hold whole; larger images are tiled to avoid that."""


class NeedsGatherError(TraceError):
    """An operator that needs more than tiles and windows: it is exact if every rank holds all of its inputs.

    `why` says so without a remedy. `places` are those of `axes`, along which its result may be sharded again; there may
    be none.
    """

    def __init__(self, message: str, axes: Axes = (), why: str = "") -> None:
        super().__init__(message)
        self.places, self.why = to_places(axes), why


def make_unsupported_error(node: Node, why: str = "has no entry in the operator table") -> TraceError:
    """Return the error for an operator that cannot run on tiles, with remedies."""
    return TraceError(
        f"{_describe(node)} {why}. It is in {node.where}. Either end the spatial stages before it "
        "(a smaller spatial_size, or another balance), or write a rule: a function like those in "
        f'engines/compiler/entries, under @register_rule("{node.operator}").'
    )


def make_shared_images_error(node: Node, why: str) -> TraceError:
    """Return the error for an operator that cannot run on one rank's share of a micro-batch's images."""
    return TraceError(
        f"{_describe(node)} {why}. It is in {node.where}, where local_dp ranks share the images of each micro-batch. "
        "Use local_dp=1, or data_parallel, which gives whole micro-batches to each replica."
    )


def _describe(node: Node) -> str:
    return f"{node.operator} (reads {', '.join(dict.fromkeys(find_ref_names(node.arguments)))})"


def make_gather_error(node: Node, why: str, axes: Axes = ()) -> NeedsGatherError:
    """Return the error for an operator that needs whole values; for large images it is final."""
    most = f"{why}; beyond {WHOLE_PX} pixels, which every rank would have to hold, there is no rule for that"
    return NeedsGatherError(str(make_unsupported_error(node, most)), axes, most)


def check_deterministic(b: Builder, node: Node) -> None:
    """Raise TraceError for a random operator that would draw differently on each rank of a stage."""
    if len(b.stage.ranks) == 1 or not uses_generator(node):
        return
    make_error = make_shared_images_error if b.stage.shares > 1 else make_unsupported_error
    raise make_error(node, "draws random numbers, which the ranks of a stage do not share")


# Alignment of a node's arguments and results: which pixels of them a rank holds, and along which axes.


def get_spec(b: Builder, name: str) -> TensorSpec:
    """Return the whole-image shape and type of any value, weight or buffer."""
    return b.get_value(Ref(name)).spec


def map_refs(pick: Callable[[Ref], Any], argument: Any) -> Any:
    """Apply `pick` to every `Ref` in nested arguments."""
    if isinstance(argument, list | tuple):
        return type(argument)(map_refs(pick, item) for item in argument)
    if isinstance(argument, dict):
        return {name: map_refs(pick, item) for name, item in argument.items()}
    return pick(argument) if isinstance(argument, Ref) else argument


def find_largest_image(b: Builder, node: Node) -> ValueLayout:
    """Return the largest tiled value that a node reads; over it, other values are broadcast."""
    images = (b.values[name] for name in node.reads if b.is_tiled(Ref(name)))
    return max(images, key=lambda image: math.prod(image.size_px))


def align_arguments(b: Builder, node: Node) -> dict[str, Any]:
    """Return the node's arguments, aligned pixel by pixel: each rank takes its own tile of values that all ranks hold.

    A single row or column that is broadcast over an image is gathered on every rank.

    Raises TraceError if the arguments cannot be aligned.
    """
    # The largest image sets the tiles. Others have the same pixels, or one row or column that is broadcast over it:
    #
    #     x  (N, C, H, W)   cut into tiles         y  (N, C, 1, W)   tiled, too, along W: gathered, then cut as x is
    #     z  (C, 1, 1)      whole on each rank     m  (H, W)         whole on each rank, and cut as x is
    tiled = find_largest_image(b, node)
    for name in node.reads:
        if b.is_tiled(Ref(name)):
            value = b.values[name]
            is_aligned = value.places == tiled.places and all(map(_can_broadcast, value.size_px, tiled.size_px))
        else:
            shape = get_spec(b, name).shape
            dims = (place.dim for place in tiled.places if len(shape) >= -place.dim)
            is_aligned = all(_can_broadcast(shape[dim], tiled.spec.shape[dim]) for dim in dims)
        if not is_aligned:
            raise NeedsGatherError(
                f"{node.operator} in {node.where} joins a tiled value of {tiled.size_px} pixels with {name} of shape "
                f"{get_spec(b, name).shape}, which has other pixels. "
                "Make it a function of the image, or end the spatial stages before this layer (spatial_size, balance)."
            )
    parts = {}
    for ref in map(Ref, dict.fromkeys(node.reads)):
        beneath = b.is_tiled(ref) and b.get_value(ref).size_px == tiled.size_px
        parts[ref.name] = b.align_to_output(ref) if beneath else cut_to_tile(b, node, b.all_gather(ref), tiled)
    arguments: dict[str, Any] = map_refs(lambda ref: parts[ref.name], node.arguments)
    return arguments


def _can_broadcast(size: int, whole: int) -> bool:
    return size in (1, whole)


def cut_to_tile(b: Builder, node: Node, ref: Ref, tiled: ValueLayout, tile: Tile | None = None) -> Ref:
    """Return the part, under this rank's `tile` of the node's result, of a value that every rank holds whole.

    The last axes of the value are those of `tiled`, or of size 1. By default the tile is all that the rank computes.
    """
    spec, tile = get_spec(b, ref.name), tile or b.get_output_tiles(tiled.size_px)[b.rank]
    if lead := count_lead(tuple(p for p in tiled.places if len(spec.shape) >= -p.dim and spec.shape[p.dim] > 1)):
        return _cut_beside_lead(b, node, ref, tiled, lead)
    pairs = zip(tiled.places, tile, strict=True)
    cut = {place: span for place, span in pairs if len(spec.shape) >= -place.dim and spec.shape[place.dim] > 1}
    value = ValueLayout(ref.name, spec, tuple(cut), differentiable=True)
    spans = {
        axis: (span.start, span.stop)
        for axis, span, size in zip(value.split().axes, cut.values(), value.size_px, strict=True)
        if size > len(span)
    }
    if not spans:
        return ref
    name = f"{node.name}.{ref.name}.tile"
    if value.is_split:
        return b.add_local_op(name, "tile.cut", ref, tuple(spans), tuple(spans.values()), like=spec)
    split = value.split().spec
    x = b.add_local_op(f"{name}.split", "aten.reshape.default", ref, split.shape, like=split)
    x = b.add_local_op(f"{name}.cut", "tile.cut", x, tuple(spans), tuple(spans.values()), like=split)
    shape = value.compute_shape(Tile(*cut.values()))
    return b.add_local_op(name, "aten.reshape.default", x, shape, like=spec)


def _cut_beside_lead(b: Builder, node: Node, ref: Ref, tiled: ValueLayout, lead: int) -> Ref:
    """Return the part that `cut_to_tile` does where `tiled` has `lead` positions beside its pixels."""
    dim, spec, name = tiled.places[0].dim, get_spec(b, ref.name), f"{node.name}.{ref.name}"
    parts = [
        b.add_local_op(f"{name}.{part}", "aten.slice.Tensor", ref, dim, *span, like=spec.resize(dim, span[1] - span[0]))
        for part, span in (("lead", (0, lead)), ("pixels", (lead, spec.shape[dim])))
    ]
    shape, places = drop_lead(tiled.spec.shape, tiled.places)
    own = cut_to_tile(b, node, parts[1], replace(tiled, spec=replace(tiled.spec, shape=shape), places=places))
    if b.rank != b.stage.ranks[0]:
        return own
    return b.add_local_op(f"{name}.beside", "aten.cat.default", (parts[0], own), dim, like=spec)


def get_local_ranges(b: Builder, spec: TensorSpec, axes: Axes) -> list[tuple[int, int, int]]:
    """Return, for each axis of the current node's result, its whole size and this rank's start and stop."""
    ranges = [(size, 0, size) for size in spec.shape]
    if axes:
        tile = b.get_output_tiles(spec.get_sizes(axes))[b.rank]
        for axis, span in zip(axes, tile, strict=True):
            ranges[axis] = (spec.shape[axis], span.start, span.stop)
    return ranges


def get_local_shape(b: Builder, spec: TensorSpec, places: Places) -> tuple[int, ...]:
    """Return the shape of this rank's part of the current node's result."""
    if not places:
        return spec.shape
    return compute_local_shape(spec.shape, places, b.get_output_tiles(get_sizes(spec.shape, places))[b.rank])


def get_sharded_axes(b: Builder, ref: Ref) -> tuple[int, ...]:
    """Return the axes along which a value is sharded, each a dimension of its own, counted from the front."""
    value = b.get_value(ref)
    return tuple(axis + len(value.spec.shape) for axis in value.axes)


def find_sharded_dims(b: Builder, ref: Ref) -> set[int]:
    """Return the dimensions, counted from the front, of which each rank has a part."""
    value = b.get_value(ref)
    return {place.dim + len(value.spec.shape) for place in value.places}


def get_places_without(b: Builder, ref: Ref, dims: Sequence[int]) -> Places:
    """Return the places of a value's sharded axes after the dimensions `dims`, counted from the front, are removed."""
    value = b.get_value(ref)
    count = len(value.spec.shape)
    left = [dim for dim in range(count) if dim not in dims]
    return keep_places(value.places, [left.index(dim) - len(left) if dim in left else None for dim in range(count)])


_COMPARED = "divide multiply subtract greater greater_equal less less_equal not_equal"
_UNTAGGED = {
    "default": (
        "alias broadcast_tensors clone contiguous detach _to_copy lift_fresh_copy "
        "zeros_like ones_like full_like empty_like "
        "leaky_relu log_sigmoid hardswish special_expit special_erf "  # leaky_relu: not tagged in torch 2.11
        "isclose negative absolute arctan2 floor_divide"
    ),
    "Tensor": f"masked_fill __and__ __or__ __xor__ rsub {_COMPARED}",
    "Scalar": f"where __and__ __or__ __xor__ floor_divide {_COMPARED}",
    "ScalarSelf": "where",
    "ScalarOther": "where",
    **dict.fromkeys(("device", "dtype", "dtype_layout"), "to"),
}
"""Pointwise operators that ATen does not tag as such, by overload."""

_POINTWISE = {f"aten.{name}.{overload}" for overload, names in _UNTAGGED.items() for name in names.split()}


# Tensors are stored with channels last here, so a view may have to be a copy. Operators that read the order in memory
# get copies of their arguments in the order of the trace.
_ANY_LAYOUT = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
    "aten.view_as.default": "aten.reshape_as.default",
}
_BY_MEMORY_ORDER = (
    *("aten.as_strided.default", "aten.as_strided_scatter.default"),
    *("aten.view_as_complex.default", "aten.view.dtype"),
)


@register_kernel("tile.of_contiguous")
def run_on_contiguous(kernel: str, *arguments: Any, **keywords: Any) -> Any:
    """Run a kernel on contiguous copies of its tensor arguments, where they are not contiguous."""
    return get_kernel(kernel)(*(a.contiguous() if isinstance(a, Tensor) else a for a in arguments), **keywords)


def apply_locally(b: Builder, node: Node, axes: Iterable[int | Place], **changes: Any) -> Ref:
    """Run the node's own operator on local values, with some arguments replaced by `changes`.

    `axes` are those along which the result is sharded: dimensions, or places in them. A tiled result is computed from
    the pixels under it, any other from the pixels that the rank owns. Values in `changes` are passed as they are.
    """
    axes = to_places(axes)
    pick = b.align_to_output if axes else b.crop_to_own
    changes = {name: map_refs(pick, value) for name, value in node.arguments.items() if name not in changes} | changes
    positional, keywords = split_arguments(node, changes)
    kernel = node.operator if has_kernel(node.operator) else _ANY_LAYOUT.get(node.operator, node.operator)
    if node.operator in _BY_MEMORY_ORDER:
        kernel, positional = "tile.of_contiguous", [kernel, *positional]
    if uses_generator(node):
        kernel, positional = "tile.seeded", [SEED, DEVICE, *make_seeded_arguments(node, kernel), *positional]
    spec = node.spec or TensorSpec((), "float32")
    if node.spec is None and axes:  # several outputs: sizes along the sharded axes, and a floating type if one is read
        image, shape = find_largest_image(b, node), [1] * -min(axes).dim
        for place, source in zip(axes, image.places, strict=True):
            shape[place.dim] = image.spec.shape[source.dim]
        types = [get_spec(b, name) for name in node.reads]
        spec = TensorSpec(tuple(shape), next((read.dtype for read in types if read.is_floating), image.spec.dtype))
    return b.add_local_op(node.name, kernel, *positional, like=spec, axes=axes, **keywords)


def split_arguments(node: Node, changes: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the node's arguments as its operator takes them. A device becomes the rank's device."""
    arguments = {**node.arguments, **changes}
    if arguments.get("device") is not None:
        arguments["device"] = DEVICE
    if has_kernel(node.operator):
        return list(arguments.values()), {}
    # A type, a device and the like are passed by name; None is their default.
    schema = get_operator(node.operator)._schema.arguments
    keyword_only = {argument.name for argument in schema if argument.kwarg_only}
    positional = [value for name, value in arguments.items() if name not in keyword_only]
    keywords = {name: value for name, value in arguments.items() if name in keyword_only and value is not None}
    return positional, keywords


def is_pointwise(name: str) -> bool:
    """Return whether each output pixel depends only on the same pixel of the inputs."""
    return name in _POINTWISE or (not has_kernel(name) and torch.Tag.pointwise in get_operator(name).tags)


# Operators that read all pixels: every rank gathers them, for images of few pixels only.


def all_gather_pixels(b: Builder, node: Node, ref: Ref) -> Ref:
    """Gather all pixels of a value, for a node.

    Raises NeedsGatherError if there are more than `WHOLE_PX`: of one image, or of all images if ranks share them.
    """
    if is_too_large(b, ref):
        things = "pixels" if b.stage.shares == 1 else "numbers of a channel"
        raise make_gather_error(node, f"reads all {_format_sizes(_get_gathered_px(b, ref))} {things} of {ref.name}")
    return b.all_gather(ref)


def is_too_large(b: Builder, ref: Ref) -> bool:
    """Return whether other ranks hold parts of a value, and it has too many pixels for each to hold all of them."""
    return b.is_tiled(ref) and len(b.stage.ranks) > 1 and math.prod(_get_gathered_px(b, ref)) > WHOLE_PX


def _get_gathered_px(b: Builder, ref: Ref) -> tuple[int, ...]:
    value = b.get_value(ref)
    shape = value.spec.shape
    return value.size_px if b.stage.shares == 1 else (*shape[:1], *shape[2:])


def all_gather_lines(b: Builder, node: Node, source: Ref, axis: int, lines: Span) -> Ref:
    """Gather a few lines of a tiled value, along its sharded axis `axis` counted from the front, on every rank.

    Raises NeedsGatherError beyond `WHOLE_PX` pixels.
    """
    whole = Tile.whole(*b.get_value(source).size_px)
    wanted = whole.replace_span(get_sharded_axes(b, source).index(axis), lines)
    if wanted.pixels > WHOLE_PX:
        raise make_gather_error(node, f"takes {_format_sizes(wanted.shape)} pixels out of {source.name}")
    # Every rank wants the same lines, wherever its own tile lies.
    gathered = b.exchange(b.crop_to_own(source), dict.fromkeys(b.stage.ranks, wanted), 0.0)
    return b.pad_window(Window(gathered.name, b.get_held_tiles(gathered)[b.rank], wanted, 0.0))


def _format_sizes(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
