"""Tables of images: CSV files with one line per image."""

from __future__ import annotations

import csv
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from mpi4dl_nb.engines.errors import ImageError, describe_working_folder, make_path
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.examples import Example, ExampleImages, ShapeCache
from mpi4dl_nb.engines.images.mask_file import Ignore, parse_ignored_numbers
from mpi4dl_nb.engines.images.regular_file import is_within, read_bounded

COLUMNS = ("path", "label", "mask", "region", "level", "slide")
"""The columns of a table; see `table_images`."""

_MOST_CLASSES, _FURTHEST_PX = 99_999, 1 << 31
_LISTED = 5  # faulty lines that an error lists; further ones are only counted


def table_images(
    table: str | PathLike[str],
    size: tuple[int, int] | None,
    fit: str = "scale",
    names: Sequence[str] | None = None,
    classes: int | None = None,
    threshold: int | None = None,
    check: bool = True,
    within: str | PathLike[str] | None = None,
    ignore: Ignore = None,
) -> ExampleImages:
    """Return the images of a table: a CSV file with one line per image and these columns, in any order.

    - `path`: the picture's file, relative to the table's folder. Required, together with `label` or `mask` or both.
    - `label`: the image's class, a name or a non-negative integer.
    - `mask`: a file with a class number per pixel (grey or palette PNG, TIFF, `.npy`), as large as the region or the
      whole level. Its numbers are used as the file stores them.
    - `region`: `y0 x0 height width` in pixels of the level; the whole picture by default. Pixels outside are white.
    - `level`: of the pyramid; the default, 0, is the finest.
    - `slide`: what similar images have in common, such as the patient: `split` keeps images of a slide together.

    `size` is the (height, width) in pixels that all images are scaled or cropped to, as `fit` says (None: unchanged);
    see `ExampleImages` for these and `threshold`.

    If all labels are non-negative whole numbers, they are the class numbers, by value: 2, 2.0 and 2e0 are class 2. If
    none is a number, they are names, and the classes are `names`, such as those of the table that a model was trained
    on, or else the sorted labels. Any others (words beside numbers, -1, 0.5) need `names`: their order is not clear.
    Masks have `classes` classes, or two with a `threshold`. Pixels whose number is in `ignore`, such as 255 for void,
    have no class: their label is the `ignore_index` of the loss (PyTorch's default is -100). A loss that ignores no
    label is refused, and so are these three for a table without masks.
    A table may come from an untrusted source: after following links, its files must be inside the folder `within`,
    by default the table's own.
    Raises ImageError, naming the table, its lines and the reasons, if a file is missing or a line is invalid. Unless
    `check` is off (so that bad images can be skipped later), also if a file is no picture, has no such region, or has
    a mask of another size.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from mpi4dl_nb import table_images
    >>> folder = Path(tempfile.mkdtemp())
    >>> Image.new("RGB", (40, 30)).save(folder / "a.png")
    >>> lines = "path,label,region", "a.png,tumour,0 8 24 32"
    >>> size_bytes = (folder / "regions.csv").write_text("\\n".join(lines))
    >>> images = table_images(folder / "regions.csv", size=(24, 32), names=("benign", "tumour"))
    >>> images.label(0)
    1
    """
    # Errors are collected and reported together, so that the user can fix them all at once, in two rounds: the lines by
    # themselves, then the labels and files, which make sense only once every line has been understood.
    check_names(names)
    table, troubles = make_path(table), list[tuple[int, object]]()
    finder = FileFinder(table.parent, table.parent if within is None else within)
    drafts: list[tuple[int, Example, str]] = []  # line, the example without its class, its label
    for line, cells in list(_read_rows(table)):
        try:
            drafts.append((line, *_parse_row(cells, finder)))
        except ValueError as trouble:
            troubles.append((line, trouble))
    _raise_troubles(table, troubles)
    names = names or _make_class_names(table, {label for _, _, label in drafts} - {""})
    options = {"classes": classes, "threshold": threshold, "ignore": parse_ignored_numbers(ignore) or None}
    masks = _count_mask_classes(table, any(example.mask for _, example, _ in drafts), options)
    labels, shapes = _number_labels({label for _, _, label in drafts}, names), ShapeCache()
    for line, example, label in drafts:
        try:
            if label and label not in labels:
                troubles.append((line, f"the label {label!r} is none of {', '.join(names)}"))
            elif masks and not example.mask and labels[label] >= masks:
                reason = f"it has no mask, and its class {labels[label]} is none of the {masks} of the masks"
                troubles.append((line, reason))
            if check:
                example.check(shapes)
        except ImageError as error:
            troubles.append((line, error))
    _raise_troubles(table, troubles)
    examples = [replace(draft, label=labels.get(label)) for _, draft, label in drafts]
    return ExampleImages(examples, names, size, fit, masks, threshold, ignore)


