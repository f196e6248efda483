"""Base class of readers of picture files, which every process opens itself, and what they share.

A file's header cannot be trusted. Sizes are checked before memory is allocated; errors name the file and the reason.
"""

from __future__ import annotations

import json
import os
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from mpi4dl_nb.engines.comm.device import get_memory_bytes
from mpi4dl_nb.engines.errors import ImageError, describe_working_folder, make_absolute
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.images.picture_reader import Level, Picture
from mpi4dl_nb.engines.images.regular_file import NotRegularError, open_regular
from mpi4dl_nb.engines.images.second_reader import find_decoder

# The most pixels per byte of a file, those of 1 bit: a block of 4 bytes of Zstandard repeats one byte 2^17 times (RFC
# 8878). Only blank fax pages more than 32768 px wide exceed it. What a decoder may allocate is for `check_budget`.
PIXELS_PER_BYTE = 1 << 18

_TEXTS = (".xml", ".csv", ".json", ".txt", ".npy")  # no decoder: what cannot be parsed is damaged

Handle = TypeVar("Handle")
Kind = TypeVar("Kind")


class FileReader(Picture, Generic[Handle]):
    """A picture in a file that is read in parts through a handle, which `_open` returns.

    A pickled reader contains its path and metadata: the copy opens the file on its first read, so that each rank has
    its own handle. Any number of threads may read through one handle. Raises ImageError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._process = make_absolute(path), os.getpid()
        handle, levels, microns_per_px = self._open()
        self._handle: Handle | None = handle
        super().__init__(path.name, levels, microns_per_px)

    @property
    def handle(self) -> Handle:
        """The open file, reopened after unpickling, `close` or a fork. Raises ImageError if its levels have changed."""
        with self._lock:
            forked = self._process != os.getpid()  # a handle inherited by fork shares its file position with the parent
            if self._handle is None or forked:
                # The file may have been replaced meanwhile. Other pixels of the same shape cannot be told from the old
                # ones, but rectangles of another shape would lie outside of it.
                handle, levels, _ = self._open()
                if tuple(levels) != self.levels:
                    raise make_changed_error(self.path)
                self._handle, self._process = handle, os.getpid()
            return self._handle

    def close(self) -> None:
        """Release the handle; the next read opens the file again."""
        with self._lock:
            self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        # An open file cannot be pickled: a copy on another rank, or on another host, opens the path.
        return super().__getstate__() | {"_handle": None}

    @abstractmethod
    def _open(self) -> tuple[Handle, Sequence[Level], float | None]:
        """Open the file at `path`; return the handle, the levels (finest first) and the micrometres per pixel.

        Raises ImageError if that fails.
        """


def make_damaged_error(path: Path, reason: object) -> ImageError:
    """Build the error for a file whose content contradicts its header."""
    return ImageError(f"{path} is damaged: {reason}. Copy or export it again.")


def make_undecoded_error(path: Path, reason: str) -> ImageError:
    """Build the error for a file whose decoder failed: it is damaged if another fails as well, else of a rare kind."""
    decoder = find_decoder(path)
    if decoder:
        return ImageError(
            f"{path} is of a kind that is not read here ({reason}). {decoder} decodes it: save it anew with that, as "
            "PNG, or as TIFF with LZW or deflate."
        )
    if decoder is None and (path.is_dir() or path.suffix.lower() not in _TEXTS):
        return ImageError(
            f"{path} cannot be read: {reason}. Either it is of a kind that is not read here, or it is damaged: open it "
            "in another program, and save it anew with that."
        )
    return make_damaged_error(path, reason)


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

    A decoder may raise anything, for damaged bytes or for a kind that it does not know: keep the body small.
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
    except json.JSONDecodeError as error:
        raise make_damaged_error(path, error) from error
    except Exception as error:
        raise make_undecoded_error(path, str(error).strip().rstrip(".") or type(error).__name__) from error


def read_head(path: Path, count: int) -> bytes:
    """Return the first `count` bytes of a file. Raises ImageError if it is missing, no regular file, or unreadable."""
    with translate_errors(path), open_regular(path) as file:
        return file.read(count)


# A file's header cannot be trusted, so that the memory of a read is limited by the bytes that the file really has.
ANY_FILE_BYTES = 1 << 30  # for a file of any size, and twice as much for one of a megabyte
PER_BYTE = 128  # per byte of the file: highly compressed photographs take a hundred times their bytes
PACKED_PER_BYTE = 2048  # up to twice `ANY_FILE_BYTES`: a mask of 30,000 x 30,000 px compresses to a thousandth
SMALL_BYTES = 64 << 20  # smaller reads are not checked


def check_budget(path: Path, wanted_bytes: int, what: str, mend: str) -> None:
    """Raise ImageError if a read would take too much memory for a file of this size, or for the free memory.

    The limit is 1 GB (2 GB for a file of a megabyte) or 128 times the file's bytes, whichever is more, but never more
    than half of the free memory, since other ranks read at the same time. In the message, `what` says what takes the
    memory, and `mend` how to avoid it.
    """
    # One limit stops a small file that claims to be huge (a decompression bomb), the other an honest file that is too
    # large for this host. The message names the one that was hit.
    if wanted_bytes <= SMALL_BYTES:
        return
    there = path.stat().st_size
    packed = min(2 * ANY_FILE_BYTES, PACKED_PER_BYTE * there)
    right, free = max(ANY_FILE_BYTES, packed, PER_BYTE * there), _get_free_bytes() // 2
    if wanted_bytes <= min(right, free):
        return
    most = (
        f"{format_bytes(right)} are the most for a file of {format_bytes(there)}"
        if right < free
        else f"{format_bytes(free)} are the most here, half of what is free"
    )
    raise ImageError(f"{path}: {what}, which takes {format_bytes(wanted_bytes)} of memory, and {most}. {mend}")


def _get_free_bytes() -> int:
    """Return the free memory of the host, or the limit of this process's cgroup if that is less."""
    import psutil  # imported here: a host that only checks its GPU need not have it

    return min(int(psutil.virtual_memory().available), get_memory_bytes())


