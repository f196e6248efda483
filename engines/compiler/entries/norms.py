"""Instance, group, layer and RMS norm, and variances over space: batch norm's moments, over other groups of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.channels import check_along_other_axes, lower_other_axes
from mpi4dl_nb.engines.compiler.local_rules import (
    apply_locally,
    cut_to_tile,
    find_sharded_dims,
    get_local_shape,
    make_gather_error,
    make_shared_images_error,
    make_unsupported_error,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.places import Places
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec, to_user_name
from mpi4dl_nb.engines.graph.traceability import CUMULATIVE
from mpi4dl_nb.engines.program.instructions import RunningStatistics
from mpi4dl_nb.engines.program.kernels import compute_batch_statistics, get_kernel, get_sum_type, register_kernel


@register_kernel("tile.grouped")
def group_values(x: Tensor, kept: Sequence[int]) -> Tensor:
    """Return (1, groups, values): one group for each position along the axes `kept`."""
    # Whatever the norm, its groups become the channels of one image, (1, groups, values), for batch norm's kernels:
    #
    #     instance norm     N * C groups                layer norm over (C, H, W)    N groups
    #     group norm        N * groups                  variance over (2, 3)         N * C
    order = [*kept, *(axis for axis in range(x.dim()) if axis not in kept)]
    groups = math.prod(x.shape[axis] for axis in kept)
    return x.permute(order).reshape(1, groups, -1)


@register_kernel("tile.normalise_groups")
def normalise_groups(
    x: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    counts: list[int],
    eps: float,
    rows: int,
    shape: Sequence[int],
) -> Tensor:
    """Normalise `x`, (1, groups, values), by its groups' moments; weight and bias repeat to one for each of `rows`.

    Wu and He, 2018 (arXiv:1803.08494), section 3. One fused kernel call: each row is a channel of one image, with the
    moments of its group.
    """
    moments = moments.repeat_interleave(rows // x.shape[1], -1)
    affine = [None if vector is None else vector.repeat(rows // len(vector)) for vector in (weight, bias)]
    return get_kernel("tile.batch_norm")(x.reshape(1, rows, -1), moments, *affine, counts, eps).reshape(shape)


@register_kernel("tile.variance")
def compute_variance(
    moments: Tensor, counts: list[int], correction: float, root: bool, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return variance (or its root) and mean of each group, in the whole-image shape of the result."""
    mean, biased = compute_batch_statistics(moments, counts)
    spread = biased * biased.new_tensor(sum(counts)) / max(0.0, sum(counts) - correction)
    if root:
        # The slope of a root is infinite at 0, where ATen passes no gradient on.
        zero = spread == 0
        spread = spread.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)
    return spread.to(dtype).view(shape), mean.to(dtype).view(shape)


def _group(b: Builder, node: Node, x: Ref, kernel: str, setting: Sequence[int]) -> Ref:
    """Return the values by group, (1, groups, values), as `kernel(x, setting)` arranges them, once for each value."""
    name = f"{node.name}.{x.name}.grouped"
    return Ref(name) if name in b.values else b.add_local_op(name, kernel, x, setting, like=b.get_value(x).spec)


def _compute_moments(
    b: Builder, node: Node, own: Ref, groups: int, counts: Sequence[int], ranks: tuple[int, ...] = ()
) -> Ref:
    """Return the moments of the groups of `own`, of which the tiles have `counts` values each; of one tile if one.

    `ranks` are those of the tiles, if they are not only the ranks of the stage.
    """
    #     own pixels -> moments, (tiles, 2, C), 0 but in its slot -> all-reduce -> moments of all tiles
    #
    # Backward is the same way back: the gradient of the moments is summed over the ranks, and each takes its slot's.
    slot = ranks.index(b.rank) if ranks else b.tile if len(counts) > 1 else 0
    like = TensorSpec((len(counts), 2, groups), "float64")
    moments = b.add_local_op(f"{node.name}.moments", "tile.moments", own, slot, len(counts), like=like)
    return b.all_reduce(moments, ranks) if len(counts) > 1 else moments


