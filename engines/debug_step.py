"""A training step that a rank takes as far as it is told, and what can be seen of it there in between."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil
from torch import Tensor
from torch.nn import functional

from engines.comm.device import use_threads
from engines.errors import PlanError
from engines.program.exchange_runner import ReceivedMessage
from engines.program.instructions import get_received_exchange
from engines.program.worker import Inputs
from engines.spatial.moves import Move
from engines.train_loop import RankStepStats, collect_stats
from engines.training import RankTraining, StepReport

__all__ = ["MessageEffect", "RankStepper", "StepState", "ViewRequest", "ViewResult"]

_WATCHED_BYTES = 1 << 26
"""Messages that are larger together are carried, but no copies of what they did are kept."""


@dataclass(frozen=True, slots=True)
class StepState:
    """Where a rank is, and what it holds: `activation_bytes` by name (what autograd keeps between is not among them),
    `weight_bytes` with gradients and buffers, and all memory of its process. `told` once the step is done.
    """

    position: int
    activation_bytes: int
    weight_bytes: int
    process_bytes: int
    losses: Mapping[int, float]
    told: tuple[StepReport, RankStepStats] | None = None


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """One value of a micro-batch, or its gradient, of which one channel of one image is shown.

    `axes` are its spatial ones, counted from the end, or None. No side is to have more than `bound_px` pixels.
    """

    name: str
    micro_batch: int
    gradient: bool
    axes: tuple[int, int] | None
    image: int
    channel: int
    bound_px: int


@dataclass(frozen=True, slots=True)
class ViewResult:
    """(h, w), float64: means of `block_px` x `block_px` pixels. The tensor has `shape`, and so many `channels`."""

    pixels: Tensor
    block_px: int
    shape: tuple[int, ...]
    channels: int


@dataclass(frozen=True, slots=True)
class MessageEffect:
    """What one message did where it arrived; each (h, w), or nothing where there was nothing or it is not kept."""

    move: Move
    before: Tensor | None
    arrived: Tensor | None
    after: Tensor | None


class RankStepper:
    """One step of a rank's training, begun; the number tells it from those before."""

    def __init__(self, training: RankTraining, inputs: Inputs, images: int, number: str) -> None:
        self.training, self.inputs, self.images, self.number = training, inputs, images, number
        self.seconds = 0.0
        self._landings: list[ReceivedMessage] = []
        training.start(inputs)

    def advance(self, target: int) -> StepState:
        """Do what is left of the first `target` instructions, then help messages along until all have; collective.

        The last exchange is watched: `landed` tells what arrived.
        """
        worker, start_s = self.training.worker, time.perf_counter()
        use_threads(self.training.threads)  # of this thread, which need not be the one that began
        if worker.position < target:
            self._landings = []
        while worker.position < target:
            if worker.position == target - 1:
                self._advance_recording()
            else:
                self.training.advance()
        # A large message leaves only while its sender looks, and this one may have nothing else to do.
        worker.flush_sends()
        worker.world.barrier()
        self.seconds += time.perf_counter() - start_s
        return self.standing

    def _advance_recording(self) -> None:
        """One instruction, and what arrives by it."""
        worker = self.training.worker
        exchange = get_received_exchange(worker.program.steps[worker.position].instruction)
        if exchange is None or exchange.compute_bytes((*exchange.sends, *exchange.receives)) > _WATCHED_BYTES:
            return self.training.advance()
        carrier = {**worker.runtime.exchange_runners, **worker.runtime.async_runners}[exchange.name]
        carrier.received = self._landings
        try:
            self.training.advance()
        finally:
            carrier.received = None

    @property
    def standing(self) -> StepState:
        """Where it is now."""
        worker = self.training.worker
        lanes = (tensor for lane in worker.micro_batch_states.values() for tensor in lane.tensors)
        grads = (weight.grad for weight in worker.weights.values() if weight.grad is not None)
        told = collect_stats(self.training, self.inputs, self.images, self.seconds) if worker.done else None
        return StepState(
            worker.position,
            _count_bytes(lanes),
            _count_bytes((*worker.weights.values(), *worker.buffers.values(), *grads)),
            psutil.Process().memory_info().rss,
            worker.losses,
            told,
        )

    @property
    def done(self) -> bool:
        """Whether the weights have moved; all ranks come to this together."""
        return self.training.worker.done

    def get_tensor(self, name: str | None, micro_batch: int, gradient: bool) -> Tensor | None:
        """This rank's part of a value, or of its gradient so far; None where there is none now."""
        if name is None:
            return None
        try:
            found = self.training.worker.peek(name, micro_batch)
        except PlanError:
            return None
        chosen = found.grad if gradient else found
        return None if chosen is None else chosen.detach()

    def view(self, look: ViewRequest | None) -> tuple[ViewResult | None, list[MessageEffect]]:
        """What is asked for, small enough to be drawn, and what the last exchange brought."""
        return (
            (None, [])
            if look is None
            else (self._make_view(look), [_make_effect(each, look) for each in self._landings])
        )

    def _make_view(self, look: ViewRequest) -> ViewResult | None:
        found = self.get_tensor(look.name, look.micro_batch, look.gradient)
        if found is None:
            return None
        planes = _to_planes(found, look.axes)
        if look.image >= planes.shape[0]:
            return None
        block_px = max(1, math.ceil(max(planes.shape[2:]) / look.bound_px))
        return ViewResult(
            _reduce_plane(_get_plane(planes, look), block_px), block_px, tuple(found.shape), planes.shape[1]
        )

    def drop(self) -> None:
        """Free what was computed. Weights, buffers and what random numbers follow from are as before the step."""
        self._landings = []
        self.training.worker.restart({})


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all memory that these hold, each piece once."""
    storages = {each.data_ptr(): each.nbytes() for each in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _to_planes(tensor: Tensor, axes: tuple[int, int] | None) -> Tensor:
    """(images, channels, h, w) of any tensor: without pixels, a row for each image."""
    if axes is None:
        return tensor.reshape(1, 1, max(1, tensor.shape[0]) if tensor.dim() > 1 else 1, -1)
    moved = tensor.movedim(axes, (-2, -1))
    images = moved.shape[0] if moved.dim() > 2 else 1
    return moved.reshape(images, -1, *moved.shape[-2:])


def _get_plane(planes: Tensor, look: ViewRequest) -> Tensor:
    return planes[look.image, min(look.channel, planes.shape[1] - 1)].double().cpu()


def _reduce_plane(plane: Tensor, block_px: int) -> Tensor:
    if block_px == 1 or not plane.numel():
        return plane.clone()
    size = [math.ceil(side / block_px) for side in plane.shape]
    return functional.adaptive_avg_pool2d(plane[None], size)[0]


def _make_effect(landing: ReceivedMessage, look: ViewRequest) -> MessageEffect:
    """The pixels of one channel, if there are some of that image, at full size in a strip, in part in a large piece."""

    def cut_plane(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        planes = _to_planes(tensor, look.axes)
        if look.image >= planes.shape[0]:
            return None
        return _get_plane(planes, look)[: look.bound_px, : look.bound_px].clone()

    return MessageEffect(landing.move, cut_plane(landing.before), cut_plane(landing.arrived), cut_plane(landing.after))
