"""A world with the message times of a slower link: ranks on one machine behave as if they were on several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engines.comm.wait_time import measure_wait
from engines.comm.world import Message, Pending, World

__all__ = ["ThrottledWorld"]


class ThrottledWorld:
    """Ranks of one host connected by links of `bytes_per_s` each, as by network cards that transfer on their own.

    A rank's messages arrive one after another. The transfer of each starts when it was sent or when the link is free,
    whichever is later, and does not depend on polling. A second message carries the time of sending; ranks of one host
    share a clock.
    """

    def __init__(self, world: World, bytes_per_s: float) -> None:
        self.world, self.bytes_per_s = world, bytes_per_s
        self.rank, self.size = world.rank, world.size
        self.free_s = 0.0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages."""
        # Each message is followed on its route by a stamp, the time at which it was sent.
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        stamps = [torch.empty_like(now) for _ in receives]
        both = [part for message in sends for part in (message, Message(message.peer, message.tag, now))]
        pairs = zip(receives, stamps, strict=True)
        arriving = [part for message, stamp in pairs for part in (message, Message(message.peer, message.tag, stamp))]
        count_bytes = sum(message.tensor.nbytes for message in receives)
        return _DelayedMessages(self.world.exchange(both, arriving), self, count_bytes, stamps)

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Return a function that starts the same messages each time."""
        return partial(self.exchange, sends, receives)

    def __getattr__(self, name: str) -> object:
        """Delegate all but messages to the underlying world: values, barriers, failures."""
        return getattr(self.world, name)


class _DelayedMessages:
    """Messages that are complete once their bytes have passed the link."""

    def __init__(self, pending: Pending, world: ThrottledWorld, count_bytes: int, stamps: Sequence[Tensor]) -> None:
        self.pending, self.world, self.count_bytes, self.stamps = pending, world, count_bytes, stamps
        self.end_s: float | None = None

    def _compute_end(self) -> float:
        """Return the time at which they have passed the link; call only once they have arrived."""
        if self.end_s is None:
            # The stamps arrive with the messages, so they may be read only now. The link transfers one message at a
            # time, and idles until the next one is sent:
            #
            #   sent       a     b                   c
            #   link       [--a--][-----b-----]      [---c---]
            #   complete         a            b              c
            sent_s = max((stamp.item() for stamp in self.stamps), default=0.0)
            self.end_s = max(sent_s, self.world.free_s) + self.count_bytes / self.world.bytes_per_s
            self.world.free_s = max(self.world.free_s, self.end_s) if self.stamps else self.world.free_s
        return self.end_s

    def wait(self) -> None:
        """Return when the messages are complete; sleeps meanwhile."""
        self.pending.wait()
        with measure_wait():
            time.sleep(max(0.0, self._compute_end() - time.perf_counter()))

    def is_completed(self) -> bool:
        return (self.end_s is not None or self.pending.is_completed()) and time.perf_counter() >= self._compute_end()
