"""Plan fields in user interfaces: their values as text and back, and the field that an error names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import OPTIONS, Plan

GRID = "grid"
"""The name under which the tiles along each axis are shown, which several fields may say."""

_WHOLE = re.compile(r"-?\d{1,4000}")  # `int` raises ValueError if there are many more digits
_NAMES = "|".join(OPTIONS)
_SET = re.compile(rf"\b({_NAMES})=")
_NAMED = re.compile(rf"\b({'|'.join(name for name in _NAMES.split('|') if '_' in name)})\b")


def find_plan_options(text: str) -> tuple[str, ...]:
    """Return the fields that a message names, in order: first those in `name=value`, then names that contain `_`.

    A name without `_` alone could be an English word.

    >>> find_plan_options("A batch of 3 images has parts=2. Use other parts, many times, or data_parallel.")
    ('parts', 'data_parallel')
    """
    return tuple(dict.fromkeys([*_SET.findall(text), *_NAMED.findall(text)]))


def find_plan_option(text: str, touched: str = "") -> str:
    """Return the field next to which to show a message; empty if the message names none.

    This is the field that was `touched` last, if the message names it, since it turned a valid plan into an invalid
    one. Otherwise it is the first: messages begin with the field that has to change.

    >>> text = "spatial_size=3 asks for more spatial stages than the split_size=2 stages there are."
    >>> find_plan_option(text), find_plan_option(text, touched="split_size"), find_plan_option(text, touched="parts")
    ('spatial_size', 'split_size', 'spatial_size')
    """
    named = find_plan_options(text)
    return touched if touched in named else next(iter(named), "")


def parse_value(text: str) -> Any:
    """Parse `4` as a number, `4,2` as a tuple, and anything else as a word.

    >>> parse_value("4"), parse_value("4, 2"), parse_value("auto"), parse_value("2x3,square")
    (4, (4, 2), 'auto', ('2x3', 'square'))
    """
    words = [word.strip() for word in text.strip().removesuffix(",").split(",")]
    parts = [int(word) if _WHOLE.fullmatch(word) else word for word in words]
    return tuple(parts) if "," in text else parts[0]


def format_value(value: Any) -> str:
    """Format a value so that `parse_value` restores it; None becomes an empty string.

    >>> format_value((4, 2)), format_value((4,)), format_value(None)
    ('4, 2', '4,', '')
    """
    if value is None:
        return ""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(map(str, value)) if len(value) > 1 else f"{value[0]},"


def format_text(value: Any) -> str | bool:
    """Return what a page shows of an option: its text, or whether a switch is on."""
    return value if isinstance(value, bool) else format_value(value)


def describe_texts(values: Mapping[str, Any], size_px: Sequence[int]) -> dict[str, Any]:
    """Return what a page shows of the options of a plan, which may be invalid, and of its grid of tiles, if it has one.

    `size_px` is the size of an image along each axis.

    >>> texts = describe_texts({name: getattr(Plan(slice_method="1x2"), name) for name in OPTIONS}, (64, 64))
    >>> texts["split_size"], texts["grid"]
    ('2', [1, 2])
    """
    texts: dict[str, Any] = {name: format_text(value) for name, value in values.items()}
    with suppress(PlanError):
        stages = values["spatial_size"] or 1
        names = ("slice_method", "num_spatial_parts")
        tiled = Plan(split_size=stages, spatial_size=stages, **{name: values[name] for name in names})
        grid = tiled.fit(size_px).grids[0]
        if len(grid) == len(size_px):  # one that cuts other axes than the image has is an error, and nothing to show
            texts[GRID] = list(grid)
    return texts
