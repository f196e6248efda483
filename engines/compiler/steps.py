"""The steps of programs: what each of them is, in the user's model and the schedule, and which ranks can run theirs.

The state of all ranks is one number for each: how many of its steps are done. Not all combinations are reachable: a
rank that waits for others cannot be past an instruction that they have not begun. `DependencyOrder` finds the reachable
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mpi4dl_nb.engines.compiler.stages import find_layers
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.plan.schedule import ActionKind, PipelineAction
from mpi4dl_nb.engines.program.effects import Effects, Phase
from mpi4dl_nb.engines.program.instructions import (
    ModelInstruction,
)
from mpi4dl_nb.engines.program.program import Program, Step

UNITS = ("instruction", "layer", "micro-batch", "phase")
"""Units by which a run can advance, from the smallest to the largest."""


@dataclass(frozen=True, slots=True)
class StepLabel:
    """One step of a rank's program. `work` is None at the update, which belongs to no micro-batch.

    `layer` and `modules` are those of the computation, or of the one for which a message is sent.
    """

    step: Step
    work: PipelineAction | None = None
    layer: str = ""
    modules: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """`block.conv`, or the first and the last of several: `block.0 … 2`."""
        if len(self.modules) < 2:
            return "".join(self.modules)
        first, last = (module.split(".") for module in (self.modules[0], self.modules[-1]))
        shared = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
        return f"{'.'.join(first)} … {'.'.join(last[shared:])}"

    @property
    def kind(self) -> str:
        """The kind of instruction, as in a timeline."""
        return self.step.instruction.kind

    @property
    def phase_name(self) -> str:
        """`forward`, `backward` (of inputs, weights or both) or `update`."""
        phase = self.step.phase
        return phase.value if phase in (Phase.FORWARD, Phase.UPDATE) else Phase.BACKWARD.value

    @property
    def where(self) -> str:
        """The place in the model, or the instruction's own name if it belongs to no layer."""
        return self.module or self.layer or self.step.instruction.name

    @property
    def text(self) -> str:
        """A short description: `forward compute · micro-batch 0 · blocks.0.conv1`."""
        way = "" if self.kind == "update" else f"{self.phase_name} "
        return f"{way}{self.kind} · " + (f"micro-batch {self.step.micro_batch} · " if self.work else "") + self.where

    def get_block(self, unit: str) -> object:
        """Return a key that is equal for steps of one unit: a layer, a micro-batch in a stage, or a phase."""
        return {
            "layer": (self.work, self.phase_name, self.layer),
            "micro-batch": (self.work, self.phase_name),
            "phase": self.phase_name,
        }[unit]


def label_steps(graph: ModelGraph, program: Program) -> tuple[StepLabel, ...]:
    known = {
        name: where
        for way in program.direction_programs.values()
        for name, where in _locate_instructions(graph, way.stages)
    }
    kinds = {Phase.FORWARD: ActionKind.FORWARD, Phase.WEIGHTS: ActionKind.WEIGHTS}  # else BACKWARD
    labels: list[StepLabel] = []
    for step in program.steps:
        here = known.get(step.instruction.name)
        if step.phase is Phase.UPDATE or here is None:
            # A gradient sum starts after the last gradient in it. What comes before all others has no place yet.
            after = step.phase is not Phase.UPDATE and labels
            labels.append(replace(labels[-1], step=step) if after else StepLabel(step))
            continue
        stage, layer, modules = here
        kind = kinds.get(step.phase, ActionKind.BACKWARD)
        work = PipelineAction(kind, program.directions[step.micro_batch], stage, step.micro_batch)
        labels.append(StepLabel(step, work, layer, modules))
    # Labels are counted with the rank's first micro-batch.
    first = next((label.work for label in labels if label.work), None)
    return tuple(
        label if label.work or label.step.phase is Phase.UPDATE else replace(label, work=first) for label in labels
    )


