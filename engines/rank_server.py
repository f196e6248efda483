"""What a rank does for the notebook: runs functions, keeps trainings between them, tells failures as data."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import torch

from engines.comm.world import World
from engines.errors import ReleasedError
from engines.notebook_imports import NotebookImports, make_import_error, sync_imports
from engines.output import LineBuffer, OutputLine, RankStream
from engines.packing import pack
from engines.status_board import StatusBoard, report_working

if TYPE_CHECKING:
    from engines.debug_step import RankStepper
    from engines.predict.calibrate import Calibration
    from engines.train_loop import RankTrainLoop
    from engines.training import RankTraining

__all__ = [
    "SPOKEN",
    "Failure",
    "RankServer",
    "Reply",
    "allow_during_step",
    "execute",
    "join",
    "recover",
    "recover_and_reset",
    "run",
]

SPOKEN = "\x1espoken "
"""What a line begins with that carries one of a rank's: the rest is JSON."""

_OURS = Path(__file__).parent

# How MPI names what a rank sees when another one has failed.
_BY_OTHERS = re.compile("MPI_ERR_(REVOKED|PROC_FAILED)")


class RankServer:
    """One rank's state between two calls: its end of the world; trainings, courses and predictions by name.

    On its `board` it writes where it is.
    """

    def __init__(self, world: World, board: StatusBoard | None = None) -> None:
        self.world, self.board = world, board or StatusBoard()
        self.trainings: dict[str, RankTraining] = {}
        self.courses: dict[str, RankTrainLoop] = {}
        self.predictions: dict[str, Any] = {}
        self.calibration: Calibration | None = None
        self.walk: RankStepper | None = None

    def abort_debug_step(self) -> None:
        """Give up the step that is walked, if any: messages under way must not meet those of other work. Collective."""
        if self.walk is None or self.walk.done:
            self.walk = None
        else:
            self.world.abort()
            self.recover()

    def recover(self) -> None:
        """Bring the ranks together again, without old messages; a step that was walked is given up. Collective."""
        walk, self.walk = self.walk, None
        self.world.recover()
        if walk is not None:
            walk.drop()  # not before: messages under way still lie in its memory


def allow_during_step(function: Callable[..., Any]) -> Callable[..., Any]:
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
        chain = list(_iterate_chain(error))
        links = tuple((_format_title(link), tuple(_select_frames(link))) for link in reversed(chain))
        return cls(type(error).__name__, str(error), any(map(_is_consequence, chain)), links, str(where or ""))

    def format_traceback(self) -> str:
        """As Python writes it. Made where it is shown: only the notebook knows the text of its cells."""
        parts = (
            "".join(traceback.format_list([traceback.FrameSummary(*f) for f in frames])) + title
            for title, frames in self.links
        )
        return "\n\nwhich led to\n\n".join(parts)


@dataclass(frozen=True)
class Reply:
    """What a rank says to a call: the function's value, or why there is none; and how many `lines` it has printed."""

    value: Any = None
    failure: Failure | None = None
    lines: int = 0


def _iterate_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _format_title(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _select_frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """The user's own frames, or ours where there are none, and the last one, where it happened."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    known = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    users = [frame for frame in known if not Path(frame.filename).is_relative_to(_OURS)]
    for frame in frames:
        if frame in (users or known) or frame is frames[-1]:
            yield frame.filename, frame.lineno or 0, frame.name


def _is_consequence(error: BaseException) -> bool:
    """Whether a rank failed only because another one did, or because it was told to stop."""
    return isinstance(error, ReleasedError | KeyboardInterrupt) or bool(_BY_OTHERS.search(str(error)))


def execute(host: RankServer, common: bytes, own: bytes, followed: NotebookImports | None = None) -> bytes:
    """Call `function(host, *args, *own)`, where `common` is `(function, args)`, to a pickled Answer.

    If that fails the other ranks are released first, so that none waits for this one. A step that is walked is given
    up, unless the function says that it may go on (`while_walking`). `followed`: what to do like the notebook before.
    """
    output = host.board.output
    before = output.emitted if output else 0
    with report_working(host.board, "takes its work"):
        try:
            if followed is not None:
                sync_imports(followed)
            function, args, own_args = _unpack_call(common, own)
            host.board.report(getattr(function, "__qualname__", repr(function)).encode())
            if not getattr(function, "allow_during_step", False):
                host.abort_debug_step()
            return _pack_reply(host, function(host, *args, *own_args), before)
        except BaseException as error:
            return _abort_and_reply(host, error, before)


def _unpack_call(common: bytes, own: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]:
    try:
        function, args = cloudpickle.loads(common)
        return function, args, cloudpickle.loads(own)
    except ImportError as error:
        raise make_import_error(error) from error


def _pack_reply(host: RankServer, value: Any, before: int, failure: Failure | None = None) -> bytes:
    """A pickled Answer, once all is emitted that was printed; `before` as many lines had been."""
    if (output := host.board.output) is None:
        return pack(Reply(value, failure))
    output.end()
    return pack(Reply(value, failure, output.emitted - before))


def _abort_and_reply(host: RankServer, error: BaseException, before: int) -> bytes:
    host.world.abort()
    return _pack_reply(host, None, before, Failure.of(error, host.board.read()))


@allow_during_step
def recover(host: RankServer) -> None:
    """Be ready for new work after a failure; collective. Trainings stay, on the same world, made fresh."""
    host.recover()


@allow_during_step
def recover_and_reset(host: RankServer) -> None:
    """As `recover`, where there are fewer ranks than before: what was made for all of them is given up."""
    host.recover()
    for held in (host.trainings, host.courses, host.predictions):
        held.clear()


@cache
def _get_server() -> RankServer:
    from engines.comm.mpi import MpiWorld

    host = RankServer(MpiWorld(), StatusBoard.from_environment())
    host.board.output = _redirect_output()
    # MPI's own end waits for all ranks, and those may wait for this one: it ends at once, so that they are told.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit.register(_exit_at_once, os.getpid())
    return host


def _exit_at_once(rank_pid: int) -> None:
    """Leave the interpreter without MPI's end; a process that the rank has forked ends as it likes."""
    if os.getpid() == rank_pid:
        os._exit(1)


def _redirect_output() -> LineBuffer:
    """From here on whatever this process prints goes to the notebook, line by line, and from threads, too."""
    way = sys.stdout

    def emit(line: OutputLine) -> None:
        way.write(f"\n{SPOKEN}{json.dumps([line.stream, line.text])}\n")

    output = LineBuffer(emit, way.flush)
    sys.stdout, sys.stderr = (RankStream(each, getattr(sys, each), lambda: output) for each in ("stdout", "stderr"))
    return output


def join() -> tuple[int, int, int]:
    """(rank, size, pid) of this MPI process, once all have come; collective."""
    world = _get_server().world
    return world.rank, world.size, os.getpid()


def run(common: bytes, own: bytes, followed: NotebookImports) -> bytes:
    """`execute` on this MPI process. SIGINT stops it, once."""
    host = _get_server()
    before = host.board.output.emitted if host.board.output else 0
    torch.set_grad_enabled(True)  # an interrupt just as `no_grad` began or ended leaves it off, and nothing is trained
    signal.signal(signal.SIGINT, _stop_once)
    try:
        return execute(host, common, own, followed)
    except KeyboardInterrupt as error:  # held back in MPI, it came while that call's failure was being told
        return _abort_and_reply(host, error, before)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # or the answer could be lost; until the next message


def _stop_once(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
