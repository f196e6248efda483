"""Collect the tiles of a prediction on rank 0: what is kept of the scores, and the sinks that it goes to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engines.comm.collective_errors import run_on_all
from engines.comm.world import Message, World
from engines.errors import TraceError
from engines.inference.output_kinds import get_output_channels, get_output_dtype
from engines.inference.padded_region import PaddedRegion
from engines.inference.tile_sink import MakeSink
from engines.layer.graph import TensorSpec
from engines.program.program import ShardSpec
from engines.spatial.tiles import Grid, Tile

__all__ = ["TileStitcher"]

_TAG = 2


class TileStitcher:
    """Collects one tile of each rank at a time on rank 0; collective.

    `spec` describes the whole prediction, `feed` a tile's part of it. Raises TraceError if the prediction is not a
    score for each class and pixel, ImageError if the sink cannot be made.
    """

    def __init__(
        self,
        world: World,
        grid: Grid,
        spec: TensorSpec,
        feed: ShardSpec,
        region: PaddedRegion,
        kind: str,
        sink: MakeSink,
    ) -> None:
        if feed.axes != (-2, -1) or len(spec.shape) != 4:
            raise TraceError(
                f"The model answers with {spec.shape}; only (N, K, H, W), a score for each class and pixel, can be put "
                "together from tiles."
            )
        self.world, self.grid, self.size_px = world, grid, spec.shape[-2:]
        sides = zip(region.picture_px, self.size_px, region.size_px, strict=True)
        self.out_px = tuple(-(-asked * out // padded) for asked, out, padded in sides)  # without the padding
        self.channels = get_output_channels(kind, spec.shape[1])
        self.dtype = get_output_dtype(kind, spec.shape[1], spec.dtype)
        self.late = ""  # first error of the sink, raised by `check`
        height, width = self.out_px
        shape = height, width, self.channels
        self.sink = run_on_all(world, lambda: sink(shape, self.dtype) if world.rank == 0 else None)

    def check(self) -> None:
        """Raise OSError if tiles could not be written."""
        if self.late:
            raise OSError(self.late)

    def add(self, first: int, own: NDArray[Any] | None) -> None:
        """Send this rank's tile to rank 0, which puts one tile of each rank, from number `first` on.

        `own` is (h, w, C), or None if this rank has no tile left.
        """
        #     5 tiles, 3 ranks     round 0: 0 1 2     round 1: 3 4 -        rank 2 has none left, and sends nothing
        if self.world.rank:
            if own is not None:
                sent = torch.from_numpy(own.view(np.uint8).reshape(-1))
                self.world.exchange([Message(0, _TAG, sent)], []).wait()
            return
        for rank in range(min(self.world.size, self.grid.tiles - first)):
            # In rank order, so that rank 0 holds a single received tile at a time.
            tile, pixels = self.grid.get_tile(first + rank, *self.size_px), own
            if rank:
                shape = (*tile.shape, self.channels)
                buffer = torch.empty(math.prod(shape) * self.dtype.itemsize, dtype=torch.uint8)
                self.world.exchange([], [Message(rank, _TAG, buffer)]).wait()
                pixels = buffer.numpy().view(self.dtype).reshape(shape)
            # An error must not be raised here: other ranks are computing the next round, and rank 0 would leave their
            # sends without receives. `check` raises it within the next collective. Tiles are received nevertheless.
            inside = tile & Tile.whole(*self.out_px)
            if inside and not self.late:
                try:
                    self.sink.put(inside, pixels[inside.to_slices(tile)])
                except OSError as error:
                    self.late = str(error)

    def finish(self) -> Any:
        """Return the sink's result on rank 0. Raises OSError if the sink fails."""
        self.check()
        return self.sink.finish() if self.sink is not None else None

    def close(self) -> None:
        """Close the sink; nothing unfinished is left."""
        if self.sink is not None:
            self.sink.close()
