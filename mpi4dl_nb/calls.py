"""One function under way on all ranks: who has answered, who has failed, and the error that tells it."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

from engines.errors import CheckpointError, ImageError, LossError, Mpi4dlError, PlanError, RankError, TraceError
from engines.host import Answer, Failure

__all__ = ["DEATH", "Call", "Ranks"]

_LOOK_S = 0.02  # a death is looked for this often; an answer is noticed at once
_GRACE_S = 0.35  # after a failure the other ranks come back by themselves in this time, or are told to

DEATH = Failure("Death", "its process has ended (killed, perhaps for lack of memory, or by the code that it ran)")
_SILENCE = Failure("Silence", "it does not answer any more, and the others could not go on without it")
_TYPED = {kind.__name__: kind for kind in (CheckpointError, ImageError, LossError, PlanError, RankError, TraceError)}


class Ranks(Protocol):
    """`n` ranks at work, by MPI or not."""

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """Start `engines.host.execute` on one rank."""

    def interrupt(self) -> None:
        """Make every rank that is at work stop, as far as it can be made to."""

    def lost(self) -> list[int]:
        """The ranks that have died."""

    def stop(self) -> None:
        """End them all."""


class Call:
    """The answers that have come, in the order in which they came, and the futures of the ranks at work."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.answers: dict[int, Answer] = {}
        self.waiting: dict[Future[bytes], int] = {}

    def make(self, common: bytes, parts: Sequence[bytes], within_s: float = float("inf")) -> None:
        """Run it, until all have answered, or one has failed and the others have had time to come back."""
        try:
            for rank, part in enumerate(parts):
                self.waiting[self._ranks.submit(rank, common, part)] = rank
            self._collect(within_s, until_failure=True)
            if self.failures:
                self.release(_GRACE_S)
        except KeyboardInterrupt:
            self._ranks.interrupt()
            raise

    def release(self, within_s: float) -> bool:
        """Whether all ranks have come back, after some time by themselves and some when they were told to."""
        self._collect(_GRACE_S)
        if self.waiting:
            self._ranks.interrupt()
            self._collect(within_s)
        return not self.waiting

    def _collect(self, within_s: float, until_failure: bool = False) -> None:
        deadline = time.monotonic() + within_s
        while self.waiting and time.monotonic() < deadline and not (until_failure and self.failures):
            wait(self.waiting, _LOOK_S, FIRST_COMPLETED)
            lost = self._ranks.lost()
            for future in [each for each, rank in self.waiting.items() if each.done() or rank in lost]:
                rank = self.waiting.pop(future)
                self.answers[rank] = _read(future, rank in lost)

    @property
    def failures(self) -> dict[int, Failure]:
        """By rank."""
        return {rank: answer.failure for rank, answer in self.answers.items() if answer.failure}

    @property
    def clean(self) -> bool:
        """Whether the ranks are ready for the next call."""
        return not self.waiting and not self.failures

    def error(self) -> Mpi4dlError:
        """What went wrong, on the rank where it began."""
        failures = self.failures
        own = [rank for rank, failure in failures.items() if not failure.released]
        if self.waiting and not own:
            return _error(min(self.waiting.values()), _SILENCE, "")
        rank, *others = own or failures
        also = sorted(each for each in others if failures[each].message == failures[rank].message)
        return _error(rank, failures[rank], f" (And so on ranks {', '.join(map(str, also))}.)" if also else "")


def _read(future: Future[bytes], lost: bool) -> Answer:
    try:
        return pickle.loads(future.result(timeout=0))
    except Exception as error:
        return Answer(failure=DEATH if lost else Failure.of(error))


def _error(rank: int, failure: Failure, more: str) -> Mpi4dlError:
    kind = _TYPED.get(failure.kind, RankError)
    name = "" if failure.kind in (*_TYPED, DEATH.kind, _SILENCE.kind) else f"{failure.kind}: "
    error = kind(f"Rank {rank}: {name}{failure.message}{more}")
    error.rank, error.remote_traceback = rank, failure.traceback()
    if error.remote_traceback:
        error.add_note(f"\nOn rank {rank}:\n{error.remote_traceback}")
    return error
