"""Opens files that strangers may have made: regular ones only, inside a folder, and text only up to a size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["TEXT_BYTES", "NotRegularError", "is_within", "open_regular", "read_bounded"]

TEXT_BYTES = 1 << 28  # of tables, lists and JSON: ten times a table of a million lines


class NotRegularError(OSError):
    """A pipe, which would be waited for, or a device, which may never end."""


def is_within(path: str | Path, folder: str | Path) -> bool:
    """Whether a path, links followed, lies in a folder, links followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, and NotRegularError where it is a pipe, a socket or a device."""
    return open(path, "rb", opener=_open_descriptor)


def _open_descriptor(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise NotRegularError(errno.EINVAL, "it is no regular file", path)
    return handle


def read_bounded(path: str | Path, most_bytes: int = TEXT_BYTES) -> bytes:
    """Read a file of text whole. Raises OSError, also where it is no regular file or larger than `most_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        found = file.read(most_bytes + 1) if size <= most_bytes else b""  # it may grow meanwhile
    if max(size, len(found)) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
    return found
