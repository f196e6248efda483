"""Some ranks of a world as a world of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from engines.comm import value_messages
from engines.comm.world import Message, Pending, World
from engines.errors import PlanError

__all__ = ["SubGroup"]


class SubGroup:
    """The `ranks` of a world, numbered from 0 in their order, as one of them sees it.

    Messages keep their tags: whoever speaks to one of these ranks outside of the sub-world, meanwhile, must not be
    one of them. A failure is everyone's: it releases all ranks of the whole world.

    Raises PlanError on a rank that is not among them.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world, self.ranks = world, tuple(ranks)
        if world.rank not in self.ranks:
            raise PlanError(f"Rank {world.rank} is none of the ranks {self.ranks} of this sub-world. Make it on those.")
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)

    def _to_world_ranks(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages with the whole world's numbers."""
        return [replace(message, peer=self.ranks[message.peer]) for message in messages]

    def can_access(self, device: torch.device) -> bool:
        """Whether messages may lie in the memory of a device."""
        return self.world.can_access(device)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages."""
        return self.world.exchange(self._to_world_ranks(sends), self._to_world_ranks(receives))

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Messages to be started again and again."""
        return self.world.prepare(self._to_world_ranks(sends), self._to_world_ranks(receives))

    def collectives(self, device: torch.device) -> None:
        """None: whether each rank has a GPU of its own is known of the whole world."""

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all its ranks, pickled."""
        return value_messages.all_gather(self, value)

    def gather(self, value: Any) -> list[Any]:
        """The values of all its ranks, on its rank 0."""
        return self.all_gather(value)[: None if self.rank == 0 else 0]

    def barrier(self) -> None:
        """Return when all its ranks are here."""
        self.all_gather(None)

    def abort(self) -> None:
        """Tell all ranks of the whole world to stop waiting."""
        self.world.abort()

    def recover(self) -> None:
        """Be ready again after a failure; collective over the whole world."""
        self.world.recover()
