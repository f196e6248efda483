"""All sections of the table of metadata, and `docs/metadata.md`, which is written from them."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4dl_nb.engines.images.metadata.jpeg import JPEG
from mpi4dl_nb.engines.images.metadata.ome_tiff import OME_TIFF
from mpi4dl_nb.engines.images.metadata.ome_zarr import OME_ZARR
from mpi4dl_nb.engines.images.metadata.png import PNG
from mpi4dl_nb.engines.images.metadata.row import MetadataRow
from mpi4dl_nb.engines.images.metadata.tiff import TIFF

SECTIONS: dict[str, tuple[MetadataRow, ...]] = {
    "TIFF": TIFF,
    "OME-TIFF": OME_TIFF,
    "OME-Zarr": OME_ZARR,
    "PNG": PNG,
    "JPEG": JPEG,
}

_HEAD = """\
# Metadata that decide which value a pixel has

For each tag, attribute and order of arrays: what is done with it in a picture and in a mask (whose numbers are
classes). *Read*: its meaning is applied. *Refused*: an error names it before any training. *Ignored*: it does not
change the pixels that are read, for the reason given. The page is written from `engines/images/metadata/` by
`python -m mpi4dl_nb.engines.images.metadata.page`; tests read a file for each row.
"""


def format_page() -> str:
    """Return the text of `docs/metadata.md`.

    >>> format_page().splitlines()[0]
    '# Metadata that decide which value a pixel has'
    """
    return "\n".join([_HEAD, *(_format_section(title, rows) for title, rows in SECTIONS.items())])


def _format_section(title: str, rows: Sequence[MetadataRow]) -> str:
    lines = [f"## {title}", "", "| name | where | changes | picture | mask | how |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.number} | {row.changes} | {row.picture} | {row.mask or '–'} | {row.note} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(format_page(), end="")
