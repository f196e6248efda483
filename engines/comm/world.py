"""What a worker asks of a transport: messages between ranks that do not block, and waits that end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engines.comm.nccl import Collectives

__all__ = ["Message", "Pending", "World"]


@dataclass(frozen=True, slots=True)
class Message:
    """`tensor` (contiguous) goes to, or comes from, rank `peer` under `tag`."""

    peer: int
    tag: int
    tensor: Tensor


class Pending(Protocol):
    """Communication under way."""

    def wait(self) -> None:
        """Return when it is complete. Raises RankError if a rank fails meanwhile, rather than wait for it."""

    def is_completed(self) -> bool:
        """Whether it is complete; returns at once. Raises RankError if a rank has failed."""


class World(Protocol):
    """All ranks of one cluster, as one of them sees it."""

    rank: int
    size: int

    def can_access(self, device: torch.device) -> bool:
        """Whether messages may lie in the memory of a device; where they may not, they pass through the host."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages; tensors may not be touched before `wait` returns."""

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Messages between the same tensors each time that the result is called; nothing starts yet.

        They are not started again before `wait` has returned.
        """

    def collectives(self, device: torch.device) -> Collectives | None:
        """What adds up tensors of a device without messages, None where nothing does; collective.

        The same one each time, until a rank has failed.
        """

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on every rank; collective."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, on rank 0, nothing elsewhere: large ones need be held once only."""

    def barrier(self) -> None:
        """Return when every rank is here; those that wait take no processor time to speak of."""

    def abort(self) -> None:
        """Tell all other ranks to stop waiting: this one has failed."""

    def recover(self) -> None:
        """Be ready for new work after a failure; collective."""