def _compute_group_moments(b: Builder, node: Node, source: Ref, groups: int, *how: Any) -> tuple[Ref, list[int]]:
    """Return the moments of each group from all tiles, and each tile's number of values of a group."""
    counts = b.count_elements(source, groups) if b.is_tiled(source) else [b.get_value(source).spec.numel // groups]
    return _compute_moments(b, node, _group(b, node, b.crop_to_own(source), *how), groups, counts), counts


def _normalise_channels(b: Builder, node: Node, groups: int) -> tuple[Ref, list[int]]:
    """Normalise (N, C, ...) over `groups` runs of channels of one image; return the moments and the tiles' counts."""
    a, value = node.arguments, b.get_value(node.arguments["input"])
    channels = value.spec.shape[1]
    how = "aten.reshape.default", (1, groups, -1)
    moments, counts = _compute_group_moments(b, node, a["input"], groups, *how)
    shape = get_local_shape(b, node.result, value.places)
    settings = a["weight"], a["bias"], counts, a["eps"], value.spec.shape[0] * channels, shape
    x = _group(b, node, b.align_to_output(a["input"]), *how)
    b.add_local_op(node.name, "tile.normalise_groups", x, moments, *settings, like=node.result, axes=value.places)
    return moments, counts


# Operators whose result has memory of its own.
_OWN_MEMORY = {f"aten.{name}.default" for name in ("zeros", "ones", "new_zeros", "new_ones", "repeat", "clone")}
_OWN_MEMORY |= {f"aten.{name}.default" for name in ("zeros_like", "ones_like", "full", "new_full", "full_like")}


def _add_statistics(b: Builder, node: Node, entry: RunningStatistics) -> None:
    """Have the update set running statistics, unless forward has made them for this node alone and forgets them."""
    names = {entry.mean_buffer, entry.variance_buffer}
    if names <= b.graph.buffers.keys() - b.graph.constants.keys():
        b.statistics.append(entry)
        return
    readers = {other.name for other in b.graph.nodes if not names.isdisjoint(other.reads)}
    makers = {other.name: other.operator for other in b.graph.nodes if other.name in names}
    if readers != {node.name} or makers.keys() != names or not _OWN_MEMORY.issuperset(makers.values()):
        raise make_unsupported_error(node, "updates running statistics that are no buffers of the model")


@register_rule("aten.instance_norm.default", everywhere=True, tiled=("input",))
def instance_norm(b: Builder, node: Node) -> None:
    """Normalise every channel of every image (Ulyanov et al., 2016, arXiv:1607.08022)."""
    a, value = node.arguments, b.get_value(node.arguments["input"])
    if b.stage.shares > 1 and value.places and a["use_input_stats"] and a["running_mean"]:
        raise make_shared_images_error(node, "keeps running statistics of all images, for which there is no rule")
    check_along_other_axes(b, node, a["input"], (0, 1))
    if not a["use_input_stats"]:
        apply_locally(b, node, value.places)
        return
    moments, counts = _normalise_channels(b, node, value.spec.shape[0] * value.spec.shape[1])
    if a["running_mean"]:
        names = a["running_mean"].name, a["running_var"].name
        _add_statistics(b, node, RunningStatistics(*names, moments.name, a["momentum"], tuple(counts)))


@register_rule("aten.group_norm.default", tiled=("input",))
def group_norm(b: Builder, node: Node) -> None:
    """Normalise groups of neighbouring channels of each image."""
    check_along_other_axes(b, node, node.arguments["input"], (0, 1))
    _normalise_channels(b, node, b.get_value(node.arguments["input"]).spec.shape[0] * node.arguments["num_groups"])


def _is_over_space(b: Builder, node: Node) -> bool:
    """Return whether the last axes, over which a layer norm normalises, include rows and columns.

    Raises TraceError if they include only one of the two.
    """
    first = -len(node.arguments["normalized_shape"])
    inside = {place.dim >= first for place in b.get_value(node.arguments["input"]).places}
    if len(inside) > 1:
        raise make_gather_error(node, "normalises over one spatial axis of two")
    return inside == {True}


@register_kernel("tile.reshaped")
def reshape_and_cast(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Reshape and cast to the result's type, since float32 weights promote half precision to float32."""
    return x.reshape(shape).to(dtype)


def _scale_and_shift(b: Builder, node: Node, name: str, shape: Sequence[int], places: Places) -> None:
    """Apply the weight and bias of a layer norm over space: each tile takes its own pixels of them."""
    for argument, operator in (("weight", "mul"), ("bias", "add")):
        if (vector := node.arguments.get(argument)) is not None:
            x, part = Ref(name), cut_to_tile(b, node, vector, b.get_value(Ref(name)))
            name = f"{node.name}.{operator}"
            b.add_local_op(name, f"aten.{operator}.Tensor", x, part, like=node.result, axes=places)
    dtype = getattr(torch, node.result.dtype)
    b.add_local_op(node.name, "tile.reshaped", Ref(name), shape, dtype, like=node.result, axes=places)


@register_rule("aten.layer_norm.default")
def layer_norm(b: Builder, node: Node) -> None:
    """Normalise each pixel over its channels or, if space is included, each image (arXiv:1607.06450)."""
    value = b.get_value(node.arguments["input"])
    if not _is_over_space(b, node):
        apply_locally(b, node, value.places)
        return
    shape = get_local_shape(b, node.result, value.places)
    kept = range(len(shape) - len(node.arguments["normalized_shape"]))
    groups = math.prod(value.spec.shape[axis] for axis in kept)
    source, how = node.arguments["input"], ("tile.grouped", tuple(kept))
    moments, counts = _compute_group_moments(b, node, source, groups, *how)
    x, whole = _group(b, node, b.align_to_output(source), *how), f"{node.name}.normalised"
    settings = None, None, counts, node.arguments["eps"], groups, shape
    b.add_local_op(whole, "tile.normalise_groups", x, moments, *settings, like=node.result, axes=value.places)
    _scale_and_shift(b, node, whole, shape, value.places)


@register_kernel("tile.square_sums")
def sum_squares(x: Tensor, axes: int) -> Tensor:
    """Return sums of squares over the last `axes` axes."""
    return x.to(get_sum_type(x)).square().sum(list(range(-axes, 0)), keepdim=True)


@register_kernel("tile.by_root_mean_square")
def normalise_rms(x: Tensor, squares: Tensor, count: int, eps: float | None) -> Tensor:
    """Divide by the root mean square: Zhang and Sennrich, 2019 (arXiv:1910.07467), equation 4."""
    # As PyTorch does, whose default is the eps of the type it computes in, float32 for a half one.
    return (x * (squares / count + (torch.finfo(squares.dtype).eps if eps is None else eps)).rsqrt()).to(x.dtype)


@register_rule("aten.rms_norm.default")
def rms_norm(b: Builder, node: Node) -> None:
    """Normalise as a layer norm does, but without subtracting the mean."""
    source, axes = node.arguments["input"], len(node.arguments["normalized_shape"])
    value = b.get_value(source)
    if not _is_over_space(b, node):
        apply_locally(b, node, value.places)
        return
    like = TensorSpec((*value.spec.shape[:-axes], *(1,) * axes), value.spec.sums.dtype)
    squares = b.add_local_op(f"{node.name}.squares", "tile.square_sums", b.crop_to_own(source), axes, like=like)
    total, x = b.all_reduce(squares), b.align_to_output(source)
    whole, settings = f"{node.name}.normalised", (value.spec.numel // like.numel, node.arguments["eps"])
    b.add_local_op(whole, "tile.by_root_mean_square", x, total, *settings, like=node.result, axes=value.places)
    _scale_and_shift(b, node, whole, get_local_shape(b, node.result, value.places), value.places)


@register_rule(
    *(
        f"aten.{name}.{of}"
        for name in ("var", "std", "var_mean", "std_mean")
        for of in ("default", "dim", "correction")
    ),
)
def lower_variance(b: Builder, node: Node) -> None:
    """Lower variances and standard deviations; over space, from the moments of all tiles."""
    a, source = node.arguments, node.arguments["self"]
    count, sharded = len(b.get_value(source).spec.shape), find_sharded_dims(b, source)
    dims = {dim % count for dim in a.get("dim") or range(count)}
    if sharded.isdisjoint(dims):
        lower_other_axes(b, node, source)
        return
    if not sharded <= dims:
        raise make_gather_error(node, "reduces one spatial axis of two")
    correction = a.get("correction", a.get("unbiased", True))
    correction, root = float(1 if correction is None else correction), "std" in node.operator
    sizes, dtype = b.get_value(source).spec.shape, b.get_value(source).spec.dtype
    kept = [axis for axis in range(count) if axis not in dims]
    shape = [1 if axis in dims else sizes[axis] for axis in range(count) if axis not in dims or a.get("keepdim")]
    groups = math.prod(sizes[axis] for axis in kept)
    moments, counts = _compute_group_moments(b, node, source, groups, "tile.grouped", tuple(kept))
    name = node.name if node.spec is None else f"{node.name}.both"
    settings = counts, correction, root, shape, getattr(torch, dtype)
    both = b.add_local_op(name, "tile.variance", moments, *settings, like=TensorSpec(tuple(shape), dtype))
    if node.spec is not None:
        b.add_local_op(node.name, "getitem", both, 0, like=node.result)


# Batch norm over all tiles: local moments, an all-reduce and a local formula. Or each tile by itself.


@register_rule("aten.batch_norm.default", everywhere=True, tiled=("input",))
def batch_norm(b: Builder, node: Node) -> None:
    """Normalise by the moments of all tiles or, if so planned, of each; the update sets the running statistics."""
    a = node.arguments
    value = b.get_value(a["input"])
    check_along_other_axes(b, node, a["input"], 1)
    if not a["training"]:
        apply_locally(b, node, value.places)
        return
    channels, affine = value.spec.shape[1], (a["weight"], a["bias"])
    counts, ranks = b.count_elements(a["input"], channels), tuple[int, ...]()
    if node.module in b.graph.synced and len(b.copies) > len(b.stage.ranks):
        # All replicas: what a stage's ranks hold alike, as after a global pool, one of each replica counts.
        ranks = b.copies if len(counts) > 1 else b.copies[b.tile :: len(b.stage.ranks)]
        counts = counts * (len(b.copies) // len(b.stage.ranks))
    if len(counts) == 1:  # the rank holds whole images: the plain kernel alone
        whole = a["input"], *affine, a["eps"]
        both = b.add_local_op(f"{node.name}.both", "tile.whole_batch_norm", *whole, like=node.result)
        b.add_local_op(node.name, "getitem", both, 0, like=node.result, axes=value.places)
        like = TensorSpec((1, 2, channels), "float64")
        moments = b.add_local_op(f"{node.name}.moments", "getitem", both, 1, like=like)
    else:
        if b.local_stats_ranks:  # each tile by its own moments
            counts = [counts[b.tile]]
        moments = _compute_moments(b, node, b.crop_to_own(a["input"]), channels, counts, ranks)
        x = b.align_to_output(a["input"])
        settings = *affine, counts, a["eps"]
        b.add_local_op(node.name, "tile.batch_norm", x, moments, *settings, like=node.result, axes=value.places)
    if a["running_mean"]:
        names = a["running_mean"].name, a["running_var"].name
        counter = f"{names[0].removesuffix('running_mean')}num_batches_tracked" if a["momentum"] == CUMULATIVE else None
        if counter and counter not in b.graph.buffers:
            raise make_unsupported_error(
                node, f"has momentum=None, but there is no {to_user_name(counter)} to count its batches"
            )
        averaging = b.local_stats_ranks, counter
        entry = RunningStatistics(*names, moments.name, a["momentum"], tuple(counts), *averaging, whole=bool(ranks))
        _add_statistics(b, node, entry)


@register_rule("aten.add_.Tensor", everywhere=True)
def count_batches(b: Builder, node: Node) -> None:
    """Record an increment of the number of batches seen: a buffer that grows by a constant at the update."""
    buffer = node.arguments["self"].name
    if buffer not in b.graph.buffers:
        raise make_unsupported_error(node, "writes to a value in a way for which there is no rule")
    b.counters[buffer] = b.counters.get(buffer, 0) + node.arguments["other"] * node.arguments["alpha"]
