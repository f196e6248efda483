"""A rank's server for the notebook: it runs functions, keeps trainings between calls, and returns failures as data."""

from __future__ import annotations

import _thread
import atexit
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, Protocol, TypeVar

import cloudpickle
import torch

from mpi4dl_nb.engines.comm.output import LineBuffer, OutputLine, RankStream
from mpi4dl_nb.engines.comm.status_board import StatusBoard, report_working
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import Mpi4dlError, RankError, ReleasedError, get_message, iterate_causes
from mpi4dl_nb.engines.server.notebook_imports import NotebookImports, make_import_error, pack, sync_imports

SPOKEN = "\x1espoken "
"""The prefix of a line that carries a line of a rank's output; the rest is JSON."""

_OURS = Path(__file__).parents[1]

_MOST_LINKS = 30  # exceptions of a chain that are told

_AGAIN_S = 0.01  # until an interrupt that came during a `__del__` is tried again

# MPI's error classes on a rank when another rank has failed.
_BY_OTHERS = re.compile("MPI_ERR_(REVOKED|PROC_FAILED)")


Kept = TypeVar("Kept")


class PausedStep(Protocol):
    """A step that a rank has begun and that waits for the notebook, with messages under way."""

    @property
    def done(self) -> bool:
        """Whether all of it has run."""

    def drop(self) -> None:
        """Free the buffers of its messages, which will not arrive any more."""


class RankServer:
    """One rank's state between two calls: its world, a step that waits, and the objects that its functions keep.

    The server writes on `board` what the rank is doing.
    """

    def __init__(self, world: World, board: StatusBoard | None = None) -> None:
        self.world, self.board = world, board or StatusBoard()
        self.paused: PausedStep | None = None
        self._kept: dict[type, dict[str, Any]] = {}
        self.arriving: bytearray | None = None  # parts of the next call
        self.leaving = b""  # the last reply, of which parts are still to be fetched

    def get_kept(self, kind: type[Kept]) -> dict[str, Kept]:
        """Return the objects of one kind that the rank keeps, such as its trainings, by name. Adding one keeps it."""
        return self._kept.setdefault(kind, {})

    def abort_debug_step(self) -> None:
        """Abort the debug step, if any: its pending messages must not match those of other work. Collective."""
        if self.paused is None or self.paused.done:
            self.paused = None
        else:
            self.reconnect(self.world.renew)

    def discard(self) -> None:
        """Close and forget all that the rank keeps."""
        for objects in self._kept.values():
            for kept in objects.values():
                if hasattr(kept, "close"):  # files, loaders and settings of the allocator outlive the object otherwise
                    kept.close()
        self._kept.clear()

    def reconnect(self, connect: Callable[[], None]) -> None:
        """Connect the ranks by a function of the world, without old messages; a debug step is aborted. Collective."""
        paused, self.paused = self.paused, None
        connect()
        if paused is not None:
            paused.drop()  # only now: until then pending messages still use the step's buffers


def allow_during_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that ranks may run in the middle of a debug step: it sends no messages."""
    function.allow_during_step = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Failure:
    """An exception as plain data. `released`: it is only the consequence of another rank's failure.

    `links` are the chained exceptions, oldest first, each with its (file, line, function) frames. `where` is the rank's
    status when it failed.
    """

    kind: str
    message: str
    released: bool = False
    links: tuple[tuple[str, tuple[tuple[str, int, str], ...]], ...] = ()
    where: str = ""

    @classmethod
    def of(cls, error: BaseException, where: object = "") -> Failure:
        """Make the failure from an exception, without the exception itself: the notebook may not know its type.

        Long texts are cut, and of a long chain of exceptions the oldest ones are left out.
        """
        kind, message = type(error).__name__, get_message(error)
        try:
            chain = list(islice(iterate_causes(error), _MOST_LINKS))
            # Frames are strings and numbers, so that the notebook needs none of the rank's modules to read them.
            texts = [get_message(exception) for exception in chain]
            links = tuple(
                (f"{type(exception).__name__}: {text}", tuple(_select_frames(exception)))
                for exception, text in zip(reversed(chain), reversed(texts), strict=True)
            )
            # It only follows from another rank's failure, or from an interrupt, if any exception of its chain does.
            released = any(
                isinstance(exception, ReleasedError | KeyboardInterrupt) or _BY_OTHERS.search(text)
                for exception, text in zip(chain, texts, strict=True)
            )
        except Exception:  # the user's exception has a cause or a file name of which Python makes no traceback
            return cls(kind, message, isinstance(error, KeyboardInterrupt), ((f"{kind}: {message}", ()),))
        return cls(kind, message, released, links, str(where or ""))

    def format_traceback(self) -> str:
        """Format the traceback as Python does. Only the notebook can: it alone has the source of its cells."""
        return "\n\nwhich led to\n\n".join(_format_frames(frames) + title for title, frames in self.links)


@dataclass(frozen=True)
class Reply:
    """A rank's reply to a call: the function's value or failure, and the number of `lines` it has printed."""

    value: Any = None
    failure: Failure | None = None
    lines: int = 0


def _format_frames(frames: Sequence[tuple[str, int, str]]) -> str:
    summaries = [traceback.FrameSummary(*frame, lookup_line=False) for frame in frames]
    try:
        return "".join(traceback.format_list(summaries))
    except Exception:  # a file name that is none: Python looks for the lines of source there
        return "".join(f"  File {file!r}, line {line}, in {name}\n" for file, line, name in frames)


def _select_frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """Yield the user's own frames, or ours if there are none, and always the last frame."""
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    known = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    users = [frame for frame in known if not Path(frame.filename).is_relative_to(_OURS)]
    for frame in frames:
        if frame in (users or known) or frame is frames[-1]:
            yield frame.filename, frame.lineno or 0, frame.name


