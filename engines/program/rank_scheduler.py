"""Cooperative scheduling of ranks in one thread: a rank that must wait for another lets others run.

The work of each rank has its own stack (a greenlet), which is suspended inside a receive and resumed later. With a
single thread, each kernel has all cores and no two ranks compute at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from greenlet import greenlet
from torch.utils._python_dispatch import _disable_current_modes

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, Mailbox
from mpi4dl_nb.engines.comm.status_board import measure_wait
from mpi4dl_nb.engines.errors import RankError


class _SuspendingMailbox(Mailbox):
    """A mailbox that suspends a rank whose message has not arrived, until the scheduler resumes it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size, self.recovered, self.recovering = size, 0, 0
        self.waits_for: dict[int, Callable[[], bool]] = {}
        self.before_rest: dict[int, Callable[[], object]] = dict.fromkeys(range(size), lambda: None)

    def wait_for_message(self, place: Any) -> None:
        if not self.has(place):
            (_, rank, _), _ = place
            self._suspend(rank, lambda: self.failed or place in self.letters)
            self._check()

    def recover(self, rank: int) -> None:
        """Discard old messages once every rank is here."""
        # A generation count: ranks that are resumed after the reset see that it has grown, and leave.
        here = self.recovered
        self.recovering += 1
        try:
            if self.recovering == self.size:
                self.recovered += 1
                self.clear()
            else:
                self._suspend(rank, lambda: self.recovered > here)
        finally:
            self.recovering -= 1

    def _suspend(self, rank: int, until: Callable[[], bool]) -> None:
        self.before_rest[rank]()
        self.waits_for[rank] = until
        gradients = torch.is_grad_enabled()  # per thread, hence shared by all ranks
        try:
            with measure_wait(suspended=True), _disable_current_modes():  # dispatch modes are per thread, too
                greenlet.getcurrent().parent.switch()
        finally:
            torch.set_grad_enabled(gradients)
            del self.waits_for[rank]

    def can_run(self, rank: int) -> bool:
        """Return whether a rank has nothing to wait for."""
        return rank not in self.waits_for or self.waits_for[rank]()

    def count_unread(self, rank: int) -> int:
        """Return how many messages for a rank are in the mailbox."""
        with self.arrived:
            return sum(target == rank for (_, target, _), _ in self.letters)


class _SingleThreadWorld(LoopbackWorld):
    shares_memory = True


class RankScheduler:
    """Runs `size` ranks in one thread; `worlds` are their worlds."""

    def __init__(self, size: int) -> None:
        self._mail = _SuspendingMailbox(size)
        self.worlds = [_SingleThreadWorld(rank, size, self._mail) for rank in range(size)]

    def register(self, rank: int, before_rest: Callable[[], object]) -> None:
        """Set what a rank does before others run."""
        self._mail.before_rest[rank] = before_rest

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the work of each rank to its end and return the results. The first failure ends all and is raised.

        If all ranks wait for each other, one of them raises RankError at its wait.
        """
        stacks = {rank: greenlet(work) for rank, work in enumerate(works)}
        results: dict[int, Any] = {}
        gradients = torch.is_grad_enabled()
        try:
            while len(results) < len(works):
                left = sorted(stacks.keys() - results.keys())
                able = [rank for rank in left if self._mail.can_run(rank)]
                if able:
                    # The rank with the most unread messages is resumed. A tile whose halo has arrived thus continues
                    # before another tile starts work that it would have to hold while it waits. What a waiting tile
                    # holds is offloaded, but unread messages are not, so this order keeps them few.
                    #
                    #   tile 0   layer 1, sends to 1 | waits for 1                  | layer 2 ...
                    #   tile 1                       | layer 1, sends to 0 | waits for 2
                    #   tile 2     (begins only when 0 and 1 can do no more)        | layer 1 ...
                    rank = max(able, key=self._mail.count_unread)
                    result = stacks[rank].switch()
                else:
                    rank = left[0]
                    result = stacks[rank].throw(RankError(f"ranks {left} all wait for each other"))
                torch.set_grad_enabled(gradients)
                if stacks[rank].dead:
                    results[rank] = result
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # frames would keep the tiles' tensors alive
            # End all stacks and discard all messages; only the first failure is reported.
            for stack in stacks.values():
                with suppress(Exception):
                    stack.throw()
            self._mail.waits_for.clear()
            self._mail.clear()
            raise
        finally:
            torch.set_grad_enabled(gradients)
        return [results[rank] for rank in range(len(works))]
