"""Runs a program: one instruction at a time, or all of them. There is no other way to compute here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.comm.all_reduce import all_reduce
from engines.comm.nccl import Collectives, NcclAllReduce, OrderedStarter
from engines.comm.wait_time import get_wait_s
from engines.comm.world import World
from engines.errors import PlanError
from engines.program.async_exchange import make_async_runners
from engines.program.batch_stats import BatchStats
from engines.program.exchange_runner import make_exchange_runners
from engines.program.instructions import (
    DEVICE,
    Compute,
    CountLabels,
    Exchange,
    FiniteCheckAllReduce,
    Phase,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from engines.program.micro_batch import MicroBatchState, Runtime
from engines.program.output_buffers import find_output_allocators
from engines.program.program import Program, Step
from engines.program.segment import Segment
from engines.program.send_queue import SendQueue
from engines.program.timeline import TimelineEvent
from engines.program.update import GradientBucket, OptimiserStep, UpdateRules, update_buffers
from engines.spatial.rng import compute_step_seed
from engines.status_board import get_status_board

__all__ = ["Inputs", "Worker"]

Inputs = Mapping[int, Mapping[str, Tensor]]
"""A rank's parts of the inputs of each of its micro-batches."""


class Worker:
    """One rank's tensors, and its place in its program.

    `weights` and `buffers` are the rank's own, by name; `constants` change before the passes of a step only, by
    `count_labels`. `keeps_graphs` as in `Tools`, `make_lane` makes what holds a micro-batch, `make_segment` what
    computes. `words` say of each step what it is, for whoever asks where the rank is.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimiser: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
        seed: int = 0,
        rules: UpdateRules | None = None,
        keeps_graphs: bool = True,
        make_lane: Callable[..., MicroBatchState] = MicroBatchState,
        make_segment: Callable[..., Segment] = Segment,
        constants: Mapping[str, Tensor] | None = None,
        count_labels: Callable[[CountLabels, Mapping[int, Tensor]], int] | None = None,
    ) -> None:
        self.program, self.world = program, world
        self.weights, self.buffers, self.constants = weights, buffers, constants or {}
        self.optimiser_step = OptimiserStep(weights, optimiser, rules or UpdateRules())
        self.device = device or torch.device("cpu")
        self.events: list[TimelineEvent] = []
        self.seed, self.steps, self._make_lane = seed, 1, make_lane
        self.step_labels = [step.instruction.name.encode() for step in program.steps]
        self._count_labels = count_labels
        self._send_queue = SendQueue()
        self._sums: dict[str, GradientBucket] = {}
        self._collectives: Collectives | None = None
        self.runtime = self._prepare(keeps_graphs, make_segment)
        self.restart({})

    def _prepare(self, keeps_graphs: bool, make_segment: Callable[..., Segment]) -> Runtime:
        """Every exchange and every segment, prepared once."""
        owned: dict[str, Any] = {**self.weights, **self.buffers, **self.constants, DEVICE.name: self.device}
        exchanges = [item for item in self.program.forward if isinstance(item, Exchange)]
        found = make_exchange_runners(exchanges, self.world, self.device, self._send_queue)
        segments = {
            item.name: make_segment(item, owned, rooms)
            for way in self.program.direction_programs.values()
            for rooms in [find_output_allocators(way, found)]
            for item in way.forward
            if isinstance(item, Compute)
        }
        halves = make_async_runners(self.program.forward, self.world, self.device, self._send_queue)
        return Runtime(self.world, found, segments, keeps_graphs, halves)

    def connect(self) -> None:
        """Before a step: have gradients added up without messages, where the world can; collective over all ranks.

        What was connected before a rank failed is not used again. Raises RankError where ranks do not reach each other.
        """
        found = self.world.collectives(self.device)
        if found is not self._collectives:
            self._collectives = found
            self._sums = dict(self._connect_buckets(found)) if found else {}

    def _connect_buckets(self, found: Collectives) -> Iterator[tuple[str, GradientBucket]]:
        """The sums of this rank, in an order that all ranks have: groups that share ranks wait for each other."""
        sums = {each for step in self.program.steps if isinstance(each := step.instruction, SumGradients)}
        order = OrderedStarter(len(sums))
        for number, bucket in enumerate(sorted(sums, key=lambda each: each.tag)):
            group = found.connect_group(bucket.group, self.device)
            added = partial(NcclAllReduce, group=group, number=number, order=order, check=found.check)
            yield bucket.name, GradientBucket(self.weights, bucket, self.world, added)

    def resume_from(self, other: Worker) -> None:
        """Go on where a worker of the same weights has come to, with its optimiser, scale, steps and sums of gradients.

        Both walk programs of the same model on the same ranks, for steps of different numbers of images.
        """
        self.optimiser_step, self.seed, self.steps = other.optimiser_step, other.seed, other.steps
        self._sums, self._collectives = other._sums, other._collectives

    def restart(self, inputs: Inputs) -> None:
        """Go to the start of a training step with this rank's parts of the inputs."""
        self.position = 0
        self.helping_s = 0.0
        self._send_queue.discard()
        self.events = []
        self._agreed: Tensor | None = None
        count = self.program.micro_batches
        self.micro_batch_states = {
            number: self._make_lane(
                self.runtime,
                self.program.get_direction_program(number),
                inputs.get(number, {}),
                seed=compute_step_seed(self.seed, self.steps * count + number),
                loss_gradient=self.optimiser_step.scale / count,
            )
            for number in sorted(self.program.directions)
        }
        self._batch_stats = BatchStats(self.micro_batch_states, count)

    @property
    def done(self) -> bool:
        """Whether the step is complete."""
        return self.position == len(self.program.steps)

    def run(self, inputs: Inputs) -> float | None:
        """One whole training step; the loss, on the ranks that have it."""
        self.restart(inputs)
        while not self.done:
            self.step()
        return self.loss

    @property
    def losses(self) -> dict[int, float]:
        """The losses that are known here, by micro-batch."""
        return {number: loss for number, lane in self.micro_batch_states.items() if (loss := lane.loss) is not None}

    @property
    def loss(self) -> float | None:
        """The mean of the losses that are known here, None where there is none."""
        found = self.losses.values()
        return sum(found) / len(found) if found else None

    def step(self) -> Step:
        """Do one instruction and go on to the next."""
        step = self.program.steps[self.position]
        get_status_board().report(self.step_labels[self.position], self.steps)
        start_s, before_s = time.perf_counter(), get_wait_s()
        sent = self._run_step(step)
        event = TimelineEvent.of(self.program.rank, step, start_s, time.perf_counter(), sent, get_wait_s() - before_s)
        self.events.append(event)
        self.position += 1
        start_s = time.perf_counter()
        # What is sent is read until it has gone: whoever ends a program may free it or write over it.
        self._send_queue.wait() if self.done else self._send_queue.poll()
        self.helping_s += time.perf_counter() - start_s
        return step

    def flush_sends(self) -> None:
        """Let messages start whose pixels a device has still to pack: for whoever stops here, and waits for others."""
        self._send_queue.flush()

    def offload(self) -> None:
        """Let what its micro-batches hold lie where they put it while nothing is computed with it, if they do."""
        for lane in self.micro_batch_states.values():
            lane.offload()

    def peek(self, name: str, micro_batch: int | None = None) -> Tensor:
        """This rank's part of a live value, of the micro-batch that is (or was last) worked on unless one is named.

        Its gradient so far is in `.grad`. Raises PlanError where the value is not made yet, is gone already, or is
        not this rank's.
        """
        lane = self._get_micro_batch(micro_batch)
        for tensors in (lane.values, lane.leaves, self.weights, self.buffers):
            if name in tensors:
                return lane.fetch(tensors[name])
        alive = ", ".join(sorted(lane.leaves)[:8])
        raise PlanError(f"rank {self.program.rank} holds no value {name!r} now. It holds {alive}, ...")

    @property
    def live_values(self) -> dict[str, Tensor]:
        """What the rank holds now of the values of the micro-batch that is worked on, by name."""
        lane = self._get_micro_batch(None)
        return {name: lane.fetch(tensor) for name, tensor in {**lane.leaves, **lane.values}.items()}

    def _get_micro_batch(self, micro_batch: int | None) -> MicroBatchState:
        if micro_batch is None:
            done = [step for step in self.program.steps[: self.position] if step.phase is not Phase.UPDATE]
            micro_batch = done[-1].micro_batch if done else next(iter(self.micro_batch_states))
        if micro_batch not in self.micro_batch_states:
            here = ", ".join(map(str, self.micro_batch_states))
            raise PlanError(
                f"rank {self.program.rank} works on the micro-batches {here}, not on {micro_batch}. Name one of them."
            )
        return self.micro_batch_states[micro_batch]

    def _run_step(self, step: Step) -> int:
        if not isinstance(step.instruction, Compute):
            self.flush_sends()
        match step.instruction:
            case CountLabels() as counting:
                lanes = {number: self.micro_batch_states[number] for number in counting.program.directions}
                labels = {number: lane.fetch(lane.values["labels"]) for number, lane in lanes.items()}
                return self._count_labels(counting, labels)
            case SumGradients() as bucket:
                return self._sum_gradients(bucket, begins=step.phase is not Phase.UPDATE)
            case ReduceBatchStats() as share:
                return self._batch_stats.reduce(share, self.world)
            case FiniteCheckAllReduce() as agreement:
                return self._reduce_gradient_stats(agreement)
            case Update() as update:
                return self._update(update)
            case instruction:
                return self.micro_batch_states[step.micro_batch].run_instruction(instruction, step.phase)

    def _sum_gradients(self, bucket: SumGradients, begins: bool) -> int:
        if not begins:
            self._sums[bucket.name].finish()
            return 0
        if bucket.name not in self._sums:
            self._sums[bucket.name] = GradientBucket(self.weights, bucket, self.world)
        own = self._sums[bucket.name]
        self._send_queue.add(self._send_queue.start_after(own.pack(), own.total.begin))
        return own.total.sent_bytes

    def _reduce_gradient_stats(self, agreement: FiniteCheckAllReduce) -> int:
        self._send_queue.wait()
        self._agreed = self.optimiser_step.compute_gradient_stats(agreement.counted)
        under_way = all_reduce(self.world, self._agreed, agreement.group)
        under_way.wait()
        return under_way.sent_bytes

    def _update(self, update: Update) -> int:
        self.steps += 1  # from here on the state is another, or between two: a rank that fails now has half a step
        sent = update_buffers(self.buffers, update, self._batch_stats, self.world)
        for lane in self.micro_batch_states.values():
            lane.end_step()
        self.optimiser_step.step(
            self.optimiser_step.compute_gradient_stats(self.weights) if self._agreed is None else self._agreed
        )
        return sent
