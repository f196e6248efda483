"""The last pictures that this process has opened, since a table may have thousands of regions of one slide."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from PIL import Image

from engines.images.files import reasons
from engines.images.picture import Picture, open_image
from engines.images.pillow import PillowPicture, quiet_at_any_size

__all__ = ["opened", "shape_of"]

_ORIENTATION = 0x0112  # of EXIF; from 5 on, rows are columns
_KEPT = 4  # OpenSlide keeps up to 32 MB of decoded pixels for each


class _Opened:
    """Pictures by file, as long as the file does not change. Pictures that are decoded whole are not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pictures: OrderedDict[tuple[object, ...], Picture] = OrderedDict()

    def __call__(self, path: Path) -> Picture:
        """The picture in a file. Raises ImageError, which names the file, where it cannot be read."""
        with reasons(path):
            state = path.stat()
        key = (path.absolute(), state.st_mtime_ns, state.st_size)
        with self._lock:
            picture = self._pictures.pop(key, None)
        picture = picture or open_image(path)
        if not isinstance(picture, PillowPicture):
            with self._lock:
                self._pictures[key] = picture
                while len(self._pictures) > _KEPT:
                    self._pictures.popitem(last=False)
        return picture


opened = _Opened()


def shape_of(path: Path, level: int = 0) -> tuple[int, int]:
    """Height and width in pixels of one level of a picture; of a PNG or JPEG file, its header says it.

    Raises ImageError, which names the file, where it cannot be read or has no such level.
    """
    try:
        with quiet_at_any_size(), Image.open(path, formats=("PNG", "JPEG")) as image:
            shape = image.size[::-1]
            turned = image.getexif().get(_ORIENTATION, 1) > 4
    except Exception:  # a damaged header fails in any way; and whoever reads the picture has the words for it
        return opened(path).shape(level)
    if level:
        return opened(path).shape(level)
    return shape[::-1] if turned else shape
