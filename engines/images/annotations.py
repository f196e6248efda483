"""Tables made from annotations of other tools: folders of masks, and boxes in Pascal VOC format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree.ElementTree import Element

from engines.errors import ImageError
from engines.images.files import translate_errors
from engines.images.folder import list_pictures
from engines.images.safe_xml import XML_BYTES, parse_xml
from engines.images.tables import write_table
from engines.regular_file import TEXT_BYTES, is_within, read_bounded
from engines.working_folder import describe_working_folder

__all__ = ["write_boxes_table", "write_masks_table"]


def write_masks_table(images: Path, masks: Path, table: Path) -> int:
    """Write a table of the pictures in a folder, whose masks have the same names in another folder.

    Returns the number of pictures. Raises ImageError if there are none, or if one has no mask or several.
    """
    of_masks = _require_pictures(masks)
    found = {path.stem: path for path in of_masks}
    times = Counter(path.stem for path in of_masks)
    if twice := [path.name for path in of_masks if times[path.stem] > 1]:
        raise ImageError(f"{masks} has several masks of one name: {', '.join(twice[:5])}. Keep one of each.")
    there = _require_pictures(images)
    missing = [path.name for path in there if path.stem not in found]
    if missing:
        raise ImageError(
            f"{len(missing)} of {len(there)} pictures in {images} have no mask of their name in {masks}, the first "
            f"of them {', '.join(missing[:5])}. Add the masks, or take the pictures away."
        )
    return write_table(table, [(path, found[path.stem]) for path in there], ("path", "mask"))


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
        seen: Counter[str] = Counter()
        for label, row, col in _read_boxes(folder / "Annotations" / f"{name}.xml", folder):
            seen[label] += 1
            if most is None or seen[label] <= most:
                region = f"{row - crop_px // 2} {col - crop_px // 2} {crop_px} {crop_px}"
                rows.append((files[name], label, region, name))
    return write_table(table, rows, ("path", "label", "region", "slide"))


def _require_pictures(folder: Path) -> list[Path]:
    if not folder.is_dir() or not (found := list_pictures(folder)):
        raise ImageError(f"There are no pictures in {folder} (looked for in {describe_working_folder()}).")
    return found


def _read(path: Path, folder: Path, most_bytes: int) -> bytes:
    # An unpacked archive may hold links: one to /etc/passwd would put that file's text into an error message.
    if path.is_file() and not is_within(path, folder):
        raise ImageError(f"{path} is a link that leads out of {folder}. Copy the folder whole.")
    return read_bounded(path, most_bytes)


def _read_boxes(path: Path, folder: Path) -> list[tuple[str, int, int]]:
    """Return the class of each box, and the row and column of its centre."""
    with translate_errors(path):
        found = parse_xml(_read(path, folder, XML_BYTES)).findall("object")
        boxes = [
            (each.findtext("name", "").strip(), _compute_middle(each, "y"), _compute_middle(each, "x"))
            for each in found
        ]
        if not all(label for label, _, _ in boxes):
            raise ValueError("an object has no name")
    return boxes


def _compute_middle(box: Element, axis: str) -> int:
    low, high = (float(box.findtext(f"bndbox/{axis}{end}", "")) for end in ("min", "max"))
    return int(low - 1 + high) // 2  # VOC counts pixels from 1 and includes the last one
