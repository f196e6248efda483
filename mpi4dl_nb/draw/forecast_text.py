"""The forecast of a training step as one line of text."""

from __future__ import annotations

from engines.formatting import format_bytes, format_number, format_seconds
from engines.predict.forecast import Forecast
from engines.predict.machine import Machine

__all__ = ["describe_forecast"]


def describe_forecast(found: Forecast, machine: Machine) -> str:
    """Return `Predicted on Summit: 12.3 ms a step, 325 images/s; the fullest rank holds 459.2 MB of 16.0 GB.`"""
    limit = machine.get_rank_bytes(found.ranks)
    room = f" of {format_bytes(limit)}" if limit else ""
    room += ": it does not fit" if limit and limit < found.peak_bytes else ""
    return (
        f"Predicted on {machine.name}: {format_seconds(found.seconds)} a step, {format_number(found.images_per_s)} "
        f"images/s; the fullest rank holds {format_bytes(found.peak_bytes)}{room}."
    )
