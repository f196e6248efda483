"""Open files from untrusted sources: only regular files, inside a folder, text up to a size, XML without entities.

Files of one's own are replaced as a whole.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn
from xml.etree import ElementTree as ET

# The first bytes of a file tell its kind, whatever its name. The last two of TIFF are BigTIFF, for files beyond 4 GB.
PNG_HEAD, JPEG_HEAD = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
TIFF_HEADS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

TEXT_BYTES = 1 << 28  # most bytes of a table, list or JSON file: ten times a table of a million lines
XML_BYTES = 1 << 25  # of a text that is parsed to a tree, which takes about ten times as much memory


class NotRegularError(OSError):
    """The path is no regular file: a pipe would block the reader, and a device may never end."""


def is_within(path: str | Path, folder: str | Path) -> bool:
    """Return whether a path is inside a folder, after links are resolved in both."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, and NotRegularError for a pipe, a socket or a device."""

    def open_descriptor(path: str, flags: int) -> int:
        # O_NONBLOCK: opening a pipe must not wait for a writer. The open handle is checked, and not the path, which may
        # change.
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            os.close(handle)
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise NotRegularError(errno.EINVAL, "it is no regular file", path)
        return handle

    return open(path, "rb", opener=open_descriptor)


def read_bounded(path: str | Path, most_bytes: int = TEXT_BYTES) -> bytes:
    """Read a text file whole. Raises OSError, also if it is no regular file or larger than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size <= most_bytes else b""  # one byte more, since the file may grow
    if max(size, len(data)) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
    return data


@contextmanager
def write_beside(path: Path, replaces: bool = True) -> Iterator[Path]:
    """Within the context a file may be written at the yielded path, beside `path`, which it then replaces.

    So a reader, or a crash, finds the old file or the new one, and never half of one. After an error, or with
    `replaces=False`, the new one is removed instead.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        yield beside
        if replaces:
            beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def refuse_doctype(*named: object) -> NoReturn:
    """Raise ValueError: a document type, which no picture's XML needs, could define entities."""
    raise ValueError("it has a document type, whose entities could grow without end")


class _NoDoctypeBuilder(ET.TreeBuilder):
    doctype = staticmethod(refuse_doctype)


def parse_xml(text: str | bytes) -> ET.Element:
    """Return the root element. Raises ET.ParseError, and ValueError for a document type.

    >>> parse_xml("<a><b>1</b></a>").findtext("b")
    '1'
    """
    return ET.fromstring(text, ET.XMLParser(target=_NoDoctypeBuilder()))
