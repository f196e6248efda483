"""Read a picture on several ranks, each its own tile, and compare the pixels with one read of the whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256

from mpi4dl_nb.engines.bench.measure import measure_host_peak_bytes
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.world import World, run_on_all
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture, Pixels
from mpi4dl_nb.engines.plan import Plan

ALLOWED_BYTES = 64 << 20  # allowed beyond a rank's part of the picture: a reader's working memory
Box = tuple[int, int, int, int]
"""First row, first column, height and width."""


def run_bench_read(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench read`."""
    flags = options.make_bare_parser(
        "Read an image on the ranks, tile by tile, and in one process; compare pixels and memory."
    )
    flags.add_argument("image", help="a file: PNG, JPEG, TIFF, Zarr or a slide")
    flags.add_argument("--slice-method", default="square", help="square, vertical, horizontal, or a grid such as 2x3")
    flags.add_argument("--halo-px", type=int, default=0, help="pixels that each rank reads around its tile")
    flags.add_argument("--level", type=int, default=0, help="0 is the finest")
    chosen = flags.parse_args(arguments)
    return bench_read(world, chosen.image, chosen.slice_method, chosen.halo_px, chosen.level)


def bench_read(world: World, path: str, method: str = "square", halo_px: int = 0, level: int = 0) -> dict[str, object]:
    """Return a line with one entry per rank in `bytes_read`, `peak_bytes` (beyond the memory before) and `seconds`.

    `ok`: the ranks have exactly the pixels that rank 0 then reads at once, and no rank's peak exceeds the largest part
    of the picture by more than `ALLOWED_BYTES`. Raises ImageError, or PlanError if the grid does not fit.
    """
    if halo_px < 0:
        raise PlanError(f"halo_px={halo_px}: a halo has 0 pixels or more.")
    measured: list[object] = []

    def compute_box() -> Box:
        (grid,) = Plan(split_size=1, spatial_size=1, num_spatial_parts=world.size, slice_method=method).grids
        tile = grid.cut(*open_image(path).shape(level))[world.rank]
        height, width = tile.shape
        return tile.rows.start - halo_px, tile.cols.start - halo_px, height + 2 * halo_px, width + 2 * halo_px

    box = run_on_all(world, compute_box)

    def read_box() -> None:
        start_s, picture = time.perf_counter(), open_image(path)
        pixels = picture.read(*box, level)
        measured.extend((time.perf_counter() - start_s, picture.bytes_read, _compute_digest(pixels)))

    peak = run_on_all(world, lambda: measure_host_peak_bytes(read_box))
    results = world.all_gather((box, peak, *measured))
    boxes, peaks, seconds, read, digests = zip(*results, strict=True)
    # Digests travel instead of pixels: rank 0 cuts each rank's box out of its own read and compares sums.
    line = run_on_all(world, lambda: _read_in_one_process(path, level, boxes, digests) if world.rank == 0 else {})
    share = max(height * width for _, _, height, width in boxes) * 3
    kept = max(peaks) <= share + ALLOWED_BYTES
    return line | {
        "ranks": world.size,
        "bytes_read": read,
        "seconds": [round(elapsed_s, 4) for elapsed_s in seconds],
        "peak_bytes": peaks,
        "largest_part_bytes": share,
        "ok": bool(line.get("same_pixels", True)) and kept,
    }


def _read_in_one_process(path: str, level: int, boxes: tuple[Box, ...], digests: tuple[str, ...]) -> dict[str, object]:
    """Return the results of one process that reads the level at once."""
    same: list[bool] = []
    picture = open_image(path)
    rows, cols = picture.shape(level)

    def read_whole() -> None:
        whole = ArrayPicture(picture.name, picture.read(0, 0, rows, cols, level))
        same.extend(_compute_digest(whole.read(*box)) == digest for box, digest in zip(boxes, digests, strict=True))

    peak = measure_host_peak_bytes(read_whole)
    return {
        "image": picture.name,
        "level": level,
        "shape": [rows, cols],
        "microns_per_px": picture.microns_per_px,
        "same_pixels": all(same),
        "picture_bytes": rows * cols * 3,
        "one_process_peak_bytes": peak,
    }


def _compute_digest(pixels: Pixels) -> str:
    return sha256(pixels.data).hexdigest()
