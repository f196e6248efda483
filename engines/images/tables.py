"""Tables of images: CSV files with a line for each image."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from os import PathLike
from pathlib import Path

from engines.errors import ImageError
from engines.images.example import Example
from engines.images.examples import ExampleImages
from engines.images.mask_file import Ignore
from engines.regular_file import is_within, read_bounded
from engines.spatial.tiles import Span, Tile
from engines.working_folder import describe_working_folder

__all__ = ["COLUMNS", "table_images", "write_table"]

COLUMNS = ("path", "label", "mask", "region", "level", "slide")
"""Of a table, as `table_images` explains them."""

_MOST_CLASSES, _FURTHEST_PX = 99_999, 1 << 31
_TOLD = 5  # lines of a table, before the others are only counted


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
    """The images of a table: a CSV file with a line for each, and these columns, in any order.

    - `path`: the picture's file, from the table's folder on. This one is needed, and `label` or `mask` or both.
    - `label`: the image's class, a name or a whole number from 0.
    - `mask`: a file of class numbers by pixel (grey or palette PNG, TIFF, `.npy`), as large as the region or as the
      whole level. Its numbers are taken as the file stores them.
    - `region`: `y0 x0 height width` in pixels of the level; none is the whole. What sticks out of the picture is white.
    - `level`: of the pyramid; 0, where nothing is said, is the finest.
    - `slide`: what images that resemble each other have in common, such as the patient: `split` keeps it on one side.

    `size` is (height, width) in pixels that all images are brought to as `fit` says (None: as they are); for these and
    `threshold` see `ExampleImages`.

    Labels that are all whole numbers from 0 are the classes. Otherwise they are names, and the classes are `names`,
    such as those of the table that a model was trained on, or else the names in their order. Masks have as many
    `classes` as is said, or two with a `threshold`. Pixels of a number in `ignore`, such as 255 for void, have no
    class: their label is the `ignore_index` of the loss (PyTorch's default is -100), so that it leaves them out. A loss
    that leaves no label out is refused.
    A table may come from anybody: its files must lie `within` a folder, links followed, which is its own unless given.
    Raises ImageError, which names the table, its lines and what is wrong with them, where a file is missing or a line
    cannot be understood; and unless `check` is off, so that bad images can be left out later, where a file is no
    picture, or has no such region, or its mask another size.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from mpi4dl_nb import table_images
    >>> folder = Path(tempfile.mkdtemp())
    >>> Image.read_new("RGB", (40, 30)).save(folder / "a.png")
    >>> lines = "path,label,region", "a.png,tumour,0 8 24 32"
    >>> size_bytes = (folder / "regions.csv").write_text("\\n".join(lines))
    >>> images = table_images(folder / "regions.csv", size=(24, 32), names=("benign", "tumour"))
    >>> images.label(0)
    1
    """
    table = Path(table)
    rows = list(_read_rows(table))
    troubles = _TableErrors(table)
    place = _FileScope(table.parent, Path(os.path.realpath(table.parent if within is None else within)))
    drafts = [draft for row in rows if (draft := _parse_row(row, place, troubles))]
    troubles.raise_if_any()
    names = names or _make_class_names(table, {draft.label for draft in drafts} - {""})
    masks = _resolve_mask_classes(table, drafts, classes, threshold)
    labels = {name: number for number, name in enumerate(names)}
    for draft in drafts:
        if draft.label and draft.label not in labels:
            troubles.add(draft.line, f"the label {draft.label!r} is none of {', '.join(names)}")
        elif masks and not draft.example.mask and labels[draft.label] >= masks:
            troubles.add(
                draft.line, f"it has no mask, and its class {labels[draft.label]} is none of the {masks} of the masks"
            )
        if check:
            _check(draft, troubles)
    troubles.raise_if_any()
    examples = [replace(draft.example, label=labels.get(draft.label)) for draft in drafts]
    return ExampleImages(examples, names, size, fit, masks, threshold, ignore if masks else None)


def write_table(
    table: str | PathLike[str], rows: Iterable[Sequence[object]], columns: Sequence[str] = COLUMNS[:2]
) -> int:
    """Write a table of these columns, and say how many lines it has; paths become relative to it.

    Raises ImageError where it cannot be written.
    """
    table = Path(table)
    lines = [[_format_cell(value, table.parent) for value in row] for row in rows]
    try:
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *lines])
    except OSError as error:
        raise ImageError(f"{table} cannot be written: {error.strerror}. Choose another place for the table.") from None
    return len(lines)


def _format_cell(value: object, folder: Path) -> object:
    return os.path.relpath(value, folder) if isinstance(value, Path) else value


@dataclass
class _TableErrors:
    """What is wrong with the lines of a table: told together, so that it is mended at once."""

    table: Path
    told: list[str] = field(default_factory=list)

    def add(self, line: int, text: str) -> None:
        """One more."""
        self.told.append(f"line {line}: {text.rstrip('.')}")

    def raise_if_any(self) -> None:
        """Raises ImageError where there are any."""
        if self.told:
            more = f"; and {len(self.told) - _TOLD} more lines" if len(self.told) > _TOLD else ""
            raise ImageError(f"{self.table}, {'; '.join(self.told[:_TOLD])}{more}. Mend or remove them.")


@dataclass(frozen=True)
class _TableRow:
    line: int
    cells: dict[str, str]

    def get(self, column: str) -> str:
        """Its text; empty where the table has no such column."""
        return self.cells.get(column, "")


@dataclass(frozen=True)
class _ParsedRow:
    """An example whose label is still a text."""

    line: int
    example: Example
    label: str


def _read_rows(table: Path) -> Iterator[_TableRow]:
    """Raises ImageError where there is no table, or its first line is no header."""
    try:
        with StringIO(read_bounded(table).decode("utf-8-sig"), newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(table, header)
            count = 0
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                if len(cells) != len(header):
                    raise ImageError(
                        f"{table}, line {reader.line_num}: it has {len(cells)} cells, but the header has "
                        f"{len(header)}. Put quotation marks around a cell that has a comma in it."
                    )
                count += 1
                yield _TableRow(reader.line_num, dict(zip(header, map(str.strip, cells), strict=True)))
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


@dataclass(frozen=True)
class _FileScope:
    """Where paths of a table begin, and the real folder that their files may not lie outside of."""

    folder: Path
    within: Path

    def resolve_file(self, name: str, what: str) -> Path:
        """Raises ValueError where there is none, or none that the table may name."""
        if not name:
            raise ValueError("it has no path")
        path = self.folder / name
        if "\0" not in name and not is_within(path, self.within):
            raise ValueError(
                f"the {what} {name!r} lies outside of {self.within} (if you trust the table: within=, or --within)"
            )
        if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises where a name is too long)
            raise ValueError(f"the {what} {path} is missing")
        return path


def _parse_row(row: _TableRow, place: _FileScope, troubles: _TableErrors) -> _ParsedRow | None:
    """None where something is wrong, which is added to the troubles."""
    try:
        label = row.get("label")
        if not label and ("label" in row.cells or not row.get("mask")):
            raise ValueError("it has no label" if "label" in row.cells else "it has no mask")
        path = place.resolve_file(row.get("path"), "file")
        mask = place.resolve_file(row.get("mask"), "mask") if row.get("mask") else None
        level = _parse_numbers(row.get("level") or "0", "level", 1)[0]
        return _ParsedRow(
            row.line, Example(path, None, mask, _parse_region(row.get("region")), level, row.get("slide")), label
        )
    except ValueError as trouble:
        troubles.add(row.line, str(trouble))
        return None


def _parse_region(text: str) -> Tile | None:
    if not text:
        return None
    y0, x0, height, width = _parse_numbers(text, "region", 4)
    if min(height, width) < 1:
        raise ValueError(f"the region {text!r} has no pixels: it is y0 x0 height width")
    return Tile(Span(y0, y0 + height), Span(x0, x0 + width))


def _check(draft: _ParsedRow, troubles: _TableErrors) -> None:
    try:
        draft.example.check()
    except ImageError as error:
        troubles.add(draft.line, str(error))


def _parse_numbers(text: str, what: str, count: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split()]
    except ValueError:
        numbers = []
    beyond = any(abs(number) > _FURTHEST_PX for number in numbers)
    if len(numbers) != count or beyond or (what == "level" and numbers[0] < 0):
        of = "y0 x0 height width, four whole numbers" if count == 4 else "one whole number, 0 or more"
        raise ValueError(f"the {what} {text!r} is not {of}")
    return numbers


def _make_class_names(table: Path, labels: set[str]) -> list[str]:
    """Of the classes, in order."""
    if not all(label.isascii() and label.isdigit() for label in labels):
        return sorted(labels)
    if labels and len(longest := max(labels, key=len)) > len(str(_MOST_CLASSES)):
        raise ImageError(f"{table}: the label {longest:.20} is no class number: they go from 0 to {_MOST_CLASSES}.")
    return [str(number) for number in range(1 + max(map(int, labels), default=-1))]


def _resolve_mask_classes(
    table: Path, drafts: Sequence[_ParsedRow], classes: int | None, threshold: int | None
) -> int | None:
    if not any(draft.example.mask for draft in drafts):
        return None
    if classes is None and threshold is None:
        raise ImageError(
            f"{table} has masks. Say how many classes their numbers stand for (classes=), or above which number "
            "a pixel is of class 1 and not 0 (threshold=)."
        )
    return classes or 2
