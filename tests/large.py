"""`python -m tests.large [--side-px 30720] [--memory-mb 500]`: a slide larger than memory, predicted on 4 ranks.

Makes a pyramid of tissue, has `python -m mpi4dl_nb.engines predict` segment it within a bound of memory for each rank,
and compares regions of the answer with one process. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tifffile
import torch
from safetensors.torch import save_file
from skimage.data import immunohistochemistry
from torch import nn

from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.dataset import to_network_input
from mpi4dl_nb.engines.images.mask_file import MaskFile
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.picture_reader import Picture
from mpi4dl_nb.engines.models import UNet
from tests.mpi import make_mpi_command, make_mpi_environment

RANKS, LEVELS, TILE, REGION, MARGIN, REGIONS = 4, 4, 512, 1024, 64, 10
CLASSES = 3
STEADY = 50
ARGUMENTS = {"width": 2, "depth": 1}


def generate_tiles(height: int, width: int, shrink: int) -> Iterator[np.ndarray]:
    """The tiles of one level, no two of them the same."""
    small = immunohistochemistry()[:TILE:shrink, :TILE:shrink]
    tile = np.tile(small, (shrink, shrink, 1))[:TILE, :TILE]
    for y in range(-(-height // TILE)):
        for x in range(-(-width // TILE)):
            moved = np.roll(tile, (y * 37, x * 53), (0, 1))
            moved[:8, :8] = (y * 7 % 256, x * 11 % 256, 128)
            yield moved


def make_slide(path: Path, height: int, width: int) -> None:
    """A tiled BigTIFF of JPEG tiles, with its smaller levels as sub-images."""
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level in range(LEVELS + 1):
            shape = (-(-height // 2**level), -(-width // 2**level), 3)
            file.write(
                generate_tiles(*shape[:2], 2**level), shape=shape, dtype=np.uint8, tile=(TILE, TILE), photometric="rgb",
                compression="jpeg", metadata=None, maxworkers=1,
                subifds=0 if level else LEVELS, subfiletype=int(level > 0),
            )  # fmt: skip


def make_segmenter(path: Path) -> nn.Module:
    """A small U-Net that finds pixels of each class in the tissue; its weights lie in `path`."""
    torch.manual_seed(0)
    model = UNet(num_classes=CLASSES, **ARGUMENTS)
    pixels = to_network_input(next(generate_tiles(TILE, TILE, 1)))[None]
    with torch.no_grad():
        for _ in range(STEADY):  # batch norms learn what tissue is like
            scores = model(pixels)
        deviation, mean = torch.std_mean(scores, (0, 2, 3))
        model.head.bias.sub_(mean).div_(deviation)
        model.head.weight.div_(deviation.view(-1, 1, 1, 1))
    save_file(model.state_dict(), path)
    return model.eval()


def compare_regions(model: nn.Module, slide: Picture, answer: MaskFile) -> tuple[int, np.ndarray]:
    """Of some regions, corners among them: pixels of which one process says another class, and pixels of each class."""
    height, width = slide.shape()
    places = np.random.default_rng(7).integers((0, 0), (height - REGION, width - REGION), (REGIONS - 2, 2))
    starts = [(0, 0), (height - REGION, width - REGION), *((int(y), int(x)) for y, x in places // 4 * 4)]
    pairs = [(_predict_classes(model, slide, *start), answer.read(_cut(*start))) for start in starts]
    different = sum(int((plain != told).sum()) for plain, told in pairs)
    return different, sum(np.bincount(plain.ravel(), minlength=CLASSES) for plain, _ in pairs)


def _cut(y: int, x: int) -> Tile:
    return Tile(Span(y, y + REGION), Span(x, x + REGION))


def _predict_classes(model: nn.Module, slide: Picture, y: int, x: int) -> np.ndarray:
    """Of one region, by one process; the model sees a margin around it, as far as the slide goes."""
    (y0, y1), (x0, x1) = (
        (max(0, start - MARGIN), min(size, start + REGION + MARGIN))
        for start, size in zip((y, x), slide.shape(), strict=True)
    )
    with torch.no_grad():
        scores = model(to_network_input(slide.read(y0, x0, y1 - y0, x1 - x0))[None])
    return scores[0].argmax(0)[y - y0 :, x - x0 :][:REGION, :REGION].numpy()


def main(arguments: Sequence[str]) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--side-px", type=int, default=30720)
    flags.add_argument("--memory-mb", type=int, default=500)
    chosen = flags.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        weights, slide, answer = (Path(scratch, name) for name in ("unet.safetensors", "slide.tif", "classes.tif"))
        model = make_segmenter(weights)
        make_slide(slide, chosen.side_px - MARGIN, chosen.side_px)
        command = ["-m", "mpi4dl_nb.engines", "predict", "--model", "mpi4dl_nb:UNet", "--num-classes", CLASSES]
        command += ["--activation", "softmax"]
        command += ["--model-args", json.dumps(ARGUMENTS), "--weights", weights, "--image", slide, "--to", answer]
        command = make_mpi_command(RANKS, *command, "--memory-mb", chosen.memory_mb)
        told = subprocess.run(command, env=make_mpi_environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
        line = json.loads(told.splitlines()[-1])
        different, of_class = compare_regions(model, open_image(slide), MaskFile(answer, CLASSES))
    within = max(line["peak_bytes"]) <= chosen.memory_mb * 2**20
    print(json.dumps({**line, "px_of_class": of_class.tolist(), "different_px": different, "within": within}))
    return 0 if within and not different else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