def check_names(names: object) -> None:
    """Raise ImageError if the `names` of classes are given, but are no texts in an order."""
    right = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(name, str) for name in names)
    if names is not None and not right:
        raise ImageError(
            f"names={names!r} must be the names of the classes, texts in their order, such as ('benign', 'tumour')."
        )


def has_masks(table: Path) -> bool:
    """Return whether any line of a table has a mask. Raises ImageError if it is no table."""
    return any(cells.get("mask") for _, cells in _read_rows(table))


def _count_mask_classes(table: Path, masked: bool, options: Mapping[str, Any]) -> int | None:
    """Return the number of classes of a table's masks; None if it is not `masked`.

    Raises ImageError if the `options` of masks are missing, invalid or without effect.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, kind, least in (("classes", Integral, 1), ("threshold", Real, 0)):
        value = chosen.get(name, least)
        if isinstance(value, bool) or not isinstance(value, kind) or value < least or not value < math.inf:
            whole = "whole " * (kind is Integral)
            raise ImageError(f"{name}={value!r} must be a {whole}number from {least} on, for what masks hold.")
    if chosen and not masked:
        raise ImageError(
            f"{table} has no masks, without which {', '.join(chosen)} would have no effect. Leave it away, or give the "
            "table a column `mask`."
        )
    if masked and not chosen.keys() & {"classes", "threshold"}:
        raise ImageError(
            f"{table} has masks. Say how many classes their numbers stand for (classes=), or above which number "
            "a pixel is of class 1 and not 0 (threshold=)."
        )
    return int(chosen.get("classes", 2)) if masked else None


def _raise_troubles(table: Path, troubles: Sequence[tuple[int, object]]) -> None:
    """Raise ImageError if there are any errors in the lines of a table."""
    if troubles:
        listed = "; ".join(f"line {line}: {str(trouble).rstrip('.')}" for line, trouble in troubles[:_LISTED])
        more = f"; and {len(troubles) - _LISTED} more lines" if len(troubles) > _LISTED else ""
        raise ImageError(f"{table}, {listed}{more}. Mend or remove them.")


def write_table(
    table: str | PathLike[str], rows: Iterable[Sequence[object]], columns: Sequence[str] = COLUMNS[:2]
) -> int:
    """Write a table with these columns and return its number of rows; paths become relative to the table's folder.

    Raises ImageError if the file cannot be written.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from mpi4dl_nb import write_table
    >>> table = Path(tempfile.mkdtemp()) / "table.csv"
    >>> write_table(table, [("a.png", "cancer"), ("b.png", "healthy")])
    2
    >>> table.read_text().split()
    ['path,label', 'a.png,cancer', 'b.png,healthy']
    """
    table = make_path(table)
    lines = [
        [os.path.relpath(value, table.parent) if isinstance(value, Path) else value for value in row] for row in rows
    ]
    text = StringIO(newline="")
    csv.writer(text).writerows([columns, *lines])
    try:
        table.write_bytes(text.getvalue().encode())  # encoded first: what cannot be leaves no half of a table
    except OSError as error:
        raise ImageError(f"{table} cannot be written: {error.strerror}. Choose another place for the table.") from None
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 40) : error.end + 40]
        raise ImageError(f"{table} cannot be written as UTF-8 text: {near!a} is none. Rename that file.") from None
    return len(lines)


def _read_rows(table: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number and the cells of each line. Raises ImageError if there is no table, or no header in its line 1.

    A line number is that of the line's end, since quoted cells may contain line breaks.
    """
    try:
        # Spreadsheets write a byte order mark; `utf-8-sig` drops it, which would be part of the first column's name.
        with StringIO(read_bounded(table).decode("utf-8-sig"), newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(table, header)
            count = 0
            for cells in reader:
                cells = [cell.strip() for cell in cells]
                if not any(cells):
                    continue
                if len(cells) != len(header):
                    raise ImageError(
                        f"{table}, line {reader.line_num}: it has {len(cells)} cells, but the header has "
                        f"{len(header)}. Put quotation marks around a cell that has a comma in it."
                    )
                count += 1
                yield reader.line_num, dict(zip(header, cells, strict=True))
    except FileNotFoundError:
        raise ImageError(f"The table {table} does not exist (looked for in {describe_working_folder()}).") from None
    except OSError as error:
        raise ImageError(f"The table {table} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ImageError(f"{table} is no table of comma-separated UTF-8 text: {error}. Save it as CSV again.") from None
    if not count:
        raise ImageError(f"The table {table} is empty. Give it a line for each image below its header.")


def _check_header(table: Path, header: Sequence[str]) -> None:
    known = f"The columns are {', '.join(COLUMNS)}, between commas, in any order."
    unknown = [name for name in header if name not in COLUMNS]
    if not header or unknown:
        raise ImageError(f"{table}, line 1: unknown columns {', '.join(map(repr, unknown)) or '(none)'}. {known}")
    if len(set(header)) < len(header):
        raise ImageError(f"{table}, line 1: a column is there twice: {', '.join(header)}. {known}")
    if "path" not in header or not {"label", "mask"} & set(header):
        raise ImageError(f"{table}, line 1: there must be a column `path`, and `label` or `mask` or both. {known}")


class FileFinder:
    """Finds the files of a table, whose names are relative to `folder`, inside the folder `within`.

    A table may have a million lines: each name is looked for once, and links are followed once for each folder.
    """

    def __init__(self, folder: Path, within: str | PathLike[str]) -> None:
        self._folder, self._within = folder, os.path.realpath(within)
        self._found: dict[str, Path | str] = {}  # the path of a name, or what is wrong with it
        self._folders: dict[str, str] = {}  # without links

    def find(self, name: str, what: str) -> Path:
        """Return the path of a file. Raises ValueError if it is missing, or not inside the folder."""
        if name not in self._found:
            self._found[name] = self._look_for(name)
        outcome = self._found[name]
        if isinstance(outcome, str):
            raise ValueError(outcome.format(what=what))
        return outcome

    def _look_for(self, name: str) -> Path | str:
        if not name:
            return "it has no path"
        path = make_path(self._folder / name)
        if self._is_plain_file(path):
            return path
        # A link, or no file: whether a file outside of the folder is there is not told.
        if "\0" not in name and not is_within(path, self._within):
            shown = f"{name!r} lies outside of {self._within}".replace("{", "{{").replace("}", "}}")
            return f"the {{what}} {shown} (if you trust the table: within=, or --within)"
        if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises where a name is too long)
            return "the {what} " + str(path).replace("{", "{{").replace("}", "}}") + " is missing"
        return path

    def _is_plain_file(self, path: Path) -> bool:
        """Return whether a path is there, inside the folder, and no link itself."""
        parent = str(path.parent)
        if path.name in ("", "..") or "\0" in parent:
            return False
        if parent not in self._folders:
            self._folders[parent] = os.path.realpath(parent)
        real = self._folders[parent]
        if real != self._within and not real.startswith(self._within.rstrip(os.sep) + os.sep):
            return False
        try:
            return not stat.S_ISLNK(os.lstat(f"{real}{os.sep}{path.name}").st_mode)
        except (OSError, ValueError):
            return False


def _parse_row(cells: dict[str, str], finder: FileFinder) -> tuple[Example, str]:
    """Return the example of a line, without its class number, and its label. Raises ValueError if it is invalid."""
    label, masked, text = cells.get("label", ""), cells.get("mask", ""), cells.get("region", "")
    # A cell may be empty only if the table has the other column; with both, each image needs its label.
    if not label and ("label" in cells or not masked):
        raise ValueError("it has no label" if "label" in cells else "it has no mask")
    path = finder.find(cells["path"], "file")
    mask = finder.find(masked, "mask") if masked else None
    level = _parse_numbers(cells["level"], "level", 1)[0] if cells.get("level") else 0
    region = None
    if text:
        y0, x0, height, width = _parse_numbers(text, "region", 4)
        if min(height, width) < 1:
            raise ValueError(f"the region {text!r} has no pixels: it is y0 x0 height width")
        region = Tile(Span(y0, y0 + height), Span(x0, x0 + width))
    return Example(path, None, mask, region, level, cells.get("slide", "")), label


def _parse_numbers(text: str, what: str, count: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split()]
    except ValueError:
        numbers = []
    beyond = bool(numbers) and (max(numbers) > _FURTHEST_PX or min(numbers) < -_FURTHEST_PX)
    if len(numbers) != count or beyond or (what == "level" and numbers[0] < 0):
        of = "y0 x0 height width, four whole numbers" if count == 4 else "one whole number, 0 or more"
        raise ValueError(f"the {what} {text!r} is not {of}")
    return numbers


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def _parse_class(label: str) -> int | None:
    """Return the class number that a label is, in any spelling (7, 07, 7.0, 7e0); None if it is none.

    >>> [_parse_class(label) for label in ("12", "2.0", "1e1", "0.5", "-1", "ill")]
    [12, 2, 10, None, None, None]
    """
    # pandas writes whole numbers with a ".0" if the column has held a missing value.
    value = float(label) if _NUMBER.fullmatch(label) else -1.0
    value = min(value, 2.0**53)  # from which on floats skip whole numbers: no class number, however large
    return int(value) if value.is_integer() and value >= 0 else None


def _make_class_names(table: Path, labels: set[str]) -> list[str]:
    """Return the class names, in order: the sorted labels, or "0" to the highest if all labels are class numbers.

    Raises ImageError if the labels have no clear order: some are numbers, but not all of them are class numbers.
    """
    if not any(_NUMBER.fullmatch(label) for label in labels):
        return sorted(labels)
    classes = {label: _parse_class(label) for label in labels}
    if large := [label for label, index in classes.items() if index is not None and index > _MOST_CLASSES]:
        raise ImageError(f"{table}: the label {large[0]:.20} is no class number: they go from 0 to {_MOST_CLASSES}.")
    if others := sorted(label for label, index in classes.items() if index is None):
        examples = ", ".join(f"{label:.20}" for label in others[:_LISTED]) + ", ..." * (len(others) > _LISTED)
        raise ImageError(
            f"{table}: some labels are numbers, but {len(others)} of {len(labels)} different ones are no class numbers "
            f"({examples}), so that the order of the classes is not clear. Number all classes from 0, or give all "
            "labels in their order: names=(...)."
        )
    return [str(index) for index in range(1 + max(index for index in classes.values() if index is not None))]


def _number_labels(labels: set[str], names: Sequence[str]) -> dict[str, int]:
    """Return the class of each label that is one of `names`, or the same number in another spelling; "" has none.

    >>> _number_labels({"07", "ill", ""}, ("None", "", "7"))
    {'None': 0, '7': 2, '07': 2}
    """
    known = {name: index for index, name in enumerate(names) if name}
    parsed = {label: _parse_class(label) for label in labels - known.keys()}
    other = {label: str(index) for label, index in parsed.items() if index is not None}
    return known | {label: known[name] for label, name in other.items() if name in known}
