"""Why a loss is not a number: what a rank finds in its labels, images, weights and earlier losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.layer.graph import ModelGraph, Ref, plain_name
from engines.loss.classes import class_numbers
from engines.loss.counting import Counting
from engines.program.worker import Worker

__all__ = ["Cause", "causes", "said"]

LABELS, IMAGES, WEIGHTS, GROWTH, ELSE = range(5)

_GROWN = 10  # a loss that is so many times the smallest before it has grown


@dataclass(frozen=True, slots=True, order=True)
class Cause:
    """Something that makes losses infinite or undefined, in words. A lower `level` explains those above it.

    `finders`: so many ranks must find the same, as each sees only its part of the labels.
    """

    level: int
    words: str
    finders: int = 1


def said(found: Mapping[int, Sequence[Cause]]) -> str:
    """The causes that explain the others, with the ranks that found them; empty where there are none."""
    finders: dict[Cause, list[int]] = {}
    for rank, causes in sorted(found.items()):
        for cause in causes:
            finders.setdefault(cause, []).append(rank)
    known = sorted(cause for cause, ranks in finders.items() if len(ranks) >= cause.finders)
    return " ".join(f"{_on(finders[cause])}: {cause.words}" for cause in known if cause.level == known[0].level)


def _on(ranks: Sequence[int]) -> str:
    return f"Found on rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"


def causes(
    graph: ModelGraph, worker: Worker, counting: Counting, recent: Sequence[float], micro_batch: int | None = None
) -> list[Cause]:
    """What this rank finds, of all its micro-batches or of the one whose loss is not a number.

    `recent` are the losses of the last steps, the newest last, where this rank knows them.
    """
    found = [*_of_totals(graph, counting), *_of_inputs(worker, micro_batch), *_of_weights(worker)]
    if not counting.totals:
        found += _of_labels(graph, worker, counting.sharers, micro_batch)
    if micro_batch is not None:
        found += [*_growth(recent), *_of_answers(graph, worker, micro_batch)]
    return found


def _of_totals(graph: ModelGraph, counting: Counting) -> Iterator[Cause]:
    """What the loss of the whole batch divides by is 0; a micro-batch without labels does no harm then.

    Other totals may be 0, such as a count that the loss keeps from 0, or that of a class which is absent.
    """
    divisors = {node.arguments["other"] for node in graph.nodes if node.operator == "aten.div.Tensor"}
    if counting.worker and any(not value.any() for name, value in counting.values.items() if Ref(name) in divisors):
        yield Cause(
            LABELS,
            "No label counts: the loss divides by what the labels of the whole batch count, and that is 0 (all are "
            "ignored, masked, or of a class of weight 0). In plain PyTorch it is nan too. Leave such batches out.",
        )


def _of_labels(graph: ModelGraph, worker: Worker, sharers: int, micro_batch: int | None) -> Iterator[Cause]:
    """A mean over none of the labels of a micro-batch, of which `sharers` ranks have a part each."""
    for number, lane in worker.lanes.items():
        if lane.inputs.get("labels") is None or micro_batch not in (None, number):
            continue
        labels = lane.at_hand(lane.inputs["labels"])
        for numbers in class_numbers(graph):
            if not numbers.valid(labels).any():
                yield Cause(
                    LABELS,
                    f"No label of {_which(worker, number)} counts: all are {numbers.ignored}, which the loss ignores. "
                    "Its mean is over none, and nan in plain PyTorch too. Leave such batches out.",
                    sharers,
                )


def _of_inputs(worker: Worker, micro_batch: int | None) -> Iterator[Cause]:
    for number, lane in worker.lanes.items():
        for name, tensor in lane.inputs.items():
            gone = tensor is None  # tiles in turn give up what they need no more
            bad = 0 if gone or micro_batch not in (None, number) else _not_finite(lane.at_hand(tensor))
            if bad:
                where = LABELS if name == "labels" else IMAGES
                what = "1 value" if bad == 1 else f"{bad} values"
                verb = "is" if bad == 1 else "are"
                yield Cause(where, f"{what} of the {name} of {_which(worker, number)} {verb} not finite.")


def _of_weights(worker: Worker) -> Iterator[Cause]:
    held = {**worker.weights, **worker.buffers}
    names = [plain_name(name) for name, tensor in held.items() if _not_finite(tensor.detach())]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield Cause(
            WEIGHTS,
            f"Weights are not finite themselves after {worker.steps - 1} updates: {', '.join(names[:3])}{more}. "
            "Load a checkpoint, or begin anew; then lower the learning rate, or bound the gradients (clip_norm).",
        )


def _growth(recent: Sequence[float]) -> Iterator[Cause]:
    if len(recent) > 1 and abs(recent[-1]) > _GROWN * min(map(abs, recent)):
        losses = ", ".join(f"{loss:.4g}" for loss in recent)
        yield Cause(
            GROWTH, f"The losses before it grow: {losses}. Lower the learning rate, or bound the gradients (clip_norm)."
        )


def _of_answers(graph: ModelGraph, worker: Worker, micro_batch: int) -> Iterator[Cause]:
    lane = worker.lanes[micro_batch]
    answer = lane.leaves.get(graph.prediction)
    if answer is not None and _not_finite(lane.at_hand(answer).detach()):
        yield Cause(
            ELSE,
            "The model's answers are not finite, but images, labels and weights are, as far as this rank has them. "
            "Lower the learning rate, or look for a division by 0 or an overflow in the model.",
        )
    else:
        yield Cause(
            ELSE,
            "The model's answers are finite: the loss itself has no value for them, such as a logarithm of 0, or a "
            "mean over no labels.",
        )


def _which(worker: Worker, number: int) -> str:
    count = worker.program.micro_batches
    return f"micro-batch {number} of {count}" if count > 1 else "the batch"


def _not_finite(tensor: Tensor) -> int:
    if not tensor.is_floating_point():
        return 0
    return int(tensor.numel() - tensor.isfinite().sum().item())
