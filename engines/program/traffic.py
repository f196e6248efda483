"""The messages that a rank sends in one training step, counted from its program before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engines.comm.all_reduce_sizes import count_sends
from engines.program.instructions import (
    AllReduce,
    CountLabels,
    Exchange,
    ExchangeHalf,
    FiniteCheckAllReduce,
    Phase,
    ReduceBatchStats,
    SumGradients,
)

if TYPE_CHECKING:
    from engines.program.program import Program, Step

__all__ = ["Traffic", "count_step_traffic", "count_traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A number of messages that a rank sends, and their total bytes."""

    messages: int
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def count_traffic(program: Program) -> dict[str, Traffic]:
    """Return what the rank of this program sends in a training step, forward and backward, by kind of instruction.

    Kinds are `halo`, `stage` (from one stage to the next) and `all-reduce`, as in a timeline.
    """
    found: dict[str, Traffic] = {}
    for step in program.steps:
        kind = step.instruction.kind
        for part in count_step_traffic(step):
            found[kind] = found.get(kind, Traffic(0, 0)) + part
    return found


def count_step_traffic(step: Step) -> Iterable[Traffic]:
    """Yield what one step sends, if anything."""
    match step.instruction:
        case ExchangeHalf(exchange=exchange, begins=begins):
            yield from count_step_traffic(replace(step, instruction=exchange)) if begins else ()
        case Exchange() as exchange:
            moves = exchange.sends if step.phase is Phase.FORWARD else exchange.receives
            yield Traffic(len(moves), exchange.compute_bytes(moves))
        case CountLabels(program=program, bytes=count_bytes, group=group):
            yield from count_traffic(program).values()
            yield Traffic(*count_sends(count_bytes, len(group)))
        case SumGradients() if step.phase is Phase.UPDATE:
            return  # counted where it starts
        case AllReduce() | SumGradients() | ReduceBatchStats() | FiniteCheckAllReduce() as total:
            yield Traffic(*count_sends(total.bytes, len(total.group)))
