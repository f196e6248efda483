"""Formatting for people: numbers with significant digits and a unit, lists of names, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from html import escape
from itertools import groupby


def format_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit.

    >>> format_bytes(12), format_bytes(3072)
    ('12 bytes', '3.0 KB')
    """
    if count < 1024:
        return f"{count} bytes"
    size, unit = float(count), "bytes"
    for unit in ("KB", "MB", "GB", "TB"):  # noqa: B007
        size /= 1024
        if size < 1000:
            break
    return f"{size:.1f} {unit}"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number to `digits` significant digits, or all its integer digits, with thousands separators.

    >>> format_number(2359.8), format_number(128.04), format_number(29.01), format_number(1.2), format_number(0.0456)
    ('2,360', '128', '29.0', '1.20', '0.0456')
    """
    decimals = max(0, digits - len(str(int(value))))
    return f"{value:,.{decimals}f}" if value >= 1 else f"{value:.{digits}g}"


def format_seconds(seconds: float, digits: int = 3) -> str:
    """Format a duration with `digits` significant digits, in s, ms or µs.

    >>> format_seconds(12.3), format_seconds(0.01234), format_seconds(0.0000051, 2), format_seconds(0)
    ('12.3 s', '12.3 ms', '5.1 µs', '0 s')
    """
    return _format_in_units(seconds, {"s": 1.0, "ms": 1e-3, "µs": 1e-6}, digits) if seconds else "0 s"


def format_flops(count: float) -> str:
    """Format an amount of arithmetic, in floating-point operations.

    >>> format_flops(2.5e12), format_flops(81_600_000), format_flops(1234), format_flops(0)
    ('2.50 TFLOP', '81.6 MFLOP', '1.23 kFLOP', '0 kFLOP')
    """
    return _format_in_units(count, {"TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6, "kFLOP": 1e3})


def _format_in_units(value: float, units: Mapping[str, float], digits: int = 3) -> str:
    """Format a value in the largest unit that it reaches, else in the last one."""
    unit = next((unit for unit, size in units.items() if value >= size), list(units)[-1])
    return f"{format_number(value / units[unit], digits)} {unit}"


def format_microns(microns: float) -> str:
    """Format a length in micrometres, from 1,000 on in millimetres.

    >>> format_microns(37.49), format_microns(500), format_microns(1250)
    ('37.5 µm', '500 µm', '1.25 mm')
    """
    return f"{microns:.3g} µm" if microns < 999.5 else f"{microns / 1000:.3g} mm"


def format_percent(share: float) -> str:
    """Format a fraction as a percentage; a small positive one is not rounded to 0%.

    >>> format_percent(0.304), format_percent(0.001), format_percent(0.0), format_percent(1.0)
    ('30%', 'under 1%', '0%', '100%')
    """
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"


def format_shares(shares: Mapping[str, float]) -> str:
    """Format the parts of a whole, the largest first; what is zero is left out.

    >>> format_shares({"halo": 0.004, "compute": 0.904, "stage": 0.0})
    '90% compute, under 1% halo'
    """
    large = sorted(((share, kind) for kind, share in shares.items() if share), key=lambda part: -part[0])
    return ", ".join(f"{format_percent(share)} {kind}" for share, kind in large)


def format_count(count: int, name: str) -> str:
    """Return a number of things, such as `2,048 ranks`.

    >>> format_count(1, "rank"), format_count(2048, "rank")
    ('1 rank', '2,048 ranks')
    """
    return f"{count:,} {name}{'s' * (count != 1)}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, those that follow one another as a range.

    >>> format_ranks([4]), format_ranks([0, 1]), format_ranks([0, 1, 2, 5]), format_ranks([3, 2, 1])
    ('rank 4', 'ranks 0, 1', 'ranks 0 to 2, 5', 'ranks 3 to 1')
    """
    # Ranks of mirrored stages fall. In a run, rank - index is constant if ranks rise, rank + index if they fall.
    way = -1 if len(ranks) > 1 and ranks[1] < ranks[0] else 1
    runs: list[str] = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - way * pair[0]):
        members = [rank for _, rank in run]
        runs += [f"{members[0]} to {members[-1]}"] if len(members) > 2 else map(str, members)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs)}"


def format_names(names: Sequence[str]) -> str:
    """Format the first three names, and the number of the others.

    >>> format_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


_LISTED, _FIRST = 24, 6  # names that a message lists; of more, the first ones only


def describe_unknown(problem: str, asked: object, known: Iterable[str], remedy: str = "") -> str:
    """Return the message for a name that does not exist: the problem, near names, and the names that exist.

    `remedy` replaces the list of the names.

    >>> describe_unknown("schedule='1f1' is unknown", "1f1", ("fill_drain", "1f1b"))
    "schedule='1f1' is unknown. Did you mean '1f1b'? Choose one of fill_drain, 1f1b."
    >>> describe_unknown("There is no layer 'b.80'", "b.80", [f"b.{number}" for number in range(40)])
    "There is no layer 'b.80'. Did you mean 'b.8' or 'b.0'? There are 40; the first are b.0, b.1, b.2, b.3, b.4, b.5."
    """
    names = list(dict.fromkeys(known))
    # Of a module `blocks.0.conv`, `blocks` and `blocks.0` are names, too.
    parts = [name.split(".") for name in names]
    within = dict.fromkeys(".".join(path[:end]) for path in parts for end in range(1, len(path) + 1))
    near = get_close_matches(str(asked), within, n=2)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    if not remedy and len(names) <= _LISTED:
        remedy = f"Choose one of {', '.join(names)}."
    remedy = remedy or f"There are {len(names)}; the first are {', '.join(names[:_FIRST])}."
    return f"{problem}.{hint} {remedy}"


# A table of facts in HTML for display in notebooks: plain text, legible in light and dark themes.

_LEFT = 'style="text-align: left"'


def format_html_table(caption: str, facts: Mapping[str, object]) -> str:
    """Format one row for each fact, with its name and its value. Facts that are None are left out.

    >>> format_html_table("Cluster", {"ranks": "< 5"})[-24:]
    '&lt; 5</td></tr></table>'
    """
    rows = (
        f'<tr><th scope="row" {_LEFT}>{escape(str(name))}</th><td {_LEFT}>{escape(str(fact))}</td></tr>'
        for name, fact in facts.items()
        if fact is not None
    )
    head = f'<table style="border: 1px solid currentColor"><caption {_LEFT}>{escape(caption)}</caption>'
    return f"{head}{''.join(rows)}</table>"


_LONGEST = 200  # characters of a `repr`


class FactTable:
    """Base class of results that a notebook shows as a table of facts; `repr` is one line of at most 200 characters.

    >>> class Limit(FactTable):
    ...     facts = {"image": "64 × 64 px", "memory": "3.0 KB"}
    >>> Limit()
    <Limit: image: 64 × 64 px; memory: 3.0 KB>
    """

    __slots__ = ()

    @property
    def caption(self) -> str:
        """What the facts are of."""
        return type(self).__name__

    @property
    def facts(self) -> Mapping[str, object]:
        """The facts by name, the most important first; those that are None are not shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        text = "; ".join(f"{name}: {fact}" for name, fact in self.facts.items() if fact is not None)
        line = " ".join(f"{self.caption}: {text}".split())
        return f"<{line}>" if len(line) <= _LONGEST - 2 else f"<{line[: _LONGEST - 4].rstrip()} …>"

    def _repr_html_(self) -> str:
        return format_html_table(self.caption, self.facts)
