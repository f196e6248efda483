"""Predictions against what was measured, plan by plan: `python -m tests.foresight`, with this machine for itself.

Every plan that `plans(ranks, batch)` lists is trained for real, in rounds between which the machine is calibrated: a
shared host is not the same for minutes, and so predictions and measurements are medians over the same time.
One line of JSON for each, and for each model and image size how far off bytes, seconds and the choice of a plan were.
`--save FILE` keeps what was measured, and `--again FILE` predicts the same once more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random

from scipy.stats import kendalltau
from torch import nn

from mpi4dl_nb import Cluster
from mpi4dl_nb.engines.bench.networks import make_swin_t
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.models import UNet, UNet3d, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.candidates import Candidate
from mpi4dl_nb.engines.predict.explain import explain
from mpi4dl_nb.engines.predict.forecast import Forecast, forecast
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.search import generate_plans
from mpi4dl_nb.planning.plan_tuner import PlanTuner, order_for_measurement
from tests.typical import compute_typical

BATCH, GROUP, STEPS, TOP = 4, 15, 4, 4


def make_monai_resnet18() -> nn.Module:
    """MONAI's, for ten classes."""
    from monai.networks.nets import resnet18

    return resnet18(spatial_dims=2, n_input_channels=3, num_classes=10)


@dataclass(frozen=True)
class Subject:
    """A model, the sides of its images in pixels that are tried by default, and their channels and axes."""

    make: Callable[[], nn.Module]
    sizes: tuple[int, ...] = (128, 192)
    channels: int = 3
    axes: int = 2


MODELS = {
    "resnet20_v1": Subject(resnet20_v1),
    "UNet": Subject(partial(UNet, num_classes=3)),
    "monai_resnet18": Subject(make_monai_resnet18),
    "UNet3d": Subject(partial(UNet3d, num_classes=3, width=8), sizes=(32, 48), channels=1, axes=3),
    "swin_t": Subject(make_swin_t, sizes=(224,)),
}


@dataclass(frozen=True)
class Row:
    """One plan of a case: seconds of a step and bytes of each rank, as they were measured."""

    plan: Plan
    seconds: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()

    def __add__(self, other: Row) -> Row:
        """What was measured later on, too."""
        return Row(self.plan, self.seconds + other.seconds, other.peak_bytes)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Case:
    """A model and an image size, the machine as it was just then, and all of its plans."""

    model: str
    size_px: int
    machine: Machine
    rows: tuple[Row, ...] = field(default=())

    @property
    def name(self) -> str:
        return f"{self.model} {self.size_px} px"

    def make_tuner(self, cluster: Cluster | None) -> PlanTuner:
        subject = MODELS[self.model]
        return PlanTuner(subject.make(), (BATCH, subject.channels, *(self.size_px,) * subject.axes), cluster)

    def to_json(self) -> dict[str, object]:
        rows = [asdict(row) | {"plan": asdict(row.plan)} for row in self.rows]
        return {"model": self.model, "size_px": self.size_px, "machine": self.machine.to_json(), "rows": rows}

    @classmethod
    def from_json(cls, kept: dict) -> Case:
        rows = (Row(make_plan(row["plan"]), tuple(row["seconds"]), tuple(row["peak_bytes"])) for row in kept["rows"])
        return cls(kept["model"], kept["size_px"], Machine.from_json(kept["machine"]), tuple(rows))


