"""LRU cache of open pictures. A table may name thousands of regions of one slide."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from PIL import Image

from engines.images.files import translate_errors
from engines.images.picture import Picture, open_image
from engines.images.pillow import ORIENTATION, PillowPicture, allow_any_size
from engines.regular_file import open_regular
from engines.working_folder import make_absolute

__all__ = ["FileCache", "open_cached", "read_shape"]

Kind = TypeVar("Kind")

_KEPT = 4  # open files; OpenSlide caches up to 32 MB of decoded pixels for each


class FileCache(Generic[Kind]):
    """LRU cache of the files that `open_file` opened, while they are unchanged; fully decoded files are not kept.

    A table may name thousands of regions of one slide, which is then opened once.
    """

    def __init__(self, open_file: Callable[[Path], Kind]) -> None:
        self._lock, self._open = threading.Lock(), open_file
        self._files: OrderedDict[tuple[object, ...], Kind] = OrderedDict()

    def __call__(self, path: Path) -> Kind:
        """Return the open file at a path. Raises ImageError, naming the file, if it cannot be read."""
        with translate_errors(path):
            state = path.stat()
        key = (make_absolute(path), state.st_mtime_ns, state.st_size)
        # The entry is taken out, and put back as the newest. A thread that asks meanwhile opens the file once more:
        # that costs little, whereas a lock held during the opening would make readers of other files wait.
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
    # Opening a PNG or JPEG decodes all of it, and a data set asks for the shape of every image before it starts. A
    # damaged header may raise anything; opening the picture then raises the proper error.
    if not level:
        with (
            suppress(Exception),
            open_regular(path) as file,
            allow_any_size(),
            Image.open(file, formats=("PNG", "JPEG")) as image,
        ):
            turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
            return image.size if turned else image.size[::-1]
    return open_cached(path).shape(level)
