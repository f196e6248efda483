"""The label of pixels without a class, as determined by the training loss."""

from __future__ import annotations

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
    shape = graph.specs[graph.prediction].shape
    classes = range(max(2, shape[1] if len(shape) > 1 else 2))
    found = {numbers.ignored for numbers in find_label_specs(graph)}
    # A loss may also compute its mask itself: `labels != 255`, or `labels >= 0`. An equality names the number, unless
    # it is a class. An inequality leaves out `IGNORED` if that is on another side of the bound than class 0.
    labels = find_unchanged_labels(graph)
    for node in graph.nodes:
        read, other = node.arguments.get("self"), node.arguments.get("other")
        if not isinstance(read, Ref) or read.name not in labels or not isinstance(other, int | float):
            continue
        operator = node.operator.split(".")[1]
        if operator in ("eq", "ne") and int(other) not in classes:
            found.add(int(other))
        elif (operator in ("ge", "lt") and IGNORED < other <= 0) or (operator in ("gt", "le") and IGNORED <= other < 0):
            found.add(IGNORED)
    return found.pop() if len(found) == 1 else None


def check_ignored(images: LabelledImages, label: int | None) -> None:
    """Raise ImageError if masks have ignored numbers (`ignore=`) but the loss has no ignored label."""
    if getattr(images, "ignore", ()) and label is None:
        raise ImageError(f"The masks have pixels without a class, ignore={images.ignore}. {NOT_LEFT_OUT}")


NOT_LEFT_OUT = (
    "The loss does not leave these out: it would take their label for a class or a number. Use one with an "
    f"ignore_index, such as torch.nn.CrossEntropyLoss, or leave out where labels == {IGNORED} in the loss."
)
