"""Collect the tiles of a prediction on rank 0: what is kept of the scores, and the sinks that it goes to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpi4dl_nb.engines.comm.world import Message, World, run_on_all
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid, Tile, guess_pixel_axes
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning, compute_classes, compute_probabilities
from mpi4dl_nb.engines.inference.rank_predictor import PaddedRegion
from mpi4dl_nb.engines.program.program import ShardSpec

# Sinks for the tiles of a prediction, in any order: memory, for small ones, or a file (see `pyramid_sink.py`).


Shape = tuple[int, int, int]
"""Height, width, and channels per pixel."""


class TileSink(Protocol):
    """Sink that receives every tile once. Its methods raise OSError if they fail."""

    def put(self, tile: Tile, pixels: NDArray[Any]) -> None:
        """Store the (h, w, C) `pixels` of `tile`."""

    def finish(self) -> Any:
        """Complete the output after all tiles, and return the result."""

    def close(self) -> None:
        """Discard what is unfinished; a no-op after `finish`."""


MakeSink = Callable[[Shape, np.dtype[Any]], TileSink]


class ArraySink:
    """Sink that holds the whole prediction as an (H, W, C) array, or (H, W) if C is 1."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.whole = np.zeros(shape, dtype)

    def put(self, tile: Tile, pixels: NDArray[Any]) -> None:
        """Copy the tile into the array."""
        self.whole[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop] = pixels

    def finish(self) -> NDArray[Any]:
        return self.whole[..., 0] if self.whole.shape[2] == 1 else self.whole

    def close(self) -> None:
        """Do nothing."""


# What is kept of a model's scores for each pixel: the class, the probabilities, or the scores themselves.


KINDS = ("classes", "probabilities", "scores")


def get_output_dtype(kind: str, channels: int, meaning: OutputMeaning, computed: str = "float32") -> np.dtype[Any]:
    """Return the dtype of the output: uint8, or uint16 for more than 256 classes; scores are float32 or float64.

    `computed` is the dtype in which the model computes; scores in half precision are kept as float32.
    """
    if kind == "scores":
        return np.dtype(np.float64 if computed == "float64" else np.float32)
    many = kind == "classes" and meaning is OutputMeaning.CLASSES and channels > 256
    return np.dtype(np.uint16 if many else np.uint8)


def get_output_channels(kind: str, channels: int, meaning: OutputMeaning) -> int:
    """Return how many numbers are kept for each pixel if the model has `channels` outputs."""
    return 1 if kind == "classes" and meaning is OutputMeaning.CLASSES else channels


def convert_pixel_scores(scores: Tensor, kind: str, meaning: OutputMeaning) -> NDArray[Any]:
    """Convert (1, K, h, w) scores to an (h, w, C) array on the host.

    `classes`: C is 1, the class with the highest score; of labels C is K, 1 for each label that is there.
    `probabilities`: C is K, scaled to 0 to 255. `scores`: C is K.
    """
    channels = scores.shape[1]
    if kind == "classes":
        kept = compute_classes(scores, meaning)
    elif kind == "probabilities":
        kept = compute_probabilities(scores, meaning).mul(255).round_()
    else:
        kept = scores
    # Only what is kept crosses to the host: for classes, one number per pixel instead of K scores.
    pixels = kept[0].permute(1, 2, 0).cpu()
    pixels = pixels.float() if pixels.is_floating_point() and pixels.element_size() < 4 else pixels
    return np.ascontiguousarray(
        pixels.numpy(), get_output_dtype(kind, channels, meaning, str(scores.dtype).removeprefix("torch."))
    )


def convert_image_scores(scores: Tensor, kind: str, meaning: OutputMeaning) -> Any:
    """Convert the (K,) scores of one image, or its one score (), to its class, or the probabilities or scores.

    The classes of several labels are a tensor of K zeros and ones.
    """
    scores = scores if scores.dim() else scores[None]
    if kind == "classes":
        classes = compute_classes(scores[None], meaning).flatten()
        return int(classes) if classes.numel() == 1 else classes
    return compute_probabilities(scores[None], meaning)[0] if kind == "probabilities" else scores


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
        meaning: OutputMeaning,
        sink: MakeSink,
    ) -> None:
        if feed.axes != guess_pixel_axes(spec.shape) or not feed.axes:
            raise TraceError(
                f"The model answers with {spec.shape}; only (N, K, H, W), a score for each class and pixel, can be put "
                "together from tiles."
            )
        self.world, self.grid, self.size_px = world, grid, spec.shape[2:]
        sides = zip(region.picture_px, self.size_px, region.size_px, strict=True)
        self.out_px = tuple(-(-asked * out // padded) for asked, out, padded in sides)  # without the padding
        self.channels = get_output_channels(kind, spec.shape[1], meaning)
        self.dtype = get_output_dtype(kind, spec.shape[1], meaning, spec.dtype)
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
        if own is None:  # nor has any rank after this one
            return
        if self.sink is None:  # on all ranks but the first
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
