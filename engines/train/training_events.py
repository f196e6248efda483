"""Events of a training, their log, and the quality of predictions as counts that add up over ranks and steps."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.errors import PlanError, make_path
from mpi4dl_nb.engines.formatting import FactTable, format_number, format_percent, format_seconds
from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning, compute_classes
from mpi4dl_nb.engines.images.regular_file import read_bounded, write_beside

# The quality of predictions, counted class by class, so that the counts of ranks, steps and images add up.


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts per class: how many predictions are `right`, were `predicted`, and how many labels are `true`.

    They count images, or pixels if `pixels` is set.

    >>> from mpi4dl_nb import Counts
    >>> both = Counts((2, 1), (3, 2), (3, 2)) + Counts((1, 0), (1, 0), (1, 0))
    >>> both.right, round(both.accuracy, 3), both.dice
    ((3, 1), 0.667, 0.5)
    """

    right: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()
    true: tuple[int, ...] = ()
    pixels: bool = False

    def __add__(self, other: Counts) -> Counts:
        if not self.true or not other.true:
            return self if self.true else other
        pairs = ((self.right, other.right), (self.predicted, other.predicted), (self.true, other.true))
        right, predicted, true = (tuple(map(sum, zip(*pair, strict=True))) for pair in pairs)
        return Counts(right, predicted, true, self.pixels)

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions; None if nothing was counted."""
        return sum(self.right) / judged if (judged := sum(self.true)) else None

    @property
    def dice(self) -> float | None:
        """2 right / (predicted + true), averaged over the classes that occur; of two classes, that of the second alone.

        (Dice, 1945, "Measures of the amount of ecologic association between species".) None if no class occurs.
        """
        first = 1 if len(self.true) == 2 else 0
        sums = zip(self.right[first:], self.predicted[first:], self.true[first:], strict=True)
        coefficients = [2 * right / (predicted + true) for right, predicted, true in sums if predicted + true]
        return statistics.fmean(coefficients) if coefficients else None


@dataclass(frozen=True, slots=True)
class Scores:
    """The loss and the counts on held-out images. `bad` says which images were left out, and why.

    The loss is the mean over images, each weighted by the denominator of its own loss: labels that are not ignored,
    class weights. For a loss of this form it equals the loss of all images in one batch. For any other loss it is the
    plain mean.
    """

    loss: float
    counts: Counts
    bad: tuple[str, ...] = ()


def count_predictions(scores: Tensor, labels: Tensor, meaning: OutputMeaning = OutputMeaning.CLASSES) -> Counts:
    """Count (N, C, ...) scores against labels, integers or not.

    Of classes, labels are (N, ...) or (N, 1, ...). Of C independent labels, they are (N, C, ...), and each is counted
    by itself, as absent or present; class numbers (N, ...) are compared with the highest score. Labels that are no
    class are not counted, and nothing is counted if the shapes do not match, or the scores stand for no classes.
    """
    if scores.dim() < 2 or meaning in (OutputMeaning.AMOUNTS, OutputMeaning.UNKNOWN):
        return Counts()
    if meaning is not OutputMeaning.CLASSES and (labels.shape == scores.shape or scores.shape[1] == 1):
        # One channel for each label: pairs of (absent, present), whatever the label.
        labels = labels.unsqueeze(1) if labels.shape == (*scores.shape[:1], *scores.shape[2:]) else labels
        present = compute_classes(scores, meaning)
        return _count(present, labels, 2, labels.dim() > 2) if labels.shape == scores.shape else Counts()
    shape = (*scores.shape[:1], *scores.shape[2:])
    if labels.shape == (shape[0], 1, *shape[1:]):
        labels = labels[:, 0]
    if labels.shape != shape:
        return Counts()
    return _count(scores.argmax(1), labels, scores.shape[1], labels.dim() > 1)


def _count(guess: Tensor, labels: Tensor, classes: int, of_pixels: bool) -> Counts:
    truth = labels.to(guess)
    judged = (truth >= 0) & (truth < classes)
    guess, truth = guess[judged], truth[judged]
    # Three histograms over the classes: right, predicted, true.
    samples = (guess[guess == truth], guess, truth)
    right, predicted, true = (tuple(torch.bincount(numbers, minlength=classes).tolist()) for numbers in samples)
    return Counts(right, predicted, true, of_pixels)


# The events of a training: results of each step and each epoch, skipped images and recoveries; and its summary.


@dataclass(frozen=True, slots=True, repr=False)
class StepResult(FactTable):
    """The result of one step. `counts` are of its predictions, made before the weights changed.

    `seconds` is the time to compute the step, and `wait_s` the time the ranks waited for its images.

    >>> from mpi4dl_nb import Counts, StepResult
    >>> result = StepResult(epoch=0, step=3, images=8, seconds=2.0, loss=0.5, counts=Counts())
    >>> result.images_per_s
    4.0
    """

    epoch: int
    step: int
    images: int
    seconds: float
    loss: float
    counts: Counts
    wait_s: float = 0.0

    @property
    def caption(self) -> str:
        return f"Step {self.step} of epoch {self.epoch}"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "loss": f"{self.loss:.6g}",
            "accuracy": None if self.accuracy is None else format_percent(self.accuracy),
            "images": f"{self.images}, {format_number(self.images_per_s)} a second",
            "time": format_seconds(self.seconds),
            "wait for images": format_seconds(self.wait_s),
        }

    @property
    def images_per_s(self) -> float:
        """Images per second, without the time to read them."""
        return self.images / self.seconds

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions; None if the model does not predict classes."""
        return self.counts.accuracy


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """A bad image that all ranks leave out from now on: which one, and why.

    >>> from mpi4dl_nb import SkippedImage
    >>> SkippedImage("a.png: it ends early").text
    'a.png: it ends early'
    """

    text: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recovery: after a failure the training continues, with `steps` steps and `epochs` epochs done.

    >>> from mpi4dl_nb import Recovered
    >>> Recovered("Rank 1 died; it was restarted.", steps=4, epochs=1).steps
    4
    """

    text: str
    steps: int
    epochs: int


@dataclass(frozen=True, slots=True, repr=False)
class EpochResult(FactTable):
    """The result of an epoch, or of the rest of one.

    `loss` is the mean over its images. `left_out` is the number of images known to be bad. `held_out` holds the scores
    on held-out images.

    >>> from mpi4dl_nb import Counts, EpochResult, StepResult
    >>> EpochResult.of([StepResult(0, 0, 8, 2.0, 0.5, Counts()), StepResult(0, 1, 8, 2.0, 0.25, Counts())]).loss
    0.375
    """

    epoch: int
    steps: int
    images: int
    seconds: float
    wait_s: float
    loss: float
    counts: Counts
    left_out: int = 0
    held_out: Scores | None = None

    @property
    def caption(self) -> str:
        return f"Epoch {self.epoch}"

    @property
    def facts(self) -> dict[str, object]:
        skipped = {"epoch", "seconds", "images_per_s", "data_wait"}
        numbers = {name: value for name, value in self.record.items() if value is not None and name not in skipped}
        return {
            **{
                name.replace("_", " "): value if type(value) is int else f"{value:.6g}"
                for name, value in numbers.items()
            },
            "time": format_seconds(self.seconds + self.wait_s),
            "waiting for images": format_percent(self.data_wait),
            "images a second": format_number(self.images_per_s),
        }

    @classmethod
    def of(cls, steps: Sequence[StepResult], left_out: int = 0, held_out: Scores | None = None) -> EpochResult:
        """Merge the results of an epoch's steps."""
        seconds, wait_s, images = (
            sum(getattr(step, name) for step in steps) for name in ("seconds", "wait_s", "images")
        )
        # A smaller last step weighs less, so that the mean is that over images.
        loss = statistics.fmean([step.loss for step in steps], [step.images for step in steps])
        counts = sum((step.counts for step in steps), Counts())
        return cls(steps[0].epoch, len(steps), images, seconds, wait_s, loss, counts, left_out, held_out)

    @property
    def images_per_s(self) -> float:
        """Images per second, including the time to wait for them."""
        return self.images / (self.seconds + self.wait_s)

    @property
    def data_wait(self) -> float:
        """The fraction of the time in which the ranks waited for images."""
        return self.wait_s / (self.seconds + self.wait_s)

    @property
    def record(self) -> dict[str, float | int | None]:
        """The result as plain numbers; None for values that do not exist."""
        return {
            "epoch": self.epoch,
            "steps": self.steps,
            "images": self.images,
            "seconds": self.seconds + self.wait_s,
            "images_per_s": self.images_per_s,
            "data_wait": self.data_wait,
            "left_out": self.left_out,
            **_make_score_record("", self.loss, self.counts),
            **_make_score_record(
                "held_out_", *((self.held_out.loss, self.held_out.counts) if self.held_out else (None, Counts()))
            ),
        }

    def __str__(self) -> str:
        """Format the result as one line."""
        record = self.record
        worth = ("accuracy", "dice", "held_out_loss", "held_out_accuracy", "held_out_dice")
        parts = [f"{name.replace('_', ' ')} {record[name]:.4f}" for name in worth if record[name] is not None]
        parts += [f"{self.images_per_s:.2f} images/s", f"{self.data_wait:.0%} of the time waiting for images"]
        parts += [f"{self.left_out} bad images left out"] if self.left_out else []
        return f"Epoch {self.epoch} Global loss: {self.loss:.6f}, {', '.join(parts)}"


