"""A subset of a world's ranks as a world of its own, and Python values as messages between ranks."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from struct import Struct
from typing import Any

import torch

from engines.comm.world import Message, Pending, World
from engines.errors import PlanError, ReleasedError

__all__ = [
    "VALUE_TAG",
    "SubGroup",
    "all_gather_by_messages",
    "pack_value",
    "receive_value",
    "send_value",
    "unpack_value",
]


# A subset of a world's ranks as a world of its own.

# Python values as bytes with a checksum: unpickling incomplete or undefined bytes could run arbitrary code.


_HEAD = Struct("<QI?")  # length and checksum of the body, and whether it is JSON
_SEED = 1  # of checksums, so that all zeros are not a valid value
_PLAIN = (type(None), bool, int, float, str)


def pack_value(value: Any) -> bytearray:
    """Return the value after its length and checksum: as JSON if it is a plain value, else pickled."""
    is_plain = type(value) in _PLAIN
    body = json.dumps(value).encode() if is_plain else pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return bytearray(_HEAD.pack(len(body), zlib.crc32(body, _SEED), is_plain)) + body


def unpack_value(sealed: bytes | bytearray | memoryview) -> Any:
    """Return the value. Raises ReleasedError if the bytes are not those that were sent: a failure has cut them short.

    >>> unpack_value(pack_value("no space left")), unpack_value(pack_value({"rank": 1}))
    ('no space left', {'rank': 1})
    """
    view = memoryview(sealed)
    if len(view) >= _HEAD.size:
        length, checksum, is_plain = _HEAD.unpack_from(view)
        body = view[_HEAD.size :]
        # Nothing is unpickled before both are right: MPI may complete a receive of a failed rank with any bytes.
        if len(body) == length and zlib.crc32(body, _SEED) == checksum:
            return json.loads(bytes(body)) if is_plain else pickle.loads(body)
    raise ReleasedError("released: what another rank has sent did not come whole")


# Python values as messages.


# Python values travel as two messages: the length, then the packed value. MPI has calls of its own for values, but they
# block inside MPI: if the communicator was revoked just as such a call began, about one in two hundred waited for ever.
# Waits for messages poll, and check whether a rank has failed.

VALUE_TAG = (1 << 23) - 1
"""A tag that no program uses."""


def all_gather_by_messages(world: World, value: Any, check: Callable[[], None] = lambda: None) -> list[Any]:
    """Return the values of all ranks, in rank order, on every rank; collective."""
    sealed = pack_value(value)
    under_way = [send_value(world, peer, sealed) for peer in range(world.size) if peer != world.rank]
    # This rank's own value is unpacked, too: every rank gets copies, never the sender's object.
    found = [
        unpack_value(sealed) if peer == world.rank else receive_value(world, peer, check) for peer in range(world.size)
    ]
    for pending in under_way:
        pending.wait()
    return found


def send_value(world: World, peer: int, sealed: bytearray) -> Pending:
    """Start to send a value packed by `pack_value`."""
    parts = torch.tensor([len(sealed)]), torch.frombuffer(sealed, dtype=torch.uint8)
    return world.exchange([Message(peer, VALUE_TAG, part) for part in parts], [])


def receive_value(world: World, peer: int, check: Callable[[], None] = lambda: None) -> Any:
    """Return the next value of a rank. `check` raises if what has arrived may be invalid."""
    length = torch.zeros(1, dtype=torch.int64)
    world.exchange([], [Message(peer, VALUE_TAG, length)]).wait()
    check()
    # `check` comes first: after a failure the length may be garbage.
    sealed = torch.empty(int(length), dtype=torch.uint8)
    world.exchange([], [Message(peer, VALUE_TAG, sealed)]).wait()
    check()
    return unpack_value(sealed.numpy().data)


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
