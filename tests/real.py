"""`python -m tests.real brecahad|bccd|same [--seeds N] [--epochs N]`: trainings on real images, each a line of JSON.

`brecahad` and `bccd` train on 4 ranks and are judged by images that they have not seen, beside what knows nothing.
`same` compares the losses of 1 rank and of 4 in float64, on whole images. The images are in `../shared/data`, or in
the folder that MPI4DL_NB_DATA names.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import LabelledImages, Subset
from mpi4dl_nb.engines.images.folder import write_boxes_table, write_masks_table
from mpi4dl_nb.engines.images.tables import table_images
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.train.history import History
from mpi4dl_nb.engines.train.training_events import count_predictions

ROOT = Path(__file__).parents[1]
SIZE = 1024, 1360  # of a picture of BreCaHAD
CROP = 96
TILES = Plan(split_size=1, spatial_size=1, num_spatial_parts=4)  # to the loss
MIXED = Plan(split_size=2, spatial_size=1, num_spatial_parts=3, slice_method="vertical")
ALONE = Plan(split_size=1, spatial_size=0)

Sides = tuple[LabelledImages, LabelledImages]


def find_data() -> Path | None:
    """The folder of real images, where there is one."""
    folder = Path(os.environ.get("MPI4DL_NB_DATA", ROOT.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def make_brecahad(folder: Path, tables: Path, size: tuple[int, int] = SIZE, seed: int = 0) -> Sides:
    """18 pictures with masks of nuclei to train on, and 6 to judge by, parted by picture."""
    table = tables / "brecahad.csv"
    write_masks_table(folder / "brecahad" / "images", folder / "brecahad" / "masks", table)
    return table_images(table, size, threshold=127, fit="crop", within=folder).split(0.25, seed)


def make_bccd(folder: Path, tables: Path, size_px: int = CROP) -> Sides:
    """Crops of blood cells of 3 kinds, one of a kind and picture, from the official lists `trainval` and `test`."""
    for chosen in ("trainval", "test"):
        write_boxes_table(folder / "bccd" / "BCCD", chosen, tables / f"{chosen}.csv", CROP, most=1)
    train, judge = (
        table_images(tables / f"{chosen}.csv", (size_px, size_px), within=folder) for chosen in ("trainval", "test")
    )
    assert train.names == judge.names
    return train, judge


def compute_nuclei_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy and 1 - Dice of the nuclei, which are a small part of the pixels."""
    share = torch.softmax(prediction, 1)[:, 1]
    true = (labels == 1).to(share.dtype)
    dice = (2 * (share * true).sum() + 1) / (share.sum() + true.sum() + 1)
    return nn.functional.cross_entropy(prediction, labels) + 1 - dice


def make_segmenter(seed: int, width: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return UNet(num_classes=2, width=width, depth=3)


def make_classifier(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return resnet20_v1(num_classes=3)


def train_brecahad(
    cluster: Cluster, folder: Path, tables: Path, seed: int, epochs: int, width: int
) -> dict[str, object]:
    train, judge = make_brecahad(folder, tables, seed=seed)
    adam = partial(torch.optim.Adam, lr=3e-3)
    falls = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=5e-3, total_steps=epochs * len(train))
    training = Training(
        make_segmenter(seed, width), TILES, cluster, (1, 3, *SIZE), compute_nuclei_loss, adam, scheduler=falls
    )
    history = training.fit(train, epochs, False, held_out=judge, seed=seed, log=tables / f"brecahad{seed}.jsonl")
    training.close()
    return {
        **_make_line(history),
        "baseline_all_nuclei_dice": _score_everything(judge),
        "baseline_dark_dice": _score_dark(train, judge),
    }


def train_bccd(cluster: Cluster, folder: Path, tables: Path, seed: int, epochs: int, _: int) -> dict[str, object]:
    train, judge = make_bccd(folder, tables, 48)
    adam = partial(torch.optim.Adam, lr=2e-3)
    training = Training(make_classifier(seed), MIXED, cluster, (16, 3, 48, 48), optimiser=adam)
    history = training.fit(train, epochs, False, held_out=judge, seed=seed, log=tables / f"bccd{seed}.jsonl")
    training.close()
    classes = [np.bincount([each.label(i) for i in range(len(each))], minlength=3) for each in (train, judge)]
    most = int(classes[1][classes[0].argmax()])
    return {**_make_line(history), "baseline_most_frequent_accuracy": most / len(judge), "judged": len(judge)}


def _make_line(history: History) -> dict[str, object]:
    last = history.epochs[-1].record
    dice = [epoch.record["held_out_dice"] for epoch in history.epochs]
    accuracy = [round(epoch.record["held_out_accuracy"], 4) for epoch in history.epochs]
    each = {"held_out_dice_by_epoch": dice} if dice[0] is not None else {"held_out_accuracy_by_epoch": accuracy}
    return {**last, **each}


def _score_everything(images: LabelledImages) -> float | None:
    """Dice of calling every pixel a nucleus."""
    counted = [
        count_predictions(torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, *SIZE), _get_mask(images, i))
        for i in _all(images)
    ]
    return sum(counted[1:], counted[0]).dice


