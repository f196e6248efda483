"""What the channels of a model's output mean, as its traced loss takes them: classes, labels, or amounts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, TensorSpec, find_loss_nodes


class OutputMeaning(Enum):
    """What the channels of an output are."""

    CLASSES = "scores of classes, of which one is right: softmax over the channels"
    LABELS = "scores of independent labels: the sigmoid of each channel"
    SHARES = "probabilities of independent labels already"
    AMOUNTS = "amounts, without probabilities"
    UNKNOWN = "unknown"


ACTIVATIONS = {"softmax": OutputMeaning.CLASSES, "sigmoid": OutputMeaning.LABELS, None: OutputMeaning.AMOUNTS}
"""What a caller may say instead of the loss."""

FROM_LOSS = "auto"

Meaning = OutputMeaning


def compute_classes(scores: Tensor, meaning: OutputMeaning) -> Tensor:
    """Return the classes of (N, K, ...) scores as whole numbers.

    Of classes: (N, 1, ...), the class with the highest score. Of labels: (N, K, ...), 1 for each label that is more
    probable than not. Raises PlanError for other outputs.
    """
    if meaning is Meaning.CLASSES:
        return scores.argmax(1, keepdim=True)
    _check_has_classes(meaning, "classes")
    return (scores > (0.5 if meaning is Meaning.SHARES else 0)).long()


def compute_probabilities(scores: Tensor, meaning: OutputMeaning) -> Tensor:
    """Return the probabilities of (N, K, ...) scores, at least in float32. Raises PlanError for amounts."""
    scores = scores.float() if scores.element_size() < 4 else scores
    if meaning is Meaning.CLASSES:
        return scores.softmax(1)
    _check_has_classes(meaning, "probabilities")
    return scores if meaning is Meaning.SHARES else scores.sigmoid()


def _check_has_classes(meaning: OutputMeaning, kind: str) -> None:
    if meaning is Meaning.AMOUNTS:
        raise PlanError(
            "The model's outputs are amounts, as of a regression or with activation=None, so that there are no "
            f"{kind}. Ask for kind='scores', the outputs as they are; of probabilities that your model makes itself, "
            "the classes are then scores > 0.5 or scores.argmax(-1)."
        )
    if meaning is Meaning.UNKNOWN:
        raise PlanError(
            f"Which {kind} the outputs stand for cannot be seen in the loss: whether each channel is a label of its "
            "own, or one of them is the right class. Say activation='sigmoid' (--activation sigmoid; a map for each "
            "label), 'softmax' (one class out of several) or None (amounts, as of a regression), or ask for "
            "kind='scores'."
        )


def choose_meaning(activation: object, graph: ModelGraph | None = None) -> OutputMeaning:
    """Return what `activation` says, or else ("auto") the loss in `graph`. Raises PlanError if it is unknown."""
    if activation == FROM_LOSS:
        return find_output_meaning(graph) if graph is not None and graph.loss else Meaning.UNKNOWN
    if not (activation is None or isinstance(activation, str)) or activation not in ACTIVATIONS:
        names = [name for name in (*ACTIVATIONS, FROM_LOSS) if name]
        problem = describe_unknown(f"activation={activation!r} is unknown", str(activation), names)
        raise PlanError(f"{problem} None leaves the outputs as they are.")
    return ACTIVATIONS[activation]


def read_meaning(name: object) -> OutputMeaning:
    """Return the meaning of a name in a checkpoint; UNKNOWN for anything that is none."""
    return next((meaning for meaning in OutputMeaning if meaning.name.lower() == name), Meaning.UNKNOWN)


def choose_kind(kind: str | None, meaning: OutputMeaning) -> str:
    """Return what is predicted: `kind`, or by default the classes if there are any, else the scores.

    Raises PlanError if outputs of this meaning have no such kind.
    """
    if kind is None:
        kind = "scores" if meaning is Meaning.AMOUNTS else "classes"
    if kind != "scores":
        _check_has_classes(meaning, kind)
    return kind


# Find the meaning in a traced loss: what the first operator that is no change of shape does with each channel.


@dataclass(frozen=True, slots=True)
class _Channels:
    """A value of the loss that holds channels of the output: which ones, and along which axis, if any is left.

    `clamped`: probabilities near 0 and 1 are changed, so that their logarithms are finite.
    """

    numbers: tuple[int, ...]
    axis: int | None
    clamped: bool = False


_SAME = {"to", "_to_copy", "alias", "clone", "contiguous"}
_CLASS_LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
_OVER_CLASSES = ("softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp")
_OF_LABELS: tuple[str, ...] = ("sigmoid", "log_sigmoid", "log_sigmoid_forward", "special_expit", "soft_margin_loss")
_OF_LABELS += ("binary_cross_entropy_with_logits",)
_DIFFERENCES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "sub")


def find_output_meaning(graph: ModelGraph) -> OutputMeaning:
    """Return what the traced loss takes the channels of the model's first output for.

    It is UNKNOWN if the loss does not tell, or treats some channels in another way than others.
    """
    #     output (N, K, H, W) --> permute --> reshape --> cross_entropy     one class of K, if all K channels arrive
    #                        \--> select 0 --> bce_with_logits              a label: channel 0
    #
    # Operators that only move channels are followed; the first other one that is known says what they are. Operators
    # that say nothing, such as the square of a penalty, are passed over.
    output = graph.specs[graph.prediction]
    count = output.shape[1] if len(output.shape) > 1 else 1
    whole = _Channels(tuple(range(count)), 1 if len(output.shape) > 1 else None)
    followed, of_labels = {graph.prediction: whole}, {"labels"}
    meanings: dict[OutputMeaning, set[int]] = {}
    for node in find_loss_nodes(graph):  # an output may also be read by the model itself
        if followed.keys().isdisjoint(node.reads):
            if not of_labels.isdisjoint(node.reads):
                of_labels.add(node.name)
            continue
        first = node.reads[0] if node.short_operator != "sub" else next(name for name in node.reads if name in followed)
        if first not in followed:
            continue  # the output is the target of another value
        channels = followed[first]
        moved = _follow(node, graph.specs[first], channels)
        if moved is not None:
            followed[node.name] = moved
            continue
        meaning = _judge(node, graph, channels, of_labels)
        if channels.clamped and meaning is not Meaning.SHARES:
            meaning = meaning and Meaning.UNKNOWN
        if meaning is Meaning.CLASSES and channels.numbers != whole.numbers:
            meaning = Meaning.UNKNOWN
        if meaning is not None:
            meanings.setdefault(meaning, set()).update(channels.numbers)
    (meaning, *others) = meanings or [Meaning.UNKNOWN]
    return meaning if not others and meanings.get(meaning) == set(whole.numbers) else Meaning.UNKNOWN


def _judge(node: Node, graph: ModelGraph, channels: _Channels, of_labels: set[str]) -> OutputMeaning | None:
    """Return what an operator of the loss takes channels for, or None if it does not tell."""
    name = node.short_operator
    if name in _DIFFERENCES:
        return None if of_labels.isdisjoint(node.reads) else Meaning.AMOUNTS
    if name in _OF_LABELS:
        return Meaning.LABELS
    if name == "binary_cross_entropy":
        return Meaning.SHARES
    if name not in _CLASS_LOSSES and name not in _OVER_CLASSES:
        return None
    # Which axis does the operator take for that of the classes?
    count = len(graph.specs[node.arguments["self"].name].shape)
    dims = min(1, count - 1) if name in _CLASS_LOSSES else node.arguments["dim"]
    is_over = [dim % count for dim in (dims if isinstance(dims, list | tuple) else [dims])] == [channels.axis]
    return Meaning.CLASSES if is_over else Meaning.UNKNOWN


def _follow(node: Node, source: TensorSpec, channels: _Channels) -> _Channels | None:
    """Return which channels a node's output holds if it only moves, cuts or casts them, else None."""
    name, count = node.short_operator, len(source.shape)
    if node.spec is None:
        return None
    if name in _SAME:
        return channels
    if name == "clamp" and _is_within_shares(node):
        return replace(channels, clamped=True)
    if name in _MOVES:
        along = channels.axis
        return _MOVES[name](node, source.shape, along, channels) if along is not None and count else channels
    return None


