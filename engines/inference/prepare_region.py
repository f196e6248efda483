"""Prepare the recipe with which ranks predict a region of a picture tile by tile."""

from __future__ import annotations

import logging

from torch import nn

from engines.errors import TraceError
from engines.inference.padded_region import PaddedRegion
from engines.inference.rank_predictor import prepare_prediction
from engines.plan import Plan
from engines.training import Recipe

__all__ = ["prepare_region"]


def prepare_region(
    model: nn.Module, region: PaddedRegion, precision: str = "float32", device: str = "auto"
) -> tuple[Recipe, PaddedRegion]:
    """Return the recipe of the model at the region's size, and the region, padded if the model needs that.

    Some models take only multiples of a power of two: powers up to 256 are tried. Raises the TraceError for the
    unpadded size if the model takes none of them.
    """
    plan = Plan(split_size=1, spatial_size=0, precision=precision)
    # torch logs on stderr what it cannot trace, besides raising the error; a refused size would look like a failure.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    refusals: list[TraceError] = []
    try:
        for px in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            padded = region.pad_to_multiple(px)
            if refusals and padded.size_px == region.size_px:
                continue
            try:
                return prepare_prediction(model, plan, (1, 3, *padded.size_px), device), padded
            except TraceError as error:
                refusals.append(error)
    finally:
        log.disabled = before
    raise refusals[0]
