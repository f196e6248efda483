"""What ranks find alike, found by the first that asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Memo"]

T = TypeVar("T")


@dataclass
class Memo:
    """Answers that follow from what they were found from: whoever comes with the same takes the answer as it is.

    >>> common = Memo()
    >>> common.get_or_compute("sum", ([1, 2],), sum), common.get_or_compute("sum", ([1, 2],), lambda _: "not called")
    (3, 3)
    >>> common.get_or_compute("sum", ([5, 2],), sum)
    7
    """

    _found: dict[Hashable, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)

    def get_or_compute(self, key: Hashable, given: tuple[Any, ...], find: Callable[..., T]) -> T:
        """`find(*given)`, which must be a function of `given` alone; of each `key` the last answer is kept."""
        before = self._found.get(key)
        if before is None or before[0] != given:
            before = self._found[key] = given, find(*given)
        answer: T = before[1]
        return answer
