"""Outgoing messages that the rank does not wait for: they are sent while it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.comm.streams import DeviceEvent
from engines.comm.world import Pending
from engines.errors import RankError

__all__ = ["SendQueue"]


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
        if departure := self._packed:
            self._packed = None
            # Blocks until the device has packed. `_packed` is reset first, so that no send starts twice.
            departure.start_when_packed()

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
    outbox: SendQueue
    pending: Pending | None = None

    def start_when_packed(self) -> None:
        self.packed.synchronize()
        self.pending = self.start()

    def wait(self) -> None:
        self.outbox.flush()
        if self.pending is None:
            # `discard` dropped this send, so it will never start.
            raise RankError("a message is waited for whose step was given up before it left")
        self.pending.wait()

    def is_completed(self) -> bool:
        return self.pending is not None and self.pending.is_completed()
