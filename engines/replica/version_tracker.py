"""The age of the weights from which gradients are computed, and its bound."""

from __future__ import annotations

__all__ = ["VersionTracker"]


class VersionTracker:
    """The version of the weights that each replica reads. Versions count the updates.

    The staleness of an update is the number of other updates since its replica read the weights (Dean et al., 2012,
    section 4.1). With `max_staleness` no update exceeds that staleness. The bound is on versions, which is stricter
    than a bound on the steps between replicas (Ho et al., 2013, section 3). Of n replicas at work, ordered from the
    oldest read, the i-th (from 0) is applied after i others at the earliest. So a replica may read, and an update be
    applied, while `version + i - read` of each stays within the bound. The oldest reader may always be applied, so no
    replica waits for ever.

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
        """Record that a replica reads the current weights."""
        self.readers[replica] = self.version

    def can_apply(self, replica: int) -> bool:
        """Return whether applying this replica's update now keeps all other updates within the bound."""
        bound = self.max_staleness
        others = sorted(read for reader, read in self.readers.items() if reader != replica)
        # This update raises the version by one; the i-th oldest of the others is applied after i more at the earliest.
        return bound is None or all(self.version + 1 + i - read <= bound for i, read in enumerate(others))

    def apply(self, replica: int) -> int:
        """Record a replica's update as a new version, and return its staleness."""
        staleness = self.version - self.readers.pop(replica)
        self.version += 1
        return staleness
