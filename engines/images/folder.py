"""Data sets in folders: one folder of pictures per class, or pictures with the annotations of other tools."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from mpi4dl_nb.engines.errors import ImageError, describe_working_folder, make_path, read_name
from mpi4dl_nb.engines.images.examples import Example, ExampleImages
from mpi4dl_nb.engines.images.files import translate_errors
from mpi4dl_nb.engines.images.regular_file import TEXT_BYTES, XML_BYTES, is_within, parse_xml, read_bounded
from mpi4dl_nb.engines.images.tables import check_names, write_table
from mpi4dl_nb.engines.images.zarr import is_zarr

_ZARR = ".zarr"  # a folder that is itself a picture

_DICOM, _LISTS = ".dcm", (".vms", ".vmu")  # of a slide in several files, or with pictures of its parts beside it
_OF_SLIDES = (".svs", ".ndpi", ".scn", ".mrxs", ".bif", ".svslide", _DICOM, ".czi", *_LISTS)
ENDINGS = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".btf", *_OF_SLIDES, _ZARR)
"""The endings of files that are treated as pictures."""

_UNREAD = (
    *(".webp", ".bmp", ".gif", ".jp2", ".j2k", ".avif", ".heic", ".heif", ".jxl", ".ppm", ".pgm"),
    *(".pbm", ".pnm", ".tga", ".psd", ".dib", ".ico", ".svg", ".npy", ".npz", ".nii", ".lif", ".nd2", ".vsi"),
    *(".zvi", ".oib", ".oif", ".mha", ".mhd", ".nrrd", ".exr", ".hdr", ".qptiff"),
)
"""Endings of pictures in formats that are not read."""

_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval", "held_out", "holdout")
"""Names of folders that hold a share of a data set, and not a class."""

_WAY = "Put the pictures of each class into a folder of its own: CLASS/PICTURE.png or CLASS/SLIDE/PICTURE.png."

_LISTED = 5  # names that a message lists

_OF_SYSTEMS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
"""Folders that archives, network drives and operating systems create."""


def folder_images(
    folder: str | PathLike[str], size: tuple[int, int] | None, fit: str = "scale", names: tuple[str, ...] | None = None
) -> ExampleImages:
    """Return the pictures in `folder/CLASS/` and `folder/CLASS/SLIDE/`, with classes and files sorted by name.

    Folders with the same name SLIDE hold parts of one slide, whatever their class; a picture in no such folder is a
    slide of its own. `names` are the classes of a related set of images, such as those that a model was trained on.
    Hidden files and folders (`.name`, `._name` of a Mac) and those that systems add, such as `__MACOSX`, are ignored.
    Names are sorted as text, as torchvision's ImageFolder sorts them: of the folders 0, 1, 10, 2, class 2 is "10".
    Warns if numbers would have another order, and of pictures that are left out since their format or place is unknown.
    Raises ImageError, naming the folders, if some may not be read, have no pictures or are no classes in `names`, if
    they are shares of a data set (`train`, `val`) with the folders of classes inside, or if a slide has several files.

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
    check_names(names)
    folder = make_path(folder)
    with translate_errors(folder):
        is_folder = folder.is_dir()
    if not is_folder:
        raise ImageError(
            f"{folder} is not a folder (looked for in {describe_working_folder()}). "
            "Give a folder that has a folder of pictures for each class."
        )
    there = tuple(map(read_name, _list_folders(folder)))
    if names is None:
        _check_no_split(folder, there)
    unknown = sorted(set(there) - set(there if names is None else names))
    if unknown:
        raise ImageError(f"{folder} has folders of other classes than {', '.join(names or ())}: {', '.join(unknown)}.")
    pictures: dict[str, list[tuple[Path, str]]] = {}  # the pictures of each class, with the names of their slides
    left_out = list_pictures(folder)
    for name in there:
        class_folder = make_path(folder / name)
        pictures[name] = [(path, str(path)) for path in _list_images(class_folder)]
        left_out += _list_unread(class_folder)
        for slide in _list_folders(class_folder):
            pictures[name] += [(path, slide.name) for path in _list_images(slide)]
            left_out += _list_unread(slide)
            left_out += [path for deeper in _list_folders(slide) for path in list_pictures(deeper)]
    if not there:
        raise ImageError(f"{folder} has no folders. {_WAY}")
    if empty := [name for name in there if not pictures[name]]:
        raise ImageError(
            f"{folder} has {len(there)} folders, and no picture in these of them: {', '.join(empty)} (no file that "
            f"ends in {', '.join(ENDINGS)}; hidden ones do not count). {_describe_left_out(left_out)}{_WAY} Take "
            "folders away that are no class."
        )
    if left_out:
        used = sum(map(len, pictures.values()))
        warnings.warn(f"{folder}: {used} pictures are used. {_describe_left_out(left_out)}".rstrip(), stacklevel=2)
    if names is None and (numeric := _sort_numbers(there)) != there:
        index = next(index for index, pair in enumerate(zip(there, numeric, strict=True)) if len(set(pair)) > 1)
        warnings.warn(
            f"{folder}: the class folders are numbers, but sorted as text, as torchvision sorts them: class {index} is "
            f"the folder {there[index]}, not {numeric[index]}. Give names= in the order of the numbers, or leave it.",
            stacklevel=2,
        )
    classes = names or there
    examples = [
        Example(path, classes.index(name), slide=slide) for name, files in pictures.items() for path, slide in files
    ]
    return ExampleImages(examples, classes, size, fit)


