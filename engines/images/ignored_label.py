"""The label of pixels without a class, as determined by the training loss."""

from __future__ import annotations

from collections.abc import Iterator

from engines.errors import ImageError
from engines.images.dataset import LabelledImages
from engines.layer.graph import ModelGraph, Ref
from engines.loss.label_spec import find_label_specs, find_unchanged_labels

__all__ = ["IGNORED", "check_ignored", "find_ignored_label"]

IGNORED = -100
"""The internal label of pixels outside of a mask or with an ignored number: PyTorch's default `ignore_index`."""


def find_ignored_label(graph: ModelGraph) -> int | None:
    """Return the label that a traced loss ignores; None if there is none, or several.

    It is the `ignore_index` of a cross-entropy or negative log-likelihood of the labels themselves, or a number that is
    no class and that the loss compares its labels with; `labels >= 0` ignores `IGNORED`.
    """
    found = set(_collect_ignored_labels(graph))
    return found.pop() if len(found) == 1 else None


def check_ignored(images: LabelledImages, label: int | None) -> None:
    """Raise ImageError if masks have ignored numbers (`ignore=`) but the loss has no ignored label."""
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
    """Return the label that a comparison with a number singles out; for an inequality, `IGNORED` or None."""
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
