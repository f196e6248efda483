"""Rules of operators that arrange the shares of a batch anew, or work on each image by itself. None: unknown."""

from __future__ import annotations

from dataclasses import replace

from engines.layer.graph import Node, Ref, references
from engines.loss.analysis import Analysis
from engines.loss.shares import CONSTANT, Kind, Share, dims_of, rows_behind

__all__ = ["RULES"]

_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
_MOVED = ("permute", "transpose", "movedim", "swapaxes", "t", "numpy_T", "select", "slice", "narrow")
_SPREAD = ("expand", "expand_as", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
_ALONG = (
    "softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logsumexp", "amax", "amin", "argmax",
    "argmin", "max", "min", "all", "any", "var", "std", "prod", "linalg_vector_norm", "norm", "sort", "topk",
)  # fmt: skip
_BY_IMAGE = (
    "one_hot", "gather", "scatter", "scatter_add", "embedding", "conv1d", "conv2d", "conv3d", "convolution",
    "avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d", "adaptive_avg_pool2d", "upsample_nearest2d",
    "upsample_bilinear2d", "constant_pad_nd", "pad", "linear", "bmm",
)  # fmt: skip
_PARTS = ("split", "split_with_sizes", "chunk", "unbind")


def _viewed(a: Analysis, node: Node) -> Share | None:
    """A view: the images stay apart where as many entries lie before them as did."""
    ref = node.arguments["self"]
    found = a.share(ref.name)
    if found.kind is not Kind.ROWS:
        return found
    axis = a.axis(node)
    kept = axis is not None and node.spec and rows_behind(a.spec(ref), found.axis, node.spec, axis)
    return replace(found, axis=axis) if kept else None


def _moved(a: Analysis, node: Node) -> Share | None:
    """Dimensions in another order, or a part along one that is not that of the batch."""
    ref = node.arguments["self"]
    found = a.share(ref.name)
    if found.kind is not Kind.ROWS:
        return found if a.twin_agrees(node) else None
    axis, dim = a.axis(node), node.arguments.get("dim")
    takes_images = isinstance(dim, int) and dim % len(a.spec(ref).shape) == found.axis and node.spec != a.spec(ref)
    return None if axis is None or takes_images else replace(found, axis=axis)


def _spread(a: Analysis, node: Node) -> Share | None:
    """The same for each image, where the shape of the result holds the batch."""
    ref = node.arguments.get("self")
    found = a.share(ref.name) if isinstance(ref, Ref) and not node.operator.startswith("aten.new_") else CONSTANT
    if a.number(node, "fill_value") != CONSTANT:
        return None
    if found.kind is Kind.SUM:
        return found if a.twin_agrees(node) else None
    if node.name in a._twins and a._twins[node.name].spec == node.spec and found.kind is Kind.SAME:
        return found
    axis = a.axis(node)
    return None if axis is None or found.degree else replace(found, kind=Kind.ROWS, axis=axis)


def _along(a: Analysis, node: Node) -> Share | None:
    """An operator along dimensions that are not that of the batch."""
    ref = node.arguments["self"]
    found = a.settled(ref.name)
    if found.kind is Kind.SAME:
        return found if found.degree == 0 else None
    given = node.arguments.get("dim")
    dims = dims_of(given, len(a.spec(ref).shape))
    if not found.is_plain or not dims or found.axis in dims or len(node.reads) != 1:
        return None
    if node.spec is None:
        return found
    axis = a.axis(node)
    return None if axis is None else replace(found, axis=axis)


def _by_image(a: Analysis, node: Node) -> Share | None:
    """An operator that treats each entry of the first dimension by itself, that of the batch."""
    shares = [a.settled(name) for name in node.reads]
    if not all(each.is_plain and each.axis == 0 for each in shares):
        return None
    rows = [each for each in shares if each.kind is Kind.ROWS]
    dims = dims_of(node.arguments.get("dim"), len(a.graph.specs[node.reads[0]].shape))
    if not rows:
        return CONSTANT.made(*shares)
    if 0 in dims or a.axis(node) != 0:
        return None
    return rows[0].made(*shares)


def _looked_up(a: Analysis, node: Node) -> Share | None:
    """Entries of a constant, such as a weight for each class, by numbers that belong to images."""
    table, indices = a.settled(node.arguments["self"].name), node.arguments["indices"]
    shares = [a.settled(name) for name in references(indices)]
    if not all(each.is_plain for each in (table, *shares)) or table.kind is not Kind.SAME:
        return None
    made, axis = table.made(*shares), a.axis(node)
    if all(each.kind is Kind.SAME for each in shares):
        return made
    return None if axis is None or len(shares) != 1 else replace(made, kind=Kind.ROWS, axis=axis)


def _several(a: Analysis, node: Node) -> Share | None:
    """Values side by side, along another dimension than that of the batch."""
    found = [a.share(name) for name in node.reads]
    first = found[0]
    if any((each.kind, each.degree, each.axis) != (first.kind, first.degree, first.axis) for each in found):
        return None
    made = first.made(*found)
    if first.kind is not Kind.ROWS:
        return made
    axis = a.axis(node)
    along = node.arguments.get("dim")
    count = len(node.spec.shape) if node.spec else 0
    if axis is None or not isinstance(along, int) or along % count == axis:
        return None
    return replace(made, axis=axis)


def _parted(a: Analysis, node: Node) -> Share | None:
    """Several tensors out of one; each is asked for by `getitem`."""
    ref = node.arguments["self"]
    found, dim = a.share(ref.name), node.arguments.get("dim", 0)
    apart = found.kind is not Kind.ROWS or dim % len(a.spec(ref).shape) != found.axis
    return found if apart else None


def _picked(a: Analysis, node: Node) -> Share | None:
    found = a.share(node.reads[0])
    if found.kind is not Kind.ROWS:
        return found
    axis = a.axis(node)
    return None if axis is None else replace(found, axis=axis)


RULES = {
    **dict.fromkeys(_VIEWS, _viewed),
    **dict.fromkeys(_MOVED, _moved),
    **dict.fromkeys(_SPREAD, _spread),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(_BY_IMAGE, _by_image),
    "index": _looked_up,
    **dict.fromkeys(("stack", "cat"), _several),
    **dict.fromkeys(_PARTS, _parted),
    "getitem": _picked,
}
