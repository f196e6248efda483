"""Other shapes for the same values: rows and columns stay whole axes, the others are split, merged or repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.align import align_arguments, get_local_shape, get_spatial_axes, get_spec
from engines.spatial.entries.sampling import lower_resample, make_copy_taps
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.unsupported import make_gather_error

__all__: list[str] = []


@register_rule(
    *(f"aten.{name}.default" for name in ("view", "reshape", "view_as", "reshape_as", "squeeze", "unsqueeze")),
    *("aten.squeeze.dim", "aten.squeeze.dims", "aten.flatten.using_ints", "aten.unflatten.int"),
)
def reshape(b: Builder, node: Node) -> None:
    """Reshape values in the same order; rows and columns must each remain an axis of its own."""
    source = next(iter(node.arguments.values()))
    if not b.is_tiled(source):
        raise make_gather_error(node, "takes its shape from an image")
    shape = b.get_value(source).spec.shape
    found = [_find_unchanged_axes(shape, node.spec.shape, axis) for axis in get_spatial_axes(b, source)[:2]]
    pairs = [(rows, cols) for rows in found[0] for cols in found[1] if rows != cols]
    if not pairs:
        raise make_gather_error(node, f"takes rows and columns apart or together ({shape} to {node.spec.shape})")
    count = len(node.spec.shape)
    # Axes of size 1 leave a choice: prefer the last two axes, where rules for images expect rows and columns.
    axes = tuple(axis - count for axis in max(pairs, key=lambda pair: (pair == (count - 2, count - 1), pair)))
    x, own = b.align_to_output(source), get_local_shape(b, node.spec, axes)
    b.add_local_op(node.name, "aten.reshape.default", x, own, like=node.spec, axes=axes)


def _find_unchanged_axes(shape: Sequence[int], out: Sequence[int], axis: int) -> list[int]:
    """Return the axes of `out` along which the same values run as along `axis` of `shape`.

    >>> _find_unchanged_axes((2, 6, 5, 7), (2, 2, 3, 5, 7), 2)
    [3]
    """
    # In row-major order an axis keeps its values if it has the same size, and as many positions before it.
    before = math.prod(shape[:axis])
    return [at for at, size in enumerate(out) if size == shape[axis] and math.prod(out[:at]) == before]


@register_rule("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def expand(b: Builder, node: Node) -> None:
    """Expand axes of size 1 and add leading axes."""
    source = align_arguments(b, node)["self"]
    axes = next(b.values[name].axes for name in node.reads if b.is_tiled(Ref(name)))
    whole = get_spec(b, source.name).shape
    if b.is_tiled(source) and any(whole[axis] != node.spec.shape[axis] for axis in axes):
        raise make_gather_error(node, "repeats rows or columns")
    own = get_local_shape(b, node.spec, axes)
    b.add_local_op(node.name, "aten.expand.default", source, own, like=node.spec, axes=axes)


@register_rule("aten.repeat.default", "aten.tile.default", images=("self",))
def repeat(b: Builder, node: Node) -> None:
    """Repeat channels and batch; or rows and columns."""
    times, source = node.arguments.get("repeats", node.arguments.get("dims")), node.arguments["self"]
    if not set(times[-2:]) - {1}:
        apply_locally(b, node, (-2, -1))
    elif set(times[:-2]) - {1}:
        raise make_gather_error(node, f"repeats pixels and other axes at once ({tuple(times)})")
    else:
        sizes = zip(b.get_value(source).size_px, (1, *times)[-2:], strict=True)
        lower_resample(b, node, source, *(make_copy_taps([*range(size)] * again) for size, again in sizes))


@register_rule("aten.new_empty.default")
def new_empty(b: Builder, node: Node) -> None:
    """Create a tensor that only takes its type from an image: every rank makes all of it."""
    apply_locally(b, node, None)
