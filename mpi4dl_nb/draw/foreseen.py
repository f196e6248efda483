"""What is predicted of a step, in a line."""

from __future__ import annotations

from engines.predict.forecast import Forecast
from engines.predict.machine import Machine
from engines.spoken import spoken_bytes, spoken_rate, spoken_seconds

__all__ = ["foreseen_words"]


def foreseen_words(found: Forecast, machine: Machine) -> str:
    """`Predicted on Summit: 12.3 ms a step, 325 images/s; the fullest rank holds 459.2 MB of 16.0 GB.`"""
    limit = machine.rank_bytes(found.ranks)
    room = f" of {spoken_bytes(limit)}" if limit else ""
    room += ": it does not fit" if limit and limit < found.peak_bytes else ""
    return (
        f"Predicted on {machine.name}: {spoken_seconds(found.seconds)} a step, {spoken_rate(found.images_per_s)} "
        f"images/s; the fullest rank holds {spoken_bytes(found.peak_bytes)}{room}."
    )
