"""A folder of pictures, one folder in it for each class."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from engines.errors import ImageError
from engines.images.labelled import network_input, resized
from engines.images.picture import open_image
from engines.spatial.tiles import Tile

__all__ = ["FolderImages"]

_ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


class FolderImages:
    """The PNG, JPEG and TIFF files in `folder/CLASS/`, classes and files in the order of their names.

    Each is scaled to `size` = (height, width) pixels when it is read. Raises ImageError where there are none.
    """

    def __init__(self, folder: Path, size: tuple[int, int]) -> None:
        if not folder.is_dir():
            raise ImageError(
                f"{folder} is not a folder (looked for in {Path.cwd()}). "
                "Give the --datapath of a folder that has a folder of pictures for each class."
            )
        self.size = size
        self.names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [(path, number) for number, name in enumerate(self.names) for path in _pictures(folder / name)]
        if not self.files:
            raise ImageError(
                f"{folder} has {len(self.names)} folders and no picture in them ({', '.join(_ENDINGS)}). "
                "Put the pictures of each class into a folder of its own: CLASS/PICTURE.png."
            )

    @property
    def classes(self) -> int:
        """Folders, whatever is in them."""
        return len(self.names)

    def __len__(self) -> int:
        return len(self.files)

    def part(self, index: int, tile: Tile) -> Tensor:
        """(3, h, w), float32 from -1 to 1. The whole file is read. Raises ImageError where it cannot be."""
        picture = open_image(self.files[index][0])
        return network_input(resized(picture.read(0, 0, *picture.shape()), self.size), tile)

    def label(self, index: int) -> int:
        """The number of its folder."""
        return self.files[index][1]


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _ENDINGS)
