"""The labels of a loss: which values it takes, how many count over a whole batch, and why a loss is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.loss_analysis import CLASS_LOSSES
from mpi4dl_nb.engines.compiler.whole_loss import run_nodes
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref, to_user_name
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.program.program import CountLabels, Program
from mpi4dl_nb.engines.program.worker import Worker

# Which values the labels may have according to the traced loss: class numbers, or anything else.


_PICKING = {"select", "slice", "narrow", "unbind", "split", "split_with_sizes", "chunk", "getitem", "index_select"}
"""Operators that return a part of the labels, such as one plane of several."""

_PASSING = {"view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "movedim"}
_PASSING |= {"to", "_to_copy", "alias", "clone", "contiguous", "detach", "long", "lift_fresh_copy"} | _PICKING
_BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


@dataclass(frozen=True, slots=True)
class LabelSpec:
    """A use of the labels as class numbers from 0 to `classes` - 1, except for the label `ignored`, if any.

    `part` is the value of the graph that has the labels which are used so: all labels, or some of them.
    """

    classes: int
    ignored: int | None = None
    part: str = "labels"

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
    direct, specs = find_unchanged_labels(graph), []
    for node in graph.nodes:
        name, a = node.short_operator, node.arguments
        if name in CLASS_LOSSES and (target := _get_ref_name(node, "target")) in direct:
            shape = graph.specs[a["self"].name].shape
            if not graph.specs[a["target"].name].is_floating:
                specs.append(LabelSpec(shape[min(1, len(shape) - 1)], a["ignore_index"], direct[target]))
        elif name == "one_hot" and (target := _get_ref_name(node, "self")) in direct and a.get("num_classes", -1) > 0:
            specs.append(LabelSpec(a["num_classes"], part=direct[target]))
    return tuple(dict.fromkeys(specs))


def find_unchanged_labels(graph: ModelGraph) -> dict[str | None, str]:
    """Return the names of the labels and of all values that only change their shape or dtype, or are a part of them.

    Each is mapped to the value that has the same labels in it: "labels", or the last one that took a part of them.
    """
    names: dict[str | None, str] = {"labels": "labels"}
    for node in graph.nodes:
        if node.short_operator not in _PASSING or not node.reads or node.reads[0] not in names:
            continue
        if {*node.reads[1:]} <= graph.constants.keys():  # such as the numbers of index_select
            names[node.name] = node.name if node.short_operator in _PICKING else names[node.reads[0]]
    return names


def find_invalid_labels(graph: ModelGraph, labels: Tensor) -> Iterator[tuple[LabelSpec, Tensor]]:
    """Yield the labels of a step that the loss takes as class numbers, but does not accept, by their use.

    Several tasks may share one tensor of labels: each part of it is held against the classes of its own task.
    """
    for numbers in find_label_specs(graph):
        # A part is cut out of the labels of a micro-batch, of whose shape the trace is.
        count = graph.inputs["labels"].shape[0] if labels.dim() else 1
        several = numbers.part != "labels" and labels.dim() and len(labels) > count
        for part in labels.split(count) if several else (labels,):
            if (wrong := numbers.find_invalid(_cut_part(graph, numbers.part, part))).numel():
                yield numbers, wrong
                break


def _cut_part(graph: ModelGraph, name: str, labels: Tensor) -> Tensor:
    """Return the part `name` of the labels of a micro-batch."""
    names = find_unchanged_labels(graph)
    nodes = {node.name: node for node in graph.nodes if node.name in names}
    needed, at = [], name
    while at != "labels":
        needed.append(nodes[at])
        at = nodes[at].reads[0]
    return run_nodes(reversed(needed), {**graph.constants, "labels": labels.cpu()})[name]


def _get_ref_name(node: Node, argument: str) -> str | None:
    ref = node.arguments.get(argument)
    return ref.name if isinstance(ref, Ref) else None


def has_binary_labels(graph: ModelGraph) -> bool:
    """Return whether the loss takes the unchanged labels as probabilities, from 0 to 1."""
    direct = find_unchanged_labels(graph)
    return any(
        node.short_operator in _BINARY_LOSSES and _get_ref_name(node, "target") in direct for node in graph.nodes
    )


def find_class_count(graph: ModelGraph) -> int:
    """Return the number of classes that random labels may be drawn from."""
    known = [numbers.classes for numbers in find_label_specs(graph)]
    shape = graph.specs[graph.prediction].shape
    return min(known) if known else max(2, shape[1] if len(shape) > 1 else 2)


# The denominators of a loss over the whole batch: the ranks of the last stage count the labels of all micro-batches.


class LabelCounter:
    """The totals over the labels of all micro-batches, on one rank: `values` by name, which the loss reads.

    They are valid once `count` has returned, and equal on every rank of the last stage. `program` is the rank's
    training program; `owned` are its weights and buffers. `sharers` is the number of ranks that each hold a shard of
    a micro-batch's labels.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        program: Program,
        world: World,
        owned: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.world, self.totals, self.micro_batches = world, graph.totals, plan.micro_batches
        self.values = {
            total.name: torch.ones(total.spec.shape, dtype=getattr(torch, total.spec.dtype), device=device)
            for total in graph.totals
        }
        ways = program.direction_programs.values()
        feeds = [way.input_shards["labels"] for way in ways if "labels" in way.input_shards]
        spread = any(feed.axes for feed in feeds)
        self.sharers = len(Layout.of(plan).stages[-1].ranks) if spread else 1
        # A program like that of a forward pass, whose only inputs are labels.
        self.worker: Worker | None = None
        for label_program in (instruction.program for instruction in program.select_instructions(CountLabels)):
            buffers = {name: owned[name].detach() for name in label_program.buffers}
            self.worker = Worker(label_program, world, {}, buffers, device=device)
            self.worker.step_labels = [b"counts the labels of the whole batch"] * len(label_program.steps)

    def count(self, instruction: CountLabels, labels: Mapping[int, Tensor]) -> int:
        """Update `values` from this rank's `labels`, by micro-batch, and return the bytes sent.

        Collective over the ranks of the last stage.
        """
        worker, group = self.worker, instruction.group
        if worker is None:
            raise TypeError(f"The program of this rank has no instruction {instruction.name}.")
        worker.run({micro_batch: {"labels": labels[micro_batch]} for micro_batch in worker.program.directions})
        parts = []
        for total in self.totals:
            # Only the rank that seeds the loss of a micro-batch contributes, so that the sum counts each one once.
            counts = [
                worker.peek(total.source, micro_batch).detach().double().cpu().flatten()
                for micro_batch in worker.program.directions
                if worker.program.get_direction_program(micro_batch).seeds_loss
            ]
            parts.append(torch.stack(counts).sum(0) if counts else torch.zeros(total.spec.numel, dtype=torch.float64))
        sums = torch.cat(parts)  # all totals in one vector, so that a step needs a single all-reduce
        sent_bytes = sum(event.bytes for event in worker.events)
        worker.restart({})
        if len(group) > 1:
            sent_bytes += all_reduce(self.world, sums, group).wait()
        parts = sums.split([total.spec.numel for total in self.totals])
        for total, part in zip(self.totals, parts, strict=True):
            mean = part / self.micro_batches**total.degree
            self.values[total.name].copy_(mean.view(total.spec.shape))
        return sent_bytes