def _check_no_split(folder: Path, there: Sequence[str]) -> None:
    """Raise ImageError if the folders are shares of a data set, with the folders of the classes inside."""
    classes = [path.name for name in there if name.lower() in _SPLITS for path in _list_folders(folder / name)]
    if classes and all(name.lower() in _SPLITS for name in there):
        first = next((name for name in there if name.lower().startswith("train")), there[0])
        raise ImageError(
            f"{folder} has the folders {', '.join(there)}, which are shares of a data set and no classes; those are "
            f"inside: {', '.join(dict.fromkeys(classes[:_LISTED]))}. Give one share to train with, such as "
            f"{folder / first}, and another one to fit(..., held_out=folder_images(...)). If they are the classes, "
            f"say so: names={tuple(there)}."
        )


def _sort_numbers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names that are all whole numbers in the order of the numbers; others as they are."""
    return tuple(sorted(names, key=int)) if all(name.isascii() and name.isdecimal() for name in names) else names


def _describe_left_out(paths: Sequence[Path]) -> str:
    """Return a sentence for each reason for which pictures are left out; empty without any, else with a space after."""
    misplaced = [path for path in paths if path.suffix.lower() not in _UNREAD]
    unread = Counter(path.suffix.lower() for path in paths if path.suffix.lower() in _UNREAD)
    text = ""
    if unread:
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(unread.items()))
        text = f"{unread.total()} others are of formats that are not read ({counts}): save them as PNG or TIFF. "
    if misplaced:
        text += (
            f"{len(misplaced)} others are left out, as they are neither in CLASS/ nor in CLASS/SLIDE/: "
            f"{', '.join(map(str, misplaced[:_LISTED]))}. "
        )
    return text


def _list_unread(folder: Path) -> list[Path]:
    endings = {*_UNREAD} - {*ENDINGS}
    return [path for path in _list_visible(folder)[1] if path.suffix.lower() in endings and not path.is_dir()]


def _list_folders(folder: Path) -> list[Path]:
    return _list_visible(folder)[0]


def _list_images(folder: Path) -> list[Path]:
    """Return the pictures in the folder of a class or slide. Raises ImageError if several may be of one slide."""
    pictures = list_pictures(folder)
    lists = [path.name for path in pictures if path.suffix.lower() in _LISTS]
    several = lists or [path.name for path in pictures if path.suffix.lower() == _DICOM]
    if lists or len(several) > 1:
        raise ImageError(
            f"{folder} has slides of several files ({', '.join(several[:_LISTED])}), each of which would count as an "
            "image, and might be trained on and held out at once. Name one file of each slide in a table "
            "(write_table, table_images)."
        )
    return pictures


def list_pictures(folder: Path, more: Sequence[str] = ()) -> list[Path]:
    """Return the sorted files in a folder that have a picture's ending, or one of `more`, and are not hidden.

    Raises ImageError if the folder may not be read.
    """
    endings = {*ENDINGS, *more} - {_ZARR}
    return [path for path in _list_visible(folder)[1] if path.suffix.lower() in endings or path.is_dir()]


def _list_visible(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the sorted folders and files in a folder, without hidden ones and those that systems add.

    A Zarr store counts as a file. Raises ImageError if the folder, or one in it, may not be read.
    """
    folders: list[Path] = []
    files: list[Path] = []
    with translate_errors(folder):
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(".") and path.name not in _OF_SYSTEMS:
                is_folder = path.is_dir() and path.suffix.lower() != _ZARR and not is_zarr(path)
                (folders if is_folder else files).append(path)
    return folders, files


