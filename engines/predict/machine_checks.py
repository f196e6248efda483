"""Checks of a machine: the valid ranges of its numbers, and the noise of the calibration that measured them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpi4dl_nb.engines.predict.tallies import CLASSES

# Valid ranges, beyond which forecasts would overflow or take for ever. They are wide: from one byte in a thousand
# seconds to more than all computers of the world together.

Check = Callable[[str, Any], None]

_SHOWN = 24  # characters of a wrong value that are shown


def _make_number_check(least: float, most: float, endless: bool = False, whole: bool = False) -> Check:
    """Return a check for a number in that range; with `endless` infinity is allowed, too."""
    span = f"from {least} to {most}" if whole else f"from {least:g} to {most:g}"

    def check(name: str, value: Any) -> None:
        # To Python, True is a number too. The comparison is written so that nan fails.
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise TypeError(f"{name} is {_format_value(value)}, which is no {'whole ' * whole}number")
        if not (least <= value <= most or (endless and value == math.inf)):
            raise ValueError(f"{name} is {_format_value(value)}, but must be {span}")

    return check


def _make_type_check(kind: type, words: str) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, kind):
            raise TypeError(f"{name} is {_format_value(value)}, which is no {words}")

    return check


def _make_optional_check(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _make_list_check(check: Check, most: int) -> Check:
    def check_entries(name: str, value: Any) -> None:
        _make_type_check(list, "list")(name, value)
        if len(value) > most:
            raise ValueError(f"{name} has {len(value):,} entries, but at most {most:,} are read")
        for index, entry in enumerate(value):
            check(f"{name}[{index}]", entry)

    return check_entries


def _make_table_check(checks: Mapping[str, Check], needed: tuple[str, ...]) -> Check:
    def check_fields(name: str, value: Any) -> None:
        _make_type_check(dict, "table of names and numbers")(name or "all of it", value)
        before = f"{name}." if name else ""
        if missing := [field for field in needed if field not in value]:
            raise ValueError(f"{before}{missing[0]} is missing")
        for field, entry in value.items():
            if field not in checks:
                raise ValueError(f"{before}{field[:_SHOWN]} is unknown")
            checks[field](f"{before}{field}", entry)

    return check_fields


def _format_value(value: Any) -> str:
    # Python refuses to print integers of more than some thousand digits: they could be the wrong value.
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of some {int(value.bit_length() * math.log10(2)):,} digits"
    text = str(value) if isinstance(value, int | float | None) else repr(value)[: 2 * _SHOWN]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


_SECONDS = _make_number_check(0, 3600)
_PER_SECOND, _PER_SECOND_OR_ALL = _make_number_check(1e-3, 1e24), _make_number_check(1e-3, 1e24, endless=True)
_TIMES, _PART = _make_number_check(0, 1e3), _make_number_check(1e-6, 1e3)
_AXES, _SAMPLES = 8, 1000

_SPEED = _make_table_check(
    {
        "at": _make_list_check(_make_number_check(0, 1e15), _AXES),
        "half": _make_list_check(_make_number_check(0, 1e9), _AXES),
        **dict.fromkeys(("per_s", "back_per_s"), _PER_SECOND),
        **dict.fromkeys(("crowded", "inputs", "weights"), _PART),
        "spread": _TIMES,
    },
    needed=("at", "per_s", "back_per_s"),
)
_LINK = {"latency_s": _SECONDS, "bytes_per_s": _PER_SECOND_OR_ALL}
_IN_SECONDS = (
    *("call_s", "back_call_s", "least_s", "instruction_s", "exchange_s", "sum_s"),
    *("weight_s", "statistic_s", "update_s", "resume_s", "thread_s", "message_s"),
)
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("name", "source", "sums"), _make_type_check(str, "text")),
    "speeds": _make_table_check(dict.fromkeys(CLASSES, _make_list_check(_SPEED, _SAMPLES)), needed=()),
    **dict.fromkeys(_IN_SECONDS, _SECONDS),
    "slice_s": _make_number_check(1e-5, 3600),
    **_LINK,
    "copy_per_s": _PER_SECOND_OR_ALL,
    "host_per_s": _make_optional_check(_PER_SECOND_OR_ALL),
    "cold_copies": _TIMES,
    "jitter": _make_number_check(0, 1),
    "cores": _make_optional_check(_make_number_check(1, 1024, whole=True)),
    "memory_bytes": _make_optional_check(_make_number_check(1, 1 << 60, whole=True)),
    **dict.fromkeys(("ranks", "node_ranks"), _make_optional_check(_make_number_check(1, 1 << 20, whole=True))),
    "between": _make_optional_check(_make_table_check(_LINK, needed=tuple(_LINK))),
    "noise": _make_table_check(dict.fromkeys(("elsewhere", "spread"), _make_number_check(0, 1e9)), needed=()),
    "quick": _make_type_check(bool, "switch (true or false)"),
}


def check_machine(fields: Any) -> None:
    """Check the fields that `Machine.to_json` should have written against the valid ranges.

    Raises ValueError or TypeError, naming the field and the value.

    >>> check_machine({"name": "toy", "source": "by hand", "speeds": {}, "latency_s": 10**400})
    Traceback (most recent call last):
    ...
    ValueError: latency_s is a whole number of some 400 digits, but must be from 0 to 3600
    """
    _make_table_check(_CHECKS, needed=("name", "source", "speeds"))("", fields)


# Reliability of a calibration: the share of other programs on the cores, and the spread of repeated measurements.


MOST_ELSEWHERE, MOST_SPREAD = 0.2, 0.5
"""The limits of a good calibration. Beyond, forecasts reflect other programs rather than the machine."""

_USELESS = 2.5  # multiple of the limits


@dataclass(frozen=True, slots=True)
class Spin:
    """A rank that requested a core all the time: host, process, wall time, and the CPU time that it received."""

    host: str
    process: int
    wall_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of a calibration.

    `elsewhere`: the fraction of the cores that other programs took while the ranks requested all of them. `spread`: the
    relative interquartile range of repeated measurements.
    """

    elsewhere: float = 0.0
    spread: float = 0.0

    @property
    def level(self) -> float:
        """The noise relative to the limits; a good calibration has at most 1."""
        return max(self.elsewhere / MOST_ELSEWHERE, self.spread / MOST_SPREAD)

    @property
    def is_good(self) -> bool:
        """Whether a calibration with this noise may be stored."""
        return self.level <= 1

    @property
    def is_useless(self) -> bool:
        """Whether forecasts from such a calibration would mislead."""
        return self.level > _USELESS

    def __str__(self) -> str:
        return (
            f"other programs took {self.elsewhere:.0%} of the cores (good: up to {MOST_ELSEWHERE:.0%}) and repeated "
            f"measurements differ by {self.spread:.0%} (good: up to {MOST_SPREAD:.0%})"
        )


