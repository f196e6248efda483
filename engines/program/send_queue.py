"""Messages that nobody here waits for: they leave while the rank goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.comm.streams import DeviceEvent
from engines.comm.world import Pending
from engines.errors import RankError

__all__ = ["SendQueue"]


class SendQueue:
    """What is on its way, and what a device has still to fill. Each message keeps its own memory until it has gone.

    A device works behind its rank, which need not wait for it before it tells it more. But whoever waits for another
    rank must have sent what that one waits for: `leave` comes before.
    """

    def __init__(self) -> None:
        self._under_way: list[Pending] = []
        self._packed: _DeferredSend | None = None

    def start_after(self, packed: DeviceEvent, start: Callable[[], Pending]) -> Pending:
        """Have messages start when the device has passed `packed`; those before them have left by then."""
        self.flush()
        if packed.query():
            return start()
        self._packed = _DeferredSend(packed, start, self)
        return self._packed

    def flush(self) -> None:
        """Return when all messages have started."""
        if departure := self._packed:
            self._packed = None
            departure.start_when_packed()

    def add(self, pending: Pending) -> None:
        """Let go of messages that were started, or are to depart."""
        self._under_way.append(pending)

    def poll(self) -> None:
        """Help messages along, without waiting: transports may need the sender to look."""
        if self._packed and self._packed.packed.query():
            self.flush()
        if self._under_way:
            self._under_way = [pending for pending in self._under_way if not pending.is_completed()]

    def discard(self) -> None:
        """Ask no more after messages of a step that was given up."""
        self._under_way = []
        self._packed = None

    def wait(self) -> None:
        """Return when all have gone. Raises RankError if a rank fails meanwhile."""
        self.flush()
        for pending in self._under_way:
            pending.wait()
        self._under_way = []


@dataclass
class _DeferredSend:
    """Messages that start when a device has filled them: `pending` from then on."""

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
            raise RankError("a message is waited for whose step was given up before it left")
        self.pending.wait()

    def is_completed(self) -> bool:
        return self.pending is not None and self.pending.is_completed()