# Tables made from annotations of other tools: folders of masks, and boxes in Pascal VOC format.


def write_masks_table(images: Path, masks: Path, table: Path) -> int:
    """Write a table of the pictures in a folder, whose masks have the same names in another folder.

    Returns the number of pictures. Raises ImageError if there are none, or if one has no mask or several.
    """
    of_masks = _require_pictures(masks, (".npy",))
    by_stem = {path.stem: path for path in of_masks}
    times = Counter(path.stem for path in of_masks)
    if twice := [path.name for path in of_masks if times[path.stem] > 1]:
        raise ImageError(f"{masks} has several masks of one name: {', '.join(twice[:5])}. Keep one of each.")
    there = _require_pictures(images)
    missing = [path.name for path in there if path.stem not in by_stem]
    if missing:
        raise ImageError(
            f"{len(missing)} of {len(there)} pictures in {images} have no mask of their name in {masks}, the first "
            f"of them {', '.join(missing[:5])}. Add the masks, or take the pictures away."
        )
    return write_table(table, [(path, by_stem[path.stem]) for path in there], ("path", "mask"))


def write_boxes_table(folder: Path, chosen: str, table: Path, crop_px: int = 96, most: int | None = None) -> int:
    """Write a table of square crops around the boxes of a folder in Pascal VOC format, with the boxes' labels.

    `chosen` is the list of images, such as `train` for `ImageSets/Main/train.txt`. Boxes are in `Annotations/`,
    pictures in `JPEGImages/`. A crop has `crop_px` x `crop_px` pixels around the centre of its box, white beyond the
    picture's edges; its slide is its picture. `most` limits the boxes per class and picture to the first ones.
    (Everingham et al., 2010, "The Pascal Visual Object Classes (VOC) Challenge", IJCV 88.)
    Returns the number of crops. Raises ImageError, naming the file, if one is missing or damaged.
    """
    files = {path.stem: path for path in _require_pictures(folder / "JPEGImages")}
    listed = folder / "ImageSets" / "Main" / f"{chosen}.txt"
    with translate_errors(listed):
        text = _read(listed, folder, TEXT_BYTES).decode()
        names = [line.split()[0] for line in text.splitlines() if line.strip()]
    missing = [name for name in names if name not in files]
    if missing:
        raise ImageError(
            f"{listed} names {len(missing)} images that are not in {folder / 'JPEGImages'}: {', '.join(missing[:5])}."
        )
    rows = []
    for name in names:
        path, seen = folder / "Annotations" / f"{name}.xml", Counter[str]()
        with translate_errors(path):
            for box in parse_xml(_read(path, folder, XML_BYTES)).findall("object"):
                label = box.findtext("name", "").strip()
                # VOC counts pixels from 1 and includes the last one.
                row, col = (
                    int(sum(float(box.findtext(f"bndbox/{axis}{end}", "")) for end in ("min", "max")) - 1) // 2
                    for axis in "yx"
                )
                if not label:
                    raise ValueError("an object has no name")
                seen[label] += 1
                if most is None or seen[label] <= most:
                    region = f"{row - crop_px // 2} {col - crop_px // 2} {crop_px} {crop_px}"
                    rows.append((files[name], label, region, name))
    return write_table(table, rows, ("path", "label", "region", "slide"))


def _require_pictures(folder: Path, more: Sequence[str] = ()) -> list[Path]:
    if not folder.is_dir() or not (pictures := list_pictures(folder, more)):
        raise ImageError(f"There are no pictures in {folder} (looked for in {describe_working_folder()}).")
    return pictures


def _read(path: Path, folder: Path, most_bytes: int) -> bytes:
    # An unpacked archive may hold links: one to /etc/passwd would put that file's text into an error message.
    if path.is_file() and not is_within(path, folder):
        raise ImageError(f"{path} is a link that leads out of {folder}. Copy the folder whole.")
    return read_bounded(path, most_bytes)
