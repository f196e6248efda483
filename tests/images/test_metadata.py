"""The rows of the page about metadata are complete, and every row has a made file."""

from __future__ import annotations

import pytest
from made_files import SECTIONS, MetadataRow, list_rows_without_files

ROWS = [row for rows in SECTIONS.values() for row in rows]


@pytest.mark.parametrize("section", SECTIONS)
def test_no_name_stands_twice(section: str):
    names = [row.name for row in SECTIONS[section]]
    assert names
    assert len(set(names)) == len(names)


def test_a_row_without_a_made_file_is_found():
    row = MetadataRow("Orientation", "tag 274", "rows", "read", "read", "Turned.")
    assert list_rows_without_files([row], {}) == ["Orientation"]
    assert list_rows_without_files([], {"Orientation": None}) == ["Orientation"]
    assert list_rows_without_files([row], {"Orientation": None}) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_what_it_changes_and_how(row: MetadataRow):
    assert row.name
    assert row.where
    assert row.changes
    assert row.how.endswith(".")
    assert {row.picture, row.mask} <= {"read", "refused", "ignored", None}
    assert row.picture
