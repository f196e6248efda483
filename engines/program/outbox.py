"""Messages that nobody here waits for: they leave while the rank goes on."""

from __future__ import annotations

from engines.comm.world import Pending

__all__ = ["Outbox"]


class Outbox:
    """What is on its way. Each message keeps its own memory until it has gone."""

    def __init__(self) -> None:
        self._under_way: list[Pending] = []

    def add(self, pending: Pending) -> None:
        """Let go of messages that were started."""
        self._under_way.append(pending)

    def look(self) -> None:
        """Help messages along, without waiting: transports may need the sender to look."""
        if self._under_way:
            self._under_way = [pending for pending in self._under_way if not pending.done()]

    def forget(self) -> None:
        """Ask no more after messages of a step that was given up."""
        self._under_way = []

    def wait(self) -> None:
        """Return when all have gone. Raises RankError if a rank fails meanwhile."""
        for pending in self._under_way:
            pending.wait()
        self._under_way = []
