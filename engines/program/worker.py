"""Runs a program: one instruction at a time, or all of them. There is no other way to compute here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engines.comm.total import all_reduce
from engines.comm.world import World
from engines.errors import PlanError
from engines.program.carry import carriers
from engines.program.instructions import (
    DEVICE,
    SEED,
    Agree,
    AllReduce,
    Compute,
    Exchange,
    Phase,
    Program,
    Step,
    SumGradients,
    Update,
)
from engines.program.room import find_rooms
from engines.program.segment import Segment
from engines.program.timeline import Event
from engines.program.update import Descent, UpdateRules, sum_gradients, update_buffers
from engines.spatial.draws import step_seed

__all__ = ["Worker"]


class Worker:
    """One rank's tensors, and its place in its program.

    `weights` and `buffers` are the rank's own, by name. Values live as leaf tensors, so that the gradients of
    all who read them add up in `.grad`; a segment's backward starts from what it made.
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
    ) -> None:
        self.program, self.world = program, world
        self.weights, self.buffers = weights, buffers
        self.descent = Descent(weights, optimiser, rules or UpdateRules())
        self.device = device or torch.device("cpu")
        self.events: list[Event] = []
        self.seed, self.steps_begun = seed, -1
        exchanges = [step.instruction for step in program.steps if isinstance(step.instruction, Exchange)]
        self._carriers = carriers(exchanges, world, self.device)
        rooms = find_rooms(program, self._carriers)
        self._owned: dict[str, Any] = {**weights, **buffers, DEVICE.name: self.device}
        self._segments = {
            step.instruction.name: Segment(step.instruction, self._owned, rooms)
            for step in program.steps
            if isinstance(step.instruction, Compute)
        }
        self._lasting = {program.loss, program.prediction}
        for step in program.steps:
            if isinstance(step.instruction, Update):
                self._lasting.update(entry.moments for entry in step.instruction.statistics)
        self.restart({})

    def restart(self, inputs: Mapping[str, Tensor]) -> None:
        """Go to the start of a training step with this rank's part of the inputs."""
        self.position = 0
        self.steps_begun += 1
        self._owned[SEED.name] = step_seed(self.seed, self.steps_begun)
        self.events = []
        self._agreed: Tensor | None = None
        self._values: dict[str, Tensor] = dict(inputs)
        self._leaves: dict[str, Tensor] = dict(inputs)
        self._kept: dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    @property
    def done(self) -> bool:
        """Whether the step is complete."""
        return self.position == len(self.program.steps)

    def run(self, inputs: Mapping[str, Tensor]) -> float | None:
        """One whole training step; the loss, on the ranks that have it."""
        self.restart(inputs)
        while not self.done:
            self.step()
        return self.loss

    @property
    def loss(self) -> float | None:
        """The loss, once it is known and where it is."""
        name = self.program.loss
        return self._leaves[name].item() if name in self._leaves else None

    def step(self) -> Step:
        """Do one instruction and go on to the next."""
        step = self.program.steps[self.position]
        start_s = time.perf_counter()
        sent = self._do(step) or 0
        self.events.append(Event.of(self.program.rank, step, start_s, time.perf_counter(), sent))
        self.position += 1
        return step

    def peek(self, name: str) -> Tensor:
        """This rank's part of a live value. Its gradient so far is in `.grad`.

        Raises PlanError where the value is not made yet, is gone already, or is not this rank's.
        """
        for tensors in (self._values, self._leaves, self.weights, self.buffers):
            if name in tensors:
                return tensors[name]
        alive = ", ".join(sorted(self._leaves)[:8])
        raise PlanError(f"rank {self.program.rank} holds no value {name!r} now. It holds {alive}, ...")

    @property
    def live(self) -> dict[str, Tensor]:
        """What the rank holds now of the step's values, by name."""
        return {**self._leaves, **self._values}

    def _do(self, step: Step) -> int | None:
        forward = step.phase is Phase.FORWARD
        match step.instruction:
            case Compute() as segment:
                return self._compute(segment) if forward else self._compute_back(segment)
            case Exchange() as exchange:
                return self._exchange(exchange) if forward else self._exchange_back(exchange)
            case AllReduce() as reduction:
                return self._reduce(reduction) if forward else self._reduce_back(reduction)
            case SumGradients() as bucket:
                return sum_gradients(self.weights, bucket, self.world)
            case Agree() as agreement:
                return self._agree(agreement)
            case Update() as update:
                return self._update(update)

    def _keep(self, name: str, value: Tensor, differentiable: bool) -> None:
        leaf = value.detach()
        self._leaves[name] = self._values[name] = leaf.requires_grad_(differentiable and leaf.is_floating_point())

    def _release(self, instruction: Any, names: tuple[str, ...]) -> None:
        """Forget what is not read again going forward; backward keeps its own hold on it."""
        for name in names:
            if self.program.reads[name][-1] == instruction.name and name not in self._lasting:
                self._values.pop(name, None)

    def _compute(self, segment: Compute) -> None:
        made = self._segments[segment.name](self._values)
        for name, value in zip(segment.outputs, made, strict=True):
            self._keep(name, value, value.requires_grad)
        if segment.differentiable:
            self._kept[segment.name] = made
        self._release(segment, segment.inputs)
        if self.program.loss in segment.outputs:
            self._seed(self._leaves[self.program.loss])

    def _seed(self, loss: Tensor) -> None:
        """The gradient starts here, once: the tiles that share this loss start from nothing."""
        loss.grad = torch.full_like(loss, self.descent.scale if self.program.seeds_loss else 0.0)

    def _compute_back(self, segment: Compute) -> None:
        made = self._kept.pop(segment.name)
        grads = [self._taken(name) for name in segment.outputs]
        pairs = zip(made, grads, strict=True)
        roots = [(value, grad) for value, grad in pairs if grad is not None and value.requires_grad]
        if roots:
            torch.autograd.backward(*zip(*roots, strict=True))
            self._part_gradients(segment)

    def _part_gradients(self, segment: Compute) -> None:
        """Give each leaf a gradient of its own.

        Autograd may leave two leaves with one buffer (where both reach a sum through views); whatever is added to
        one of them later would be added to both.
        """
        seen: set[int] = set()
        for name in segment.inputs:
            leaf = self._leaves[name]
            if leaf.grad is not None:
                address = leaf.grad.untyped_storage().data_ptr()
                leaf.grad = leaf.grad.clone() if address in seen else leaf.grad
                seen.add(address)

    def _taken(self, name: str) -> Tensor | None:
        """The gradient that has gathered for a value, which is not needed any more."""
        leaf = self._leaves[name] if name in self._lasting else self._leaves.pop(name)
        grad, leaf.grad = leaf.grad, None
        return grad

    def _exchange(self, exchange: Exchange) -> int:
        source = self._values.get(exchange.source) if exchange.own else None
        window, sent = self._carriers[exchange.name].there(source)
        if window is not None:
            self._keep(exchange.target, window, exchange.differentiable)
        self._release(exchange, (exchange.source,))
        return sent

    def _exchange_back(self, exchange: Exchange) -> int:
        grad = self._taken(exchange.target) if exchange.window else None
        source = self._leaves[exchange.source] if exchange.own else None
        alone = len(self.program.reads[exchange.source]) == 1
        return self._carriers[exchange.name].back(grad, source, alone)

    def _reduce(self, reduction: AllReduce) -> int:
        total = self._values[reduction.source].detach().clone()
        all_reduce(self.world, total, reduction.group).wait()
        self._keep(reduction.target, total, reduction.differentiable)
        self._release(reduction, (reduction.source,))
        return total.nbytes

    def _reduce_back(self, reduction: AllReduce) -> int:
        source, grad = self._leaves[reduction.source], self._taken(reduction.target)
        total = torch.zeros_like(source) if grad is None else grad.clone()
        all_reduce(self.world, total, reduction.group).wait()
        source.grad = total if source.grad is None else source.grad.add_(total)
        return total.nbytes

    def _agree(self, agreement: Agree) -> None:
        self._agreed = self.descent.told(agreement.counted)
        all_reduce(self.world, self._agreed, agreement.group).wait()

    def _update(self, update: Update) -> int:
        sent = update_buffers(self.buffers, update, self._leaves, self.world)
        kept = self._lasting | self.program.feeds.keys()
        self._leaves = {name: leaf for name, leaf in self._leaves.items() if name in kept}
        self._values = {name: value for name, value in self._values.items() if name in kept}
        self.descent.step(self.descent.told(self.weights) if self._agreed is None else self._agreed)
        return sent
