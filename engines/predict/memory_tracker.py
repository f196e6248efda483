"""Tracks memory: the blocks that are held, how often, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["GradientTracker", "MemoryTracker"]


class MemoryTracker:
    """Reference-counted memory blocks by key, each counted once while it is held; `now` are the bytes by kind.

    >>> ledger = MemoryTracker()
    >>> ledger.hold("x", {"activations": 8}), ledger.hold("x"), ledger.release("x"), ledger.total
    (None, None, None, 8)
    >>> ledger.release("x"), ledger.total, ledger.peak
    (None, 0, 8)
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peak_step = 0
        self.step = 0
        self._held: dict[Hashable, tuple[int, Mapping[str, int]]] = {}

    def hold(self, key: Hashable, parts: Mapping[str, int] | None = None) -> None:
        """Add one reference to a block; `parts` are its bytes by kind, used if the block is new."""
        count, there = self._held.get(key, (0, parts or {}))
        self._held[key] = count + 1, there
        if not count:
            self._add(there, 1)

    def release(self, key: Hashable) -> None:
        """Remove one reference; the last one frees the block."""
        count, parts = self._held.pop(key)
        if count > 1:
            self._held[key] = count - 1, parts
        else:
            self._add(parts, -1)

    @property
    def held(self) -> dict[Hashable, Mapping[str, int]]:
        """The bytes by kind of each block that is held now."""
        return {key: parts for key, (_, parts) in self._held.items()}

    def add_transient(self, **kinds: int) -> None:
        """Count bytes that are in use for a moment only: they can raise the peak, but are not held."""
        if self.total + sum(kinds.values()) > self.peak:
            self.peak = self.total + sum(kinds.values())
            self.at_peak = dict(self.now + Counter(kinds))
            self.peak_step = self.step

    def _add(self, parts: Mapping[str, int], sign: int) -> None:
        for kind, size in parts.items():
            self.now[kind] += sign * size
            self.total += sign * size
        if self.total > self.peak:
            self.add_transient()


@dataclass
class GradientTracker:
    """The gradients during backward through a segment; `arrived` are the values that have one, initially the outputs.

    The gradients of the outputs are held by the caller. `parts` are values whose gradient is a part of that of a larger
    value. `moved` are the bytes read and written by additions of gradients.
    """

    ledger: MemoryTracker
    arrived: set[str]
    lies_in: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    moved: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, name: str, size: int, passed_from: Sequence[str]) -> None:
        """Add a gradient to a value: in new memory, or in the memory of a result's gradient that is passed on."""
        # "given": the gradient of an output of the segment, whose memory the caller holds. "new": a block of this
        # backward. A gradient that is passed on keeps the name of the block in which it lies.
        self.count += 1
        given = next((self.lies_in.get(each, f"given:{each}") for each in passed_from if each in self.arrived), None)
        key = given or f"new:{self.count}"
        self.ledger.hold(key, None if given else {"gradient": size})
        there = self.lies_in.get(name)
        if there is not None:
            self.moved.append(3 * size)
        # A second gradient: autograd adds in place if the first one has memory of its own, so the new block is freed.
        # If both are passed on, `hold_passed` counts the memory of the sum.
        if there is not None and (given or not there.startswith("given:")):
            self.ledger.release(key)
            return
        if there is not None:  # the first one is another value's memory: the sum needs memory of its own
            self.ledger.release(there)
        self.lies_in[name], self.sizes[name] = key, size
        self.arrived.add(name)

    def release(self, names: Sequence[str]) -> None:
        """Release the gradients of these values after their use."""
        for name in names:
            if name in self.lies_in:
                self.ledger.release(self.lies_in.pop(name))
                self.sizes.pop(name)

    @property
    def passed(self) -> list[str]:
        """The values whose gradient is that of an output of the segment, and not memory of their own."""
        return [name for name, key in self.lies_in.items() if key.startswith("given:")]

    def hold_passed(self) -> None:
        """Hold a copy of each passed gradient: a segment's inputs and weights keep theirs, in memory of their own."""
        for name in self.passed:
            self.ledger.hold(f"own:{name}", {"gradient": self.sizes[name]})
