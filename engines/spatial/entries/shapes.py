"""Other shapes for the same values: rows and columns stay whole axes, the others are split, merged or repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.entries.sampling import copies, resampled
from engines.spatial.ops import entry
from engines.spatial.places import lined_up, local_shape, spec_of, whole_axes
from engines.spatial.plain import as_it_is
from engines.spatial.refusals import apart

__all__: list[str] = []


@entry(
    *(
        f"aten.{name}"
        for name in (
            "view.default", "reshape.default", "view_as.default", "reshape_as.default",
            "flatten.using_ints", "unflatten.int", "squeeze.default", "squeeze.dim", "squeeze.dims",
            "unsqueeze.default",
        )
    )
)  # fmt: skip
def reshape(b: Builder, node: Node) -> None:
    """The same values in the same order; rows and columns must still be there, each as an axis of its own."""
    source = next(iter(node.arguments.values()))
    if not b.is_tiled(source):
        raise apart(node, "takes its shape from an image")
    shape = b.value(source).spec.shape
    found = [_kept(shape, node.spec.shape, axis) for axis in whole_axes(b, source)[:2]]
    pairs = [(rows, cols) for rows in found[0] for cols in found[1] if rows != cols]
    if not pairs:
        raise apart(node, f"takes rows and columns apart or together ({shape} to {node.spec.shape})")
    count = len(node.spec.shape)
    axes = tuple(axis - count for axis in max(pairs, key=lambda pair: (pair == (count - 2, count - 1), pair)))
    b.local(
        node.name, "aten.reshape.default", b.beneath(source), local_shape(b, node.spec, axes), like=node.spec, axes=axes
    )


def _kept(shape: Sequence[int], out: Sequence[int], axis: int) -> list[int]:
    """The axes of `out` along which the same values lie as along `axis` of `shape`.

    >>> _kept((2, 6, 5, 7), (2, 2, 3, 5, 7), 2)
    [3]
    """
    before = math.prod(shape[:axis])
    return [at for at, size in enumerate(out) if size == shape[axis] and math.prod(out[:at]) == before]


@entry("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def expand(b: Builder, node: Node) -> None:
    """Axes of one value grow, and axes come in front."""
    source = lined_up(b, node)["self"]
    axes = next(b.values[name].axes for name in node.reads if b.is_tiled(Ref(name)))
    whole = spec_of(b, source.name).shape
    if b.is_tiled(source) and any(whole[axis] != node.spec.shape[axis] for axis in axes):
        raise apart(node, "repeats rows or columns")
    b.local(node.name, "aten.expand.default", source, local_shape(b, node.spec, axes), like=node.spec, axes=axes)


@entry("aten.repeat.default", "aten.tile.default", images=("self",))
def repeat(b: Builder, node: Node) -> None:
    """Channels and batch again and again; or rows and columns."""
    times, source = node.arguments.get("repeats", node.arguments.get("dims")), node.arguments["self"]
    if not set(times[-2:]) - {1}:
        as_it_is(b, node, (-2, -1))
    elif set(times[:-2]) - {1}:
        raise apart(node, f"repeats pixels and other axes at once ({tuple(times)})")
    else:
        sizes = zip(b.value(source).size_px, (1, *times)[-2:], strict=True)
        resampled(b, node, source, *(copies([*range(size)] * again) for size, again in sizes))


@entry("aten.new_empty.default")
def new(b: Builder, node: Node) -> None:
    """A constant that only takes its type from an image: every rank makes all of it."""
    as_it_is(b, node, None)
