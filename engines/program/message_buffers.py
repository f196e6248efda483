"""The messages of an exchange: where each message's pixels are, and the memory it is sent from or received in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.device import has_own_memory
from mpi4dl_nb.engines.comm.streams import DeviceEvent
from mpi4dl_nb.engines.comm.world import Message, Pending, World
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.geometry.tiles import Move, Span, Tile
from mpi4dl_nb.engines.program.exchange import ALIGNED_BYTES, Exchange

Index = tuple[EllipsisType | slice, ...]


@dataclass(frozen=True, slots=True)
class MessageBuffer:
    """One message: `pixels` is its buffer in the shape of the region, `flat` the same memory in one dimension.

    The buffer may be the region itself, if its pixels are contiguous; copying it onto itself then does nothing.
    """

    peer: int
    index: Index
    flat: Tensor
    pixels: Tensor


@dataclass(frozen=True, slots=True)
class MessageSet:
    """The messages of both phases. Gradients of pixels sent in the forward pass arrive in the same buffers."""

    sent: Sequence[MessageBuffer]
    received: Sequence[MessageBuffer]
    start_forward: Callable[[], Pending]
    start_backward: Callable[[], Pending]


def make_persistent_messages(exchange: Exchange, world: World, arena: Tensor) -> MessageSet:
    """Make persistent messages in the memory of `arena`, prepared once and reused in each step."""
    # | send to 0 |pad| send to 2 |pad| receive from 0 |pad| receive from 2 |pad|    the next exchange begins at 0, too
    buffers, used = [], 0
    for move in (*exchange.sends, *exchange.receives):
        buffers.append(_make_buffer(exchange, move, partial(arena.narrow, 0, used)))
        used += -(-exchange.compute_bytes([move]) // ALIGNED_BYTES) * ALIGNED_BYTES  # rounded up
    return _make_message_set(exchange, buffers, world.prepare)


def make_temporary_messages(
    exchange: Exchange, world: World, memory: Callable[[int], Tensor], source: Tensor | None, window: Tensor | None
) -> MessageSet:
    """Make messages directly between `source` and `window` where possible, else through fresh `memory`.

    A tensor is used directly if it is given, contiguous in the region and accessible to the transport. For messages too
    large to be kept between steps, and for those that are still being sent while the rank continues.
    """
    ends = (*((move, source) for move in exchange.sends), *((move, window) for move in exchange.receives))
    buffers = [
        _make_buffer(exchange, move, memory, whole if whole is not None and world.can_access(whole.device) else None)
        for move, whole in ends
    ]
    return _make_message_set(exchange, buffers, lambda *both: partial(world.exchange, *both))


def choose_message_device(device: torch.device, world: World) -> torch.device:
    """Return where messages of tensors on `device` are: on the device itself, or on its host."""
    return device if world.can_access(device) else torch.device("cpu")


def make_message_allocator(
    device: torch.device, world: World, allocate: Callable[..., Tensor] = torch.empty
) -> Callable[[int], Tensor]:
    """Return a function that allocates message memory, of a number of bytes, for tensors on `device`.

    Host memory for a GPU's messages is pinned, so that copies are asynchronous.
    """
    where = choose_message_device(device, world)
    return partial(allocate, dtype=torch.uint8, device=where, pin_memory=has_own_memory(device) and where != device)


def _make_message_set(
    exchange: Exchange, buffers: Sequence[MessageBuffer], ready: Callable[..., Callable[[], Pending]]
) -> MessageSet:
    sent, received = buffers[: len(exchange.sends)], buffers[len(exchange.sends) :]
    # Two ranks match their messages by (peer, tag) alone. Micro-batches share a tag: their messages match in the order
    # in which both ranks post them, which the schedule makes the same, as MPI keeps the order of a pair of ranks.
    #
    #   forward    tag    pixels of `own`        rank 0  ---->  rank 1   into its window
    #   backward   tag+1  gradients of these     rank 0  <----  rank 1   out of its window's gradient
    there = ready(_make_messages(sent, exchange.tag), _make_messages(received, exchange.tag))
    # The odd tag keeps gradients apart from activations: with several micro-batches in flight, both travel between the
    # same two ranks, and neither may match the other's receive.
    back = ready(_make_messages(received, exchange.tag + 1), _make_messages(sent, exchange.tag + 1))
    return MessageSet(sent, received, there, back)


def _make_messages(buffers: Sequence[MessageBuffer], tag: int) -> list[Message]:
    return [Message(buffer.peer, tag, buffer.flat) for buffer in buffers]


def _make_buffer(
    exchange: Exchange, move: Move, memory: Callable[[int], Tensor], whole: Tensor | None = None
) -> MessageBuffer:
    """Make a message whose buffer is its region of `whole` if that is contiguous, else `memory` to pack pixels into."""
    is_sent, dtype = move in exchange.sends, getattr(torch, exchange.dtype)
    peer, frame = (move.target, exchange.own_tile) if is_sent else (move.source, exchange.window_tile)
    index, shape = make_index(exchange, move.tile, frame), exchange.compute_shape(move.tile)
    if whole is not None and whole.dtype == dtype:
        pixels = whole.data[index]  # `data`: autograd must not count packing as a change
        # MPI sends one run of memory. The channels of an image are innermost, so that whole rows of a tile over all
        # columns are one run, while columns are many short ones. Lazily conjugated or negated values differ from their
        # memory.
        ordered = pixels.movedim(1, -1) if exchange.is_image else pixels
        if ordered.is_contiguous() and not (ordered.is_conj() or ordered.is_neg()):
            return MessageBuffer(peer, index, ordered.view(-1), pixels)
    flat = memory(exchange.compute_bytes([move])).view(dtype)
    pixels = flat.view(shape)
    if exchange.is_image:
        # Channels last, as in the tensors that pixels are copied from and to: rows are then copied whole.
        batch, channels, *sides = shape
        pixels = flat.view(batch, *sides, channels).movedim(-1, 1)
    return MessageBuffer(peer, index, flat, pixels)


def make_index(exchange: Exchange, tile: Tile, frame: Tile) -> Index:
    """Return the index of the pixels of `tile` in a tensor that holds those of `frame`."""
    chosen = dict(zip(exchange.axes, tile.to_slices(frame), strict=True))
    return (..., *(chosen.get(axis, slice(None)) for axis in range(min(chosen, default=0), 0)))


def find_outside(exchange: Exchange, window: Tile) -> list[Index]:
    """Return the indices of a window's parts outside the image: two for each axis, which overlap in the corners."""
    sides = (
        window.replace_span(index, span & beyond)
        for index, (axis, span) in enumerate(zip(exchange.axes, window, strict=True))
        for beyond in (Span(span.start, 0), Span(exchange.shape[axis], span.stop))
    )
    return [make_index(exchange, side, window) for side in sides if side]