Packed = bytes | memoryview
Work = tuple[Packed, Packed]


def execute(host: RankServer, common: Packed, own: Packed, followed: NotebookImports | None = None) -> bytes:
    """Call `function(host, *args, *own)`, where `common` is the pickled `(function, args)`, and return a pickled Reply.

    If the function fails, its communicator is revoked first, so that no other rank waits for this one. A debug step is
    aborted, unless the function is marked with `allow_during_step`. `followed`: imports of the notebook to repeat
    first.
    """
    output, known = host.board.output, set(sys.modules)
    before = output.emitted if output else 0
    with report_working(host.board, "takes its work"):
        try:
            if followed is not None:
                sync_imports(followed)
            try:
                (function, args), own_args = cloudpickle.loads(common), cloudpickle.loads(own)
            except ImportError as error:
                raise make_import_error(error) from error
            except Mpi4dlError:
                raise
            except Exception as error:
                what = f"{type(error).__name__}: {get_message(error)}"
                raise RankError(f"what it was sent cannot be unpickled: {what}") from error
            host.board.report(getattr(function, "__qualname__", repr(function)).encode())
            # A debug step is stopped between two instructions, with messages under way: other work must not meet them.
            if not getattr(function, "allow_during_step", False):
                host.abort_debug_step()
            return _pack_reply(host, function(host, *args, *own_args), before)
        # SystemExit and interrupts too: an exception that left here would end the rank without a word to the notebook.
        except BaseException as error:
            _drop_orphaned_modules(known)
            return _revoke_and_reply(host, error, before)


def _drop_orphaned_modules(known: Set[str]) -> None:
    """Remove the modules, imported after those in `known`, whose package is not there: its import was interrupted."""
    # Python removes a package whose import fails, but keeps the submodules that it had imported:
    #
    #     import matplotlib --> matplotlib.cbook, which refers to `matplotlib` --> KeyboardInterrupt
    #
    # The next import of the package would get these submodules, which refer to the first, unfinished package for ever.
    for name in sorted(sys.modules.keys() - known):  # a package before its submodules
        package, _, _ = name.rpartition(".")
        if package and package not in sys.modules:
            del sys.modules[name]


def _pack_reply(host: RankServer, value: Any, before: int, failure: Failure | None = None) -> bytes:
    """Return a pickled Reply, after all printed lines have been emitted; `before` is their number before the call."""
    if (output := host.board.output) is None:
        return pack(Reply(value, failure))
    output.end()
    return pack(Reply(value, failure, output.emitted - before))


def _revoke_and_reply(host: RankServer, error: BaseException, before: int) -> bytes:
    host.world.revoke()
    return _pack_reply(host, None, before, Failure.of(error, host.board.read()))


@allow_during_step
def recover(host: RankServer) -> None:
    """Recover for new work after a failure. Trainings stay, on the same world with a new communicator. Collective."""
    host.reconnect(host.world.recover)


@allow_during_step
def recover_and_reset(host: RankServer) -> None:
    """Recover with fewer ranks than before: everything that was made for all of them is discarded. Collective."""
    recover(host)
    host.discard()


@cache
def _get_server() -> RankServer:
    from mpi4dl_nb.engines.comm.mpi import MpiWorld

    host = RankServer(MpiWorld(), StatusBoard.from_environment())
    # All output of this process, from any thread, goes to the notebook, line by line.
    way = sys.stdout

    def emit(line: OutputLine) -> None:
        # mpiexec forwards this line among others of all ranks; the line break before it ends whatever C code has begun.
        way.write(f"\n{SPOKEN}{json.dumps([line.stream, line.text])}\n")

    output = host.board.output = LineBuffer(emit, way.flush)
    for stream in ("stdout", "stderr"):
        setattr(sys, stream, RankStream(stream, getattr(sys, stream), lambda: output))
    # MPI_Finalize waits for all ranks, and those may wait for this one. The process exits without it, so that MPI
    # reports to the others that this rank has failed.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank_pid = os.getpid()

    def exit_at_once() -> None:
        if os.getpid() == rank_pid:  # processes that the rank has forked exit as usual
            os._exit(1)

    atexit.register(exit_at_once)
    return host


