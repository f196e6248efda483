"""Runs a rank's program, one instruction at a time or a whole step. All computation goes through here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.nccl import Collectives, NcclAllReduce, OrderedStarter
from mpi4dl_nb.engines.comm.status_board import get_status_board, get_wait_s
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.program.effects import Instruction, Phase, select_kind
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import make_exchange_runners
from mpi4dl_nb.engines.program.instructions import (
    DEVICE,
    Compute,
    FiniteCheckAllReduce,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from mpi4dl_nb.engines.program.message_buffers import SendQueue
from mpi4dl_nb.engines.program.micro_batch import MicroBatchState, Runtime
from mpi4dl_nb.engines.program.program import CountLabels, Program, Step
from mpi4dl_nb.engines.program.ring import RingAttention
from mpi4dl_nb.engines.program.ring_runner import RingRunner
from mpi4dl_nb.engines.program.rng import compute_step_seed
from mpi4dl_nb.engines.program.segment import Segment, find_output_allocators
from mpi4dl_nb.engines.program.shared_state import PendingUpdate, SharedGradientBucket, SharedState
from mpi4dl_nb.engines.program.timeline import TimelineEvent
from mpi4dl_nb.engines.program.update import BatchStats, GradientBucket, OptimiserStep, UpdateRules, update_buffers

Inputs = Mapping[int, Mapping[str, Tensor]]
"""A rank's parts of the inputs: micro-batch, then input name, then tensor."""


