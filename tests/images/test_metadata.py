"""The page about metadata is written from the table, and every row of the table has a made file."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_files import list_rows_without_files

from mpi4dl_nb.engines.images.metadata.page import SECTIONS, format_page
from mpi4dl_nb.engines.images.metadata.row import MetadataRow

PAGE = Path(__file__).parents[2] / "docs" / "metadata.md"


def test_the_page_is_written_from_the_table():
    assert PAGE.read_text(encoding="utf-8") == format_page(), (
        "python -m mpi4dl_nb.engines.images.metadata.page > docs/metadata.md"
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_no_name_stands_twice(section: str):
    names = [row.name for row in SECTIONS[section]]
    assert len(set(names)) == len(names)


def test_a_row_without_a_made_file_is_found():
    row = MetadataRow("Orientation", "tag 274", "rows", "read", "read", "Turned.")
    assert list_rows_without_files([row], {}) == ["Orientation"]
    assert list_rows_without_files([], {"Orientation": None}) == ["Orientation"]
    assert list_rows_without_files([row], {"Orientation": None}) == []


def test_a_row_says_what_it_changes_and_how():
    with pytest.raises(ValueError, match="needs a name, what it changes"):
        MetadataRow("Orientation", "tag 274", "", "read", "read", "Turned.")
