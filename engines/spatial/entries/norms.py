"""Instance, group, layer and RMS norm, and variances over space: batch norm's moments, over other groups of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engines.graph.model_graph import Node, Ref, TensorSpec, to_user_name
from engines.graph.traceability import CUMULATIVE
from engines.program.builder import Builder
from engines.program.instructions import RunningStatistics
from engines.spatial.entries.channels import reduce_other_axes
from engines.spatial.kernels import compute_batch_statistics, get_kernel, get_sum_type, register_kernel
from engines.spatial.local_rules import (
    apply_locally,
    cut_to_tile,
    get_local_shape,
    get_spatial_axes,
    make_gather_error,
    make_unsupported_error,
)
from engines.spatial.operator_table import register_rule

__all__: list[str] = []


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
    return (spread.sqrt() if root else spread).to(dtype).view(shape), mean.to(dtype).view(shape)


Rows = Callable[[Ref], Ref]
"""Maps (...) to (1, groups, values): the values of a tensor by group."""


def _group_by(b: Builder, node: Node, kernel: str, setting: Sequence[int]) -> Rows:
    """Return a grouping by `kernel(x, setting)`, which runs once for each value."""

    def group(x: Ref) -> Ref:
        name = f"{node.name}.{x.name}.grouped"
        return Ref(name) if name in b.values else b.add_local_op(name, kernel, x, setting, like=b.get_value(x).spec)

    return group


def _compute_moments(b: Builder, name: str, x: Ref, rows: Rows, groups: int) -> tuple[Ref, list[int]]:
    """Return the moments of each group from all tiles, and each tile's number of values of a group."""
    counts = b.count_elements(x, groups) if b.is_tiled(x) else [b.get_value(x).spec.numel // groups]
    slot = b.tile if len(counts) > 1 else 0
    like = TensorSpec((len(counts), 2, groups), "float64")
    own = b.add_local_op(f"{name}.moments", "tile.moments", rows(b.crop_to_own(x)), slot, len(counts), like=like)
    return b.all_reduce(own) if len(counts) > 1 else own, counts


def _normalise_channels(b: Builder, node: Node, groups: int) -> tuple[Ref, list[int]]:
    """Normalise (N, C, ...) over `groups` runs of channels of one image; return the moments and the tiles' counts."""
    a, value = node.arguments, b.get_value(node.arguments["input"])
    channels = value.spec.shape[1]
    rows = _group_by(b, node, "aten.reshape.default", (1, groups, -1))
    moments, counts = _compute_moments(b, node.name, a["input"], rows, groups)
    shape = get_local_shape(b, node.spec, value.axes)
    settings = a["weight"], a["bias"], counts, a["eps"], value.spec.shape[0] * channels, shape
    x = rows(b.align_to_output(a["input"]))
    b.add_local_op(node.name, "tile.normalise_groups", x, moments, *settings, like=node.spec, axes=value.axes)
    return moments, counts


@register_rule("aten.instance_norm.default", everywhere=True, images=("input",))
def instance_norm(b: Builder, node: Node) -> None:
    """Normalise every channel of every image (Ulyanov et al., 2016, arXiv:1607.08022)."""
    a, value = node.arguments, b.get_value(node.arguments["input"])
    if not a["use_input_stats"]:
        apply_locally(b, node, value.axes)
        return
    moments, counts = _normalise_channels(b, node, value.spec.shape[0] * value.spec.shape[1])
    if a["running_mean"]:
        if b.is_batch_sharded(a["input"]):
            raise make_unsupported_error(node, "keeps running statistics of images that ranks share")
        names = a["running_mean"].name, a["running_var"].name
        b.statistics.append(RunningStatistics(*names, moments.name, a["momentum"], tuple(counts)))


@register_rule("aten.group_norm.default", images=("input",))
def group_norm(b: Builder, node: Node) -> None:
    """Normalise groups of neighbouring channels of each image."""
    _normalise_channels(b, node, b.get_value(node.arguments["input"]).spec.shape[0] * node.arguments["num_groups"])


def _is_over_space(b: Builder, node: Node) -> bool:
    """Return whether the last axes, over which a layer norm normalises, include rows and columns.

    Raises TraceError if they include only one of the two.
    """
    rows, cols, count = get_spatial_axes(b, node.arguments["input"])
    first = count - len(node.arguments["normalized_shape"])
    if (rows >= first) != (cols >= first):
        raise make_gather_error(node, "normalises over one spatial axis of two")
    return rows >= first


@register_kernel("tile.reshaped")
def reshape_and_cast(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Reshape and cast to the result's type, since float32 weights promote half precision to float32."""
    return x.reshape(shape).to(dtype)


def _scale_and_shift(b: Builder, node: Node, name: str, shape: Sequence[int], axes: tuple[int, int]) -> None:
    """Apply the weight and bias of a layer norm over space: each tile takes its own pixels of them."""
    for argument, operator in (("weight", "mul"), ("bias", "add")):
        if (vector := node.arguments.get(argument)) is not None:
            x, part = Ref(name), cut_to_tile(b, node, vector, b.get_value(Ref(name)))
            name = f"{node.name}.{operator}"
            b.add_local_op(name, f"aten.{operator}.Tensor", x, part, like=node.spec, axes=axes)
    dtype = getattr(torch, node.spec.dtype)
    b.add_local_op(node.name, "tile.reshaped", Ref(name), shape, dtype, like=node.spec, axes=axes)


@register_rule("aten.layer_norm.default")
def layer_norm(b: Builder, node: Node) -> None:
    """Normalise each pixel over its channels or, if space is included, each image (arXiv:1607.06450)."""
    value = b.get_value(node.arguments["input"])
    if not _is_over_space(b, node):
        apply_locally(b, node, value.axes)
        return
    shape = get_local_shape(b, node.spec, value.axes)
    kept = range(len(shape) - len(node.arguments["normalized_shape"]))
    groups = math.prod(value.spec.shape[axis] for axis in kept)
    rows = _group_by(b, node, "tile.grouped", tuple(kept))
    moments, counts = _compute_moments(b, node.name, node.arguments["input"], rows, groups)
    x, whole = rows(b.align_to_output(node.arguments["input"])), f"{node.name}.normalised"
    settings = None, None, counts, node.arguments["eps"], groups, shape
    b.add_local_op(whole, "tile.normalise_groups", x, moments, *settings, like=node.spec, axes=value.axes)
    _scale_and_shift(b, node, whole, shape, value.axes)


@register_kernel("tile.square_sums")
def sum_squares(x: Tensor, axes: int) -> Tensor:
    """Return sums of squares over the last `axes` axes."""
    return x.to(get_sum_type(x)).square().sum(list(range(-axes, 0)), keepdim=True)


@register_kernel("tile.by_root_mean_square")
def normalise_rms(x: Tensor, squares: Tensor, count: int, eps: float | None) -> Tensor:
    """Divide by the root mean square: Zhang and Sennrich, 2019 (arXiv:1910.07467), equation 4."""
    return (x * (squares / count + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()).to(x.dtype)


@register_rule("aten.rms_norm.default")
def rms_norm(b: Builder, node: Node) -> None:
    """Normalise as a layer norm does, but without subtracting the mean."""
    source, axes = node.arguments["input"], len(node.arguments["normalized_shape"])
    value = b.get_value(source)
    if not _is_over_space(b, node):
        apply_locally(b, node, value.axes)
        return
    like = TensorSpec((*value.spec.shape[:-axes], *(1,) * axes), value.spec.sums.dtype)
    own = b.add_local_op(f"{node.name}.squares", "tile.square_sums", b.crop_to_own(source), axes, like=like)
    total, x = b.all_reduce(own), b.align_to_output(source)
    whole, settings = f"{node.name}.normalised", (value.spec.numel // like.numel, node.arguments["eps"])
    b.add_local_op(whole, "tile.by_root_mean_square", x, total, *settings, like=node.spec, axes=value.axes)
    _scale_and_shift(b, node, whole, get_local_shape(b, node.spec, value.axes), value.axes)


@register_rule(
    *(f"aten.{name}.dim" for name in ("var", "std", "var_mean", "std_mean")),
    *(f"aten.{name}.correction" for name in ("var", "std", "var_mean", "std_mean")),
)
def lower_variance(b: Builder, node: Node) -> None:
    """Lower variances and standard deviations; over space, from the moments of all tiles."""
    a, source = node.arguments, node.arguments["self"]
    rows, cols, count = get_spatial_axes(b, source)
    dims = {dim % count for dim in a.get("dim") or range(count)}
    if not {rows, cols} & dims:
        reduce_other_axes(b, node, source)
        return
    if not {rows, cols} <= dims:
        raise make_gather_error(node, "reduces one spatial axis of two")
    correction = a.get("correction", a.get("unbiased", True))
    correction, root = float(1 if correction is None else correction), "std" in node.operator
    sizes, dtype = b.get_value(source).spec.shape, b.get_value(source).spec.dtype
    kept = [axis for axis in range(count) if axis not in dims]
    shape = [1 if axis in dims else sizes[axis] for axis in range(count) if axis not in dims or a.get("keepdim")]
    groups = math.prod(sizes[axis] for axis in kept)
    rows = _group_by(b, node, "tile.grouped", tuple(kept))
    moments, counts = _compute_moments(b, node.name, source, rows, groups)
    name = node.name if node.spec is None else f"{node.name}.both"
    settings = counts, correction, root, shape, getattr(torch, dtype)
    both = b.add_local_op(name, "tile.variance", moments, *settings, like=TensorSpec(tuple(shape), dtype))
    if node.spec is not None:
        b.add_local_op(node.name, "getitem", both, 0, like=node.spec)


# Batch norm over all tiles: local moments, an all-reduce and a local formula. Or each tile by itself.


__all__: list[str] = []


@register_rule("aten.batch_norm.default", everywhere=True, images=("input",))
def batch_norm(b: Builder, node: Node) -> None:
    """Normalise by the moments of all tiles or, if so planned, of each; the update sets the running statistics."""
    a = node.arguments
    value = b.get_value(a["input"])
    if not a["training"]:
        apply_locally(b, node, value.axes)
        return
    channels = value.spec.shape[1]
    #     own pixels -> moments, (tiles, 2, C), 0 but in its slot -> all-reduce -> moments of all tiles -> own result
    #
    # Backward is the same way back: the gradient of the moments is summed over the ranks, and each takes its slot's.
    counts, slot = b.count_elements(a["input"], channels), b.tile
    is_whole = len(counts) == 1
    if b.local_stats_ranks and not is_whole:  # each tile by its own moments
        counts, slot = [counts[b.tile]], 0
    like = TensorSpec((len(counts), 2, channels), "float64")
    affine = a["weight"], a["bias"]
    if is_whole:  # the rank holds whole images: the plain kernel alone
        both = b.add_local_op(
            f"{node.name}.both", "tile.whole_batch_norm", a["input"], *affine, a["eps"], like=node.spec
        )
        b.add_local_op(node.name, "getitem", both, 0, like=node.spec, axes=value.axes)
        moments = b.add_local_op(f"{node.name}.moments", "getitem", both, 1, like=like)
    else:
        x = b.crop_to_own(a["input"])
        moments = b.add_local_op(f"{node.name}.moments", "tile.moments", x, slot, len(counts), like=like)
        if not b.local_stats_ranks:
            moments = b.all_reduce(moments)
        x = b.align_to_output(a["input"])
        b.add_local_op(
            node.name, "tile.batch_norm", x, moments, *affine, counts, a["eps"], like=node.spec, axes=value.axes
        )
    if a["running_mean"]:
        names = a["running_mean"].name, a["running_var"].name
        counter = f"{names[0].removesuffix('running_mean')}num_batches_tracked" if a["momentum"] == CUMULATIVE else None
        if counter and counter not in b.graph.buffers:
            raise make_unsupported_error(
                node, f"has momentum=None, but there is no {to_user_name(counter)} to count its batches"
            )
        b.statistics.append(
            RunningStatistics(*names, moments.name, a["momentum"], tuple(counts), b.local_stats_ranks, counter)
        )


@register_rule("aten.add_.Tensor", everywhere=True)
def count_batches(b: Builder, node: Node) -> None:
    """Record an increment of the number of batches seen: a buffer that grows by a constant at the update."""
    buffer = node.arguments["self"].name
    if buffer not in b.graph.buffers:
        raise make_unsupported_error(node, "writes to a value in a way for which there is no rule")
    b.counters[buffer] = b.counters.get(buffer, 0) + node.arguments["other"] * node.arguments["alpha"]