def describe_steps(graph: ModelGraph, plan: Plan, program: Program) -> list[bytes]:
    """Return a description of each step of a program: the rank's role, the instruction, and its peers."""
    role, count = Layout.of(plan).describe_rank(program.rank), len(program.steps)
    descriptions = []
    for position, (label, effects) in enumerate(zip(label_steps(graph, program), program.effects, strict=True), 1):
        others = ", ".join(map(str, sorted(_find_sync(label.step, effects, frozenset())[2] - {program.rank})))
        together = f", with {others}" if others else ""
        descriptions.append(f"{role}: {label.text}{together} (instruction {position} of {count})".encode())
    return descriptions


def find_block_end(found: tuple[StepLabel, ...], start: int, unit: str) -> int:
    """Return how many steps are done at the end of the unit that step `start` belongs to."""
    if start == len(found) or unit == "instruction":
        return min(start + 1, len(found))
    block = found[start].get_block(unit)
    return next((index for index in range(start, len(found)) if found[index].get_block(unit) != block), len(found))


def _locate_instructions(
    graph: ModelGraph, stages: Mapping[int, Iterable[ModelInstruction]]
) -> Iterator[tuple[str, tuple[int, str, tuple[str, ...]]]]:
    """Yield (name, (stage, layer, modules)) of each instruction of a forward pass.

    A communication belongs to the next segment of its stage, or to the last one if none follows.
    """
    layer_of = {
        node.name: layer.name
        for layer in find_layers(graph)
        for node in graph.nodes[layer.nodes.start : layer.nodes.stop]
    }
    for stage, items in stages.items():
        waiting: list[str] = []
        layer, modules = "", tuple[str, ...]()
        for item in items:
            waiting.append(item.name)
            if item.is_local:
                # A segment that only prepares something, such as a padded window, counts to the layer before.
                layer = next((layer_of[op.out] for op in item.local_ops if op.out in layer_of), layer)
                modules = tuple(dict.fromkeys(op.module for op in item.local_ops if op.module))
                yield from ((name, (stage, layer, modules)) for name in waiting)
                waiting = []
        yield from ((name, (stage, layer, modules)) for name in waiting)  # the sends at the end of the stage


# Which ranks can run their next step, and which others must advance first.


StepCounts = tuple[int, ...]
"""For each rank, the number of its steps that are done."""


