"""Base class of readers of picture files, which every process opens itself, and what they share.

A file's header cannot be trusted. Sizes are checked before memory is allocated; errors name the file and the reason.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from engines.errors import ImageError
from engines.images.picture_reader import Level, PictureReader
from engines.regular_file import NotRegularError, open_regular
from engines.working_folder import describe_working_folder, make_absolute

__all__ = [
    "JPEG_HEAD",
    "MEND",
    "PIXELS_PER_BYTE",
    "PNG_HEAD",
    "TIFF_HEADS",
    "FileReader",
    "check_size",
    "make_changed_error",
    "make_damaged_error",
    "read_head",
    "translate_errors",
]

MEND = "Copy or export it again."
# The first bytes of a file tell its kind, whatever its name. The last two of TIFF are BigTIFF, for files beyond 4 GB.
PNG_HEAD, JPEG_HEAD = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
TIFF_HEADS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PIXELS_PER_BYTE = 4096  # no compression exceeds this, except for blank fax pages

Handle = TypeVar("Handle")


class FileReader(PictureReader, Generic[Handle]):
    """A picture in a file that is read in parts through a handle, which `_open` returns.

    A pickled reader contains its path and metadata: the copy opens the file on its first read, so that each rank has
    its own handle. Any number of threads may read through one handle. Raises ImageError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = make_absolute(path)
        self._lock, self._process = threading.Lock(), os.getpid()
        self._handle: Handle | None = self._open()
        super().__init__(path.name, self._get_levels(self._handle), self._get_microns(self._handle))

    @property
    def handle(self) -> Handle:
        """The open file, reopened after unpickling, `close` or a fork. Raises ImageError if its levels have changed."""
        with self._lock:
            forked = self._process != os.getpid()  # a handle inherited by fork shares its file position with the parent
            if self._handle is None or forked:
                # The file may have been replaced meanwhile. Other pixels of the same shape cannot be told from the old
                # ones, but rectangles of another shape would lie outside of it.
                handle = self._open()
                if tuple(self._get_levels(handle)) != self.levels:
                    raise make_changed_error(self.path)
                self._handle, self._process = handle, os.getpid()
            return self._handle

    def close(self) -> None:
        """Release the handle; the next read opens the file again."""
        with self._lock:
            self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        # Neither an open file nor a lock can be pickled: a copy on another rank, or on another host, opens the path.
        return self.__dict__ | {"_handle": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    @abstractmethod
    def _open(self) -> Handle:
        """Open the file at `path`. Raises ImageError if that fails."""

    @abstractmethod
    def _get_levels(self, handle: Handle) -> Sequence[Level]:
        """Return the levels in the file, finest first."""

    @abstractmethod
    def _get_microns(self, handle: Handle) -> float | None:
        """Return the micrometres per pixel of level 0, or None if the file does not give them."""


def make_damaged_error(path: Path, reason: object) -> ImageError:
    """Build the error for a file whose content contradicts its header."""
    return ImageError(f"{path} is damaged: {reason}. {MEND}")


def make_changed_error(path: Path) -> ImageError:
    """Build the error for a file that has changed since it was opened."""
    return ImageError(f"{path} has changed since it was opened. Open it again.")


def check_size(path: Path, rows: int, cols: int, pixels_per_byte: int = PIXELS_PER_BYTE) -> None:
    """Raise ImageError if a file is too small for rows * cols pixels.

    A damaged header could otherwise ask for more memory than there is, and the system would kill the process.
    """
    there = path.stat().st_size
    if rows * cols > there * pixels_per_byte:
        raise make_damaged_error(path, f"it says that it holds {rows} x {cols} pixels, but it has only {there} bytes")


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate any exception of a decoder into an ImageError that names the file and the reason.

    A decoder may raise anything for damaged bytes, so every other exception is reported as damage: keep the body small.
    """
    try:
        yield
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{path} does not exist (looked for in {describe_working_folder()}).") from None
    except IsADirectoryError:
        raise ImageError(f"{path} is a folder. Give the path of one picture in it.") from None
    except PermissionError:
        raise ImageError(f"{path} may not be read by this user.") from None
    except NotRegularError:
        raise ImageError(f"{path} is no regular file. Give the path of a picture.") from None
    except MemoryError as error:
        raise ImageError(f"{path} cannot be read: there is not enough memory. {error}. Read a smaller part.") from error
    except Exception as error:
        raise make_damaged_error(path, str(error).strip().rstrip(".") or type(error).__name__) from error


def read_head(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file. Raises ImageError if it is missing, no regular file, or unreadable."""
    with translate_errors(path), open_regular(path) as file:
        return file.read(count)