def join() -> tuple[int, int, int]:
    """Return (rank, size, pid) of this MPI process, after all ranks have started. Collective."""
    world = _get_server().world
    return world.rank, world.size, os.getpid()


# What is large comes in parts, and goes in parts, each of which is one message:
#
#     notebook ──>   receive_part   receive_part  ...  run(sizes)              send_part      send_part   ...
#          rank                                            └──> size of reply      └──> part      └──> part
#
# Each part changes the rank's status. So the time of a transfer is no hang, whatever the size and the link, but a link
# that sends nothing any more is one. The notebook asks for a part of the reply when the one before has arrived: a rank
# could only tell when it has put its parts into a queue.
def receive_part(part: bytes, begin: int, total_bytes: int) -> None:
    """Keep a part of the next call, which begins at the byte `begin` of `total_bytes`."""
    host = _get_server()
    _report_transfer(host, "arrival of its work", begin + len(part), total_bytes)
    if begin == 0:
        host.arriving = bytearray()
    if host.arriving is None or len(host.arriving) != begin:  # one before this was lost: this call will say so
        host.arriving = None
    else:
        host.arriving += part


def _take_work(host: RankServer, common_bytes: int, own_bytes: int) -> Work:
    """Return the two pieces of what has arrived in parts. Raises RankError if a part is missing."""
    arrived, host.arriving = host.arriving, None
    total_bytes = common_bytes + own_bytes
    if arrived is None or len(arrived) != total_bytes:
        raise RankError(
            f"of the {total_bytes:,} bytes of its work {len(arrived or b''):,} have arrived: the connection was cut, "
            "or its memory is full. Call again."
        )
    whole = memoryview(arrived)
    return whole[:common_bytes], whole[common_bytes:]


def send_part(begin: int, part_bytes: int) -> bytes:
    """Return the part of the last reply that begins at the byte `begin`; the last one ends the rank's work."""
    host = _get_server()
    part = host.leaving[begin : begin + part_bytes]
    if begin + part_bytes < len(host.leaving):
        _report_transfer(host, "sending of its result", begin, len(host.leaving))
    else:
        host.leaving = b""
        host.board.report(b"")
    return part


def _keep_large(host: RankServer, reply: bytes, part_bytes: int) -> bytes | int:
    """Return a reply, or only its size if it is larger than a part: the notebook then fetches it."""
    host.leaving = reply if len(reply) > part_bytes else b""
    if not host.leaving:
        return reply
    _report_transfer(host, "sending of its result", 0, len(reply))
    return len(reply)


def _report_transfer(host: RankServer, what: str, done_bytes: int, total_bytes: int) -> None:
    host.board.report(f"the {what} ({done_bytes:,} of {total_bytes:,} bytes)".encode())
    host.board.report_waiting(True)


def _is_in_finaliser(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to a `__del__`: Python prints an exception there and goes on."""
    while frame and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def run(work: Work | None, sizes: tuple[int, int], followed: NotebookImports, part_bytes: int) -> bytes | int:
    """Call `execute` on this MPI process; the first SIGINT interrupts it.

    `work` is its `common` and `own`, of these `sizes`; None if they have come in parts. A reply of more than
    `part_bytes` is kept for `send_part`, and its size returned.
    """
    host = _get_server()
    before = host.board.output.emitted if host.board.output else 0
    torch.set_grad_enabled(True)  # an interrupt on entry to or exit from `no_grad` can leave gradients disabled

    def interrupt_once(number: int, frame: FrameType | None) -> None:
        if _is_in_finaliser(frame):
            _thread.start_new_thread(interrupt_later, (get_ident(), number))  # unlike `Thread`, this needs no lock
            return
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    def interrupt_later(thread: int, number: int) -> None:
        time.sleep(_AGAIN_S)
        if signal.getsignal(number) is interrupt_once:  # not the handler of a later call
            signal.pthread_kill(thread, number)

    signal.signal(signal.SIGINT, interrupt_once)
    try:
        reply = execute(host, *(work or _take_work(host, *sizes)), followed)
    # Parts have not arrived; or an interrupt that an MPI call has deferred came while `execute` packed its failure.
    except (RankError, KeyboardInterrupt) as error:
        reply = _revoke_and_reply(host, error, before)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the next call: an interrupt could lose the reply
    return _keep_large(host, reply, part_bytes)