# Outgoing messages that the rank does not wait for: they are sent while it computes.


class SendQueue:
    """Sends in flight, and at most one batch of sends that the device has yet to pack.

    Each message keeps its memory until it is sent. A GPU runs asynchronously to its rank, and the rank enqueues further
    kernels without waiting for it. A deferred send can deadlock: two ranks that block on each other's message, each
    with its own send still deferred, would wait for ever. Therefore call `flush` before blocking on another rank.

      pack on the GPU  -->  deferred (at most one batch)  --start-->  in flight  --poll-->  sent
    """

    def __init__(self) -> None:
        self._under_way: list[Pending] = []
        self._packed: _DeferredSend | None = None

    def start_after(self, packed: DeviceEvent, start: Callable[[], Pending]) -> Pending:
        """Start messages once the device has passed the event `packed`, after all earlier messages have started."""
        self.flush()
        # On the CPU the event has always passed, so messages start at once.
        if packed.query():
            return start()
        self._packed = _DeferredSend(packed, start, self)
        return self._packed

    def flush(self) -> None:
        """Return when all messages have started."""
        if deferred := self._packed:
            self._packed = None
            # Blocks until the device has packed. `_packed` is reset first, so that no send starts twice.
            deferred.packed.synchronize()
            deferred.pending = deferred.start()

    def add(self, pending: Pending) -> None:
        """Track sends, started or deferred, that the rank does not wait for now."""
        self._under_way.append(pending)

    def poll(self) -> None:
        """Drive the messages in flight without blocking: some transports make progress only when polled."""
        if self._packed and self._packed.packed.query():
            self.flush()
        if self._under_way:
            self._under_way = [pending for pending in self._under_way if not pending.is_completed()]

    def discard(self) -> None:
        """Forget the messages of a step that was given up."""
        self._under_way = []
        self._packed = None

    def wait(self) -> None:
        """Return when all messages are sent. Raises RankError if a rank fails meanwhile."""
        self.flush()
        for pending in self._under_way:
            pending.wait()
        self._under_way = []


@dataclass
class _DeferredSend:
    """Messages that start once a device has packed them; `pending` is set from then on."""

    packed: DeviceEvent
    start: Callable[[], Pending]
    send_queue: SendQueue
    pending: Pending | None = None

    def wait(self) -> None:
        self.send_queue.flush()
        if self.pending is None:
            # `discard` dropped this send, so it will never start.
            raise RankError("a message is waited for whose step was given up before it left")
        self.pending.wait()

    def is_completed(self) -> bool:
        return self.pending is not None and self.pending.is_completed()