def _score_dark(train: LabelledImages, judge: LabelledImages) -> float | None:
    """Dice of calling dark pixels nuclei, as dark as is best for the images that are trained on."""

    def compute_dice(images: LabelledImages, limit: float) -> float:
        whole = Tile.whole(*SIZE)
        counted = []
        for i in _all(images):
            red = images.part(i, whole)[0]
            counted.append(count_predictions(torch.stack([red - limit, limit - red])[None], _get_mask(images, i)))
        return sum(counted[1:], counted[0]).dice or 0.0

    return compute_dice(judge, max(np.linspace(-0.8, 0.6, 8), key=partial(compute_dice, train)))


def _get_mask(images: LabelledImages, index: int) -> Tensor:
    return images.mask(index, Tile.whole(*SIZE))[None]


def _all(images: LabelledImages) -> range:
    return range(len(images))


def compare_losses(folder: Path, tables: Path, steps: int = 3) -> dict[str, object]:
    """The losses of the first steps on whole pictures of BreCaHAD, by 1 rank and by 4."""
    train, _ = make_brecahad(folder, tables)
    found = []
    for plan in (ALONE, TILES):
        with Cluster(plan.ranks) as cluster:
            exact = replace(plan, precision="float64")
            training = Training(make_segmenter(0), exact, cluster, (1, 3, *SIZE), compute_nuclei_loss)
            found.append(training.fit(Subset(train, range(steps)), progress=False).losses)
    far = max(abs(one - four) / abs(one) for one, four in zip(*found, strict=True))
    return {
        "losses_1_rank": found[0],
        "losses_4_ranks": found[1],
        "largest_relative_difference": far,
        "ok": far <= 1e-9,
    }


def main(arguments: Sequence[str]) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("what", choices=["brecahad", "bccd", "same"])
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--first-seed", type=int, default=0)
    flags.add_argument("--epochs", type=int, default=12)
    flags.add_argument("--width", type=int, default=4, help="channels of the segmenter at full size, of `brecahad`")
    flags.add_argument("--keep", type=Path, help="a folder for the tables and for the log of each epoch")
    flags.add_argument("--steps", type=int, default=3, help="of `same`")
    chosen = flags.parse_args(arguments)
    folder = find_data()
    if folder is None:
        print("There is no ../shared/data, and no folder that MPI4DL_NB_DATA names.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        tables = (chosen.keep or Path(scratch)).absolute()
        tables.mkdir(parents=True, exist_ok=True)
        if chosen.what == "same":
            line = compare_losses(folder, tables, chosen.steps)
            print(json.dumps(line), flush=True)
            return 0 if line["ok"] else 1
        work = {"brecahad": train_brecahad, "bccd": train_bccd}[chosen.what]
        with Cluster(4) as cluster:
            for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
                start_s = time.perf_counter()
                line = work(cluster, folder, tables, seed, chosen.epochs, chosen.width)
                line["whole_seconds"] = round(time.perf_counter() - start_s, 1)
                print(json.dumps({"what": chosen.what, "seed": seed, **line}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
