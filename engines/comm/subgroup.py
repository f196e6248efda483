"""A subset of a world's ranks as a world of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from engines.comm.value_messages import all_gather_by_messages
from engines.comm.world import Message, Pending, World
from engines.errors import PlanError

__all__ = ["SubGroup"]


class SubGroup:
    """The `ranks` of a world, numbered from 0 in that order, as seen by one of them.

    Messages keep their tags: messages of the whole world to the same ranks at the same time must use different ones. A
    failure releases all ranks of the whole world.

    Raises PlanError on a rank that is not among `ranks`.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world, self.ranks = world, tuple(ranks)
        if world.rank not in self.ranks:
            raise PlanError(f"Rank {world.rank} is none of the ranks {self.ranks} of this sub-world. Make it on those.")
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)

    def _to_world_ranks(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with peers numbered as in the whole world."""
        return [replace(message, peer=self.ranks[message.peer]) for message in messages]

    def can_access(self, device: torch.device) -> bool:
        """Return whether messages may be in a device's memory."""
        return self.world.can_access(device)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages."""
        return self.world.exchange(self._to_world_ranks(sends), self._to_world_ranks(receives))

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Return a function that starts the same messages each time."""
        return self.world.prepare(self._to_world_ranks(sends), self._to_world_ranks(receives))

    def collectives(self, device: torch.device) -> None:
        """Return None: whether each rank has a GPU of its own is determined for the whole world only."""

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the group, pickled."""
        # The world's own `all_gather` is collective over all of its ranks; the others are at work on something else.
        return all_gather_by_messages(self, value)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the group on its rank 0, [] elsewhere."""
        return self.all_gather(value)[: None if self.rank == 0 else 0]

    def barrier(self) -> None:
        """Return when all ranks of the group are here."""
        self.all_gather(None)

    def abort(self) -> None:
        """Release all ranks of the whole world that wait."""
        self.world.abort()

    def recover(self) -> None:
        """Prepare for new work after a failure; collective over the whole world."""
        self.world.recover()
