"""Follows the batch through a traced loss: which values are sums or means over it, and what they are divided by.

Only operators that are known to keep images apart are followed; whatever else meets the batch is unknown. Where a
number that decides may be the size of the batch, a second trace with twice as many images tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from engines.errors import TraceError
from engines.layer.graph import ModelGraph, Node, Ref, TensorSpec, references
from engines.loss.shares import CONSTANT, Kind, Share, batch_axis, reduced_axis, rows_behind
from engines.spatial.plain import is_pointwise

__all__ = ["CLASS_LOSSES", "Analysis"]

NONE, MEAN, SUM = 0, 1, 2  # ATen's `reduction`

CLASS_LOSSES = ("cross_entropy_loss", "nll_loss_nd")
_ELEMENT_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss",
    "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss",
)  # fmt: skip
_LINEAR = ("neg", "negative", "to", "type_as", "_to_copy", "alias", "clone", "contiguous", "detach", "lift_fresh_copy")
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


@dataclass
class Analysis:
    """The share of each value of a loss in the whole batch's. `twin` traces the same with twice as many images.

    `totals` are known sums that are taken over all micro-batches, and `wanted` those that would have to be. `ratios`
    are the nodes that divide by what the labels count, and `scaled` pairs (reader, value) of sums that join means.
    """

    graph: ModelGraph
    twin: Callable[[], ModelGraph]
    totals: frozenset[str] = frozenset()
    wanted: set[str] = field(default_factory=set)
    ratios: set[str] = field(default_factory=set)
    scaled: set[tuple[str, str]] = field(default_factory=set)
    why: str = ""
    _found: dict[str, Share] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """By name."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def _twins(self) -> Mapping[str, Node]:
        """The same nodes for twice as many images; none where the model or the loss does other things for them."""
        try:
            twin = self.twin()
        except TraceError:
            return {}
        if [(n.name, n.operator) for n in twin.nodes] != [(n.name, n.operator) for n in self.graph.nodes]:
            return {}
        return {node.name: node for node in twin.nodes}

    def loss(self) -> Share:
        """The share of the loss itself."""
        for node in self._cone():
            self._found[node.name] = self._checked(node, self._share_of(node))
        found = self.share(self.graph.loss or "")
        if "_twins" in self.__dict__ and not self._answers_agree():
            found = Share(Kind.ROWS)
        if found.kind is Kind.ROWS or (found.kind is Kind.SUM and found.degree not in (0, 1)):
            return self._unknown(self.nodes[self.graph.loss or ""])
        return found

    def _answers_agree(self) -> bool:
        """Whether the images of the answers that the loss reads lie along their first axis, as the twin has it."""
        read = {name for node in self._cone() for name in node.reads}.intersection(self.graph.answers)
        return all(batch_axis(self.nodes[name].spec, self._twins[name].spec) == 0 for name in read if self._twins)

    def _cone(self) -> list[Node]:
        """The nodes of the loss, behind the model's answers, in order."""
        asked, found = {self.graph.loss}, []
        for node in reversed(self.graph.nodes):
            if node.name in asked and node.name not in self.graph.answers:
                found.append(node)
                asked.update(node.reads)
        return found[::-1]

    def share(self, name: str) -> Share:
        """Of a value, an input, a weight or a buffer."""
        if name in self.totals:
            return Share(Kind.SAME, derived=True)
        if name in self._found:
            return self._found[name]
        if name in self.graph.weights or name in self.graph.buffers:
            return replace(CONSTANT, known=name not in self.graph.trainable)
        spec, images = self.graph.specs.get(name), self.graph.inputs["images"].shape[0]
        given = name in self.graph.inputs or name in self.graph.answers
        if given and spec is not None and spec.shape[:1] == (images,):
            return Share(Kind.ROWS, known=name == "labels")
        return Share(Kind.UNKNOWN)

    def _checked(self, node: Node, found: Share) -> Share:
        """What the twin contradicts is unknown; it is asked only if it is there already."""
        if found.kind is Kind.ROWS and node.spec and "_twins" in self.__dict__:
            twin = self._twins.get(node.name)
            if twin is None or batch_axis(node.spec, twin.spec) != found.axis:
                return self._unknown(node)
        return found

    def _unknown(self, node: Node) -> Share:
        self.why = self.why or f"{node.operator.removeprefix('aten.').split('.')[0]} in {node.where}"
        return Share(Kind.UNKNOWN)

    def _share_of(self, node: Node) -> Share:
        name = node.operator.removeprefix("aten.").split(".")[0]
        shares = {ref: self.share(ref) for ref in node.reads}
        if any(each.kind is Kind.UNKNOWN for each in shares.values()):
            return self._unknown(node)
        for names, rule in _RULES:
            if name in names:
                return rule(self, node) or self._unknown(node)
        if is_pointwise(node.operator):
            return self._pointwise(node) or self._unknown(node)
        plain = [self._settled(ref) for ref in node.reads]
        if all(each.kind is Kind.SAME and each.degree == 0 for each in plain) and self._twin_agrees(node):
            return CONSTANT.made(*plain)
        return self._unknown(node)

    # ---- what operands are

    def _settled(self, name: str) -> Share:
        """A value for whoever needs it whole: of a known sum, the total over all micro-batches."""
        found = self.share(name)
        if found.kind is Kind.SUM and found.known:
            self.wanted.add(name)
            return Share(Kind.SAME, derived=True)
        return found

    def _twin_agrees(self, node: Node) -> bool:
        """Whether nothing in a node's arguments depends on the number of images."""
        return self._numbers_agree(node) and self._twins[node.name].spec == node.spec

    def _numbers_agree(self, node: Node) -> bool:
        """The same of its arguments alone, without the shape of the result."""
        twin = self._twins.get(node.name)
        return twin is not None and repr(twin.arguments) == repr(node.arguments)

    def _number(self, node: Node, argument: str) -> Share | None:
        """The share of a number among the arguments: it may be the size of the batch, or divide by it."""
        mine = node.arguments.get(argument)
        if mine is None or isinstance(mine, bool):
            return CONSTANT
        theirs = self._twins[node.name].arguments.get(argument) if node.name in self._twins else None
        if not isinstance(mine, int | float) or not isinstance(theirs, int | float):
            return None
        if mine == theirs:
            return CONSTANT
        return {2 * mine: replace(CONSTANT, degree=-1), mine / 2: replace(CONSTANT, degree=1)}.get(theirs)

    def _operand(self, node: Node, argument: str) -> Share | None:
        value = node.arguments.get(argument)
        return self.share(value.name) if isinstance(value, Ref) else self._number(node, argument)

    def _spec(self, ref: Any) -> TensorSpec:
        return self.graph.specs[ref.name]

    def _aligned(self, node: Node, shares: Mapping[str, Share]) -> int | None:
        """Where the images of the result lie if all operands have them on the same axis, counted from the end."""
        ends = {
            share.axis - len(self.graph.specs[name].shape)
            for name, share in shares.items()
            if share.kind is Kind.ROWS and name in self.graph.specs
        }
        if len(ends) != 1 or node.spec is None:
            return None
        (end,) = ends
        return end + len(node.spec.shape)

    def _axis(self, node: Node) -> int | None:
        twin = self._twins.get(node.name)
        return batch_axis(node.spec, twin.spec) if twin else None

    # ---- rules; None where the result is unknown

    def _pointwise(self, node: Node) -> Share | None:
        """Any function of each element by itself."""
        shares = {name: self._settled(name) for name in node.reads}
        if not all(each.is_plain for each in shares.values()) or not self._numbers_agree(node):
            return None
        made = CONSTANT.made(*shares.values())
        if all(each.kind is Kind.SAME for each in shares.values()):
            return made
        axis = self._aligned(node, shares)
        return None if axis is None else made.made(kind=Kind.ROWS, axis=axis)

    def _linear(self, node: Node) -> Share | None:
        """What changes the sign or the type, but not into whole numbers."""
        found, before = self.share(node.reads[0]), self.graph.specs.get(node.reads[0])
        rounds = node.spec and before and before.is_floating and not node.spec.is_floating
        return self._pointwise(node) if rounds else found

    def _product(self, node: Node) -> Share | None:
        """A product or a quotient: degrees add up or are taken away, and only one operand may be a sum."""
        divides = node.operator.removeprefix("aten.").startswith(("div", "true_divide"))
        if node.arguments.get("rounding_mode"):
            return self._pointwise(node)
        one, two = self._operand(node, "self"), self._operand(node, "other")
        if one is None or two is None:
            return None
        one, two = self._factors(node, one, two, divides)
        if Kind.SUM in (one.kind, two.kind) and (one.kind, two.kind).count(Kind.SAME) != 1:
            return None
        if divides and two.kind is Kind.SUM:
            return None
        degree = one.degree - two.degree if divides else one.degree + two.degree
        main = one if two.kind is Kind.SAME else two
        made = main.made(one, two, degree=degree)
        if divides and two.derived:
            made = replace(made, over=one.over | {self._denominator(node)})
        if made.kind is not Kind.ROWS:
            return made
        named = {ref.name: s for ref, s in ((node.arguments[a], s) for a, s in (("self", one), ("other", two)))
                 if isinstance(ref, Ref)}  # fmt: skip
        axis = self._aligned(node, named)
        return None if axis is None else replace(made, axis=axis)

    def _factors(self, node: Node, one: Share, two: Share, divides: bool) -> tuple[Share, Share]:
        """Of a known sum its total, where what it is combined with is no mere number."""

        def total(argument: str, own: Share) -> Share:
            ref = node.arguments[argument]
            return self._settled(ref.name) if isinstance(ref, Ref) else own

        if divides:
            two = total("other", two)
        if two.kind is not Kind.SAME or two.derived:
            one = total("self", one)
        if one.kind is not Kind.SAME or one.derived:
            two = total("other", two)
        return one, two

    def _denominator(self, node: Node) -> str:
        """The total that a quotient divides by, "?" where it is not a total itself."""
        ref = node.arguments["other"]
        return ref.name if isinstance(ref, Ref) and (ref.name in self.totals or ref.name in self.wanted) else "?"

    def _added(self, node: Node) -> Share | None:
        """A sum or a difference of two operands of the same kind; sums over the batch may join means of it."""
        one, two = self._operand(node, "self"), self._operand(node, "other")
        if one is None or two is None or self._number(node, "alpha") != CONSTANT:
            return None
        kinds = {one.kind, two.kind}
        if Kind.ROWS in kinds or (kinds == {Kind.SAME}):
            return self._pointwise(node) if one.degree == two.degree == 0 or Kind.SUM in kinds else None
        one, two = _as_sum(one), _as_sum(two)
        if one.degree == two.degree:
            return one.made(two)
        if one.known and two.known:
            return self._pointwise(node)
        return self._joined(node, {"self": one, "other": two})

    def _joined(self, node: Node, operands: Mapping[str, Share]) -> Share | None:
        """Sums, means and constants become one mean over the micro-batches."""
        for argument, each in operands.items():
            ref = node.arguments[argument]
            if each.degree not in (0, 1) or (each.degree == 0 and not isinstance(ref, Ref)):
                return None
            if each.degree == 0:
                self.scaled.add((node.name, ref.name))
        one, two = operands.values()
        return one.made(two, degree=1)

    def _reduced(self, node: Node) -> Share | None:
        """A sum or a mean, over the batch or over other dimensions."""
        ref, mean = node.arguments["self"], ".mean." in node.operator
        found, spec = self.share(ref.name), self._spec(ref)
        if found.kind is not Kind.ROWS:
            return found
        count = len(spec.shape)
        dims = _dims(node.arguments.get("dim"), count) or tuple(range(count))
        if found.axis not in dims:
            keepdim = bool(node.arguments.get("keepdim"))
            return replace(found, axis=reduced_axis(found.axis, dims, keepdim))
        over = found.over | ({""} if mean else set())
        return replace(found, kind=Kind.SUM, degree=found.degree + mean, axis=0, over=over)

    def _class_loss(self, node: Node) -> Share | None:
        """Cross-entropy or its second half; of a mean over class numbers the labels decide what it divides by."""
        a = node.arguments
        scores, labels = self.share(a["self"].name), self._settled(a["target"].name)
        weight = self._settled(a["weight"].name) if isinstance(a["weight"], Ref) else CONSTANT
        rows = all(each.kind is Kind.ROWS and each.axis == 0 and each.degree == 0 for each in (scores, labels))
        if not rows or weight.kind is not Kind.SAME or weight.degree:
            return None
        made = scores.made(labels, weight)
        if a["reduction"] == NONE:
            return made
        if a["reduction"] == SUM:
            return replace(made, kind=Kind.SUM)
        if self._spec(a["target"]).is_floating:
            return replace(made, kind=Kind.SUM, degree=1, over=frozenset({""}))
        if not (labels.known and weight.known):
            return None
        self.ratios.add(node.name)
        key = repr([a["target"], a["weight"], a["ignore_index"]])
        return replace(made, kind=Kind.SUM, degree=1, known=False, over=frozenset({key}))

    def _element_loss(self, node: Node) -> Share | None:
        """A loss of each element, of which a mean divides by their number."""
        shares = {name: self._settled(name) for name in node.reads}
        if not all(each.is_plain for each in shares.values()):
            return None
        rows = {name: each for name, each in shares.items() if each.kind is Kind.ROWS}
        if len({each.axis - len(self.graph.specs[name].shape) for name, each in rows.items()}) != 1:
            return None
        made, reduction = CONSTANT.made(*shares.values()), node.arguments["reduction"]
        if reduction == NONE:
            axis = self._aligned(node, shares)
            return None if axis is None else replace(made, kind=Kind.ROWS, axis=axis)
        over = frozenset({""}) if reduction == MEAN else frozenset()
        return replace(made, kind=Kind.SUM, degree=int(reduction == MEAN), over=made.over | over)

    def _viewed(self, node: Node) -> Share | None:
        """A view: the images stay apart where as many entries lie before them as did."""
        ref = node.arguments["self"]
        found = self.share(ref.name)
        if found.kind is not Kind.ROWS:
            return found
        axis = self._axis(node)
        kept = axis is not None and node.spec and rows_behind(self._spec(ref), found.axis, node.spec, axis)
        return replace(found, axis=axis) if kept else None

    def _moved(self, node: Node) -> Share | None:
        found = self.share(node.arguments["self"].name)
        if found.kind is not Kind.ROWS:
            return found
        axis = self._axis(node)
        return None if axis is None else replace(found, axis=axis)

    def _spread(self, node: Node) -> Share | None:
        """The same for each image, where the shape of the result holds the batch."""
        ref = node.arguments.get("self")
        found = self.share(ref.name) if isinstance(ref, Ref) and not node.operator.startswith("aten.new_") else CONSTANT
        if self._number(node, "fill_value") != CONSTANT:
            return None
        if found.kind is Kind.SUM:
            return found if self._axis(node) is None else None
        if node.name in self._twins and self._twins[node.name].spec == node.spec and found.kind is Kind.SAME:
            return found
        axis = self._axis(node)
        return None if axis is None or found.degree else replace(found, kind=Kind.ROWS, axis=axis)

    def _along(self, node: Node) -> Share | None:
        """An operator along dimensions that are not that of the batch."""
        ref = node.arguments["self"]
        found = self._settled(ref.name)
        if found.kind is Kind.SAME:
            return found if found.degree == 0 else None
        given = node.arguments.get("dim")
        dims = _dims(given, len(self._spec(ref).shape))
        if not found.is_plain or not dims or found.axis in dims or len(node.reads) != 1:
            return None
        if node.spec is None:
            return found
        axis = self._axis(node)
        return None if axis is None else replace(found, axis=axis)

    def _by_image(self, node: Node) -> Share | None:
        """An operator that treats each entry of the first dimension by itself, that of the batch."""
        shares = [self._settled(name) for name in node.reads]
        if not all(each.is_plain and each.axis == 0 for each in shares):
            return None
        rows = [each for each in shares if each.kind is Kind.ROWS]
        dims = _dims(node.arguments.get("dim"), len(self.graph.specs[node.reads[0]].shape))
        if not rows:
            return CONSTANT.made(*shares)
        if 0 in dims or self._axis(node) != 0:
            return None
        return rows[0].made(*shares)

    def _looked_up(self, node: Node) -> Share | None:
        """Entries of a constant, such as a weight for each class, by numbers that belong to images."""
        table, indices = self._settled(node.arguments["self"].name), node.arguments["indices"]
        shares = [self._settled(name) for name in references(indices)]
        if not all(each.is_plain for each in (table, *shares)) or table.kind is not Kind.SAME:
            return None
        made, axis = table.made(*shares), self._axis(node)
        if all(each.kind is Kind.SAME for each in shares):
            return made
        return None if axis is None or len(shares) != 1 else replace(made, kind=Kind.ROWS, axis=axis)

    def _several(self, node: Node) -> Share | None:
        """Values side by side, along another dimension than that of the batch."""
        found = [self.share(name) for name in node.reads]
        first = found[0]
        if any((each.kind, each.degree, each.axis) != (first.kind, first.degree, first.axis) for each in found):
            return None
        made = first.made(*found)
        if first.kind is not Kind.ROWS:
            return made
        axis = self._axis(node)
        along = node.arguments.get("dim")
        count = len(node.spec.shape) if node.spec else 0
        if axis is None or not isinstance(along, int) or along % count == axis:
            return None
        return replace(made, axis=axis)

    def _parted(self, node: Node) -> Share | None:
        """Several tensors out of one; each is asked for by `getitem`."""
        ref = node.arguments["self"]
        found, dim = self.share(ref.name), node.arguments.get("dim", 0)
        apart = found.kind is not Kind.ROWS or dim % len(self._spec(ref).shape) != found.axis
        return found if apart else None

    def _picked(self, node: Node) -> Share | None:
        found = self.share(node.reads[0])
        if found.kind is not Kind.ROWS:
            return found
        axis = self._axis(node)
        return None if axis is None else replace(found, axis=axis)


