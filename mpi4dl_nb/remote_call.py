"""One function under way on all ranks: who has answered, who has failed, and the error that tells it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from engines.errors import (
    CheckpointError,
    DamagedError,
    ImageError,
    LossError,
    Mpi4dlError,
    PlanError,
    RankError,
    TraceError,
    UnreadableError,
)
from engines.output import OutputLine
from engines.rank_server import Failure, Reply
from mpi4dl_nb.hang import Hang, find_hang
from mpi4dl_nb.launch.guard_reports import RankExit, StalledRank

__all__ = ["CallInterrupted", "Ranks", "RemoteCall"]

_LOOK_S = 0.02  # a death is looked for this often; an answer is noticed at once
_STOP_S = 0.8  # an interrupt waits this long for ranks to come back, so that they are ready again when it is told
_END_S = 2.0  # for those that were ended to be gone
_GRACE_S = 0.35  # after a failure the other ranks come back by themselves in this time, or are told to

_HEARD_S = 1.0  # what ranks have printed may come so much later than their answers

_DEATH = Failure("Death", "its process has ended")
_SILENCE = Failure("Silence", "it does not answer any more, and the others could not go on without it")
_TYPED = {
    kind.__name__: kind
    for kind in (
        CheckpointError, DamagedError, ImageError, LossError, PlanError, RankError, TraceError, UnreadableError,
    )
}  # fmt: skip


class Ranks(Protocol):
    """`n` ranks at work, by MPI or not."""

    def count(self) -> int:
        """How many ranks there are, the lost ones among them."""

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Start `engines.rank_server.execute` on one rank."""

    def interrupt(self) -> None:
        """Make every rank that is at work stop, as far as it can be made to."""

    def kill(self, ranks: Iterable[int]) -> None:
        """End ranks that can't be made to stop."""

    def find_lost_ranks(self) -> Mapping[int, RankExit]:
        """The ranks that have died, and how, in the order in which they did."""

    def find_lost_hosts(self) -> frozenset[str]:
        """The hosts that do not answer any more: their ranks are lost, and the others can't go on by themselves."""

    def find_stalled_ranks(self) -> Mapping[int, StalledRank]:
        """The ranks that have not gone on for a while."""

    def pack(self, values: Sequence[Any]) -> list[bytes]:
        """As bytes for the ranks, which have the same code then. Raises TypeError, AttributeError, PicklingError."""

    def capture_output(self) -> AbstractContextManager[None]:
        """Within it what ranks print is kept for `said`."""

    def read_output(self) -> list[tuple[int, OutputLine]]:
        """What ranks have printed since this was last asked."""

    def has_pending_output(self, rank: int, lines: int) -> bool:
        """Whether some of so many lines that a rank has printed in its last call are still on their way."""

    def exclude_ranks(self, ranks: Iterable[int]) -> None:
        """Go on without ranks that have died: the others are numbered anew, in their order."""

    def stop(self) -> None:
        """End them all."""


Show = Callable[[list[tuple[int, OutputLine]]], None]


class CallInterrupted(KeyboardInterrupt):
    """What was under way did not come to its end in the time that was left after an interrupt."""


