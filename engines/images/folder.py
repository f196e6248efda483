"""A folder of pictures, with a folder in it for each class."""

from __future__ import annotations

from pathlib import Path

from engines.errors import ImageError
from engines.images.example import Example
from engines.images.examples import ExampleImages

__all__ = ["folder_images", "pictures"]

_ZARR = ".zarr"  # a folder that is a picture

ENDINGS = (
    ".png", ".jpg", ".jpeg", ".tif", ".tiff", ".btf",
    ".svs", ".ndpi", ".scn", ".mrxs", ".bif", ".svslide", ".dcm", ".czi", _ZARR,
)  # fmt: skip
"""Of the files that are taken for pictures."""


def folder_images(
    folder: Path, size: tuple[int, int] | None, fit: str = "scale", names: tuple[str, ...] | None = None
) -> ExampleImages:
    """The pictures in `folder/CLASS/` and `folder/CLASS/SLIDE/`, classes and files in the order of their names.

    Folders of one name SLIDE hold parts of one slide, in whichever class they are; a picture that lies in no such
    folder is a slide of its own. `names` are the classes of other images that these go with, such as those that a
    model was trained on. Raises ImageError where a class has no picture.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from mpi4dl_nb import folder_images
    >>> folder = Path(tempfile.mkdtemp())
    >>> for path in (folder / "benign" / "a.png", folder / "tumour" / "slide1" / "b.png"):
    ...     path.parent.mkdir(parents=True)
    ...     Image.new("RGB", (40, 30)).save(path)
    >>> images = folder_images(folder, size=(24, 32))
    >>> len(images), images.names
    (2, ('benign', 'tumour'))
    """
    if not folder.is_dir():
        raise ImageError(
            f"{folder} is not a folder (looked for in {Path.cwd()}). "
            "Give the --datapath of a folder that has a folder of pictures for each class."
        )
    there = tuple(path.name for path in _folders(folder))
    unknown = sorted(set(there) - set(there if names is None else names))
    if unknown:
        raise ImageError(f"{folder} has folders of other classes than {', '.join(names or ())}: {', '.join(unknown)}.")
    found = {name: _pictures(folder / name) for name in there}
    empty = [name for name in there if not found[name]]
    if empty or not there:
        raise ImageError(
            f"{folder} has {len(there)} folders and no picture in them: {', '.join(empty) or 'none'} "
            f"({', '.join(ENDINGS)}). Put the pictures of each class into a folder of its own: CLASS/PICTURE.png or "
            "CLASS/SLIDE/PICTURE.png; and take folders away that are no class."
        )
    classes = names or there
    examples = [
        Example(path, classes.index(name), slide=slide) for name, files in found.items() for path, slide in files
    ]
    return ExampleImages(examples, classes, size, fit)


def _folders(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".") and path.suffix != _ZARR
    )


def _pictures(folder: Path) -> list[tuple[Path, str]]:
    """Each with the name of its slide."""
    alone = [(path, str(path)) for path in pictures(folder)]
    return alone + [(path, slide.name) for slide in _folders(folder) for path in pictures(slide)]


def pictures(folder: Path) -> list[Path]:
    """The files in a folder whose names end as those of pictures do, in order."""
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in ENDINGS and path.is_dir() == (path.suffix == _ZARR)
    )