class FileCache(Generic[Kind]):
    """Cache of what `make(path, page)` returns for files that have not changed since: all that is in use, and the last.

    The last ones are kept until their `cost` exceeds `most`; one that alone costs more is not kept. By default, these
    are four open files: OpenSlide caches up to 32 MB of decoded pixels for each. Thread-safe.
    """

    def __init__(
        self, make: Callable[..., Kind], cost: Callable[[Kind], float] = lambda cached: 1, most: float = 4
    ) -> None:
        self._make, self._cost, self._most, self._lock = make, cost, most, threading.Lock()
        self._in_use: WeakValueDictionary[tuple[object, ...], Kind] = WeakValueDictionary()
        self._kept: OrderedDict[tuple[object, ...], Kind] = OrderedDict()

    def __call__(self, path: Path, *page: int) -> Kind:
        """Return what was made of a file (or of a page) in its current state; all callers share it.

        Raises ImageError, naming the file, if it cannot be read.
        """
        with translate_errors(path):
            state = path.stat()
        # A file that was written anew has another key, so that its old pixels are never taken for it.
        key = (make_absolute(path), *page, state.st_mtime_ns, state.st_size, state.st_ino)
        with self._lock:
            cached = self._in_use.get(key)
        if cached is None:
            # Outside of the lock, so that other files are opened meanwhile. If two threads open one file at once, the
            # later object replaces the earlier one, which goes when its reader is gone.
            cached = self._make(path, *page)
        with self._lock:
            self._in_use[key] = cached
            self._kept.pop(key, None)
            if self._cost(cached) <= self._most:
                self._kept[key] = cached
            while sum(map(self._cost, self._kept.values())) > self._most:
                self._kept.popitem(last=False)
        return cached
