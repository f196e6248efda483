"""`python -m tests.latency [configurator] [slicer] [stepper]`: how long the widgets take to answer, as lines of JSON.

Medians of whole answers, from a control's change to the new image: compiling, fetching from the ranks, drawing, PNG.
The page's own time is not in them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from engines.images.sample_data import immunohistochemistry
from engines.models import resnet20_v1, resnet110_v2
from mpi4dl_nb import Cluster, Configurator, Plan, Slicer, Stepper, Training

Answers = Iterator[tuple[str, Callable[[], object]]]
TILES = Plan(split_size=2, spatial_size=1, num_spatial_parts=4)
SIDE_PX = 2048


def configurator() -> Answers:
    """ResNet-110 v2, 512 px: the counts of a plan, and the plan compiled; times are predicted behind."""
    made = Configurator(resnet110_v2(), (1, 3, 512, 512), plan=TILES, machine="Summit")
    made.wait()
    for split, spatial in ((3, 1), (3, 2), (4, 2), (4, 1), (5, 1), (5, 2), (6, 1)):
        yield "counts", lambda split=split: setattr(made.knobs["split_size"], "value", split)
        yield "counts", lambda spatial=spatial: setattr(made.knobs["spatial_size"], "value", spatial)
        yield "compiled", lambda: made.plan
    made.wait()


def slicer() -> Answers:
    """A picture of 2048 px, ResNet-20."""
    copies = SIDE_PX // 512
    picture = np.tile(immunohistochemistry(), (copies, copies, 1))
    made = Slicer(picture, TILES, resnet20_v1())
    for number in range(8):
        yield "layer", lambda number=number: setattr(made.layer, "value", (number * 4 + 1) % made.layer.most)
        yield "tile", lambda number=number: setattr(made.tile, "value", (number + 1) % 4)
    for _ in range(3):
        yield "zoom", made.zoom_in
    for _ in range(6):
        yield "pan over values", lambda: made.go("ArrowUp")


def stepper() -> Answers:
    """On 5 ranks, ResNet-20, 64 and 256 px; forward and back."""
    with Cluster(TILES.ranks) as cluster:
        for side in (64, 256):
            images = torch.randn(2, 3, side, side)
            training = Training(resnet20_v1(), TILES, cluster, images.shape)
            made = Stepper(training, images, torch.tensor([3, 7]))
            made.kind.value, made.phase.value = "any", "backward"
            for _ in range(8):
                yield f"instruction forward, {side} px", lambda made=made: made.buttons["n"].click()
            made.buttons["b"].click()
            for _ in range(8):
                yield f"instruction back, {side} px", lambda made=made: made.buttons["n"].click()
            made.close()


WIDGETS = {"configurator": configurator, "slicer": slicer, "stepper": stepper}


def measured(name: str) -> Iterator[dict[str, object]]:
    """A line for each kind of answer; what has no name only prepares."""
    seconds: dict[str, list[float]] = {}
    for what, answer in WIDGETS[name]():
        start_s = time.perf_counter()
        answer()
        seconds.setdefault(what, []).append(time.perf_counter() - start_s)
    for what, found in seconds.items():
        if what:
            yield {
                "widget": name, "answer": what, "median_s": round(statistics.median(found), 3),
                "slowest_s": round(max(found), 3), "answers": len(found), "load": round(os.getloadavg()[0], 1),
            }  # fmt: skip


def main(names: Sequence[str]) -> None:
    for name in names or WIDGETS:
        for line in measured(name):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
