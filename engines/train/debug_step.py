"""A training step that a rank runs up to a requested instruction, and views of the rank's values in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psutil
from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.comm.device import use_threads
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Plane, Tile
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange_runner import ReceivedMessage
from mpi4dl_nb.engines.program.instructions import AllReduce, SumGradients
from mpi4dl_nb.engines.program.program import Step
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.train.step_report import StepReport
from mpi4dl_nb.engines.train.train_loop import RankStepStats, collect_stats
from mpi4dl_nb.engines.train.training import RankTraining


@dataclass(frozen=True, slots=True)
class StepState:
    """A rank's position in its step, its losses, and the memory in use.

    `activation_bytes` counts the named values (not the tensors that autograd saves between them), `weight_bytes` the
    weights with gradients and buffers, and `process_bytes` all memory of the process. `outcome` holds the report and
    statistics once the step is done.
    """

    position: int
    activation_bytes: int
    weight_bytes: int
    process_bytes: int
    losses: Mapping[int, float]
    outcome: tuple[StepReport, RankStepStats] | None = None


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """A request to view one channel of one image of a micro-batch's value, or of its gradient.

    `image` counts from the first of the micro-batch, and `plane` is what the rank holds of each image. `bound_px` is
    the largest height or width of the view. `held_shape` is the shape in which the tensor has rows and columns as
    dimensions, if it is not its own. Of the messages of a volume, that plane is viewed that is nearest to `share` of
    its depth.
    """

    name: str
    micro_batch: int
    gradient: bool
    plane: Plane
    image: int
    channel: int
    bound_px: int
    held_shape: tuple[int, ...] | None = None
    share: float = 0.5


@dataclass(frozen=True, slots=True)
class ViewResult:
    """A view: (h, w), float64, means of blocks of `block_px` (rows, columns).

    `shape` is that of the whole tensor, and `channels` the number of its channels.
    """

    pixels: Tensor
    block_px: tuple[int, int]
    shape: tuple[int, ...]
    channels: int


@dataclass(frozen=True, slots=True)
class SumResult:
    """A sum over ranks on one rank: the first of its `count` numbers, in float64, before the instruction and after it.

    `before` is what the rank adds, and `after` the sum; either is None if the rank does not hold it. `name` is that of
    the all-reduce.
    """

    name: str
    count: int
    before: Tensor | None
    after: Tensor | None


SUM_NUMBERS = 2


class RankStepper:
    """One step of a rank's training, already started. `number` distinguishes it from earlier steps."""

    def __init__(self, training: RankTraining, inputs: Inputs, images: int, number: str) -> None:
        self.training, self.inputs, self.images, self.number = training, inputs, images, number
        self.seconds = 0.0
        self._landings: list[ReceivedMessage] = []
        self._get_plane: Callable[[Tile], Plane] | None = None  # of the exchange that they landed by
        self._summed: SumResult | None = None
        training.start(inputs)

    def advance(self, target: int) -> StepState:
        """Run instructions up to number `target`, then progress messages until all ranks have done so. Collective.

        If the last of them is an exchange, its received messages are recorded, and of a sum over ranks its terms.
        """
        worker, start_s = self.training.worker, time.perf_counter()
        use_threads(self.training.threads)  # per thread, and this one may differ from the one that started the step
        if worker.position < target:
            self._landings, self._summed = [], None
        # Only the last instruction is recorded, the one that a notebook shows:
        #
        #     position ... target - 1        target
        #     run, nothing kept              run; of an exchange: pixels before, arrived, and after each message
        while worker.position < target - 1:
            self.training.advance()
        if worker.position < target:
            carrier, step = None, worker.program.steps[worker.position]
            term = self._read_sum(step, is_total=False)
            messages = worker.program.effects[worker.position].messages
            # A larger exchange (64 MiB) is carried out without copies of its effects.
            if messages and messages.waits and messages.bytes <= 1 << 26:
                carrier = worker.runtime.exchange_runners.get(step.instruction.key)
            if carrier is not None:
                carrier.received, self._get_plane = self._landings, carrier.exchange.get_plane
            try:
                self.training.advance()
            finally:
                if carrier is not None:
                    carrier.received = None
            self._record_sum(step, term, self._read_sum(step, is_total=True))
        # Some transports progress a large message only while its sender polls: without this a receiver could block,
        # since this rank may have nothing more to run before the barrier.
        worker.flush_sends()
        worker.world.barrier()
        self.seconds += time.perf_counter() - start_s
        return self.standing

    def _read_sum(self, step: Step, is_total: bool) -> tuple[int, Tensor] | None:
        """Return how many numbers the rank adds to a sum over ranks, or gets of it, and a copy of the first ones."""
        total, is_forward = step.instruction, step.phase is Phase.FORWARD
        if isinstance(total, AllReduce):
            # Forward sums `source` into `target`; backward sums the gradient of `target` into that of `source`.
            name = total.target if is_total is is_forward else total.source
            numbers = self.get_tensor(name, step.micro_batch, not is_forward)
        elif isinstance(total, SumGradients) and (step.phase is Phase.UPDATE or not is_total):
            numbers = self.training.worker.weights[total.weights[0]].grad
        else:
            numbers = None
        return None if numbers is None else (numbers.numel(), numbers.flatten()[:SUM_NUMBERS].double().cpu().clone())

    def _record_sum(self, step: Step, term: tuple[int, Tensor] | None, total: tuple[int, Tensor] | None) -> None:
        if known := term or total:
            values = [None if part is None else part[1] for part in (term, total)]
            self._summed = SumResult(step.instruction.name, known[0], *values)

    @property
    def standing(self) -> StepState:
        """The current state of the step."""
        worker = self.training.worker
        lanes = (tensor for state in worker.micro_batch_states.values() for tensor in state.tensors)
        grads = (weight.grad for weight in worker.weights.values() if weight.grad is not None)
        outcome = collect_stats(self.training, self.inputs, self.images, self.seconds) if worker.done else None
        return StepState(
            worker.position,
            _count_bytes(lanes),
            _count_bytes((*worker.weights.values(), *worker.buffers.values(), *grads)),
            psutil.Process().memory_info().rss,
            worker.losses,
            outcome,
        )

    @property
    def done(self) -> bool:
        """Whether the step is complete, and the weights updated; all ranks complete it together."""
        return self.training.worker.done

    def get_tensor(self, name: str | None, micro_batch: int, gradient: bool) -> Tensor | None:
        """Return this rank's part of a value, or of its gradient so far; None if there is none at present."""
        if name is None:
            return None
        try:
            part = self.training.worker.peek(name, micro_batch)
        # Not made yet, released already, or another rank's: for a view that is no error.
        except PlanError:
            return None
        chosen = part.grad if gradient else part
        return None if chosen is None else chosen.detach()

    def view(self, look: ViewRequest | None) -> tuple[ViewResult | None, list[ReceivedMessage], SumResult | None]:
        """Return the requested view, reduced in size, the last messages, (h, w) each, and the last sum over ranks."""
        if look is None:
            return None, [], self._summed

        def cut_plane(tensor: Tensor | None, tile_plane: Plane) -> Tensor | None:
            """Cut one channel of a message at full scale, at most `bound_px` rows and columns."""
            plane = None if tensor is None else _cut_channel(_to_planes(tensor, tile_plane), tile_plane, look)
            return None if plane is None else plane[: look.bound_px, : look.bound_px].clone()

        effects = []
        if get_plane := self._get_plane:
            for landing in self._landings:
                tile_plane = get_plane(landing.move.tile).cut(look.share)
                tensors = (cut_plane(tensor, tile_plane) for tensor in (landing.before, landing.arrived, landing.after))
                effects.append(ReceivedMessage(landing.move, *tensors))
        part = self.get_tensor(look.name, look.micro_batch, look.gradient)
        if part is None:
            return None, effects, self._summed
        planes = _to_planes(part if look.held_shape is None else part.reshape(look.held_shape), look.plane)
        plane = _cut_channel(planes, look.plane, look)
        if plane is None:
            return None, effects, self._summed
        block_px = max(1, math.ceil(max(plane.shape) / look.bound_px))
        # Pixels are means of squares. Without pixels, each row is an image of its own.
        blocks = block_px if look.plane.axes else max(1, math.ceil(plane.shape[0] / look.bound_px)), block_px
        if block_px > 1 and plane.numel():
            plane = functional.avg_pool2d(plane[None], blocks, ceil_mode=True)[0]
        return ViewResult(plane.clone(), blocks, tuple(part.shape), planes.shape[1]), effects, self._summed

    def drop(self) -> None:
        """Free all values of the step. Weights, buffers and the random seed are as before the step."""
        self._landings, self._summed = [], None
        self.training.worker.restart({})


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of the tensors' storages, each counted once."""
    # Views share a storage, and so do a value and its window: the key counts it once.
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _to_planes(tensor: Tensor, plane: Plane) -> Tensor:
    """Reshape any tensor to (images, channels, h, w); without pixels, to one row per image."""
    if not plane.axes:
        return tensor.reshape(1, 1, len(plane.tile.rows), -1)
    if plane.depth:
        tensor = tensor.narrow(plane.depth.axis, plane.depth.at - plane.depth.start, 1)
    count = len(plane.axes)
    moved = tensor.movedim(plane.axes, tuple(range(-count, 0)))
    images = moved.shape[0] if moved.dim() > count else 1
    return moved.reshape(images, -1, *moved.shape[-count:])


def _cut_channel(planes: Tensor, plane: Plane, look: ViewRequest) -> Tensor | None:
    """Return the requested (h, w) in float64 on the host; None if the image is not among the planes."""
    # Without pixels, one plane has a row for each image. Otherwise the first plane is the first image of `plane`.
    image = 0 if not plane.axes else look.image - (plane.images.start if plane.images else 0)
    if not 0 <= image < planes.shape[0]:
        return None
    return planes[image, min(look.channel, planes.shape[1] - 1)].double().cpu()
