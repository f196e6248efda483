"""What a page needs in order to show a view without a kernel: its code, its values, and the answers to what it asks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[Any, Sequence[bytes]]
"""The content and the buffers of a message of the kernel."""


@dataclass(frozen=True)
class SavedView:
    """One view of a saved page.

    `code` is a module with a default export of `render`, and `values` are the synchronised traits by name. `answers`
    holds what the kernel would send, by the name of a page's message and by the value asked for, see `make_key`. If a
    message asks for a list, each of its items is answered by itself.
    """

    code: str
    style: str
    values: dict[str, Any]
    answers: Mapping[str, Mapping[str, Answer]] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedPart:
    """A widget of a saved page: its views from top to bottom, or `html` in place of them, and remarks below.

    `links` says which values of the views follow each other, see `page/saved/saved_links.js`. With `is_side_by_side`
    the first view has the others beside it where there is room.
    """

    views: Sequence[SavedView] = ()
    html: str = ""
    remarks: Sequence[str] = ()
    links: Mapping[str, Any] = field(default_factory=dict)
    is_side_by_side: bool = False


def make_key(asked: Any) -> str:
    """Return the key of an answer: the value that is asked for as JavaScript writes it.

    >>> make_key([0, 2, 3]), make_key(True)
    ('[0,2,3]', 'true')
    """
    return json.dumps(asked, separators=(",", ":"))