def make_plan(fields: dict) -> Plan:
    return Plan(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


def measure_case(model: str, size_px: int, ranks: int, rounds: int) -> Case:
    """All plans of a case, trained on ranks of their own; the machine is calibrated before, between and behind."""
    with Cluster(ranks) as cluster:
        case = Case(model, size_px, cluster.calibrate(again=True, quick=False))
        tuning = case.make_tuner(cluster)
        asked = [
            Candidate(forecast(tuning.task.traces.get_graph(plan), plan, case.machine))
            for plan in generate_plans(ranks, BATCH, MODELS[model].axes)
        ]
        machines, rows = [case.machine], [Row(each.plan) for each in asked]
        for turn in range(rounds):
            mixed = Random(turn).sample(asked, len(asked))  # plans alike share no busy minute of the host
            found = {row.plan: row for row in _measure_round(tuning, mixed, turn == rounds - 1)}
            rows = [row + found[row.plan] for row in rows]
            machines.append(cluster.calibrate(again=True, quick=False))
        return replace(case, machine=compute_typical(machines), rows=tuple(rows))


def _measure_round(tuning: PlanTuner, asked: Sequence[Candidate], last: bool) -> Iterator[Row]:
    """Some steps of each plan, of which a few at a time are in memory; bytes are counted in the last round."""
    for first in range(0, len(asked), GROUP):
        found = tuning.measure(asked[first : first + GROUP], STEPS, count_bytes=last)
        if failed := [f"{each.plan.summary}: {each.failure}" for each in found if each.failure]:
            raise RankError(f"These plans could not be measured: {'; '.join(failed)}")
        for each in found:
            yield Row(each.plan, each.measured.seconds, each.measured.peak_bytes)


def predict_rows(case: Case) -> Iterator[tuple[Row, Forecast]]:
    """The rows, each with its prediction."""
    tuning = case.make_tuner(None)
    for row in case.rows:
        yield row, forecast(tuning.task.traces.get_graph(row.plan), row.plan, case.machine)


def report_case(case: Case) -> Iterator[dict[str, object]]:
    """A line for each plan, and one for all of them."""
    pairs = list(predict_rows(case))
    for row, found in pairs:
        yield {
            "case": case.name,
            "plan": row.plan.summary,
            "predicted_s": round(found.seconds, 4),
            "measured_s": round(row.median_s, 4),
            "spread": round((max(row.seconds) - min(row.seconds)) / row.median_s, 2),
            "time_ratio": round(found.seconds / row.median_s, 3),
            "memory_ratio": [round(p / m, 3) for p, m in _pair_bytes(row, found)],
        }
    yield {
        "case": case.name,
        "plans": len(pairs),
        **_score_memory(pairs),
        **_score_times(pairs),
        **_score_choice(pairs),
    }


Pairs = Sequence[tuple[Row, Forecast]]


def _pair_bytes(row: Row, found: Forecast) -> list[tuple[int, int]]:
    return [(memory.peak_bytes, row.peak_bytes[memory.rank]) for memory in found.memory]


def _score_memory(pairs: Pairs) -> dict[str, float]:
    errors = [abs(p / m - 1) for row, found in pairs for p, m in _pair_bytes(row, found)]
    return {"memory_median": round(statistics.median(errors), 4), "memory_worst": round(max(errors), 4)}


def _score_times(pairs: Pairs) -> dict[str, float]:
    """How far off predictions are, how alike their order is to the measured one, and that one's halves.

    `kendall_tau_where_sure` is of those pairs of plans alone that both halves of the measurements order alike.
    """
    errors = [abs(found.seconds / row.median_s - 1) for row, found in pairs]
    predicted_s = [found.seconds for _, found in pairs]
    first_s, second_s = (
        [statistics.median(half(row.seconds)) for row, _ in pairs] for half in (_get_first_half, _get_second_half)
    )
    return {
        "time_median": round(statistics.median(errors), 4),
        "time_worst": round(max(errors), 4),
        "kendall_tau": _compute_tau(predicted_s, [row.median_s for row, _ in pairs]),
        "kendall_tau_of_halves": _compute_tau(first_s, second_s),
        "kendall_tau_where_sure": _compute_tau_where_sure(predicted_s, first_s, second_s),
    }


def _get_first_half(seconds: Sequence[float]) -> Sequence[float]:
    return seconds[: len(seconds) // 2]


def _get_second_half(seconds: Sequence[float]) -> Sequence[float]:
    return seconds[len(seconds) // 2 :]


def _compute_tau_where_sure(ours: Sequence[float], *theirs: Sequence[float]) -> float:
    """Of the pairs in whose order all of `theirs` agree.

    >>> _compute_tau_where_sure([1, 2, 3], [1, 2, 3], [1, 3, 2])
    1.0
    """
    plans = list(zip(ours, *theirs, strict=True))
    orders = [[a < b for a, b in zip(one, other, strict=True)] for one, other in combinations(plans, 2)]
    right = [mine == known[0] for mine, *known in orders if len(set(known)) == 1]
    return round(2 * statistics.fmean(right) - 1, 3)


def _compute_tau(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(float(kendalltau(ours, theirs).statistic), 3)


def _score_choice(pairs: Pairs) -> dict[str, object]:
    """How much slower than the best of all plans the first one by prediction is, and the best that `tune` measures."""
    rates = {row.plan: found.images / row.median_s for row, found in pairs}
    best = max(rates.values())
    found = sorted((each for _, each in pairs), key=lambda each: -each.images_per_s)
    measured = order_for_measurement([*map(Candidate, found)], explain(found))[:TOP]
    return {
        "first_of_best": round(rates[found[0].plan] / best, 3),
        "tuned_of_best": round(max(rates[each.plan] for each in measured) / best, 3),
    }


def main(arguments: Sequence[str]) -> int:
    flags = argparse.ArgumentParser(prog="python -m tests.foresight", description=__doc__.splitlines()[0])
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    flags.add_argument("--sizes", type=int, nargs="+", metavar="PX", help="default: those of each model")
    flags.add_argument("--save", type=Path)
    flags.add_argument("--again", type=Path)
    chosen = flags.parse_args(arguments)
    cases = [Case.from_json(json.loads(line)) for line in chosen.again.read_text().splitlines()] if chosen.again else []
    for model in () if chosen.again else chosen.models:
        for size in chosen.sizes or MODELS[model].sizes:
            cases.append(measure_case(model, size, chosen.ranks, chosen.rounds))
            if chosen.save:
                with chosen.save.open("a") as file:
                    file.write(json.dumps(cases[-1].to_json()) + "\n")
    for case in cases:
        for line in report_case(case):
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