# Diagnosis of a non-finite loss from a rank's labels, images, weights and earlier losses.


LABELS, IMAGES, WEIGHTS, GROWTH, ELSE = range(5)

_GROWN = 10  # a loss counts as grown if it exceeds the smallest recent one by this factor


@dataclass(frozen=True, slots=True, order=True)
class NonFiniteCause:
    """A cause of infinite or undefined losses, in words. A cause of a lower `level` explains those of higher levels.

    `finders` is the number of ranks that must find it, since each rank has only a shard of the labels.
    """

    level: int
    words: str
    finders: int = 1


def format_causes(found: Mapping[int, Sequence[NonFiniteCause]]) -> str:
    """Return the causes of the lowest level with the ranks that found them, or "" if there are none."""
    # Level by level: a pixel that is no number makes the answers no numbers, which is then not worth saying.
    # "Rank 2 has no label that counts" is a cause only if its sharers say so, too: each sees its own tile.
    finders: dict[NonFiniteCause, list[int]] = {}
    for rank, causes in sorted(found.items()):
        for cause in causes:
            finders.setdefault(cause, []).append(rank)
    known = sorted(cause for cause, ranks in finders.items() if len(ranks) >= cause.finders)
    sentences = []
    for cause in known:
        if cause.level == known[0].level:
            ranks = finders[cause]
            several = "s" if len(ranks) > 1 else ""
            sentences.append(f"Found on rank{several} {', '.join(map(str, ranks))}: {cause.words}")
    return " ".join(sentences)


