"""Prepare the recipe with which ranks predict a region of a picture tile by tile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from engines.errors import TraceError
from engines.inference.padded_region import PaddedRegion
from engines.inference.rank_predictor import prepare_prediction
from engines.plan import Plan
from engines.training import Recipe

__all__ = ["prepare_region"]

_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def prepare_region(
    model: nn.Module, region: PaddedRegion, precision: str = "float32", device: str = "auto"
) -> tuple[Recipe, PaddedRegion]:
    """Return the recipe of the model at the region's size, and the region, padded if the model needs that.

    Some models take only multiples of a power of two: powers up to 256 are tried. Raises the TraceError for the
    unpadded size if the model takes none of them.
    """
    plan = Plan(split_size=1, spatial_size=0, precision=precision)
    refusals: list[TraceError] = []
    for px in _MULTIPLES:
        padded = region.pad_to_multiple(px)
        if refusals and padded.size_px == region.size_px:
            continue
        try:
            with _hide_trace_log():
                return prepare_prediction(model, plan, (1, 3, *padded.size_px), device), padded
        except TraceError as error:
            refusals.append(error)
    raise refusals[0]


@contextmanager
def _hide_trace_log() -> Iterator[None]:
    """Suppress torch's log on stderr: torch logs what it cannot trace, besides raising the error."""
    told = logging.getLogger("torch._subclasses.fake_tensor")
    before, told.disabled = told.disabled, True
    try:
        yield
    finally:
        told.disabled = before