class DependencyOrder:
    """The programs of all ranks, and for each step the steps of other ranks that must have begun for it to end.

    A rank that only sends does not wait. Weights are updated on all ranks, or on none.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.ends: StepCounts = tuple(len(program.steps) for program in programs)
        everyone = frozenset(range(len(programs)))
        # Equal keys are numbered on each rank: its first one meets the first ones of the others, its second one theirs.
        #
        #   rank 0   exchange 2 #0 --> exchange 2 #1 --> update
        #   rank 1                     exchange 2 #0 --> exchange 2 #1 --> update      (#0 waits for #0, never for #1)
        begun: list[dict[Hashable, int]] = []  # by rank: the index of the step with each key and number
        waits: list[list[tuple[Hashable, frozenset[int]]]] = []  # by rank and step: a key and number, and who has it
        for program in programs:
            seen: Counter[Hashable] = Counter()
            begun.append({})
            waits.append([])
            for index, (step, effects) in enumerate(zip(program.steps, program.effects, strict=True)):
                key, asks, waits_for = _find_sync(step, effects, everyone)
                begun[-1][key, seen[key]] = index
                waits[-1].append(((asks, seen[key]), waits_for))
                seen[key] += 1
        # needs[rank][index] are the (peer, step of the peer) pairs that the step waits for
        self.needs = tuple(
            tuple(tuple((peer, begun[peer][asks]) for peer in sorted(waits_for - {rank})) for asks, waits_for in steps)
            for rank, steps in enumerate(waits)
        )

    def compute_closure(self, places: StepCounts, wanted: Mapping[int, int]) -> StepCounts:
        """Return the smallest counts, from `places` on, at which the `wanted` ranks reach their wanted counts."""
        targets = list(places)
        open_ranks = dict(wanted)
        while open_ranks:
            rank, target = open_ranks.popitem()
            for index in range(targets[rank], target):
                for peer, needed in self.needs[rank][index]:
                    # `needed` is an index: the peer must have begun that step, so its count must be at least needed +
                    # 1.
                    if targets[peer] <= needed:
                        open_ranks[peer] = max(open_ranks.get(peer, 0), needed + 1)
            targets[rank] = max(targets[rank], target)
        return tuple(targets)

    def advance_within(self, places: StepCounts, limits: Sequence[int]) -> StepCounts:
        """Return the largest reachable counts in which no rank exceeds its limit."""
        # Start from the limits and lower a rank to the first step whose needs the others do not meet, until nothing
        # changes: the greatest fixed point. Ranks that wait for each other at one point pass it together.
        targets, changed = list(limits), True
        while changed:
            changed = False
            for rank, limit in enumerate(targets):
                for index in range(places[rank], limit):
                    if any(targets[peer] <= needed for peer, needed in self.needs[rank][index]):
                        targets[rank], changed = index, True
                        break
        return tuple(targets)

    def advance_once(self, places: StepCounts) -> StepCounts:
        """Advance every rank that can run its next instruction by one."""
        return self.advance_within(places, [min(done + 1, end) for done, end in zip(places, self.ends, strict=True)])

    def list_counts(self, places: StepCounts, target: StepCounts) -> list[StepCounts]:
        """Return the counts after each instruction on the way from `places` to `target`, which is the last of them.

        Every rank that can run its next instruction, and is not at its target, advances by one at a time.
        """
        way = []
        while places != target:
            reached = self.advance_within(places, [min(at + 1, end) for at, end in zip(places, target, strict=True)])
            # From counts that can be reached some rank can always go on. Should none, the rest is one advance.
            places = target if reached == places else reached
            way.append(places)
        return way

    def choose_next_rank(self, places: StepCounts) -> int | None:
        """Return the rank with the fewest steps done among those that can continue; None at the end."""
        ready = [rank for rank, done in enumerate(self.advance_once(places)) if done > places[rank]]
        return min(ready, key=lambda rank: places[rank], default=None)

    def find_blocking_ranks(self, places: StepCounts, rank: int) -> tuple[int, ...]:
        """Return the ranks for which a rank has to wait before its next instruction."""
        if places[rank] == self.ends[rank]:
            return ()
        return tuple(peer for peer, needed in self.needs[rank][places[rank]] if places[peer] < needed)


def _find_sync(step: Step, effects: Effects, everyone: frozenset[int]) -> tuple[Hashable, Hashable, frozenset[int]]:
    """Return the key of a step, and that of the steps which other ranks, returned as well, must begin for it to end.

    Steps at which ranks synchronise have one key on all of them.
    """
    messages, name = effects.messages, step.instruction.name
    here = step.micro_batch if step.instruction.per_micro_batch else None
    if messages:
        # Messages that are posted travel by themselves. A rank that receives also waits for its own sends to complete.
        key = ("messages", messages.tag, here)
        senders, receivers = ({message.peer for message in side} for side in (messages.receives, messages.sends))
        waits = messages.waits and senders
        return key if messages.posts else (*key, "ends"), key, frozenset(senders | receivers if waits else ())
    # An all-reduce proceeds only while its ranks run it: one that waits for the end needs the others to wait, too.
    waited = [reduction.group for reduction in effects.reductions if reduction.waits]
    ends = bool(waited) or not effects.reductions
    of_sum = (name, step.phase is Phase.FORWARD, ends, here)
    return of_sum, of_sum, everyone if effects.updates is not None else frozenset[int]().union(*waited)
