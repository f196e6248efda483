"""Ranks in one thread, in turn: who has to wait for another lets others run meanwhile.

Each rank's work has a stack of its own (a greenlet), on which it stops inside a receive and later goes on. There is
one thread, so that each kernel has all cores and no two ranks ever compute at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from greenlet import greenlet
from torch.utils._python_dispatch import _disable_current_modes

from engines.comm.loopback import LoopbackWorld, Mailbox
from engines.comm.wait_time import measure_suspension
from engines.errors import RankError

__all__ = ["RankScheduler"]


class _SuspendingMailbox(Mailbox):
    """Letters; a rank whose letter has not come stops there, until it is told to go on."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size, self.recovered, self.recovering = size, 0, 0
        self.waits_for: dict[int, Callable[[], bool]] = {}
        self.before_rest: dict[int, Callable[[], object]] = {}

    def wait_for_message(self, place: Any) -> None:
        if not self.has(place):
            (_, rank, _), _ = place
            self._suspend(rank, lambda: self.failed or place in self.letters)
            self._check()

    def recover(self, rank: int) -> None:
        """Throw away old letters once every rank is here."""
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
        gradients = torch.is_grad_enabled()  # the thread's, and so everybody's
        try:
            with measure_suspension(), _disable_current_modes():  # as those are that look at each operator
                greenlet.getcurrent().parent.switch()
        finally:
            torch.set_grad_enabled(gradients)
            del self.waits_for[rank]

    def can_run(self, rank: int) -> bool:
        """Whether there is nothing that a rank has to wait for."""
        return rank not in self.waits_for or self.waits_for[rank]()

    def count_unread(self, rank: int) -> int:
        """How many letters lie here for a rank."""
        with self.arrived:
            return sum(target == rank for (_, target, _), _ in self.letters)


class RankScheduler:
    """So many ranks in one thread; `worlds` are theirs."""

    def __init__(self, size: int) -> None:
        self._mail = _SuspendingMailbox(size)
        self._progress: dict[int, Callable[[], Sequence[int]]] = {}
        self.worlds = [LoopbackWorld(rank, size, self._mail) for rank in range(size)]
        for rank in range(size):
            self.register(rank, lambda: None)

    def register(
        self, rank: int, before_rest: Callable[[], object], progress: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """What a rank does before others run, and how far it has come: what is larger is further.

        Where that is not told it has come the further, the more letters lie there for it.
        """
        self._mail.before_rest[rank] = before_rest
        self._progress[rank] = progress or (lambda: (self._mail.count_unread(rank),))

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """The work of each rank to its end; what they return. The first failure ends all of them, and is raised.

        Where all wait for each other, one of them is told so: it raises RankError where it waits.
        """
        stacks = {rank: greenlet(work) for rank, work in enumerate(works)}
        results: dict[int, Any] = {}
        gradients = torch.is_grad_enabled()
        try:
            while len(results) < len(works):
                rank, result = self._resume_one(stacks, sorted(stacks.keys() - results.keys()))
                torch.set_grad_enabled(gradients)
                if stacks[rank].dead:
                    results[rank] = result
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # whoever looks at it later would hold what the tiles held
            self._abort_all(stacks)
            raise
        finally:
            torch.set_grad_enabled(gradients)
        return [results[rank] for rank in range(len(works))]

    def _resume_one(self, stacks: Mapping[int, greenlet], ranks: Sequence[int]) -> tuple[int, Any]:
        """One of the ranks goes on, and rests or ends: who it was, and what it returned.

        Of those that can, it is the one that has come furthest. So a tile whose halo has come goes on with it, before
        another one begins what it will have to wait with. What it waits with is put away; messages that nobody has
        read are not.
        """
        able = [rank for rank in ranks if self._mail.can_run(rank)]
        if not able:
            return ranks[0], stacks[ranks[0]].throw(RankError(f"ranks {ranks} all wait for each other"))
        rank = max(able, key=lambda rank: self._progress[rank]())
        return rank, stacks[rank].switch()

    def _abort_all(self, stacks: Mapping[int, greenlet]) -> None:
        """Nothing of a work that failed stays: no stack, and no letter."""
        for stack in stacks.values():
            with suppress(Exception):  # the first failure counts
                stack.throw()
        self._mail.waits_for.clear()
        self._mail.clear()
