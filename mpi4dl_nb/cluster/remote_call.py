"""One function call on all ranks: collects the replies, detects failures and hangs, and builds the error."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mpi4dl_nb.engines import errors
from mpi4dl_nb.engines.comm.output import OutputLine
from mpi4dl_nb.engines.errors import Mpi4dlError, RankError
from mpi4dl_nb.engines.formatting import format_ranks, format_seconds
from mpi4dl_nb.engines.server.rank_server import Failure, Reply
from mpi4dl_nb.engines.train.interrupts import defer_interrupt
from mpi4dl_nb.launch.supervisor_reports import RankExit, StalledRank

# Detection of hangs: ranks that wait for each other without progress, where, and since when.


@dataclass(frozen=True)
class Hang:
    """A hang. `rank` is the one that the others wait for, as far as can be determined; `words` describes all ranks."""

    rank: int
    words: str


def find_hang(
    working: Collection[int], still: Mapping[int, StalledRank], after_s: float, since_s: float
) -> Hang | None:
    """Return the hang of the working ranks, or None.

    The ranks hang if none has made progress for `after_s` seconds, and one waits, was stopped, is idle or silent. Time
    before `since_s` (of `time.monotonic()`), the begin of the call or its last reply, does not count: reports may be
    half a second old, and a rank that is reported to wait may have got its message from the one that has replied. A
    rank that computes for long is no hang as long as no rank waits for it, nor are waiting ranks while another one
    makes progress. A rank with work that is idle has not received it, or its reply does not arrive. Of a silent rank,
    it is unknown whether it makes progress.
    """
    if time.monotonic() - since_s < after_s:
        return None
    # One rank that progresses is enough to rule a hang out: the others wait for it, or will be waited for by it.
    #
    #     rank 0  computes (progress)          no hang, whatever the others do
    #     rank 1  waits ──> rank 0
    #
    #     rank 0  computes, same place         no hang: nobody waits, it may be one long kernel on every rank
    #     rank 1  computes, same place
    #
    #     rank 0  computes, same place         a hang: rank 1 can only go on if rank 0 does
    #     rank 1  waits ──> rank 0
    stuck = {rank: still[rank] for rank in sorted(working) if rank in still and still[rank].for_s >= after_s}
    if len(stuck) < len(working) or not any(
        stalled.at.waits or stalled.stopped or stalled.idle or stalled.silent for stalled in stuck.values()
    ):
        return None
    # The likely cause comes first: a rank stopped by a signal, then a silent one, then one that computes; ranks that
    # wait are consequences.
    order = sorted(stuck.items(), key=lambda pair: (not pair[1].stopped, not pair[1].silent, pair[1].at.waits, pair[0]))
    (first, cause), *others = order
    ways = ((rank, still, "waits" if still.at.waits else "stands still") for rank, still in others)
    lines = [f"Rank {rank} {way}: {_describe_state(still)}." for rank, still, way in ways]
    text = (
        f"Rank {first} does not go on: {_describe_state(cause)}. No rank has made progress for {after_s:.0f} s "
        "(hang_after_s). If work may take as long, start the cluster with a larger one."
    )
    return Hang(first, "\n".join([text, *lines]))


def _describe_state(still: StalledRank) -> str:
    why = f"; {still.why}" if still.why and not still.at.waits else ""
    if still.silent:
        return f"no report of it has arrived for {format_seconds(still.for_s, 2)}{why}"
    if still.idle:
        return f"it has not received its work, or its answer does not arrive{why}"
    return f"{still.at}, for {format_seconds(still.for_s, 2)}{why}"


_LOOK_S = 0.02  # poll interval for deaths; a reply is noticed at once
_STOP_S = 0.8  # time for ranks to return after an interrupt, so that they are ready when it is raised
_END_S = 2.0  # time for killed ranks to be gone
_GRACE_S = 0.35  # time for the other ranks to return by themselves after a failure, before they are interrupted
_EXIT_S = 1.0  # time until it is known how a rank ended whose reply was lost

_OUTPUT_S = 10.0  # output of ranks may arrive this much later than their replies, on a busy machine

_DEATH = Failure("Death", "its process has ended")
_SILENCE = Failure("Silence", "it does not answer any more, and the others could not go on without it")
_TYPED = {
    kind.__name__: kind
    for kind in (
        *(errors.CheckpointError, errors.DamagedError, errors.ImageError, errors.LossError, errors.LostTrainingError),
        *(errors.PlanError, errors.RankError, errors.TraceError, errors.UnreadableError),
    )
}
"""The errors that keep their type. They are raised on purpose and say everything: their traceback is no help."""


class Ranks(Protocol):
    """A group of `n` running ranks, over MPI or not.

    A method with a body is that of ranks that cannot be lost, and whose output needs no transfer.
    """

    def count(self) -> int:
        """Return the number of ranks, including lost ones."""

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Start `mpi4dl_nb.engines.server.rank_server.execute` on one rank."""

    def interrupt(self) -> None:
        """Interrupt every rank that is working, if possible."""

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill ranks that cannot be interrupted."""

    def find_lost_ranks(self) -> Mapping[int, RankExit]:
        """Return the dead ranks and how they ended, in the order in which they died."""
        return {}

    def find_lost_hosts(self) -> frozenset[str]:
        """Return the hosts that do not answer: their ranks are lost, and the others cannot continue by themselves."""
        return frozenset()

    def find_stalled_ranks(self) -> Mapping[int, StalledRank]:
        """Return the ranks that have made no progress for a while."""

    def pack(self, values: Sequence[Any]) -> list[bytes]:
        """Pickle values for ranks, which then use the same code. Raises TypeError, AttributeError, PicklingError."""

    def capture_output(self) -> AbstractContextManager[None]:
        """Within this context, store the output of the ranks for `read_output`."""

    def read_output(self) -> list[tuple[int, OutputLine]]:
        """Return the output of the ranks since the last call."""

    def has_pending_output(self, rank: int, lines: int) -> bool:
        """Return whether some of the `lines` lines that a rank printed in its last call have not arrived yet."""
        return False

    def exclude_ranks(self, ranks: Iterable[int]) -> None:
        """Continue without dead ranks: the others are renumbered, in order."""

    def stop(self) -> None:
        """End all ranks."""


Show = Callable[[list[tuple[int, OutputLine]]], None]


class CallInterrupted(KeyboardInterrupt):
    """The call was abandoned because it did not end within the time left after an interrupt."""


class RemoteCall:
    """A call on all ranks, with the replies in order of arrival and the futures of the ranks that still work.

    The call hangs if all working ranks stall for `hang_after_s` and one of them waits. `is_late()` is true once its
    time limit has passed. `show` receives the output of the ranks.
    """

    def __init__(
        self, ranks: Ranks, show: Show, hang_after_s: float | None = None, is_late: Callable[[], bool] | None = None
    ) -> None:
        self._ranks, self._hang_after_s, self._is_late = ranks, hang_after_s or float("inf"), is_late or (lambda: False)
        self._show = show
        self._interrupted = False
        self._progress_s = time.monotonic()
        self.hang: Hang | None = None
        self.answers: dict[int, Reply] = {}
        self._exits: dict[int, RankExit] = {}
        self._lost_replies: set[int] = set()
        self.waiting: dict[Future[bytes], int] = {}

    def run(self, common: bytes, parts: Sequence[bytes], within_s: float = float("inf")) -> None:
        """Run the call until all ranks have replied, or until one has failed and the others have had time to return."""
        # The way of a call, with the time that each stage may take:
        #
        #     submit to every rank ──> collect replies ──> all have replied: done
        #                                   │ a failure, or a hang
        #                                   v
        #                 collect for _GRACE_S: the others fail by themselves, as MPI reports the failure to them
        #                                   │ some are still at work
        #                                   v
        #                 interrupt, and collect for _GRACE_S again (a hang: what is left is killed, _END_S)
        #
        # What is left then stays in `waiting`; the next call, or `heal`, waits for it longer.
        with self._ranks.capture_output():
            try:
                with defer_interrupt():  # between a rank's message and its entry, nobody would wait for the rank
                    for rank, part in enumerate(parts):
                        self.waiting[self._ranks.submit(rank, common, part)] = rank
                self._collect(within_s, until_failure=True)
                if self.failures:
                    self.release(_GRACE_S)
                # A hang is released like a failure; ranks that do not even react to the interrupt are killed.
                if self.hang and not self.release(_GRACE_S):
                    self._end_waiting()
                # Show the remaining output: wait for lines that the replies announce, but no longer than `_OUTPUT_S`.
                deadline = time.monotonic() + _OUTPUT_S
                self._show(self._ranks.read_output())
                while any(self._ranks.has_pending_output(rank, answer.lines) for rank, answer in self.answers.items()):
                    if time.monotonic() > deadline:
                        break
                    time.sleep(_LOOK_S / 4)
                    self._show(self._ranks.read_output())
            except KeyboardInterrupt:
                self.release(_STOP_S, at_once=True)
                raise
            finally:
                self._is_late = lambda: False  # drop the caller's closure: this object is kept until the next call

    def release(self, within_s: float, at_once: bool = False) -> bool:
        """Return whether all ranks have returned, some of them by themselves and some after an interrupt.

        `at_once`: interrupt all ranks, without time to return by themselves, even if none is known to work.
        A further KeyboardInterrupt kills the ranks that have not returned.
        """
        try:
            if not at_once:
                self._collect(_GRACE_S)
            if self.waiting or at_once:  # after an interrupt, the ranks are synchronised before the next call
                self._interrupted = True
                self._ranks.interrupt()
                self._collect(within_s)
        except KeyboardInterrupt:
            self._end_waiting()
            raise
        return not self.waiting

    def _end_waiting(self) -> None:
        self._ranks.kill(self.waiting.values())
        self._collect(_END_S)

    def _collect(self, within_s: float, until_failure: bool = False) -> None:
        deadline = time.monotonic() + within_s
        while self.waiting and time.monotonic() < deadline and not (until_failure and (self.failures or self.hang)):
            wait(self.waiting, _LOOK_S, FIRST_COMPLETED)
            self._show(self._ranks.read_output())
            # Sort by the order of deaths, then of replies: survivors fail because of the first death, so their replies
            # must not come before it, and of several deaths at once the first is the cause.
            lost = self._ranks.find_lost_ranks()
            deaths = {rank: order for order, rank in enumerate(lost)}
            over = [reply for reply, rank in self.waiting.items() if reply.done() or rank in lost]
            for future in sorted(over, key=lambda reply: deaths.get(self.waiting[reply], len(deaths))):
                rank = self.waiting.pop(future)
                if rank in lost:
                    self._exits[rank] = lost[rank]
                self.answers[rank] = self._read_reply(rank, future)
                self._progress_s = time.monotonic()
            if until_failure:
                still = self._ranks.find_stalled_ranks()
                self.hang = find_hang(self.waiting.values(), still, self._hang_after_s, self._progress_s)
                if self.waiting and self._is_late():
                    raise CallInterrupted

    def _read_reply(self, rank: int, future: Future[bytes]) -> Reply:
        try:
            packed = future.result(timeout=0)
        except Exception as error:
            # A failure on the rank is in its reply. This one is of the transport, mostly since the rank died.
            self._lost_replies.add(rank)
            return Reply(failure=_DEATH if rank in self._exits else Failure.of(error))
        try:
            return pickle.loads(packed)
        except BaseException as error:
            # The code is that of the result's class, which may raise anything; only an interrupt is the user's.
            failure = Failure.of(error)
            what = f"its result cannot be unpickled in the notebook: {failure.kind}: {failure.message}"
            unread = Reply(failure=replace(failure, kind=RankError.__name__, message=what, released=False))
            if isinstance(error, KeyboardInterrupt):
                self.answers[rank] = unread
                raise
            return unread

    @property
    def failures(self) -> dict[int, Failure]:
        """The failures by rank."""
        return {rank: answer.failure for rank, answer in self.answers.items() if answer.failure}

    @property
    def clean(self) -> bool:
        """Whether the ranks are ready for the next call: all have replied, and none has failed or been interrupted."""
        return not self.waiting and not self.failures and not self._interrupted

    def _find_exit(self, rank: int) -> RankExit | None:
        """Return how a rank ended; None if it seems to be alive.

        By now, more may be known than when its reply was lost: the end of the process is reported by another way, which
        may be slower.
        """
        deadline = time.monotonic() + _EXIT_S * (rank not in self._exits)
        while (ended := self._ranks.find_lost_ranks().get(rank)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return ended or self._exits.get(rank)

    def make_error(self) -> Mpi4dlError:
        """Build the error of the first rank that failed."""
        if self.hang:
            return RankError(self.hang.words, self.hang.rank)
        failures = self.failures
        failed = [rank for rank, failure in failures.items() if not failure.released]
        if not failed and (lost := self._ranks.find_lost_ranks()):  # a rank died after its reply
            rank = next(iter(lost))
            return _make_error(rank, replace(_DEATH, message=str(lost[rank])), "")
        if self.waiting and not failed:
            return _make_error(min(self.waiting.values()), _SILENCE, "")
        # Of ranks that fail alike, the lowest is named, whichever was heard first.
        heard = list(failed or failures)
        rank, *also = sorted(other for other in heard if failures[other].message == failures[heard[0]].message)
        first = failures[rank]
        if rank in self._lost_replies and (ended := self._find_exit(rank)):
            first = replace(_DEATH, message=str(ended))
        error = _make_error(rank, first, f" (And so on {format_ranks(also)}.)" if also else "")
        for other in sorted({*failures} - {rank, *also}):
            error.add_note(f"Rank {other} {_describe_failure(failures[other])}")
        return error


def _describe_failure(failure: Failure) -> str:
    """Describe the failure of a rank that was not the first to fail."""
    where = f" in {failure.where}" if failure.where else ""
    return f"was released{where}." if failure.released else f"failed too{where}: {failure.kind}: {failure.message}"


def _make_error(rank: int, failure: Failure, more: str) -> Mpi4dlError:
    kind = _TYPED.get(failure.kind, RankError)
    name = "" if failure.kind in (*_TYPED, _DEATH.kind, _SILENCE.kind) else f"{failure.kind}: "
    error = kind(f"Rank {rank}: {name}{failure.message}{more}")
    error.rank, error.remote_traceback = rank, failure.format_traceback()
    if error.remote_traceback and failure.kind not in _TYPED:
        where = f", in {failure.where}" if failure.where else ""
        error.add_note(f"\nOn rank {rank}{where}:\n{error.remote_traceback}")
    return error
