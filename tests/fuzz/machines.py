"""Machine files: values of every type and size. What is accepted gives forecasts that are numbers, and soon."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import forecast
from mpi4dl_nb.engines.predict.machine import Link, Machine, Speed
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.predict.tallies import CLASSES
from tests.fuzz.damage import make_damaged_bytes, make_damaged_json
from tests.fuzz.judge import Case, Outside, Random

PLANS = (
    Plan(split_size=1, num_spatial_parts=2, slice_method="1x2", data_parallel=2),
    Plan(split_size=2, spatial_size=0, parts=2),
)
MADE = {
    "Summit": MACHINES["Summit"],
    "shared": Machine(
        "shared", "made up", {kind: tuple(Speed((size,), 1e9 * size, 1e9) for size in (1.0, 9.0)) for kind in CLASSES},
        call_s=1e-6, instruction_s=1e-5, copy_per_s=1e10, latency_s=1e-4, bytes_per_s=1e8, cores=2, resume_s=1e-4,
        cold_copies=0.5, thread_s=1e-6, jitter=0.05, memory_bytes=1 << 33, ranks=4, node_ranks=2,
        between=Link(1e-4, 1e8),
    ),
}  # fmt: skip
_NUMBERS = (
    1e308, -1e308, 1e-308, 5e-324, 1e30, 1e12, 1e-12, 1e3, 1e-3, 0, -1, 10**400, -(10**400), 10**18, 1 << 63, "1e9",
    [1.0], [[1.0]], {"a": 1}, True, 1024, 1e15, [1e15] * 8, [0.0] * 3, [0.0, 1e15],
)  # fmt: skip
_EXTREMES = (1e24, 1e-3, 3600, 3600.0, 1e-5, 1e15, 1e9, 1e3, 1e-6, 1, 1024, 0.5, 0)
"""What is accepted in some of the fields."""


@cache
def _make_graph(plan: Plan) -> ModelGraph:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return TraceCache(model, (2, 3, 8, 8), nn.CrossEntropyLoss(), None, "cpu").get_graph(plan)


def read(path: Path) -> None:
    """Forecast by it. Raises PlanError, and RuntimeError where a forecast is no number."""
    machine = CalibrationCache(path).read()
    if machine is None:
        raise PlanError(f"{path} is not there")
    for plan in PLANS:
        try:
            found = forecast(_make_graph(plan), plan, machine)
        except PlanError as error:
            raise RuntimeError(f"what was accepted gives no forecast: {error}") from error
        numbers = (found.seconds, found.images_per_s, found.peak_bytes, *(each.end_s for each in found.timeline.events))
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise RuntimeError(f"what was accepted gives no forecast: {numbers[:3]}")


def write_whole_cases(folder: Path) -> Iterator[Case]:
    """Each as it was stored."""
    torch.manual_seed(0)
    for name, machine in MADE.items():
        path = folder / f"{name}.json"
        path.write_text(machine.to_json())
        yield Case(name, path, lambda path=path: read(path))


def write_damaged_case(folder: Path, number: int, random: Random, outside: Outside) -> Case:
    """Some values of its JSON, or of its bytes."""
    name = list(MADE)[number % len(MADE)]
    text = MADE[name].to_json().encode()
    path = folder / "machine.json"
    way = int(random.integers(10))
    if way < 2:
        told, changed = make_damaged_json(text, random, _NUMBERS * 3)
    elif way < 3:
        told, changed = make_damaged_bytes(text, random)
    else:
        fields = json.loads(text)
        values = _EXTREMES if way < 8 else _NUMBERS
        told = ", ".join(_replace_number(fields, values, random) for _ in range(int(random.integers(1, 5))))
        changed = json.dumps(fields).encode()
    path.write_bytes(changed)
    return Case(f"{name}, {told}", path, lambda: read(path))


def _replace_number(fields: dict[str, Any], values: Sequence[Any], random: Random) -> str:
    """One field of the machine, or of one speed of all kinds."""
    value = values[int(random.integers(len(values)))]
    if random.integers(2):
        name = sorted(fields.keys() - {"speeds"})[int(random.integers(len(fields) - 1))]
        fields[name] = value
        return f"{name}={str(value)[:20]}" if name not in ("name", "source") else name
    name = str(random.choice(["per_s", "back_per_s", "crowded", "spread", "half", "at", "inputs"]))
    for samples in fields["speeds"].values():
        samples[int(random.integers(len(samples)))][name] = value if name not in ("half", "at") else [value] * 3
    return f"{name}={str(value)[:20]}"
