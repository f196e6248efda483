"""The errors that a user can meet. Each message says what is wrong, with the numbers, and how to correct it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path


class Mpi4dlError(Exception):
    """The base class of all errors that this package raises on purpose.

    `rank` is the first rank that failed by itself, if ranks were at work, and `remote_traceback` its traceback as text.

    >>> from mpi4dl_nb import Mpi4dlError, Plan
    >>> try:
    ...     Plan(split_size=0)
    ... except Mpi4dlError as error:
    ...     print(type(error).__name__)
    PlanError
    """

    rank: int | None = None
    remote_traceback = ""

    def _render_traceback_(self) -> list[str]:
        """Return the text for a notebook (IPython calls this): the user's own lines, the message and its notes.

        The user's own are the lines of the cell and of modules that are not installed, such as the layer that fails
        while PyTorch traces it. `__traceback__` and `__cause__` stay complete, and a note says how to read them.
        """
        frames = [frame for error in iterate_causes(self) for frame in traceback.extract_tb(error.__traceback__)]
        # An error and its causes have the outer frames in common: each line is listed once.
        lines = {(frame.filename, frame.lineno): frame for frame in frames if _is_users(frame.filename)}
        hides = any(f"{os.sep}torch{os.sep}" in frame.filename for frame in frames)
        notes = [*getattr(self, "__notes__", ()), *([_WHERE_ALL_IS] if hides else ())]
        return ["".join(traceback.format_list(list(lines.values()))), f"{type(self).__name__}: {self}", *notes]


_WHERE_ALL_IS = "The traceback of PyTorch is hidden: import sys, traceback; traceback.print_exception(sys.last_value)"
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"


def _is_users(filename: str) -> bool:
    """Return whether a frame is in a cell, or in a file that is neither ours nor installed."""
    installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    generated = filename.startswith("<") and not filename.startswith("<ipython")
    return not (installed or generated or filename.startswith((_OURS, _PYTHON)))


class PlanError(Mpi4dlError, ValueError):
    """The plan cannot be run: its numbers do not fit each other, the model, the image or the cluster.

    >>> from mpi4dl_nb import Plan, PlanError
    >>> try:
    ...     Plan(split_size=2, spatial_size=3)
    ... except PlanError as error:
    ...     print(str(error).partition(". ")[2])
    Use spatial_size <= 2, or a larger split_size.
    """


class LostTrainingError(PlanError):
    """The ranks do not hold the training, or some of them have done another number of its steps."""


class TraceError(Mpi4dlError):
    """The model cannot be traced, or an operator has no rule for tiles.

    >>> import torch
    >>> from mpi4dl_nb import Plan, TraceError, forecast
    >>> class Chooses(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x if x.sum() > 0 else -x
    >>> try:
    ...     forecast(Chooses(), Plan(split_size=1), (1, 3, 32, 32), "Summit")
    ... except TraceError as error:
    ...     print(type(error).__name__)
    TraceError
    """


class ImageError(Mpi4dlError, ValueError):
    """An image, or its labels, does not match what the plan was made for.

    >>> from mpi4dl_nb import ImageError, StainCrops, immunohistochemistry
    >>> try:
    ...     StainCrops(immunohistochemistry(), size_px=1000)
    ... except ImageError as error:
    ...     print("512 x 512" in str(error))
    True
    """


AS_TENSORS = (
    "Training takes such numbers as tensors, with any number of channels, which may be the planes of a stack: "
    "training.fit([(torch.as_tensor(pixels.astype('float32'))[None], labels)]) for pixels of shape (C, H, W)."
)
"""The way on for numbers that are no picture: tensors are not limited to colours of 8 bits."""


class CheckpointError(Mpi4dlError, ValueError):
    """A checkpoint cannot be written, is damaged, or belongs to another training. Earlier files are unchanged.

    >>> from mpi4dl_nb import CheckpointError, scheduler_state
    >>> try:
    ...     scheduler_state("a folder that is not there")
    ... except CheckpointError as error:
    ...     print(type(error).__name__)
    CheckpointError
    """


class DamagedError(CheckpointError):
    """The contents of a checkpoint differ from what was written, or are no checkpoint; `why` gives the reason."""

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or message


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read at present, for lack of memory, file handles or permission. It may be intact."""


class VerifyError(Mpi4dlError, RuntimeError):
    """The plain model, to which `verify` compares the ranks, cannot be trained in one process.

    >>> from mpi4dl_nb import Mpi4dlError, VerifyError
    >>> issubclass(VerifyError, Mpi4dlError)
    True
    """


class RankError(Mpi4dlError, RuntimeError):
    """Work failed on a rank.

    >>> from mpi4dl_nb import Cluster, RankError
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     try:
    ...         cluster.call(lambda host: 1 / (1 - host.world.rank))
    ...     except RankError as error:
    ...         print(error.rank)
    1
    """

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback


class ReleasedError(RankError):
    """A rank stopped waiting because another rank has failed; the cause is that rank's error."""


class LossError(RankError):
    """The loss is not finite; no weight was changed.

    >>> import torch
    >>> from mpi4dl_nb import Cluster, LossError, Plan, Training, resnet20_v1
    >>> plan = Plan(split_size=2, spatial_size=0)
    >>> with Cluster(plan.ranks, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32))
    ...     try:
    ...         training.step(torch.full((2, 3, 32, 32), torch.nan), torch.tensor([3, 7]))
    ...     except LossError as error:
    ...         print("The loss is nan." in str(error))
    True
    """

    @classmethod
    def of(cls, loss: float, micro_batch: int, micro_batches: int, cause: str) -> LossError:
        """Make the error for the loss of one of a step's micro-batches, and its cause."""
        which = f" of micro-batch {micro_batch} (of {micro_batches})" if micro_batches > 1 else ""
        return cls(f"The loss{which} is {loss}. {_UNCHANGED} {cause}")

    def with_cause(self, cause: str) -> LossError:
        """Return the same error with another cause, found by more ranks."""
        head, _, _ = str(self).partition(_UNCHANGED)
        error = LossError(f"{head}{_UNCHANGED} {cause}", self.rank, self.remote_traceback)
        # A new exception does not inherit the notes of the old one.
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error


_UNCHANGED = "No weight was changed."


# The process's working folder, to which relative paths refer; it may have been deleted.


def is_deleted() -> bool:
    """Return whether the working folder was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def describe_working_folder() -> str:
    """Describe the folder to which relative paths refer."""
    return "a folder that was deleted: os.chdir to another one" if is_deleted() else str(Path.cwd())


def make_path(path: str | PathLike[str]) -> Path:
    """Return a path under which this process finds the file: names of files are UTF-8, in any locale.

    Python encodes names by the locale. In that of LC_ALL=C without UTF-8 mode it has no letter beyond ASCII, and the
    bytes of such letters are placeholders, one each.

    >>> os.fsencode(make_path("Hände.png"))
    b'H\\xc3\\xa4nde.png'
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        with suppress(UnicodeEncodeError):  # half of a surrogate pair is no letter anywhere: opening the file says so
            return Path(os.fsdecode(error.object.encode("utf-8", "surrogateescape")))
    return Path(path)


def read_name(path: Path) -> str:
    """Return the name of a file or folder as text, in any locale.

    >>> read_name(Path("data/Hände"))
    'Hände'
    """
    return os.fsencode(path.name).decode("utf-8", "surrogateescape")


def make_absolute(path: str | PathLike[str]) -> Path:
    """Return the absolute path; unchanged if the working folder was deleted, so that a relative path leads nowhere.

    >>> make_absolute("/a/b").as_posix(), make_absolute("b") == Path.cwd() / "b"
    ('/a/b', True)
    """
    return make_path(path) if is_deleted() else make_path(path).absolute()


_LONGEST = 10_000  # characters of an exception's text


def get_message(error: BaseException) -> str:
    """Return the text of an exception, cut if it is long; if its text cannot be made, the reason for that.

    >>> class Mute(Exception):
    ...     def __str__(self):
    ...         return self.text
    >>> get_message(Mute())
    '(it has no text: its __str__ raised AttributeError)'
    >>> get_message(ValueError("x" * 30_000_000))[-29:]
    'x ... (30,000,000 characters)'
    """
    try:
        text = str(error)
    except BaseException as failure:  # the code is the user's: it may raise anything, and must not hide the error
        return f"(it has no text: its __str__ raised {type(failure).__name__})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text):,} characters)"


def iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that led to it, the latest first, each once: `raise error from error` is a circle.

    >>> error = OSError("disk")
    >>> error.__cause__ = error
    >>> list(iterate_causes(error))
    [OSError('disk')]
    """
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not exception for exception in seen):
        yield link
        seen.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
