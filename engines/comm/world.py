"""The base of all transports: non-blocking messages between ranks, Python values as messages, and collective calls."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from struct import Struct
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mpi4dl_nb.engines.errors import ImageError, Mpi4dlError, PlanError, ReleasedError

VALUE_TAG, BARRIER_TAG, TENSOR_TAG = (1 << 23) - 1, (1 << 23) - 2, (1 << 23) - 3
"""Tags that no program uses: of Python values, of barriers, and of tensors between steps (checkpoints)."""


@dataclass(frozen=True, slots=True)
class Message:
    """`tensor` (contiguous) is sent to, or received from, rank `peer` under `tag`."""

    peer: int
    tag: int
    tensor: Tensor


class Pending(Protocol):
    """Communication in flight."""

    def wait(self) -> object:
        """Return when it is complete. Raises RankError if a rank fails meanwhile, instead of waiting for ever."""

    def is_completed(self) -> bool:
        """Return at once whether it is complete. Raises RankError if a rank has failed."""


class World:
    """All ranks of one cluster, as seen by one of them.

    A transport has at least `exchange`, `revoke` and `recover`; what is made of these here may be replaced.
    """

    rank: int
    size: int
    shares_memory = False
    """Whether all ranks are in one thread and get objects of `all_gather` themselves: they may use the same tensors."""

    def can_access(self, device: torch.device) -> bool:
        """Return whether messages may be in a device's memory; if not, they are staged through the host."""
        return True

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages; the tensors must not be touched before `wait` returns."""
        raise NotImplementedError

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Return a function that starts messages between the same tensors each time it is called; nothing starts yet.

        The messages must not be started again before `wait` has returned.
        """
        return partial(self.exchange, sends, receives)

    def collectives(self, device: torch.device) -> Any:
        """Return what all-reduces tensors of a device without messages (`nccl.Collectives`), or None; collective.

        Returns the same object each time, until a rank has failed.
        """
        return None

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; collective."""
        sealed = pack_value(value)
        under_way = [send_value(self, peer, sealed) for peer in range(self.size) if peer != self.rank]
        # This rank's own value is unpacked, too: every rank gets copies, never the sender's object.
        values = [unpack_value(sealed) if peer == self.rank else receive_value(self, peer) for peer in range(self.size)]
        for pending in under_way:
            pending.wait()
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on rank 0, and [] elsewhere; collective."""
        return self.all_gather(value)[: None if self.rank == 0 else 0]

    def barrier(self) -> None:
        """Return when every rank is here; waiting takes hardly any processor time."""
        self.all_gather(None)

    def check_received(self) -> None:
        """Raise ReleasedError if what a receive has brought may be invalid, since a rank has failed."""

    def revoke(self) -> None:
        """Revoke the communicator (ULFM): pending and later calls on all ranks raise ReleasedError.

        Ends no process, unlike MPI_Abort.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """Prepare for new work after a failure; collective."""
        raise NotImplementedError

    def renew(self) -> None:
        """Drop all messages in flight while every rank is alive; collective."""
        self.revoke()
        self.recover()


class SubGroup(World):
    """The `ranks` of a world, numbered from 0 in that order, as seen by one of them.

    Messages keep their tags: messages of the whole world to the same ranks at the same time must use different ones. A
    failure releases all ranks of the whole world.

    Raises PlanError on a rank that is not among `ranks`.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world, self.ranks = world, tuple(ranks)
        if world.rank not in self.ranks:
            raise PlanError(
                f"Rank {world.rank} is not one of the ranks {self.ranks} of this group. Make the group on those only."
            )
        self.rank, self.size = self.ranks.index(world.rank), len(self.ranks)

    def _to_world_ranks(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with peers numbered as in the whole world."""
        return [replace(message, peer=self.ranks[message.peer]) for message in messages]

    def can_access(self, device: torch.device) -> bool:
        return self.world.can_access(device)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self.world.exchange(self._to_world_ranks(sends), self._to_world_ranks(receives))

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        return self.world.prepare(self._to_world_ranks(sends), self._to_world_ranks(receives))

    def check_received(self) -> None:
        self.world.check_received()

    def revoke(self) -> None:
        self.world.revoke()

    def recover(self) -> None:
        """Prepare for new work after a failure; collective over the whole world."""
        self.world.recover()


# Python values travel as two messages: the length, then the packed value. MPI has calls of its own for values, but they
# block inside MPI: if the communicator was revoked just as such a call began, about one in two hundred waited for ever.
# Waits for messages poll, and check whether a rank has failed. The checksum is needed since unpickling incomplete or
# undefined bytes could run arbitrary code.

_HEAD = Struct("<QI?")  # length and checksum of the body, and whether it is JSON
_ALIGNMENT = 16  # a message of a multiple of as many bytes may be as long as any
_SEED = 1  # of checksums, so that all zeros are not a valid value
_PLAIN = (type(None), bool, int, float, str)


def pack_value(value: Any) -> bytearray:
    """Return the value after its length and checksum: as JSON if it is a plain value, else pickled."""
    is_plain = type(value) in _PLAIN
    body = json.dumps(value).encode() if is_plain else pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    body += b" " * (-(_HEAD.size + len(body)) % _ALIGNMENT)  # which both forms end before, or ignore
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


def send_value(world: World, peer: int, sealed: bytearray) -> Pending:
    """Start to send a value packed by `pack_value`."""
    parts = torch.tensor([len(sealed)]), torch.frombuffer(sealed, dtype=torch.uint8)
    return world.exchange([Message(peer, VALUE_TAG, part) for part in parts], [])


def receive_value(world: World, peer: int) -> Any:
    """Return the next value of a rank."""
    length = torch.zeros(1, dtype=torch.int64)
    world.exchange([], [Message(peer, VALUE_TAG, length)]).wait()
    world.check_received()  # first: after a failure the length may be garbage
    sealed = torch.empty(int(length), dtype=torch.uint8)
    world.exchange([], [Message(peer, VALUE_TAG, sealed)]).wait()
    world.check_received()
    return unpack_value(sealed.numpy().data)


# Collective calls of work that may fail on one rank only, or that one rank does for all.

Made = TypeVar("Made")


def _attempt(work: Callable[[], Made], *failures: type[Exception]) -> tuple[Made | None, Exception | None]:
    """Return what `work` makes, or one of the expected failures."""
    try:
        return work(), None
    except failures as failure:
        return None, failure


def run_on_all(world: World, work: Callable[[], Made], kind: type[Mpi4dlError] = ImageError) -> Made:
    """Return what `work` makes on this rank; collective. If it fails on one rank, every rank raises its error.

    An OSError is converted to `kind`. On the ranks that did not fail, the error's cause is a ReleasedError, so that the
    error reported is attributed to the rank where it happened.
    """
    #   rank 0: work fails       "no such file" --.
    #   rank 1: work succeeds    None ------------+--> all_gather: both raise kind("no such file")
    #
    # Without this exchange, rank 1 would go on to its next collective call, and wait there for rank 0.
    result, failure = _attempt(work, Mpi4dlError, OSError)
    if isinstance(failure, OSError):
        failure = kind(str(failure) or type(failure).__name__)
    for first_failure in filter(None, all_gather_or_raise(world, failure, failure)):
        if failure:
            raise copy(first_failure) from None
        raise copy(first_failure) from make_released_error()  # ranks in threads share the exception object
    return result  # type: ignore[return-value]


def run_on_first(world: World, work: Callable[[], Made]) -> Made:
    """Return on every rank what `work` makes on rank 0; collective. If it fails there, every rank raises its error."""
    result, failure = _attempt(work, Mpi4dlError) if world.rank == 0 else (None, None)
    outcome = all_gather_or_raise(world, failure or result, failure)[0]
    if isinstance(outcome, Mpi4dlError):
        if failure:  # on rank 0: its own error, with its traceback
            raise failure
        raise copy(outcome) from make_released_error()  # ranks in threads share the exception object
    return outcome


def all_gather_or_raise(world: World, value: Any, failure: Exception | None) -> list[Any]:
    """Return the values of all ranks; collective. `failure` is the error that this rank is about to raise, if any.

    The other ranks may receive the failure and fail themselves before this rank has all of their values. This rank then
    raises `failure`, not the resulting ReleasedError.
    """
    try:
        return world.all_gather(value)
    except ReleasedError:
        if failure is None:
            raise
        failure.__suppress_context__ = True
        raise failure  # noqa: B904  (it keeps its own cause)


def make_released_error() -> ReleasedError:
    """Return the cause of an error that this rank raises because another rank has failed."""
    return ReleasedError("released: another rank has failed")
