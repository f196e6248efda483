"""The log of a training: a record for each epoch, as CSV, JSON or JSON lines, and as TensorBoard scalars."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engines.errors import PlanError
from engines.images.regular_file import read_bounded

__all__ = ["EpochLog"]

Record = Mapping[str, float | int | None]


def _format_csv(records: Iterable[Record]) -> str:
    text = io.StringIO()
    rows = list(records)
    # A later training may have more columns (held-out images): the header has those of all records.
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parse_csv(text: str) -> list[Record]:
    def parse_number(word: str) -> float | int | None:
        if not word:
            return None
        return int(word) if word.lstrip("-").isdecimal() else float(word)

    return [{name: parse_number(word) for name, word in row.items()} for row in csv.DictReader(io.StringIO(text))]


_FORMS: dict[str, tuple[Callable[[Iterable[Record]], str], Callable[[str], list[Record]]]] = {
    ".csv": (_format_csv, _parse_csv),
    ".json": (
        lambda records: json.dumps(list(records), indent=1) + "\n",
        lambda text: [dict(record) for record in json.loads(text)],
    ),
    ".jsonl": (
        lambda records: "".join(json.dumps(record) + "\n" for record in records),
        lambda text: [dict(json.loads(line)) for line in text.splitlines()],
    ),
}


class EpochLog:
    """A log file whose suffix (.csv, .json or .jsonl) chooses its format. Records of earlier trainings are kept.

    The file is always complete: it is written to a temporary file, which is then renamed. If TensorBoard is installed,
    the same numbers go to the folder `NAME.tensorboard` next to it. Raises PlanError if the file cannot be written, or
    is not a log.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.suffix not in _FORMS:
            raise PlanError(f"The log {self.path} ends in {self.path.suffix!r}. Choose one of {', '.join(_FORMS)}.")
        self._write, read = _FORMS[self.path.suffix]
        try:
            text = read_bounded(self.path).decode() if self.path.exists() else ""
            self.records = read(text) if text.strip() else []
            self._save()
        except OSError as error:
            raise PlanError(
                f"The log {self.path} cannot be written: {error.strerror}. Name a file in a folder of yours."
            ) from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(
                f"{self.path} is there already, and is no log of a training ({type(error).__name__}: {error}). "
                "Name another file."
            ) from error
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # TensorBoard is optional
            return
        self._board = SummaryWriter(str(self.path.with_suffix(".tensorboard")))

    def add(self, record: Record) -> None:
        """Add a record. If it cannot be written (a full disk), a warning is issued and the training continues."""
        self.records.append(record)
        try:
            self._save()
        except OSError as error:
            warnings.warn(f"The log {self.path} cannot be written now: {error.strerror}.", stacklevel=2)
        if self._board is not None:
            for name, value in record.items():
                if name != "epoch" and value is not None:
                    self._board.add_scalar(name, value, record["epoch"])
            self._board.flush()

    def _save(self) -> None:
        # A reader, or a crash, sees the old file or the new one, and never half of one: write beside it, sync, rename.
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(self._write(self.records) if self.records else "")
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> EpochLog:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
