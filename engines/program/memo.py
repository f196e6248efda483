"""A memo for what all ranks of a stage compute alike: the first rank computes it, the others reuse it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Memo"]

T = TypeVar("T")


@dataclass
class Memo:
    """Cached results, each reused for as long as its arguments are equal.

    >>> common = Memo()
    >>> common.get_or_compute("sum", ([1, 2],), sum), common.get_or_compute("sum", ([1, 2],), lambda _: "not called")
    (3, 3)
    >>> common.get_or_compute("sum", ([5, 2],), sum)
    7
    """

    _found: dict[Hashable, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)

    def get_or_compute(self, key: Hashable, given: tuple[Any, ...], find: Callable[..., T]) -> T:
        """Return `find(*given)`, which must depend on `given` alone; only the last result of each `key` is kept."""
        before = self._found.get(key)
        if before is None or before[0] != given:
            before = self._found[key] = given, find(*given)
        answer: T = before[1]
        return answer