class RemoteCall:
    """The answers that have come, in the order in which they came, and the futures of the ranks at work.

    Ranks that all stand still for `hang_after_s`, one of them waiting, hang; `is_late()` tells whether time is up.
    `show` is given what they print meanwhile.
    """

    def __init__(
        self, ranks: Ranks, show: Show, hang_after_s: float | None = None, is_late: Callable[[], bool] | None = None
    ) -> None:
        self._ranks, self._hang_after_s, self._is_late = ranks, hang_after_s or float("inf"), is_late or _is_never_late
        self._show = show
        self._interrupted = False
        self._began_s = time.monotonic()
        self.hang: Hang | None = None
        self.answers: dict[int, Reply] = {}
        self.waiting: dict[Future[bytes], int] = {}

    def run(self, common: bytes, parts: Sequence[bytes], within_s: float = float("inf")) -> None:
        """Run it, until all have answered, or one has failed and the others have had time to come back."""
        with self._ranks.capture_output():
            try:
                for rank, part in enumerate(parts):
                    self.waiting[self._ranks.submit(rank, common, part)] = rank
                self._collect(within_s, until_failure=True)
                if self.failures:
                    self.release(_GRACE_S)
                if self.hang and not self.release(_GRACE_S):
                    self._end_waiting()
                self._show_output()
            except KeyboardInterrupt:
                self.release(_STOP_S, at_once=True)
                raise
            finally:
                self._is_late = _is_never_late  # it may hold whoever asked, as long as the call is kept

    def _show_output(self) -> None:
        """Show the last of what was printed."""
        deadline = time.monotonic() + _HEARD_S
        self._show(self._ranks.read_output())
        while any(self._ranks.has_pending_output(rank, answer.lines) for rank, answer in self.answers.items()):
            if time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S / 4)
            self._show(self._ranks.read_output())

    def release(self, within_s: float, at_once: bool = False) -> bool:
        """Whether all ranks have come back, after some time by themselves and some when they were told to.

        An interrupt meanwhile ends those that have not.
        """
        try:
            if not at_once:
                self._collect(_GRACE_S)
            if self.waiting:
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
            lost = self._ranks.find_lost_ranks()
            over = [each for each, rank in self.waiting.items() if each.done() or rank in lost]
            for future in sorted(over, key=lambda each: _get_death_order(lost, self.waiting[each])):
                rank = self.waiting.pop(future)
                self.answers[rank] = _read(future, rank in lost)
            if until_failure:
                self.hang = find_hang(
                    self.waiting.values(), self._ranks.find_stalled_ranks(), self._hang_after_s, self._began_s
                )
                if self.waiting and self._is_late():
                    raise CallInterrupted

    @property
    def failures(self) -> dict[int, Failure]:
        """By rank."""
        return {rank: answer.failure for rank, answer in self.answers.items() if answer.failure}

    @property
    def clean(self) -> bool:
        """Whether the ranks are ready for the next call: none was told to stop, whether it heard of that or not."""
        return not self.waiting and not self.failures and not self._interrupted

    def make_error(self) -> Mpi4dlError:
        """What went wrong, on the rank where it began."""
        if self.hang:
            return RankError(self.hang.words, self.hang.rank)
        failures = self.failures
        own = [rank for rank, failure in failures.items() if not failure.released]
        if not own and (lost := self._ranks.find_lost_ranks()):  # it had answered before
            rank = next(iter(lost))
            return _make_error(rank, replace(_DEATH, message=str(lost[rank])), "")
        if self.waiting and not own:
            return _make_error(min(self.waiting.values()), _SILENCE, "")
        rank, *others = own or failures
        first = failures[rank]
        if first is _DEATH:
            first = replace(_DEATH, message=str(self._ranks.find_lost_ranks()[rank]))
        also = sorted(each for each in others if failures[each].message == first.message)
        error = _make_error(rank, first, f" (And so on ranks {', '.join(map(str, also))}.)" if also else "")
        for each in sorted({*failures} - {rank, *also}):
            error.add_note(f"Rank {each} {_describe_failure(failures[each])}")
        return error


def _is_never_late() -> bool:
    return False


def _get_death_order(lost: Mapping[int, RankExit], rank: int) -> int:
    """Of several ranks that are over at once the first to die is the cause."""
    return list(lost).index(rank) if rank in lost else len(lost)


def _read(future: Future[bytes], lost: bool) -> Reply:
    try:
        return pickle.loads(future.result(timeout=0))
    except Exception as error:
        return Reply(failure=_DEATH if lost else Failure.of(error))


def _describe_failure(failure: Failure) -> str:
    """All that is told of a rank that was not the first to fail."""
    where = f" in {failure.where}" if failure.where else ""
    return f"was released{where}." if failure.released else f"failed too{where}: {failure.kind}: {failure.message}"


def _make_error(rank: int, failure: Failure, more: str) -> Mpi4dlError:
    kind = _TYPED.get(failure.kind, RankError)
    name = "" if failure.kind in (*_TYPED, _DEATH.kind, _SILENCE.kind) else f"{failure.kind}: "
    error = kind(f"Rank {rank}: {name}{failure.message}{more}")
    error.rank, error.remote_traceback = rank, failure.format_traceback()
    if error.remote_traceback:
        where = f", in {failure.where}" if failure.where else ""
        error.add_note(f"\nOn rank {rank}{where}:\n{error.remote_traceback}")
    return error
