"""The interface of a transport: non-blocking messages between ranks, and waits that end if a rank fails."""

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
    """`tensor` (contiguous) is sent to, or received from, rank `peer` under `tag`."""

    peer: int
    tag: int
    tensor: Tensor


class Pending(Protocol):
    """Communication in flight."""

    def wait(self) -> None:
        """Return when it is complete. Raises RankError if a rank fails meanwhile, instead of waiting for ever."""

    def is_completed(self) -> bool:
        """Return at once whether it is complete. Raises RankError if a rank has failed."""


class World(Protocol):
    """All ranks of one cluster, as seen by one of them."""

    rank: int
    size: int

    def can_access(self, device: torch.device) -> bool:
        """Return whether messages may be in a device's memory; if not, they are staged through the host."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages; the tensors must not be touched before `wait` returns."""

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Pending]:
        """Return a function that starts messages between the same tensors each time it is called; nothing starts yet.

        The messages must not be started again before `wait` has returned.
        """

    def collectives(self, device: torch.device) -> Collectives | None:
        """Return what all-reduces tensors of a device without messages, or None; collective.

        Returns the same object each time, until a rank has failed.
        """

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank; collective."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on rank 0, and [] elsewhere: large values are kept once."""

    def barrier(self) -> None:
        """Return when every rank is here; waiting takes hardly any processor time."""

    def abort(self) -> None:
        """Abort the communicator so that no other rank waits for this one."""

    def recover(self) -> None:
        """Prepare for new work after a failure; collective."""
