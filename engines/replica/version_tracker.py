"""How old the weights were that a gradient was computed from, and how old they may be."""

from __future__ import annotations

__all__ = ["VersionTracker"]


class VersionTracker:
    """Which version of the weights each replica reads; versions count the updates.

    The staleness of an update is the number of others that were applied since its replica read the weights (Dean et
    al., 2012, section 4.1). With `max_staleness` no update is ever more stale. The bound is on versions, stricter than
    one on how many steps replicas lie apart (Ho et al., 2013, section 3): of n replicas at work, the oldest reader
    first, the i-th (from 0) is applied after i others at the earliest, so a replica may read, and an update be
    applied, while `version + i - read` of each stays within the bound. The oldest reader may always go ahead: nobody
    waits for ever.

    >>> ledger = VersionTracker(max_staleness=1)
    >>> for replica in (0, 1):
    ...     ledger.read(replica)
    >>> ledger.can_read
    False
    >>> ledger.apply(1)
    0
    >>> ledger.read(1)
    >>> ledger.can_apply(1), ledger.can_apply(0)
    (False, True)
    >>> ledger.apply(0)
    1
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self.version = 0
        self.readers: dict[int, int] = {}

    @property
    def can_read(self) -> bool:
        """Whether one more replica may read the weights now."""
        return self.max_staleness is None or len(self.readers) <= self.max_staleness

    def read(self, replica: int) -> None:
        """A replica reads the weights as they are now."""
        self.readers[replica] = self.version

    def can_apply(self, replica: int) -> bool:
        """Whether no other update is made too stale if this replica's is applied now."""
        bound = self.max_staleness
        others = sorted(read for reader, read in self.readers.items() if reader != replica)
        return bound is None or all(self.version + 1 + i - read <= bound for i, read in enumerate(others))

    def apply(self, replica: int) -> int:
        """A replica's update makes a new version; its staleness."""
        staleness = self.version - self.readers.pop(replica)
        self.version += 1
        return staleness
