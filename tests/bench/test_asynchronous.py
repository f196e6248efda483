"""The study of replicas that do not wait: its choices, and what it prints."""

from __future__ import annotations

import json

import pytest
import torch

from mpi4dl_nb.engines.bench import asynchronous as bench
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.asynchrony import MODES, Asynchrony
from mpi4dl_nb.engines.train.recipe import prepare
from tests.zoo import Skips

TINY = ("--replicas", "2", "--steps", "2", "--image-size", "12", "--batch-size", "2", "--model", "tests.zoo:Skips")


def parse_studies(*flags: str, ranks: int) -> list[Asynchrony]:
    return bench.parse_studies(bench.make_parser().parse_args(flags), ranks)


def test_flags_make_a_study() -> None:
    flags = ("--mode", "server", "--max-staleness", "0", "--staleness-aware", "--slow", "2:0.1,0:3")
    (study,) = parse_studies(*flags, ranks=4)
    assert study == Asynchrony(max_staleness=0, staleness_aware=True, slow={2: 0.1, 0: 3.0})


def test_of_all_modes_each_takes_what_concerns_it() -> None:
    found = parse_studies("--max-staleness", "2", "--average-every", "3", ranks=4)
    assert [study.mode for study in found] == list(MODES)
    assert [study.max_staleness for study in found] == [None, 2, None]
    assert [study.average_every for study in found] == [1, 1, 3]


REFUSED = {
    "slow": (("--slow", "2=0.1"), 4, "Argument --slow: '2=0.1' must be REPLICA:SECONDS, or several"),
    "few": ((), 3, "3 replicas of 1 rank and a server need 4 ranks, but there are 3. Start 4 ranks"),
    "many": (("--mode", "peers"), 4, "mode=peers needs 3 ranks, but there are 4. Start 3 ranks"),
    "bound": (("--mode", "server", "--max-staleness", "-2"), 4, "max_staleness=-2 must be a whole number"),
}


@pytest.mark.parametrize(("flags", "ranks", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_studied(flags: tuple[str, ...], ranks: int, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_studies(*flags, ranks=ranks)
    assert message in str(raised.value)


def test_crops_are_square() -> None:
    recipe = prepare(Skips(), Plan(split_size=1, spatial_size=0), (2, 3, 12, 14))
    with pytest.raises(PlanError, match="are square, not 12 x 14 pixels"):
        bench.make_crops_feed(recipe)


def test_batches_come_again() -> None:
    recipe = bench.make_crops_recipe(size_px=12, batch_size=2)
    feed = bench.make_crops_feed(recipe, count=6)
    assert torch.equal(feed(1)["images"], feed(4)["images"])
    assert not torch.equal(feed(1)["images"], feed(2)["images"])


@pytest.mark.nightly
def test_all_modes_over_loopback() -> None:
    asked = bench.expand_modes("all", replicas=2, steps=3)
    recipe = prepare(Skips(num_classes=2), Plan(split_size=2, spatial_size=0), (2, 3, 16, 16))
    found = run_ranks(5, lambda world: bench.bench_asynchronous(world, asked, recipe))
    for mine, study in enumerate(found[0]):
        line = study.line
        assert line["mode"] == MODES[mine]
        assert sum(line["batches"]) >= 6
        assert line["images_per_s"] == pytest.approx(len(study.turns) * 2 / study.seconds, abs=1e-3)
        assert line["max_staleness"] == max(study.staleness)
    assert len(found[4][1].turns) == len(found[0][1].turns)


@pytest.mark.nightly
def test_the_command(mpiexec) -> None:
    done = mpiexec(3, "-m", "mpi4dl_nb.engines", "bench", "asynchronous", *TINY)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert [line["mode"] for line in lines] == list(MODES)
    assert lines[1]["max_staleness"] >= 1
