"""The simulator at scale, and the search: `python -m tests.simulated` prints JSON lines; it takes some minutes.

`--growth`: seconds of a forecast for 16 to 16,384 ranks, and what it says. `--search`: the seconds of a search of all
plans for 16 ranks. Without any of them, both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.models import amoebanetd, resnet20_v1, resnet110_v2
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import forecast
from mpi4dl_nb.engines.predict.machine import Link, Machine, Speed
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.predict.search import generate_plans, search
from mpi4dl_nb.engines.predict.tallies import BY_ARITHMETIC, CLASSES

MADE_UP = Machine(
    "made up: 6 devices on a node", "round numbers of the size of those of a V100 with NVLink and two rails",
    {kind: (Speed((1.0,), *((6e12,) * 2 if kind in BY_ARITHMETIC else (4e11,) * 2)),) for kind in CLASSES},
    call_s=1e-5, back_call_s=2e-5, instruction_s=1e-5, copy_per_s=4e11, latency_s=1e-5, bytes_per_s=3e10,
    memory_bytes=16 << 30, node_ranks=6, between=Link(3e-6, 2.5e10), sums="two_level",
)  # fmt: skip
RANKS = (16, 64, 256, 1024, 2048, 4096, 16_384)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-110 v2": resnet110_v2,
    "AmoebaNet-D": lambda: amoebanetd(18, 208),
    "ResNet-20 v1": resnet20_v1,
}


def main() -> None:
    """Print what is asked for."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("growth", "search"):
        flags.add_argument(f"--{name}", action="store_true")
    flags.add_argument("--model", choices=MODELS, action="append", help="default: the first two")
    flags.add_argument("--machine", choices=MACHINES, help="default: a made-up one")
    flags.add_argument("--image-px", type=int, default=512)
    flags.add_argument("--batch", type=int, default=4)
    flags.add_argument("--ranks", type=int, help="of the search (16)")
    chosen = flags.parse_args()
    chosen.machine = MACHINES.get(chosen.machine, MADE_UP)
    parts = {"growth": predict_growth, "search": search_plans}
    asked = [name for name in parts if getattr(chosen, name)] or list(parts)
    for model in chosen.model or list(MODELS)[:2]:
        traces = TraceCache(MODELS[model](), (chosen.batch, 3, chosen.image_px, chosen.image_px), nn.CrossEntropyLoss())
        for name in asked:
            for row in parts[name](traces, chosen):
                told = {
                    "what": name,
                    "model": model,
                    "image_px": chosen.image_px,
                    "batch": chosen.batch,
                    "machine": chosen.machine.name,
                }
                print(json.dumps(told | row), flush=True)


def predict_growth(traces: TraceCache, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Four ranks are a replica: 2 x 2 tiles; and each rank is one. Efficiency is beside one replica."""
    for plan in (Plan(split_size=1, spatial_size=1), Plan(split_size=1, spatial_size=0)):
        graph = traces.get_graph(plan)
        alone = forecast(graph, plan, chosen.machine).images_per_s
        for ranks in RANKS:
            many = Plan(**plan.chosen | {"data_parallel": ranks // plan.ranks})
            began = time.perf_counter()
            found = forecast(graph, many, chosen.machine)
            yield {
                "plan": many.summary, "ranks": found.ranks, "forecast_s": round(time.perf_counter() - began, 2),
                "images_per_s": round(found.images_per_s, 1), "simulated_ranks": len(found.timeline.ranks),
                "efficiency": round(found.images_per_s / many.data_parallel / alone, 4),
            }  # fmt: skip


def search_plans(traces: TraceCache, chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All plans for so many ranks."""
    ranks = chosen.ranks or 16
    began = time.perf_counter()
    _trace(traces, ranks, chosen.batch)
    traced, traced_cpu = time.perf_counter(), time.process_time()
    found = search(ranks, chosen.batch, traces.get_graph, chosen.machine, chosen.machine.memory_bytes)
    yield {
        "ranks": ranks, "tracing_s": round(traced - began, 1), "search_s": round(time.perf_counter() - traced, 1),
        "search_cpu_s": round(time.process_time() - traced_cpu, 1),
        "simulated": len(found.fitting) + len(found.too_large), "refused": len(found.refused),
        "best": _make_lines(found.fitting[:4]),
    }  # fmt: skip


def _trace(traces: TraceCache, ranks: int, batch: int) -> None:
    for plan in generate_plans(ranks, batch):
        try:
            traces.get_graph(plan)
        except PlanError:
            continue  # the search tells it


def _make_lines(forecasts: Any) -> list[dict[str, Any]]:
    return [
        {"plan": each.plan.summary, "images_per_s": round(each.images_per_s, 1), "peak_bytes": each.peak_bytes}
        for each in forecasts
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
