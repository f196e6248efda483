"""Debug a training step instruction by instruction on the ranks: `training.stepping(images, labels)`."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from torch import Tensor

from mpi4dl_nb.engines.checks import check_choice, is_integer
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.shards import ShardIndex
from mpi4dl_nb.engines.compiler.steps import UNITS, DependencyOrder, StepCounts, StepLabel, find_block_end, label_steps
from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.engines.formatting import FactTable, describe_unknown
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.plan.schedule import Schedule
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.engines.train.debug_step import StepState
from mpi4dl_nb.engines.train.step_events import (
    BOUND_PX,
    RankEvent,
    StepEvent,
    StepInspector,
    StepView,
    choose_depth,
    compute_schedule_time,
    find_transfers,
    make_schedule,
)
from mpi4dl_nb.engines.train.train_loop import merge_stats
from mpi4dl_nb.engines.train.training import cut_inputs
from mpi4dl_nb.training.training_handle import TrainingHandle


def _check_name(option: str, asked: str | None, names: Iterable[str]) -> None:
    """Raise PlanError if `asked` is none of the names, nor a module that contains one."""
    known = list(dict.fromkeys(names))
    if asked is not None and not any(f"{name}.".startswith(f"{asked}.") for name in known):
        raise PlanError(describe_unknown(f"{option}={asked!r} does not exist", asked, known))


class StepDebugger(FactTable):
    """Debugger that executes one training step on a batch piece by piece.

    The debugger is also an iterator of events, one per instruction of every rank. The training does not change before
    the update, which all ranks do together. The update ends the step, which counts as one of `training.step` and has
    the same loss and weights.

    `instruction`, `layer`, `micro_batch` and `phase` each advance by one such unit: on every rank, as far as possible
    without any rank doing more than its unit; on one `rank` such as 2, together with everything that it waits for; or
    on the rank that is `"next"`.

    Other work on the cluster in between abandons the step; `restart` begins it again. Raises ImageError as
    `training.step` does, and RankError and LossError if a rank fails: nothing has changed then.
    """

    def __init__(self, training: TrainingHandle, whole: Mapping[str, Tensor]) -> None:
        self.training, self._recipe, graph = training, training.recipe, training.recipe.graph
        self.images = len(whole["images"])
        self._inputs = [cut_inputs(program, whole) for program in training.programs]
        self.order = DependencyOrder(training.programs)
        self.steps = tuple(label_steps(graph, program) for program in training.programs)
        self.layout = Layout.of(training.plan)
        self.image_shape = graph.inputs["images"].shape
        self._roles = ["; ".join(map(self.layout.describe_role, roles)) for roles in self.layout.roles]
        self._begin()

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule of the step."""
        return make_schedule(self._compiler)

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self.training.recipe.graph, self.training.plan)

    @cached_property
    def _inspector(self) -> StepInspector:
        extents = ShardIndex(self._compiler, self.training.programs)
        return StepInspector(extents, self.steps, self.schedule, self._call)

    def _begin(self) -> None:
        if self.training.recipe is not self._recipe:
            raise PlanError(
                f"load() has given the training another plan, {self.training.plan.summary}. This step is of the old "
                "one. Make a new one: training.stepping(images, labels)."
            )
        self.number = uuid.uuid4().hex
        self.loss: float | None = None
        parts = [(inputs,) for inputs in self._inputs]
        begin = rank_functions.begin_debug_step, self.training.name, self.training.steps, self.images, self.number
        with self.training.explain_failure():
            standings = self.training.cluster.call(*begin, per_rank=parts)
        start = (0,) * len(parts)
        self._update_event(start, 0, standings, start)

    # ---- executing

    def instruction(self, rank: int | str | None = None) -> StepEvent:
        """Execute one instruction."""
        return self.go("instruction", rank)

    def layer(self, rank: int | str | None = None) -> StepEvent:
        """Execute up to the end of the current layer, or of the next one."""
        return self.go("layer", rank)

    def micro_batch(self, rank: int | str | None = None) -> StepEvent:
        """Execute up to the end of a micro-batch's forward or backward pass through a stage."""
        return self.go("micro-batch", rank)

    def phase(self, rank: int | str | None = None) -> StepEvent:
        """Execute up to the end of the forward pass, the backward pass or the update."""
        return self.go("phase", rank)

    def go(self, unit: str, rank: int | str | None = None) -> StepEvent:
        """Execute one unit: `instruction`, `layer`, `micro-batch` or `phase`. Raises PlanError at the step's end."""
        return self._advance(self.find_unit_end(unit, rank))

    def find_unit_end(self, unit: str, rank: int | str | None = None) -> StepCounts:
        """Return the counts of done instructions that `go` would advance to, and raise the errors that it would."""
        check_choice("unit", unit, UNITS)
        self._check_open()
        now = self.event.places
        ends = [find_block_end(steps, at, unit) for steps, at in zip(self.steps, now, strict=True)]
        # Instructions of two ranks, with `|` at the end of the current unit of each:
        #
        #     rank 0   a  b |  send  c
        #                        \
        #     rank 1   d        recv  e |
        #
        # All ranks: each stops at the end of its own unit, or before an instruction for which another rank would have
        # to go beyond its unit. Rank 0 executes a and b, and rank 1 only d. One rank: it executes its whole unit, and
        # the others only what that depends on. For rank 1 these are d, recv and e, and a, b and send on rank 0.
        if rank is None:
            return self.order.advance_within(now, ends)
        ranks = self.training.plan.ranks
        chosen = self.order.choose_next_rank(now) if rank == "next" else rank
        if not isinstance(chosen, int) or not 0 <= chosen < ranks:
            raise PlanError(f"rank={rank!r} must be 0 to {ranks - 1}, 'next', or None for all.")
        if self.event.ranks[chosen].next is None:
            raise PlanError(f"Rank {chosen} has done its part of the step. Choose another one, or None for all.")
        return self.order.compute_closure(now, {chosen: ends[chosen]})

    def until(
        self,
        layer: str | None = None,
        rank: int | None = None,
        kind: str | None = None,
        phase: str | None = None,
        micro_batch: int | None = None,
    ) -> StepEvent:
        """Execute until an instruction that meets all given conditions is done, or to the end of the step.

        `layer` is the name of a layer or of a module in it, `kind` one of compute, halo, stage, all-reduce and update,
        `phase` forward, backward or update. Raises PlanError if one of them does not exist, or no instruction of the
        whole step meets them all.
        """
        return self._advance(self.find_breakpoint(layer, rank, kind, phase, micro_batch))

    def find_breakpoint(
        self,
        layer: str | None = None,
        rank: int | None = None,
        kind: str | None = None,
        phase: str | None = None,
        micro_batch: int | None = None,
    ) -> StepCounts:
        """Return the counts of done instructions that `until` would advance to, and raise the errors that it would."""
        self._check_open()
        labels = [label for steps in self.steps for label in steps]
        _check_name("layer", layer, (name for label in labels for name in (label.layer, *label.modules) if name))
        _check_name("kind", kind, (label.kind for label in labels))
        _check_name("phase", phase, (label.phase_name for label in labels))

        def is_target(who: int, label: StepLabel) -> bool:
            return (
                rank in (None, who)
                # "layer1" is met by the module layer1.0, but not by layer10
                and (layer is None or any(f"{name}.".startswith(f"{layer}.") for name in (label.layer, *label.modules)))
                and kind in (None, label.kind)
                and phase in (None, label.phase_name)
                and micro_batch in (None, label.step.micro_batch)
            )

        if not any(is_target(who, label) for who, steps in enumerate(self.steps) for label in steps):
            asked = {"layer": layer, "rank": rank, "kind": kind, "phase": phase, "micro_batch": micro_batch}
            conditions = ", ".join(f"{name}={value!r}" for name, value in asked.items() if value is not None)
            ranks, micro_batches = len(self.steps), self.training.plan.micro_batches
            raise PlanError(
                f"No instruction of the step is of {conditions}. Ask for fewer of these at once; there are ranks 0 to "
                f"{ranks - 1} and micro-batches 0 to {micro_batches - 1}."
            )
        # Advance as all ranks do at once, one instruction each where possible, but only on paper: the ranks are called
        # once, with the place that was found.
        target = self.event.places
        while target != self.order.ends:
            before, target = target, self.order.advance_once(target)
            pairs = enumerate(zip(before, target, strict=True))
            if any(is_target(who, self.steps[who][start]) for who, (start, stop) in pairs if stop > start):
                break
        return target

    def walk_to(self, target: StepCounts, most: int = 64) -> Iterator[StepEvent]:
        """Execute up to the counts of `target`, which `find_unit_end` or `find_breakpoint` returned, by instructions.

        Each event is that of one instruction, on every rank that can run one. Of a long way only the last `most` are
        executed separately; what comes before them is executed at full speed, and is one event.
        """
        way = self.order.list_counts(self.event.places, target)
        for counts in way[-most - 1 :] if len(way) > most else way:
            yield self._advance(counts)

    def finish(self) -> float:
        """Execute the rest of the step at full speed and return its loss, as `training.step` does."""
        while self.loss is None:
            self._check_open()
            self._advance(self.order.ends)
        return self.loss

    def restart(self) -> StepEvent:
        """Restart the step. If it was already done, this is the next step, with the same batch."""
        self._begin()
        return self.event

    def close(self) -> None:
        """Abandon the step if it is not done. Nothing has changed then."""
        number, self.number = self.number, ""
        if number and not self.done:
            with suppress(RankError):  # if ranks have died, the step is abandoned anyway
                self.training.cluster.call(rank_functions.abort_debug_step, number)

    def __enter__(self) -> StepDebugger:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepEvent]:
        return self

    def __next__(self) -> StepEvent:
        if self.done:
            raise StopIteration
        return self.instruction()

    @property
    def facts(self) -> dict[str, object]:
        total = ", ".join(str(len(steps)) for steps in self.steps)
        return {"plan": self.training.plan.summary, **self.event.facts, "instructions of the ranks": total}

    @property
    def done(self) -> bool:
        """Whether the step is complete and the weights are updated."""
        return self.event.done

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in order."""
        names = (label.layer for steps in self.steps for label in steps if label.layer)
        return tuple(dict.fromkeys(names))

    # ---- inspecting

    def view(
        self, channel: int = 0, image: int = 0, show: str = "made", bound_px: int = BOUND_PX, plane: int | None = None
    ) -> StepView:
        """Return one channel of one image of each rank's last value, and the effects of its last messages.

        `show` selects the `activation`, the `gradient`, or whichever was `made` last: gradients in the backward pass. A
        rank that has done nothing yet shows its part of the images. Ranks send at most `bound_px` pixels per side:
        larger values are averaged down. Of volumes, `plane` is one of the images (by default the middle one), and of a
        value with fewer planes the one at its place. Raises PlanError, before any rank is asked, for numbers that are
        too small, planes that do not exist, and signals.
        """
        share = choose_depth(self.image_shape, plane)
        for name, asked, low in (("channel", channel, 0), ("image", image, 0), ("bound_px", bound_px, 1)):
            if not is_integer(asked) or asked < low:
                raise PlanError(f"{name}={asked!r} must be a whole number of {low} or more.")
        return self._inspector.make_view(self.event, show, channel, image, bound_px, share)

    def tensor(self, name: str, gradient: bool = False, micro_batch: int = 0) -> Tensor:
        """Return a whole value of a micro-batch, assembled from all ranks, or its gradient as accumulated so far.

        `name` is that of a module, or of a value such as `images`. Raises PlanError if no rank holds the value now: in
        the forward pass, values that are still needed exist; in the backward pass, those that are not yet consumed.
        """
        graph = self.training.recipe.graph
        if not any(True for _ in self._inspector.extents.find_shards(micro_batch, name)):
            values = (name for node in graph.nodes for name in (node.module, node.name) if name)
            _check_name("name", name, [*graph.inputs, *values])
        return self._inspector.assemble_tensor(name, gradient, micro_batch)

    # ---- implementation

    def _check_open(self) -> None:
        if self.done:
            raise PlanError("The step is done, and the weights have moved. restart() begins another one on this batch.")
        if not self.number:
            problem = "This step was given up: closed, interrupted, or a rank has failed."
            raise PlanError(f"{problem} restart() begins it anew.")

    def _advance(self, target: StepCounts) -> StepEvent:
        # The notebook sends only how far the ranks go. They execute at once, as in any step, and wait for each other's
        # messages; by the order of dependencies, none waits for an instruction beyond another one's target.
        last = target == self.order.ends
        with self.training.cluster.turn:  # the update and its count here are one, whatever thread steps next
            standings = self._call("advance", [(done,) for done in target])
            if last:  # the update is done: this was a step of the training
                self.training.record_step([standing.outcome[0] for standing in standings], self.images)
        self._update_event(target, self.event.number + 1, standings, self.event.places)
        if last:
            self.loss = merge_stats([standing.outcome[1] for standing in standings]).loss
        return self.event

    def _call(self, what: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the step on all ranks. Any error abandons the step."""
        try:
            answers = self.training.cluster.call(rank_functions.call_debug_step, self.number, what, per_rank=per_rank)
        except BaseException:
            self.number = ""
            raise
        if any(answer is None for answer in answers):
            self.number = ""
            raise PlanError("The ranks have done other work, and gave this step up for it. restart() begins it anew.")
        return [answer for (answer,) in answers]

    def _update_event(self, now: StepCounts, number: int, standings: Sequence[StepState], before: StepCounts) -> None:
        losses = {n: loss for standing in standings for n, loss in standing.losses.items()}
        ranks = []
        for rank, (standing, at, steps) in enumerate(zip(standings, now, self.steps, strict=True)):
            event = RankEvent(
                rank,
                self._roles[rank],
                steps[at - 1] if at else None,
                steps[at] if at < len(steps) else None,
                self.order.find_blocking_ranks(now, rank),
                at > before[rank],
                compute_schedule_time(self.schedule.lanes[rank], steps, at),
                standing.activation_bytes,
                standing.weight_bytes,
                standing.process_bytes,
            )
            ranks.append(event)
        just_moved = tuple(
            transfer
            for rank_event in ranks
            if rank_event.moved and rank_event.did is not None
            for transfer in find_transfers(rank_event.rank, rank_event.did)
        )
        loss = statistics.fmean(losses.values()) if losses else None
        ran = tuple(stop - start for start, stop in zip(before, now, strict=True))
        self.event = StepEvent(number, tuple(ranks), just_moved, now, now == self.order.ends, loss, ran)