def compute_foreign_share(seen: Sequence[Spin], cores: int) -> float:
    """Return the fraction of the cores that other programs took, on the host where it was largest.

    All ranks of a host request a core at once; the threads of one process share one request. CPU time that the ranks do
    not receive goes to other programs.

    >>> compute_foreign_share(
    ...     [Spin("here", 1, 1.0, 0.5), Spin("here", 2, 1.0, 0.5), Spin("here", 3, 1.0, 0.5)], cores=2
    ... )
    0.25
    """
    hosts: dict[str, list[Spin]] = defaultdict(list)
    for spin in seen:
        hosts[spin.host].append(spin)
    # Fewer processes than cores cannot ask for all of them. Threads of one interpreter take turns at one core.
    shares = []
    for spins in hosts.values():
        wanted = min(cores, len({spin.process for spin in spins})) * max(spin.wall_s for spin in spins)
        shares.append(1 - sum(spin.processor_s for spin in spins) / wanted)
    return max(0.0, *shares)


def compute_spread(timings: Iterable[Sequence[float]]) -> float:
    """Return the median over timings of the interquartile range of the repetitions relative to their median.

    0 if no timing has enough repetitions.

    >>> compute_spread([[1.0, 2.0, 2.0, 2.0, 3.0], [4.0, 5.0, 5.0, 6.0]])
    0.05
    """
    spreads = []
    for timing in timings:
        if len(timing) > 2 and statistics.median(timing) > 0:
            low, middle, high = statistics.quantiles(timing, n=4, method="inclusive")
            spreads.append((high - low) / middle)
    return statistics.median(spreads) if spreads else 0.0
