"""Data sets in folders: one folder of pictures per class, or pictures with the annotations of other tools."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from engines.errors import ImageError
from engines.images.example import Example
from engines.images.examples import ExampleImages
from engines.working_folder import describe_working_folder

__all__ = ["folder_images", "list_pictures"]

_ZARR = ".zarr"  # a folder that is itself a picture

_OF_SLIDES = (".svs", ".ndpi", ".scn", ".mrxs", ".bif", ".svslide", ".dcm", ".czi")
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".btf", *_OF_SLIDES, _ZARR)
"""The endings of files that are treated as pictures."""

_WAY = "Put the pictures of each class into a folder of its own: CLASS/PICTURE.png or CLASS/SLIDE/PICTURE.png."

_OF_SYSTEMS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
"""Folders that archives, network drives and operating systems create."""


def folder_images(
    folder: str | PathLike[str],
    size: tuple[int, int] | None,
    fit: str = "scale",
    names: tuple[str, ...] | None = None,
) -> ExampleImages:
    """Return the pictures in `folder/CLASS/` and `folder/CLASS/SLIDE/`, with classes and files sorted by name.

    Folders with the same name SLIDE hold parts of one slide, whatever their class; a picture in no such folder is a
    slide of its own. `names` are the classes of a related set of images, such as those that a model was trained on.
    Hidden files and folders (`.name`, `._name` of a Mac) and those that systems add, such as `__MACOSX`, are ignored.
    Raises ImageError, naming the folders, if some have no pictures or are no classes in `names`.

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
    folder = Path(folder)
    if not folder.is_dir():
        raise ImageError(
            f"{folder} is not a folder (looked for in {describe_working_folder()}). "
            "Give the --datapath of a folder that has a folder of pictures for each class."
        )
    there = tuple(path.name for path in _list_folders(folder))
    unknown = sorted(set(there) - set(there if names is None else names))
    if unknown:
        raise ImageError(f"{folder} has folders of other classes than {', '.join(names or ())}: {', '.join(unknown)}.")
    found: dict[str, list[tuple[Path, str]]] = {}  # the pictures of each class, with the names of their slides
    for name in there:
        found[name] = [(path, str(path)) for path in list_pictures(folder / name)]
        for slide in _list_folders(folder / name):
            found[name] += [(path, slide.name) for path in list_pictures(slide)]
    if not there:
        raise ImageError(f"{folder} has no folders. {_WAY}")
    if empty := [name for name in there if not found[name]]:
        raise ImageError(
            f"{folder} has {len(there)} folders, and no picture in these of them: {', '.join(empty)} (no file that "
            f"ends in {', '.join(ENDINGS)}; hidden ones do not count). {_WAY} Take folders away that are no class."
        )
    classes = names or there
    examples = [
        Example(path, classes.index(name), slide=slide) for name, files in found.items() for path, slide in files
    ]
    return ExampleImages(examples, classes, size, fit)


def _list_folders(folder: Path) -> list[Path]:
    return sorted(path for path in _list_visible(folder) if path.is_dir() and path.suffix != _ZARR)


def list_pictures(folder: Path) -> list[Path]:
    """Return the sorted files in a folder that have a picture's ending and are not hidden."""
    return sorted(
        path
        for path in _list_visible(folder)
        if path.suffix.lower() in ENDINGS and path.is_dir() == (path.suffix == _ZARR)
    )


def _list_visible(folder: Path) -> Iterator[Path]:
    """Return the entries of a folder, without hidden ones and those that systems add."""
    return (path for path in folder.iterdir() if not path.name.startswith(".") and path.name not in _OF_SYSTEMS)