def _as_sum(share: Share) -> Share:
    """What is the same for all M micro-batches is the sum over them, divided by M once more."""
    return replace(share, kind=Kind.SUM, degree=share.degree + 1) if share.kind is Kind.SAME else share


def _dims(given: Any, count: int) -> tuple[int, ...]:
    """From the front."""
    listed: Iterable[int] = [given] if isinstance(given, int) else given or ()
    return tuple(dim % count for dim in listed) if count else ()


_RULES: tuple[tuple[tuple[str, ...], Callable[[Analysis, Node], Share | None]], ...] = (
    (CLASS_LOSSES, Analysis._class_loss),
    (_ELEMENT_LOSSES, Analysis._element_loss),
    (("sum", "mean"), Analysis._reduced),
    (("mul", "multiply", "div", "divide", "true_divide"), Analysis._product),
    (("add", "sub", "subtract", "rsub"), Analysis._added),
    (_LINEAR, Analysis._linear),
    (_VIEWS, Analysis._viewed),
    (_MOVED, Analysis._moved),
    (_SPREAD, Analysis._spread),
    (_ALONG, Analysis._along),
    (_BY_IMAGE, Analysis._by_image),
    (("index",), Analysis._looked_up),
    (("stack", "cat"), Analysis._several),
    (_PARTS, Analysis._parted),
    (("getitem",), Analysis._picked),
)
