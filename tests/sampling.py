"""Which cases of a large test `make test` runs: few that cover the parameters; the others are for `make test-all`."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import HealthCheck, settings

SEED = int(os.environ.get("SEED", "0"))
"""What random tests begin from: another one every night."""

EVERYTHING = os.environ.get("EVERYTHING") == "1"
"""Whether all cases of all tests are run, as `make test-all` does."""


def set_trials(count: int) -> settings:
    """So many random cases; in `make test` a quarter of them."""
    return settings(max_examples=count if EVERYTHING else max(5, count // 4), suppress_health_check=list(HealthCheck))


def choose_cases(cases: Sequence[frozenset[tuple[str, object]]], count: int, seed: int = 0) -> list[int]:
    """Choose at most `count` cases so that as many pairs of values as possible are met, in few cases.

    A case is a set of (parameter, value). Each time the case is taken that has most pairs which none has so far, or
    values, if there is one parameter only; none is taken that has nothing new. The seed decides between equal ones.

    >>> product = [frozenset({("a", a), ("b", b), ("c", c)}) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    >>> len(choose_cases(product, 8))
    4
    """
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    news = [_list_pairs(case) for case in cases]
    seen: set[frozenset[tuple[str, object]]] = set()
    chosen: list[int] = []
    while len(chosen) < count:
        best = max(order, key=lambda number: len(news[number] - seen), default=None)
        if best is None or not news[best] - seen:
            break
        chosen.append(best)
        seen |= news[best]
    return sorted(chosen)


def _list_pairs(case: frozenset[tuple[str, object]]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for pair in combinations(case, min(2, len(case)))}


def _group_cases(items: Sequence[pytest.Item]) -> Iterator[tuple[list[pytest.Function], int]]:
    groups = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and (mark := item.get_closest_marker("sampled")):
            groups[item.path, item.cls, item.originalname, mark.args[0]].append(item)
    yield from ((group, key[-1]) for key, group in groups.items())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases as `nightly` that are not chosen of tests marked `sampled`."""
    for group, count in () if EVERYTHING else _group_cases(items):
        cases = [
            frozenset((name, repr(value)) for name, value in item.callspec.indices.items())
            if hasattr(item, "callspec")
            else frozenset()
            for item in group
        ]
        chosen = set(choose_cases(cases, count))
        for number, item in enumerate(group):
            if number not in chosen and len(group) > 1:
                item.add_marker("nightly")
