"""`python -m mpi4dl_nb.demo`: the main use case, from cluster to figures, on a real pathology picture.

ResNet-110 v2 learns, on 2 x 2 tiles and one layer stage, which crops of a stained tissue have more stain (DAB) than
most; then its gradients are compared with those of one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mpi4dl_nb import Cluster, Plan, Training, show_slicing, show_timeline
from mpi4dl_nb.engines.cli.options import parse_positive
from mpi4dl_nb.engines.comm.device import count_cores
from mpi4dl_nb.engines.errors import Mpi4dlError
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.sample_data import StainCrops, immunohistochemistry
from mpi4dl_nb.engines.models import resnet110_v2
from mpi4dl_nb.engines.train.oracle import ReferenceTraining

PLAN = Plan(split_size=2, spatial_size=1, num_spatial_parts=4, slice_method="square")
Batch = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> bool:
    """Train, verify and draw; the last line printed is JSON. Return whether the ranks are as exact as one process."""
    flags = argparse.ArgumentParser(description="Train ResNet-110 v2 on tiles of a stained tissue.")
    flags.add_argument("--epochs", type=parse_positive, default=3)
    flags.add_argument("--batch-size", type=parse_positive, default=2)
    flags.add_argument("--crop-px", type=parse_positive, default=96)
    flags.add_argument("--backend", choices=["mpi", "loopback"], default="mpi")
    flags.add_argument("--figures", default="build/demo", help="folder for the pictures")
    chosen = flags.parse_args(arguments)
    picture = open_image(immunohistochemistry())
    batches = list(StainCrops(picture, chosen.crop_px, count=8, seed=0).iterate_batches(chosen.batch_size))
    torch.manual_seed(0)
    model = resnet110_v2(num_classes=2)
    print(f"Starting {PLAN.ranks} ranks ({PLAN.summary}) ...", flush=True)
    with Cluster(PLAN.ranks, backend=chosen.backend) as cluster:
        adam = partial(torch.optim.Adam, lr=1e-3)
        shape = tuple(batches[0][0].shape)
        training = Training(model, PLAN, cluster, shape, optimiser=adam)
        history = training.fit(batches, epochs=chosen.epochs)
        starts = range(0, len(history.losses), len(batches))  # of the epochs, whose losses are averaged
        losses = [statistics.fmean(history.losses[start : start + len(batches)]) for start in starts]
        for epoch, loss in enumerate(losses, start=1):
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
        ours, theirs = _measure_rates(training, batches)
        print("Comparing three steps in float64 with one process ...", flush=True)
        proof = training.verify(batches)
        folder = Path(chosen.figures)
        folder.mkdir(parents=True, exist_ok=True)
        figures = [folder / "slicing.png", folder / "timeline.png"]
        show_slicing(picture, PLAN, training.model).savefig(figures[0])
        show_timeline(training.timeline(), PLAN).savefig(figures[1])
    line = {
        "ranks": PLAN.ranks,
        "images_per_s": round(ours, 4),
        "one_process_images_per_s": round(theirs, 4),
        "ok": proof["ok"],
        "grad_rel": proof["grad_rel"],
        "loss_first": round(losses[0], 5),
        "loss_last": round(losses[-1], 5),
        "figures": [str(path) for path in figures],
    }
    print(json.dumps(line), flush=True)
    return bool(proof["ok"])


def _measure_rates(training: Training, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return the median images per second of the ranks and of one process with all cores, measured interleaved."""
    torch.set_num_threads(count_cores())
    alone = ReferenceTraining(training.model, training.loss, training.recipe.optimiser)
    images, labels = batches[0]
    alone.step({"images": images, "labels": labels})
    ours, theirs = [], []
    for _ in range(2):
        start_s = time.perf_counter()
        training.step(images, labels)
        middle_s = time.perf_counter()
        alone.step({"images": images, "labels": labels})
        ours.append(middle_s - start_s)
        theirs.append(time.perf_counter() - middle_s)
    return len(images) / statistics.median(ours), len(images) / statistics.median(theirs)


if __name__ == "__main__":
    try:
        sys.exit(not main())
    except Mpi4dlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
