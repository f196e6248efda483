"""LRU cache of open pictures. A table may name thousands of regions of one slide."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from PIL import Image

from engines.images.files import translate_errors
from engines.images.picture import Picture, open_image
from engines.images.pillow import PillowPicture, allow_any_size
from engines.regular_file import open_regular
from engines.working_folder import make_absolute

__all__ = ["FileCache", "open_cached", "read_shape"]

Kind = TypeVar("Kind")

_ORIENTATION = 0x0112  # EXIF tag; values from 5 on swap rows and columns
_KEPT = 4  # open files; OpenSlide caches up to 32 MB of decoded pixels for each


class FileCache(Generic[Kind]):
    """LRU cache of the files that `open_file` opened, while they are unchanged; fully decoded files are not kept."""

    def __init__(self, open_file: Callable[[Path], Kind]) -> None:
        self._lock, self._open = threading.Lock(), open_file
        self._files: OrderedDict[tuple[object, ...], Kind] = OrderedDict()

    def __call__(self, path: Path) -> Kind:
        """Return the open file at a path. Raises ImageError, naming the file, if it cannot be read."""
        with translate_errors(path):
            state = path.stat()
        key = (make_absolute(path), state.st_mtime_ns, state.st_size)
        with self._lock:
            file = self._files.pop(key, None)
        file = file or self._open(path)
        if not isinstance(file, PillowPicture):
            with self._lock:
                self._files[key] = file
                while len(self._files) > _KEPT:
                    self._files.popitem(last=False)
        return file


open_cached: FileCache[Picture] = FileCache(open_image)


def read_shape(path: Path, level: int = 0) -> tuple[int, int]:
    """Return height and width in pixels of one level of a picture; for PNG and JPEG only the header is read.

    Raises ImageError, naming the file, if it cannot be read or has no such level.
    """
    try:
        with open_regular(path) as file, allow_any_size(), Image.open(file, formats=("PNG", "JPEG")) as image:
            shape = image.size[::-1]
            turned = image.getexif().get(_ORIENTATION, 1) > 4
    except Exception:  # a damaged header may raise anything; opening the picture raises the proper error
        return open_cached(path).shape(level)
    if level:
        return open_cached(path).shape(level)
    return shape[::-1] if turned else shape