TrainingEvent = SkippedImage | StepResult | EpochResult | Recovered
"""An event of a training, passed on as it happens."""


def _make_score_record(prefix: str, loss: float | None, counts: Counts) -> dict[str, float | None]:
    dice = counts.dice if counts.pixels else None
    return {f"{prefix}loss": loss, f"{prefix}accuracy": counts.accuracy, f"{prefix}dice": dice}


def summarise(steps: Sequence[StepResult], last: EpochResult) -> dict[str, object]:
    """Summarise a training in one record: loss, accuracy and so on are those of its last epoch."""
    speeds = [step.images_per_s for step in steps]
    record = last.record
    known = ("data_wait", "dice", "held_out_loss", "held_out_accuracy", "held_out_dice")
    return {
        "epochs": last.epoch + 1,
        "steps": len(steps),
        "images_per_step": max(step.images for step in steps),
        "images_per_s_mean": round(statistics.fmean(speeds), 4),
        "images_per_s_median": round(statistics.median(speeds), 4),
        "loss": last.loss,
        "accuracy": last.counts.accuracy,
        **{name: record[name] for name in known if record[name] is not None},
        "left_out": last.left_out,
    }


# The log: a record for each epoch, as CSV, JSON or JSON lines, and as TensorBoard scalars.


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


