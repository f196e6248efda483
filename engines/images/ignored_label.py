"""Pixels without a class: which label stands for them, by the loss that is trained with."""

from __future__ import annotations

from collections.abc import Iterator

from engines.errors import ImageError
from engines.images.dataset import LabelledImages
from engines.layer.graph import ModelGraph, Ref
from engines.loss.label_spec import find_label_specs, find_unchanged_labels

__all__ = ["IGNORED", "check_ignored", "find_ignored_label"]

IGNORED = -100
"""The label of a pixel outside of a mask, or of an ignored number, until it meets a loss: PyTorch's `ignore_index`."""


def find_ignored_label(graph: ModelGraph) -> int | None:
    """The label that a traced loss leaves out; None where there is none, or where there are several.

    It is the `ignore_index` of a cross-entropy or negative log-likelihood of the labels themselves, or else a number
    that is no class and that the loss compares its labels with; `labels >= 0` leaves out `IGNORED`.
    """
    found = set(_collect_ignored_labels(graph))
    return found.pop() if len(found) == 1 else None


def check_ignored(images: LabelledImages, label: int | None) -> None:
    """Raises ImageError where masks have ignored numbers (`ignore=`), and the loss knows no such label."""
    if getattr(images, "ignore", ()) and label is None:
        raise ImageError(f"The masks have pixels without a class, ignore={images.ignore}. {NOT_LEFT_OUT}")


NOT_LEFT_OUT = (
    "The loss does not leave these out: it would take their label for a class or a number. Use one with an "
    f"ignore_index, such as torch.nn.CrossEntropyLoss, or leave out where labels == {IGNORED} in the loss."
)


def _collect_ignored_labels(graph: ModelGraph) -> Iterator[int | None]:
    shape = graph.specs[graph.prediction].shape
    classes = range(max(2, shape[1] if len(shape) > 1 else 2))
    yield from (numbers.ignored for numbers in find_label_specs(graph))
    labels = find_unchanged_labels(graph)
    for node in graph.nodes:
        read = node.arguments.get("self")
        if isinstance(read, Ref) and read.name in labels:
            label = _get_compared_label(node.operator.split(".")[1], node.arguments.get("other"))
            if label is not None and label not in classes:
                yield label


def _get_compared_label(operator: str, other: object) -> int | None:
    """The label that a comparison with a number tells from the others; of an order, whether it tells `IGNORED`."""
    if not isinstance(other, int | float):
        return None
    if operator in ("eq", "ne"):
        return int(other)
    parts = {
        "ge": IGNORED < other <= 0,
        "lt": IGNORED < other <= 0,
        "gt": IGNORED <= other < 0,
        "le": IGNORED <= other < 0,
    }
    return IGNORED if parts.get(operator) else None