def _is_within_shares(node: Node) -> bool:
    """Return whether a clamp changes probabilities near 0 and 1 only."""
    low, high = node.arguments["min"], node.arguments["max"]
    numbers = all(isinstance(limit, int | float) for limit in (low, high))
    return numbers and 0 <= low < 0.01 and 0.99 < high <= 1


def _reshape(node: Node, shape: Sequence[int], along: int, channels: _Channels) -> _Channels:
    """Find the axis of the same size with as many elements behind it."""
    behind, sizes, count = math.prod(shape[along + 1 :]), node.result.shape, len(channels.numbers)
    axes = (axis for axis, size in enumerate(sizes) if size == count and math.prod(sizes[axis + 1 :]) == behind)
    # Without such an axis, the order is not followed; each element still is of one of the channels.
    return replace(channels, axis=next(axes, None))


def _move(node: Node, shape: Sequence[int], along: int, channels: _Channels) -> _Channels:
    """Move the axes of a tensor whose sizes are their numbers."""
    axes = torch.empty(tuple(range(len(shape))), device="meta")
    order = getattr(axes, node.short_operator)(*list(node.arguments.values())[1:]).shape
    return replace(channels, axis=list(order).index(along))


def _select(node: Node, shape: Sequence[int], along: int, channels: _Channels) -> _Channels:
    dim, index = node.arguments["dim"] % len(shape), node.arguments["index"]
    if dim == along:
        return replace(channels, numbers=(channels.numbers[index],), axis=None)
    return replace(channels, axis=along - (dim < along))


def _slice(node: Node, shape: Sequence[int], along: int, channels: _Channels) -> _Channels:
    a = node.arguments
    if a["dim"] % len(shape) != along:
        return channels
    return replace(channels, numbers=channels.numbers[slice(a["start"], a["end"], a["step"])])


_MOVES: dict[str, Callable[[Node, Sequence[int], int, _Channels], _Channels]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("permute", "movedim", "moveaxis", "transpose", "swapaxes", "swapdims"), _move),
    "select": _select,
    "slice": _slice,
}
