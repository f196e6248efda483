"""Tiles that are read from images when their turn comes."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from engines.images.dataset import SyntheticImages
from engines.models import UNet
from engines.plan import Plan
from engines.program.streamed_training import StreamedTraining, make_tile_loader
from engines.spatial.tiles import Tile
from engines.train.oracle import ReferenceTraining
from engines.train.training import prepare

SIZE = (48, 32)
PLAN = Plan(split_size=1, spatial_size=1, slice_method="3x1", precision="float64")


class Watched(SyntheticImages):
    """Counts the rows of pixels that are read, in their order."""

    def __init__(self) -> None:
        super().__init__(4, SIZE, classes=3)
        self.rows: list[tuple[int, int]] = []

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        self.rows.append((tile.rows.start, tile.rows.stop))
        return super().part(index, tile, draw)


def test_a_segmentation_reads_each_tile_once_and_is_that_of_one_process(tmp_path):
    torch.manual_seed(0)
    model, images = UNet(num_classes=3), Watched()
    recipe = prepare(model, PLAN, (2, 3, *SIZE), device="cpu")
    training = StreamedTraining(recipe, tmp_path)
    one = ReferenceTraining(model, nn.CrossEntropyLoss(), recipe.optimiser, torch.float64)
    feed = make_tile_loader(training, images)
    whole = Tile.whole(*SIZE)
    for numbers in pairwise(range(4)):
        losses = training.step(feed(numbers))
        batch = {
            "images": torch.stack([SyntheticImages.part(images, n, whole) for n in numbers]).double(),
            "labels": torch.stack([images.mask(n, whole) for n in numbers]),
        }
        assert abs(losses[0] - one.step(batch)) < 1e-10
    assert sorted(images.rows) == sorted([(0, 16), (16, 32), (32, 48)] * 2 * 3)
    training.close()
