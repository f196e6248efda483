"""A row of the table of metadata: a tag, attribute or order that may change which value a pixel has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["read", "refused", "ignored"]
"""Its meaning is applied; the file is refused with an error that names it; or it is passed over; `note` says why."""


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """What is done with one tag, attribute or order of a format, in pictures and in masks.

    `name` is the format's own, and identifies the row in its section; `number` is a tag's number or an attribute's
    path; `changes` says which values of pixels depend on it; `mask` is None if masks are not read from the format.
    `note` says how it is read, why it is ignored, or what to do with a file that is refused.
    """

    name: str
    number: str
    changes: str
    picture: Action
    mask: Action | None
    note: str

    def __post_init__(self) -> None:
        if not (self.name and self.changes and self.note.endswith(".")):
            raise ValueError(f"The row {self.name!r} needs a name, what it changes, and a note of whole sentences.")