def _to_json(record: Record) -> Record:
    """Replace numbers that are not finite by None: JSON has none of them."""
    return {name: value if value is None or math.isfinite(value) else None for name, value in record.items()}


def _check_records(records: Sequence[Record]) -> None:
    """Raise ValueError if these are not the records of a log: any other file would be written over."""
    if not records:
        raise ValueError("it has no record")
    for record in records:
        if record.get("epoch") is None:
            raise ValueError("a record has no epoch")
        for name, value in record.items():
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{name} is no number, but {str(value)[:20]!r}")


_FORMS: dict[str, tuple[Callable[[Iterable[Record]], str], Callable[[str], list[Record]]]] = {
    ".csv": (_format_csv, _parse_csv),
    ".json": (
        lambda records: json.dumps(list(map(_to_json, records)), indent=1) + "\n",
        lambda text: [dict(record) for record in json.loads(text)],
    ),
    ".jsonl": (
        lambda records: "".join(json.dumps(_to_json(record)) + "\n" for record in records),
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
        self.path = make_path(path)
        if self.path.suffix not in _FORMS:
            raise PlanError(f"The log {self.path} ends in {self.path.suffix!r}. Choose one of {', '.join(_FORMS)}.")
        self._write, read = _FORMS[self.path.suffix]
        try:
            text = read_bounded(self.path).decode() if self.path.exists() else ""
            self.records = read(text) if text.strip() else []
            if text.strip():
                _check_records(self.records)
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
        with self._giving_up_board():
            self._board = SummaryWriter(str(self.path.with_suffix(".tensorboard")))

    def add(self, record: Record) -> None:
        """Add a record. If it cannot be written (a full disk), a warning is issued and the training continues."""
        self.records.append(record)
        try:
            self._save()
        except OSError as error:
            warnings.warn(f"The log {self.path} cannot be written now: {error.strerror}.", stacklevel=2)
        if self._board is not None:
            with self._giving_up_board():
                for name, value in record.items():
                    if name != "epoch" and value is not None:
                        self._board.add_scalar(name, value, record["epoch"])
                self._board.flush()

    @contextmanager
    def _giving_up_board(self) -> Iterator[None]:
        """Within this context, let an error of the disk end the TensorBoard log, with a warning, and nothing else."""
        try:
            yield
        except OSError as error:
            self._board = None
            warnings.warn(f"No more is written for TensorBoard: {error}.", stacklevel=4)

    def _save(self) -> None:
        with write_beside(self.path) as beside, beside.open("w", encoding="utf-8") as file:
            file.write(self._write(self.records) if self.records else "")
            file.flush()
            os.fsync(file.fileno())  # a power cut leaves the old file or the new one, too

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self._board is not None:
            with self._giving_up_board():
                self._board.close()
