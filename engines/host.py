"""What a rank does for the notebook: runs functions, keeps trainings between them, tells failures as data."""

from __future__ import annotations

import io
import pickle
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import torch
from torch import Tensor

from engines.comm.world import World
from engines.errors import ReleasedError
from engines.whereabouts import Board, working

if TYPE_CHECKING:
    from engines.train import RankCourse
    from engines.training import RankTraining
    from engines.walk import RankWalk

__all__ = ["Answer", "Failure", "Host", "dumps", "execute", "join", "recover", "regroup", "run", "while_walking"]

_OURS = Path(__file__).parent

# How MPI names what a rank sees when another one has failed.
_BY_OTHERS = re.compile("MPI_ERR_(REVOKED|PROC_FAILED)")


class Host:
    """One rank's state between two calls: its end of the world; trainings, courses and predictions by name.

    On its `board` it writes where it is.
    """

    def __init__(self, world: World, board: Board | None = None) -> None:
        self.world, self.board = world, board or Board()
        self.trainings: dict[str, RankTraining] = {}
        self.courses: dict[str, RankCourse] = {}
        self.predictions: dict[str, Any] = {}
        self.walk: RankWalk | None = None

    def leave(self) -> None:
        """Give up the step that is walked, if any: messages under way must not meet those of other work. Collective."""
        if self.walk is None or self.walk.done:
            self.walk = None
        else:
            self.world.fail()
            self.recover()

    def recover(self) -> None:
        """Bring the ranks together again, without old messages; a step that was walked is given up. Collective."""
        walk, self.walk = self.walk, None
        self.world.recover()
        if walk is not None:
            walk.drop()  # not before: messages under way still lie in its memory


def while_walking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that ranks may be called with in the middle of a step that is walked: it sends no messages."""
    function.while_walking = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Failure:
    """An exception as plain data. `released` says that it only follows from another rank's failure.

    `links` are the exceptions that led to it, oldest first, each with its (file, line, function) frames. `where` is
    what the rank was doing.
    """

    kind: str
    message: str
    released: bool = False
    links: tuple[tuple[str, tuple[tuple[str, int, str], ...]], ...] = ()
    where: str = ""

    @classmethod
    def of(cls, error: BaseException, where: object = "") -> Failure:
        """Only what can travel: the exception itself may be of a type that the notebook does not know."""
        chain = list(_chain(error))
        links = tuple((_title(link), tuple(_frames(link))) for link in reversed(chain))
        return cls(type(error).__name__, str(error), any(map(_follows, chain)), links, str(where or ""))

    def traceback(self) -> str:
        """As Python writes it. Made where it is shown: only the notebook knows the text of its cells."""
        parts = (
            "".join(traceback.format_list([traceback.FrameSummary(*f) for f in frames])) + title
            for title, frames in self.links
        )
        return "\n\nwhich led to\n\n".join(parts)


@dataclass(frozen=True)
class Answer:
    """What a rank says to a call: the function's value, or why there is none."""

    value: Any = None
    failure: Failure | None = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _title(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """The user's own frames, or ours where there are none, and the last one, where it happened."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    known = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    users = [frame for frame in known if not Path(frame.filename).is_relative_to(_OURS)]
    for frame in frames:
        if frame in (users or known) or frame is frames[-1]:
            yield frame.filename, frame.lineno or 0, frame.name


def _follows(error: BaseException) -> bool:
    """Whether a rank failed only because another one did, or because it was told to stop."""
    return isinstance(error, ReleasedError | KeyboardInterrupt) or bool(_BY_OTHERS.search(str(error)))


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # A tile that is a view takes the storage of its whole image along, to every rank: send a copy.
        if type(obj) is Tensor and not obj.requires_grad and _is_part(obj):
            return obj.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _is_part(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def dumps(value: Any) -> bytes:
    """Pickled, functions and classes of a notebook's cells included."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def execute(host: Host, common: bytes, own: bytes) -> bytes:
    """Call `function(host, *args, *own)`, where `common` is `(function, args)`, to a pickled Answer.

    If that fails the other ranks are released first, so that none waits for this one. A step that is walked is given
    up, unless the function says that it may go on (`while_walking`).
    """
    with working(host.board, "takes its work"):
        try:
            function, args = cloudpickle.loads(common)
            host.board.at(getattr(function, "__qualname__", repr(function)).encode())
            if not getattr(function, "while_walking", False):
                host.leave()
            return dumps(Answer(function(host, *args, *cloudpickle.loads(own))))
        except BaseException as error:
            return _failed(host, error)


def _failed(host: Host, error: BaseException) -> bytes:
    host.world.fail()
    return dumps(Answer(failure=Failure.of(error, host.board.read())))


@while_walking
def recover(host: Host) -> None:
    """Be ready for new work after a failure; collective. Trainings stay, on the same world, made fresh."""
    host.recover()


@while_walking
def regroup(host: Host) -> None:
    """As `recover`, where there are fewer ranks than before: what was made for all of them is given up."""
    host.recover()
    for held in (host.trainings, host.courses, host.predictions):
        held.clear()


@cache
def _this_rank() -> Host:
    from engines.comm.mpi import MpiWorld

    return Host(MpiWorld(), Board.inherited())


def join() -> tuple[int, int]:
    """(rank, size) of this MPI process, once all have come; collective."""
    world = _this_rank().world
    return world.rank, world.size


def run(common: bytes, own: bytes) -> bytes:
    """`execute` on this MPI process. SIGINT stops it, once."""
    host = _this_rank()
    torch.set_grad_enabled(True)  # an interrupt just as `no_grad` began or ended leaves it off, and nothing is trained
    signal.signal(signal.SIGINT, _stop_once)
    try:
        return execute(host, common, own)
    except KeyboardInterrupt as error:  # held back in MPI, it came while that call's failure was being told
        return _failed(host, error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # or the answer could be lost; until the next message


def _stop_once(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
