"""Cache of files that can only be decoded whole; their pixels are shared within the process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from numpy.typing import NDArray

from engines.images.files import translate_errors

__all__ = ["DecodeCache"]

KEPT_BYTES = 1 << 26  # of decoded files that the cache keeps alive by itself


class DecodeCache:
    """Cache of the arrays that `decode(path, page)` returns: all that are in use, and the last up to `KEPT_BYTES`."""

    def __init__(self, decode: Callable[[Path, int], NDArray[Any]]) -> None:
        self._decode, self._lock = decode, threading.Lock()
        self._in_use: WeakValueDictionary[tuple[object, ...], NDArray[Any]] = WeakValueDictionary()
        self._kept: OrderedDict[tuple[object, ...], NDArray[Any]] = OrderedDict()

    def get_pixels(self, path: Path, page: int = 0) -> NDArray[Any]:
        """Return the shared, read-only array of a page of a file in its current state.

        Raises ImageError if the file cannot be read.
        """
        with translate_errors(path):
            state = path.stat()
        # A file that was written anew has another key, so that its old pixels are never taken for it.
        key = (path, page, state.st_mtime_ns, state.st_size, state.st_ino)
        with self._lock:
            found = self._in_use.get(key)
        if found is None:
            # Outside of the lock, so that other files are decoded meanwhile. If two threads decode one file at once,
            # the later array replaces the earlier one, which goes when its reader is gone.
            found = self._decode(path, page)
            found.flags.writeable = False
        with self._lock:
            self._in_use[key] = found
            self._kept.pop(key, None)
            # Readers keep a large array alive themselves; held here too, it would outlive them.
            if found.nbytes <= KEPT_BYTES:
                self._kept[key] = found
            while sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return found
