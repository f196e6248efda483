"""Replicas that do not wait for each other: over threads in this process, and over MPI."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.comm.world import SubGroup
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.asynchrony import Asynchrony, ReplicaStudy
from mpi4dl_nb.engines.train.train_replicas import replay, train_replicas
from tests.train.replica_cases import ALONE, CASES, LOSS, RANKS, STAGES, make_batch, make_model, prepare_recipe
from tests.zoo import Chain


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_over_loopback(name: str) -> None:
    run_ranks(RANKS, CASES[name])


@pytest.fixture(scope="module")
def mpi_results(mpiexec) -> dict[str, list[str]]:
    done = mpiexec(RANKS, Path(__file__).parent / "run_replicas.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_over_mpi(name: str, mpi_results: dict[str, list[str]]) -> None:
    assert mpi_results[name] == []


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["server", "peers"])
def test_nobody_waits_for_a_replica_that_stands_still(mode: str) -> None:
    """Replica 0 does not begin its first step before the others have taken eleven of twelve batches."""
    asynchrony = Asynchrony(mode=mode, replicas=3, steps=4)
    enough, taken = threading.Event(), []

    def work(world) -> ReplicaStudy:
        def make_batch_late(number: int) -> Mapping[str, Tensor]:
            if world.rank == 0:
                assert enough.wait(timeout=60)
            else:
                taken.append(number)
                if len(taken) == 11:
                    enough.set()
            return make_batch(number)

        return train_replicas(world, prepare_recipe(Chain, ALONE), asynchrony, make_batch_late)

    study = run_ranks(4, work)[0]
    assert sum(study.batches[1:]) >= 11
    assert study.batches[0] >= 1


REFUSED = {
    "mode": ({"mode": "ring"}, "mode='ring' is unknown. Choose one of synchronous, server, peers"),
    "replicas": ({"replicas": 0}, "replicas=0 must be a whole number of at least 1"),
    "steps": ({"steps": 2.5}, "steps=2.5 must be a whole number of at least 1"),
    "bound": ({"max_staleness": -1}, "max_staleness=-1 must be a whole number of at least 0"),
    "slow": ({"replicas": 2, "slow": {2: 1.0}}, "replicas 0 to 1 sleep in each step, but it says 1.0 for replica 2"),
    "seconds": ({"slow": {0: -1.0}}, "but it says -1.0 for replica 0"),
    "a text": ({"slow": {0: "1"}}, "but it says '1' for replica 0"),
    "a list": ({"slow": [1.0]}, "slow=[1.0] must map replicas to seconds"),
    "other mode": ({"mode": "peers", "max_staleness": 3}, "max_staleness=3 says nothing about mode='peers'"),
    "no mode": ({"average_every": 3}, "average_every=3 says nothing about mode='server'"),
}


@pytest.mark.parametrize(("chosen", "message"), REFUSED.values(), ids=REFUSED)
def test_choices_that_cannot_be(chosen: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        Asynchrony(**chosen)
    assert message in str(raised.value)


def test_too_few_ranks() -> None:
    with pytest.raises(PlanError, match="3 replicas of 2 ranks and a server need 7 ranks, but there are 6"):
        Asynchrony(replicas=3).check(STAGES, ranks=6)


def test_replicas_are_not_the_plans_own() -> None:
    with pytest.raises(PlanError, match="data_parallel=2 replicas wait for each other"):
        Asynchrony(replicas=2).check(Plan(data_parallel=2), ranks=99)


def test_a_server_does_not_scale_losses() -> None:
    with pytest.raises(PlanError, match="Use bfloat16, or mode='peers'"):
        Asynchrony(replicas=2).check(Plan(split_size=1, spatial_size=0, precision="float16"), ranks=3)


def test_a_sub_world_is_made_by_its_own_ranks() -> None:
    with pytest.raises(PlanError, match=r"Rank 0 is not one of the ranks \(1, 2\)"):
        run_ranks(1, lambda world: SubGroup(world, (1, 2)))


def test_a_synchronous_study_is_not_replayed() -> None:
    recipe, asynchrony = prepare_recipe(Chain, ALONE), Asynchrony(mode="synchronous", replicas=2, steps=1)
    study = run_ranks(2, lambda world: train_replicas(world, recipe, asynchrony, make_batch))[0]
    with pytest.raises(PlanError, match="needs no replay"):
        replay(study, make_model(Chain), LOSS, recipe, make_batch)


def test_a_study_that_is_not_whole_is_not_replayed() -> None:
    recipe, asynchrony = prepare_recipe(Chain, ALONE), Asynchrony(mode="peers", replicas=2, steps=3)
    study = run_ranks(2, lambda world: train_replicas(world, recipe, asynchrony, make_batch))[0]
    kept = tuple(deed for deed in study.deeds if deed.kind != "offer")
    broken = ReplicaStudy(asynchrony, 2, study.turns, study.staleness, kept, study.weights)
    with pytest.raises(PlanError, match="wait for each other"):
        replay(broken, make_model(Chain), LOSS, recipe, make_batch)