class Worker:
    """One rank's tensors, and its position in its program.

    `weights` and `buffers` are the rank's own, by name; `constants` change only before the passes of a step, by
    `count_labels`. `keeps_graphs` is that of `Runtime`. `make_micro_batch` makes the state of a micro-batch,
    `make_segment` a runnable segment, and `allocate` (as `torch.empty`) what other ranks' pixels arrive in.
    `step_labels` describe each step for the status board. `shared` is what ranks of one thread share.
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
        make_micro_batch: Callable[..., MicroBatchState] = MicroBatchState,
        make_segment: Callable[..., Segment] = Segment,
        constants: Mapping[str, Tensor] | None = None,
        count_labels: Callable[[CountLabels, Mapping[int, Tensor]], int] | None = None,
        shared: SharedState | None = None,
        allocate: Callable[..., Tensor] = torch.empty,
    ) -> None:
        self.program, self.world, self.shared = program, world, shared
        self.weights, self.buffers, self.constants = weights, buffers, constants or {}
        self.optimiser_step = OptimiserStep(weights, optimiser, rules or UpdateRules())
        self.device = device or torch.device("cpu")
        self.events: list[TimelineEvent] = []
        self.seed, self.steps, self._make_micro_batch = seed, 1, make_micro_batch
        self.step_labels = [step.instruction.name.encode() for step in program.steps]
        self._count_labels = count_labels
        self._send_queue = SendQueue()
        self._sums: dict[str, GradientBucket | SharedGradientBucket] = {}
        self._make_bucket = partial(SharedGradientBucket, shared=shared) if shared else GradientBucket
        self._collectives: Collectives | None = None
        # Every exchange and every segment is made ready to run here, once. The micro-batches, of which there are new
        # ones in each step, share them.
        owned: dict[str, Any] = {**self.weights, **self.buffers, **self.constants, DEVICE.name: self.device}
        exchanges = list(select_kind(program.forward, Exchange))
        runners = make_exchange_runners(exchanges, world, self.device, self._send_queue, allocate)
        segments: dict[str, Segment] = {}
        for way in program.direction_programs.values():
            rooms = find_output_allocators(way, runners)
            segments |= {item.name: make_segment(item, owned, rooms) for item in select_kind(way.forward, Compute)}
        rings = select_kind(program.forward, RingAttention)
        ring_runners = {ring.name: RingRunner(ring, world, self.device) for ring in rings}
        self.runtime = Runtime(world, runners, segments, ring_runners, keeps_graphs)
        self.restart({})

    def connect(self) -> None:
        """Set up all-reduces of gradients on the device, if the world has collectives; collective over all ranks.

        Call before a step. Connections made before a failure are not reused. Raises RankError if ranks cannot be
        connected.
        """
        collectives = self.world.collectives(self.device)
        if collectives is self._collectives:
            return
        self._collectives = collectives
        connected: dict[str, GradientBucket | SharedGradientBucket] = {}
        sums = set(self.program.select_instructions(SumGradients)) if collectives else set()
        order = OrderedStarter(len(sums))
        # In tag order on every rank: connecting is collective over each group. If rank 1 connected to {1, 2} first, and
        # rank 2 to {0, 2}, and rank 0 to {0, 1}, all three would wait for ever.
        for position, bucket in enumerate(sorted(sums, key=lambda gradient_sum: gradient_sum.tag)):
            group = collectives.connect_group(bucket.group, self.device)
            added = partial(NcclAllReduce, group=group, number=position, order=order, check=collectives.check)
            connected[bucket.name] = GradientBucket(self.weights, bucket, self.world, added)
        self._sums = connected

    def resume_from(self, other: Worker) -> None:
        """Continue from another worker of the same weights: optimiser, loss scale, step count, gradient buckets.

        Both run programs of the same model on the same ranks, for steps of different numbers of images.
        """
        self.optimiser_step, self.seed, self.steps = other.optimiser_step, other.seed, other.steps
        self._sums, self._collectives = other._sums, other._collectives

    def restart(self, inputs: Inputs) -> None:
        """Go to the start of a training step with this rank's parts of the inputs."""
        self.position = 0
        self.helping_s = 0.0
        # A step given up half-way may have left sends; their buffers are kept alive by the transport's own requests.
        self._send_queue.discard()
        self.events = []
        self._gradient_stats: Tensor | None = None
        self._updates: list[PendingUpdate] = []  # of all ranks of one thread
        count = self.program.micro_batches
        make = partial(self._make_micro_batch, self.runtime, loss_gradient=self.optimiser_step.scale / count)
        self.micro_batch_states: dict[int, MicroBatchState] = {}
        for micro_batch in sorted(self.program.directions):
            way = self.program.get_direction_program(micro_batch)
            seed = compute_step_seed(self.seed, self.steps * count + micro_batch)
            self.micro_batch_states[micro_batch] = make(way, inputs.get(micro_batch, {}), seed=seed)
        self._batch_stats = BatchStats(self.micro_batch_states, count)

    @property
    def done(self) -> bool:
        """Whether the step is complete."""
        return self.position == len(self.program.steps)

    def run(self, inputs: Inputs) -> float | None:
        """Run one whole training step and return the loss, or None on ranks that do not compute it."""
        self.restart(inputs)
        while not self.done:
            self.step()
        return self.loss

    @property
    def losses(self) -> dict[int, float]:
        """The losses computed on this rank, by micro-batch."""
        losses = {micro_batch: state.loss for micro_batch, state in self.micro_batch_states.items()}
        return {micro_batch: loss for micro_batch, loss in losses.items() if loss is not None}

    @property
    def loss(self) -> float | None:
        """The mean of the losses computed on this rank, or None if there is none."""
        losses = self.losses.values()
        return sum(losses) / len(losses) if losses else None

    def step(self) -> Step:
        """Run the next instruction and advance."""
        step = self.program.steps[self.position]
        get_status_board().report(self.step_labels[self.position], self.steps)
        start_s, before_s = time.perf_counter(), get_wait_s()
        # Any instruction other than a segment may block on another rank, which in turn may need a message that still
        # waits for the device here. Starting it first avoids a deadlock:
        #
        #   rank 0   pack a (GPU busy, send deferred)   wait for b from rank 1
        #   rank 1   pack b (GPU busy, send deferred)   wait for a from rank 0
        instruction = step.instruction
        if not instruction.is_local:
            self.flush_sends()
        if instruction.per_micro_batch:
            sent = self.micro_batch_states[step.micro_batch].run_instruction(instruction, step.phase)
        else:
            sent = BATCH_KERNELS[type(instruction)](self, instruction, step.phase)
        event = TimelineEvent.of(self.program.rank, step, start_s, time.perf_counter(), sent, get_wait_s() - before_s)
        self.events.append(event)
        self.position += 1
        start_s = time.perf_counter()
        # Transports read a message's memory until it has been sent. At the end of the program the caller may free or
        # overwrite that memory, so wait; before, only poll, since some transports progress only when polled.
        self._send_queue.wait() if self.done else self._send_queue.poll()
        self.helping_s += time.perf_counter() - start_s
        return step

    def flush_sends(self) -> None:
        """Start all messages that still wait for the device to pack them. Call before blocking on another rank."""
        self._send_queue.flush()

    def offload(self) -> None:
        """Let the idle micro-batches offload what they hold, if they support it."""
        for state in self.micro_batch_states.values():
            state.offload()

    def peek(self, name: str, micro_batch: int | None = None) -> Tensor:
        """Return this rank's part of a live value, by default of the current (or last) micro-batch.

        The gradient accumulated so far is in `.grad`. Raises PlanError if the value is not made yet, already released,
        or not held by this rank, or if the rank does not have this micro-batch.
        """
        state = self._get_micro_batch(micro_batch)
        for tensors in (state.values, state.leaves, self.weights, self.buffers):
            if name in tensors:
                return state.fetch(tensors[name])
        alive = format_names(sorted(state.leaves)) or "none"
        raise PlanError(f"rank {self.program.rank} holds no value {name!r} now. The values that it holds: {alive}.")

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

    def _count(self, item: CountLabels, phase: Phase) -> int:
        if self._count_labels is None:
            raise PlanError(f"{item.name} counts labels, for which this worker has no function. Give `count_labels`.")
        states = {micro_batch: self.micro_batch_states[micro_batch] for micro_batch in item.program.directions}
        labels = {micro_batch: state.fetch(state.values["labels"]) for micro_batch, state in states.items()}
        return self._count_labels(item, labels)

    def _sum_gradients(self, bucket: SumGradients, phase: Phase) -> int:
        if phase is Phase.UPDATE:
            self._sums[bucket.name].finish()
            return 0
        if bucket.name not in self._sums:
            self._sums[bucket.name] = self._make_bucket(self.weights, bucket, self.world)
        gradients = self._sums[bucket.name]
        # Non-blocking: the sum proceeds during backward, driven by `SendQueue.poll` after each instruction.
        self._send_queue.add(self._send_queue.start_after(gradients.pack(), gradients.total.begin))
        return gradients.total.sent_bytes

    def _reduce_batch_stats(self, share: ReduceBatchStats, phase: Phase) -> int:
        return self._batch_stats.reduce(share, self.world)

    def _check_finite(self, check: FiniteCheckAllReduce, phase: Phase) -> int:
        self._send_queue.wait()  # a failed send must show before any rank changes its weights
        self._gradient_stats = self.optimiser_step.compute_gradient_stats(check.counted)
        if self.shared:
            self._updates = self.world.all_gather(PendingUpdate(self._run_optimiser))
        return all_reduce(self.world, self._gradient_stats, check.group).wait()

    def _update(self, update: Update, phase: Phase) -> int:
        self.steps += 1  # first: a rank that fails from here on has an incomplete update
        sent = update_buffers(self.buffers, update, self._batch_stats, self.world)
        for state in self.micro_batch_states.values():
            state.end_step()
        if self._gradient_stats is None:  # there is no other rank
            self._gradient_stats = self.optimiser_step.compute_gradient_stats(self.weights)
        updates, self._updates = self._updates or [PendingUpdate(self._run_optimiser)], []
        for pending in updates:
            pending.run(self._gradient_stats)
        return sent

    def _run_optimiser(self, gradient_stats: Tensor) -> None:
        self.optimiser_step.step(gradient_stats)
        if self.shared:
            self.shared.restore_memory(self.weights)


BATCH_KERNELS: dict[type[Instruction], Callable[[Worker, Any, Phase], int]] = {
    CountLabels: Worker._count,
    SumGradients: Worker._sum_gradients,
    ReduceBatchStats: Worker._reduce_batch_stats,
    FiniteCheckAllReduce: Worker._check_finite,
    Update: Worker._update,
}
"""The kernels of the instructions of the whole batch, by their kind: what they send is returned, in bytes."""
