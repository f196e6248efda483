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

from engines.comm.loopback import LoopbackWorld, Mail
from engines.errors import RankError

__all__ = ["Relay"]


class _Pauses(Mail):
    """Letters; a rank whose letter has not come stops there, until it is told to go on."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.wanted_by: dict[int, Any] = {}
        self.before_rest: dict[int, Callable[[], object]] = {}

    def await_letter(self, place: Any) -> None:
        if self.has(place):
            return
        (_, rank, _), _ = place
        self.before_rest[rank]()
        self.wanted_by[rank] = place
        gradients = torch.is_grad_enabled()  # the thread's, and so everybody's
        greenlet.getcurrent().parent.switch()
        torch.set_grad_enabled(gradients)
        del self.wanted_by[rank]

    def lets(self, rank: int) -> bool:
        """Whether there is nothing that a rank has to wait for."""
        return rank not in self.wanted_by or self.has(self.wanted_by[rank])


class Relay:
    """So many ranks in one thread; `worlds` are theirs."""

    def __init__(self, size: int) -> None:
        self._mail = _Pauses(size)
        self._progress: dict[int, Callable[[], Sequence[int]]] = {}
        self.worlds = [LoopbackWorld(rank, size, self._mail) for rank in range(size)]

    def enter(self, rank: int, before_rest: Callable[[], object], progress: Callable[[], Sequence[int]]) -> None:
        """What a rank does before others run, and how far it has come: what is larger is further."""
        self._mail.before_rest[rank], self._progress[rank] = before_rest, progress

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """The work of each rank to its end; what they return. The first failure ends all of them, and is raised."""
        stacks = {rank: greenlet(work) for rank, work in enumerate(works)}
        results: dict[int, Any] = {}
        gradients = torch.is_grad_enabled()
        try:
            while len(results) < len(works):
                rank = self._next(stacks.keys() - results.keys())
                result = stacks[rank].switch()
                torch.set_grad_enabled(gradients)
                if stacks[rank].dead:
                    results[rank] = result
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # whoever looks at it later would hold what the tiles held
            raise
        finally:
            self._end(stacks)
            torch.set_grad_enabled(gradients)
        return [results[rank] for rank in range(len(works))]

    def _next(self, ranks: set[int]) -> int:
        """Of those that can go on, the one that has come furthest.

        So a tile whose halo has come goes on with it, before another one begins what it will have to wait with.
        What it waits with is put away; messages that nobody has read are not.
        """
        able = [rank for rank in sorted(ranks) if self._mail.lets(rank)]
        if not able:
            raise RankError(f"ranks {sorted(ranks)} all wait for each other: {dict(self._mail.wanted_by)}")
        return max(able, key=lambda rank: self._progress[rank]())

    def _end(self, stacks: Mapping[int, greenlet]) -> None:
        """Nothing of a work that failed stays: no stack, and no letter."""
        for stack in stacks.values():
            with suppress(Exception):  # the first failure counts
                stack.throw()
        self._mail.wanted_by.clear()
        self._mail.clear()
