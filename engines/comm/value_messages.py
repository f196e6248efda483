"""Python values as messages."""

from collections.abc import Callable
from typing import Any

import torch

from engines.comm.value_codec import pack_value, unpack_value
from engines.comm.world import Message, Pending, World

__all__ = ["VALUE_TAG", "all_gather_by_messages", "receive_value", "send_value"]

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