def find_causes(
    graph: ModelGraph, worker: Worker, counting: LabelCounter, recent: Sequence[float], micro_batch: int | None = None
) -> list[NonFiniteCause]:
    """Return the causes that this rank finds in all its micro-batches, or in the one whose loss is not finite.

    `recent` are the losses of the last steps, the newest last; empty if this rank does not have them.
    """
    causes = [*_find_uncounted_labels(graph, worker, counting, micro_batch), *_find_bad_inputs(worker, micro_batch)]
    held = {**worker.weights, **worker.buffers}
    names = [to_user_name(name) for name, tensor in held.items() if _count_non_finite(tensor.detach())]
    if names:
        words = (
            f"Weights are not finite themselves after {worker.steps - 1} updates: {format_names(names)}. "
            "Load a checkpoint, or begin anew; then lower the learning rate, or bound the gradients (clip_norm)."
        )
        causes.append(NonFiniteCause(WEIGHTS, words))
    if micro_batch is None:
        return causes
    if len(recent) > 1 and abs(recent[-1]) > _GROWN * min(map(abs, recent)):
        losses = ", ".join(f"{loss:.4g}" for loss in recent)
        words = f"The losses before it grow: {losses}. Lower the learning rate, or bound the gradients (clip_norm)."
        causes.append(NonFiniteCause(GROWTH, words))
    state = worker.micro_batch_states[micro_batch]
    answer = state.leaves.get(graph.prediction)
    if answer is not None and _count_non_finite(state.fetch(answer).detach()):
        words = (
            "The model's answers are not finite, but images, labels and weights are, as far as this rank has them. "
            "Lower the learning rate, or look for a division by 0 or an overflow in the model."
        )
    else:
        words = (
            "The model's answers are finite: the loss itself has no value for them, such as a logarithm of 0, or a "
            "mean over no labels."
        )
    causes.append(NonFiniteCause(ELSE, words))
    return causes


def _find_uncounted_labels(
    graph: ModelGraph, worker: Worker, counting: LabelCounter, micro_batch: int | None
) -> Iterator[NonFiniteCause]:
    """Yield a cause for a denominator of the loss that is 0, or for each micro-batch whose labels are all ignored."""
    # Only totals that are divided by are checked. Others may be 0: a clamped count, or that of an absent class.
    divisors = {node.arguments["other"] for node in graph.nodes if node.operator == "aten.div.Tensor"}
    if counting.worker and any(not value.any() for name, value in counting.values.items() if Ref(name) in divisors):
        yield NonFiniteCause(
            LABELS,
            "No label counts: the loss divides by what the labels of the whole batch count, and that is 0 (all are "
            "ignored, masked, or of a class of weight 0). In plain PyTorch it is nan too. Leave such batches out.",
        )
    for index, state in worker.micro_batch_states.items():
        # Where totals are taken over the whole batch, a micro-batch without labels does no harm.
        held = state.inputs.get("labels")
        if counting.totals or held is None or micro_batch not in (None, index):
            continue
        labels = state.fetch(held)
        whole = labels.shape == graph.inputs["labels"].shape
        for numbers in find_label_specs(graph):
            # Of a tile of the labels, the part that a task takes is not known.
            if numbers.part != "labels" and not whole:
                continue
            if not numbers.get_counted_mask(_cut_part(graph, numbers.part, labels)).any():
                yield NonFiniteCause(
                    LABELS,
                    f"No label of {_describe_micro_batch(worker, index)} counts: all are {numbers.ignored}, which the "
                    "loss ignores. Its mean is over none, and nan in plain PyTorch too. Leave such batches out.",
                    counting.sharers,  # each of them holds a shard of the labels
                )


def _find_bad_inputs(worker: Worker, micro_batch: int | None) -> Iterator[NonFiniteCause]:
    for index, state in worker.micro_batch_states.items():
        for name, tensor in state.inputs.items():
            if tensor is None or micro_batch not in (None, index):  # released, or of another micro-batch
                continue
            if bad := _count_non_finite(state.fetch(tensor)):
                where = LABELS if name == "labels" else IMAGES
                what = "1 value" if bad == 1 else f"{bad} values"
                verb = "is" if bad == 1 else "are"
                yield NonFiniteCause(
                    where, f"{what} of the {name} of {_describe_micro_batch(worker, index)} {verb} not finite."
                )


def _describe_micro_batch(worker: Worker, number: int) -> str:
    count = worker.program.micro_batches
    return f"micro-batch {number} of {count}" if count > 1 else "the batch"


def _count_non_finite(tensor: Tensor) -> int:
    if not tensor.is_floating_point():
        return 0
    return int(tensor.numel() - tensor.isfinite().sum().item())
