"""Which values the labels may have according to the traced loss: class numbers, or anything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.graph.loss_analysis import CLASS_LOSSES
from engines.graph.model_graph import ModelGraph, Node, Ref

__all__ = ["LabelSpec", "find_class_count", "find_label_specs", "find_unchanged_labels", "has_accuracy"]

_PASSING = {"view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "select", "slice", "permute"}
_PASSING |= {"transpose", "to", "_to_copy", "alias", "clone", "contiguous", "detach", "long", "lift_fresh_copy"}
_REGRESSIONS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss")


@dataclass(frozen=True, slots=True)
class LabelSpec:
    """A use of the labels as class numbers from 0 to `classes` - 1, except for the label `ignored`, if any."""

    classes: int
    ignored: int | None = None

    def find_invalid(self, labels: Tensor) -> Tensor:
        """Return the labels that this loss does not accept."""
        beyond = (labels < 0) | (labels >= self.classes)
        return labels[beyond if self.ignored is None else beyond & (labels != self.ignored)]

    def get_counted_mask(self, labels: Tensor) -> Tensor:
        """Return a mask of the labels that are not ignored."""
        return torch.ones_like(labels, dtype=torch.bool) if self.ignored is None else labels != self.ignored


def find_label_specs(graph: ModelGraph) -> tuple[LabelSpec, ...]:
    """Return every distinct use of the labels as class numbers in the loss; empty if there is none.

    Labels that the loss changes first, such as `torch.where(labels == 255, 0, labels)`, are not followed.
    """
    direct, found = find_unchanged_labels(graph), []
    for node in graph.nodes:
        name, a = node.short_operator, node.arguments
        if name in CLASS_LOSSES and _get_ref_name(node, "target") in direct:
            shape = graph.specs[a["self"].name].shape
            if not graph.specs[a["target"].name].is_floating:
                found.append(LabelSpec(shape[min(1, len(shape) - 1)], a["ignore_index"]))
        elif name == "one_hot" and _get_ref_name(node, "self") in direct and a.get("num_classes", -1) > 0:
            found.append(LabelSpec(a["num_classes"]))
    return tuple(dict.fromkeys(found))


def find_unchanged_labels(graph: ModelGraph) -> set[str]:
    """Return the names of the labels and of all values that only change their shape or dtype."""
    found = {"labels"}
    for node in graph.nodes:
        if node.short_operator in _PASSING and node.reads and node.reads[0] in found:
            found.add(node.name)
    return found


def _get_ref_name(node: Node, argument: str) -> str | None:
    ref = node.arguments.get(argument)
    return ref.name if isinstance(ref, Ref) else None


def has_accuracy(graph: ModelGraph) -> bool:
    """Return whether accuracy is defined: it is not for a regression loss without class labels."""
    amounts = any(node.short_operator in _REGRESSIONS for node in graph.nodes)
    return bool(find_label_specs(graph)) or not amounts


def find_class_count(graph: ModelGraph) -> int:
    """Return the number of classes that random labels may be drawn from."""
    known = [numbers.classes for numbers in find_label_specs(graph)]
    shape = graph.specs[graph.prediction].shape
    return min(known) if known else max(2, shape[1] if len(shape) > 1 else 2)
