"""`fit(on_failure=...)`: ranks fail, die and hang in the midst of a training; its losses and weights stay the same."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi4dl_nb.cluster.calibrate_cluster import CalibrationCache
from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import LossError, PlanError, RankError
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.server.rank_server import RankServer
from mpi4dl_nb.engines.train.interrupts import StoppedError
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.training_events import Recovered, StepResult
from mpi4dl_nb.training.loops import BatchLoop
from mpi4dl_nb.training.progress import ProgressRecorder
from mpi4dl_nb.training.recovery import choose_plan
from mpi4dl_nb.training.training import Training
from tests.chaos.faults import Fault, schedule_fault
from tests.chaos.training import SHAPE, Heard, make_batches, make_model

PLAN = Plan(split_size=2, spatial_size=1, num_spatial_parts=2, slice_method="vertical", parts=2, precision="float64")
DATA = make_batches(4, seed=3)


@pytest.fixture(scope="module", params=["loopback", "mpi"])
def shared(request):
    with Cluster(3, backend=request.param, hang_after_s=5) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared, tmp_path_factory, monkeypatch):
    """Alive, and of three ranks again. How fast they are, or two of them, is taken for known: it takes a minute."""
    monkeypatch.setenv("MPI4DL_NB_MACHINES", str(tmp_path_factory.mktemp("machines")))
    for ranks in (2, 3):
        CalibrationCache.of(ranks, shared.backend).write(replace(MACHINES["Frontera"], ranks=ranks))
    return shared.resize(3)


over_mpi = pytest.mark.parametrize("shared", ["mpi"], indirect=True)
over_loopback = pytest.mark.parametrize("shared", ["loopback"], indirect=True)


def make_training(cluster: Cluster) -> Training:
    return Training(make_model(), PLAN, cluster, SHAPE)


@pytest.fixture(scope="module")
def undisturbed():
    """Losses and weights of two epochs without a fault."""
    with Cluster(3, backend="loopback") as cluster:
        found = make_training(cluster)
        return found.fit(DATA, epochs=2, progress=False).losses, found.state_dict()


def insert_fault(
    found: Training, kind: str, tmp_path: Path, steps: int = 6, rank: int = 1, at: int = 7, pause_s: float = 0.0
) -> None:
    """After so many steps, at an instruction, a rank comes to harm."""
    at += steps * len(found.programs[rank].steps)
    found.cluster.call(schedule_fault, Fault(kind, "rank", "step", rank, at, 0.0, tmp_path / "note", pause_s=pause_s))


def check(found: Training, losses: Any, undisturbed: Any) -> None:
    wanted_losses, wanted = undisturbed
    assert list(losses) == pytest.approx(list(wanted_losses), rel=1e-12)
    state = found.state_dict()
    for name, tensor in wanted.items():
        assert torch.allclose(state[name].double(), tensor.double(), rtol=1e-12, atol=1e-15), name


@pytest.mark.nightly
def test_a_failure_is_healed_in_place(cluster, undisturbed, tmp_path):
    found, heard, log = make_training(cluster), Heard(), tmp_path / "log.jsonl"
    insert_fault(found, "raise", tmp_path)
    history = found.fit(
        DATA, epochs=2, progress=False, save=tmp_path / "saved", on_failure="heal", monitor=heard, log=log
    )
    check(found, history.losses, undisturbed)
    assert [epoch.steps for epoch in history.epochs] == [4, 4]
    (healed,) = heard.healed
    assert "no step is lost" in healed.text
    assert "Rank 1: ValueError: a fault" in healed.text
    assert heard.losses == list(history.losses)
    assert [json.loads(line)["steps"] for line in log.read_text().splitlines()] == [4, 4]


@pytest.mark.nightly
@over_mpi
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_dead_ranks_are_started_anew(cluster, undisturbed, tmp_path, kind):
    """Saved after steps 3 and 6, and hurt in the eighth: one step is done again."""
    found, heard, log = make_training(cluster), Heard(), tmp_path / "log.jsonl"
    insert_fault(found, kind, tmp_path, steps=7)
    history = found.fit(
        DATA, epochs=2, progress=False, save=tmp_path / "saved", save_every=3, on_failure="heal", monitor=heard, log=log
    )
    check(found, history.losses, undisturbed)
    assert [epoch.steps for epoch in history.epochs] == [4, 4]
    (healed,) = heard.healed
    assert "1 step done again" in healed.text
    assert healed.text.count("Rank 1") == 1
    assert "stage 0, tile 1" in healed.text
    assert heard.steps == len(DATA) * 2 + 1
    assert [json.loads(line)["steps"] for line in log.read_text().splitlines()] == [4, 4]


@pytest.mark.nightly
@over_mpi
def test_the_others_go_on_under_another_plan(cluster, undisturbed, tmp_path):
    found, heard = make_training(cluster), Heard()
    insert_fault(found, "kill", tmp_path)
    held_out = SyntheticImages(3, SHAPE[2:], 4, seed=1)
    history = found.fit(
        DATA, epochs=2, progress=False, save=tmp_path / "s", on_failure="shrink", monitor=heard, held_out=held_out
    )
    assert all(epoch.held_out is not None for epoch in history.epochs)
    check(found, history.losses, undisturbed)
    assert cluster.n == found.plan.ranks == 2
    assert found.plan.micro_batches == PLAN.micro_batches
    assert "2 steps done again" in heard.healed[0].text


@pytest.mark.nightly
@over_mpi
def test_images_that_ranks_read_go_on_where_they_were(cluster, tmp_path):
    """In the midst of an epoch, with held-out images judged after each."""
    images = SyntheticImages(9, (16, 24), 3, seed=1)
    plan = Plan(split_size=1, num_spatial_parts=3, slice_method="1x3", precision="float64")

    def fit_unet(folder: Path, faulty: bool) -> tuple[Any, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        found = Training(UNet(num_classes=3, width=4, depth=1), plan, cluster, (2, 3, 16, 24))
        if faulty:
            insert_fault(found, "kill", tmp_path, steps=6)
        history = found.fit(
            images, epochs=2, progress=False, held_out=images, seed=4, save=folder, save_every=5, on_failure="heal"
        )
        return history, found.state_dict()

    history, state = fit_unet(tmp_path / "faulty", faulty=True)
    wanted, weights = fit_unet(tmp_path / "whole", faulty=False)
    assert history.losses == wanted.losses
    assert [(epoch.steps, epoch.loss, epoch.held_out.loss) for epoch in history.epochs] == [
        (epoch.steps, epoch.loss, epoch.held_out.loss) for epoch in wanted.epochs
    ]
    assert all(torch.equal(state[name], weights[name]) for name in weights)


@over_loopback
def test_a_second_try_goes_on_from_what_the_first_has_loaded(cluster, undisturbed, tmp_path, monkeypatch):
    """The first one loads the weights of step 3, and fails then; the ranks keep them."""
    found, tries, resume = make_training(cluster), [], BatchLoop.resume

    def resume_later(loop: BatchLoop, place: Any) -> None:
        tries.append(place)
        if len(tries) == 1:
            raise RankError("no memory for it")
        resume(loop, place)

    monkeypatch.setattr(BatchLoop, "resume", resume_later)
    insert_fault(found, "raise", tmp_path, steps=4, rank=1, at=len(found.programs[1].steps) - 1, pause_s=1.0)
    saving = {"save": tmp_path / "saved", "save_every": 3}
    history = found.fit(DATA, epochs=2, progress=False, on_failure="heal", **saving)
    assert len(tries) == 2
    check(found, history.losses, undisturbed)


@over_loopback
def test_what_comes_twice_in_the_same_place_is_raised(cluster, tmp_path):
    def insert_broken_step(host: RankServer, name: str) -> None:
        worker = host.get_kept(RankTraining)[name].worker
        step = worker.step

        def step_or_fail() -> Any:
            if worker.steps == 3 and host.world.rank == 2:
                raise ValueError("always")
            return step()

        worker.step = step_or_fail

    found, heard = make_training(cluster), Heard()
    cluster.call(insert_broken_step, found.name)
    with pytest.raises(RankError, match="Rank 2: ValueError: always") as caught:
        found.fit(DATA, progress=False, save=tmp_path, on_failure="heal", monitor=heard)
    assert len(heard.healed) == 1
    assert "rank 2 after 2 steps, rank 2 after 2 steps" in caught.value.__notes__[-1]


@over_loopback
def test_a_loss_that_is_no_number_is_not_healed(cluster, tmp_path):
    found, heard = make_training(cluster), Heard()
    images, labels = DATA[0]
    with pytest.raises(LossError):
        found.fit([(images * float("nan"), labels)], progress=False, save=tmp_path, on_failure="heal", monitor=heard)
    assert not heard.healed
    assert found.save(tmp_path).exists()  # a step that has failed is no obstacle


@over_loopback
def test_how_to_heal_is_checked(cluster, tmp_path):
    found = make_training(cluster)
    with pytest.raises(PlanError, match="Choose one of raise, heal, shrink"):
        found.fit(DATA, on_failure="ignore", save=tmp_path)
    with pytest.raises(PlanError, match="save=FOLDER"):
        found.fit(DATA, on_failure="heal")


@over_loopback
def test_ranks_that_failed_while_they_changed_their_weights_do_not_go_on(cluster, tmp_path):
    found = make_training(cluster)
    saved = found.save(tmp_path / "saved")
    insert_fault(found, "raise", tmp_path, steps=0, rank=1, at=len(found.programs[1].steps) - 1, pause_s=1.0)
    with pytest.raises(RankError, match="a fault"):
        found.step(*DATA[0])
    uses = [lambda: found.step(*DATA[0]), found.state_dict, lambda: found.save(tmp_path)]
    for use in (*uses, lambda: found.predict(DATA[0][0]), lambda: found.stepping(*DATA[0])):
        with pytest.raises(PlanError, match=r"has done so 1 times. Load a checkpoint"):
            use()
    found.load(saved)
    found.step(*DATA[0])


@pytest.mark.nightly
@over_loopback
@pytest.mark.parametrize("sync_batchnorm", [True, False])
def test_a_failure_in_the_midst_of_an_update_is_healed_from_a_checkpoint(cluster, tmp_path, sync_batchnorm):
    """Some have moved their statistics, or their weights, and some have not."""

    def fit_model(faulty: bool) -> tuple[Any, dict[str, torch.Tensor], Heard]:
        found, heard = Training(make_model(), replace(PLAN, sync_batchnorm=sync_batchnorm), cluster, SHAPE), Heard()
        if faulty:
            insert_fault(found, "raise", tmp_path, steps=2, at=len(found.programs[1].steps) - 1)
        history = found.fit(
            DATA, progress=False, save=tmp_path / f"{faulty}", save_every=1, on_failure="heal", monitor=heard
        )
        return history.losses, found.state_dict(), heard

    losses, state, heard = fit_model(faulty=True)
    wanted_losses, wanted, _ = fit_model(faulty=False)
    assert losses == wanted_losses
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert len(heard.healed) == 1


@pytest.mark.nightly
@over_mpi
def test_a_training_is_loaded_where_the_ranks_have_lost_it(cluster, undisturbed, tmp_path):
    found = make_training(cluster)
    found.fit(DATA, progress=False, save=tmp_path)
    cluster.restart()
    with pytest.raises(PlanError, match=r"Call load\(\) with a checkpoint"):
        found.step(*DATA[0])
    assert found.load(tmp_path) == 4
    rest = [found.step(*batch) for batch in DATA]
    check(found, [*undisturbed[0][:4], *rest], undisturbed)


@pytest.mark.nightly
def test_a_step_that_takes_long_is_given_up_by_an_interrupt(cluster, undisturbed, tmp_path):
    """A rank dallies in the third step: what was before it is saved, and goes on as if nothing had been."""

    def insert_slow_step(host: RankServer, name: str) -> None:
        worker = host.get_kept(RankTraining)[name].worker
        step, left = worker.step, [2 * len(worker.program.steps) + 5]

        def step_slowly() -> Any:
            left[0] -= 1
            until_s = time.monotonic() + (1.5 if host.world.rank == 1 and left[0] == 0 else 0)
            while time.monotonic() < until_s:
                time.sleep(0.01)
            return step()

        worker.step = step_slowly

    found, heard = make_training(cluster), Heard()
    cluster.call(insert_slow_step, found.name)
    threading.Thread(target=interrupt_after, args=(heard, 2), daemon=True).start()
    with pytest.raises(StoppedError, match="Stopped by SIGINT after 2 steps") as caught:
        found.fit(DATA, epochs=2, progress=False, save=tmp_path, monitor=heard)
    assert str(tmp_path) in str(caught.value)
    found.load(tmp_path)
    rest = [found.step(*batch) for batch in (DATA * 2)[2:]]
    check(found, [*heard.losses, *rest], undisturbed)


@pytest.mark.nightly
def test_an_interrupt_behind_the_update_saves_no_half_of_a_step(cluster, undisturbed, tmp_path):
    """All ranks have changed their weights in the third step, but nobody knows of it yet: as if it had not been."""

    def insert_slow_step(host: RankServer, name: str) -> None:
        worker = host.get_kept(RankTraining)[name].worker
        step, left = worker.step, [3 * len(worker.program.steps)]

        def step_slowly() -> Any:
            done = step()
            left[0] -= 1
            until_s = time.monotonic() + (1.5 if left[0] == 0 else 0)
            while time.monotonic() < until_s:
                time.sleep(0.01)
            return done

        worker.step = step_slowly

    found, heard = make_training(cluster), Heard()
    cluster.call(insert_slow_step, found.name)
    threading.Thread(target=interrupt_after, args=(heard, 2), daemon=True).start()
    with pytest.raises(StoppedError) as caught:
        found.fit(DATA, epochs=2, progress=False, save=tmp_path, save_every=1, monitor=heard)
    assert str(tmp_path) in str(caught.value)
    done = found.load(tmp_path)
    rest = [found.step(*batch) for batch in (DATA * 2)[done:]]
    check(found, [*heard.losses[:done], *rest], undisturbed)


def interrupt_after(heard: Heard, steps: int) -> None:
    """The stop button, a moment after so many steps."""
    while heard.steps < steps:
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@over_loopback
def test_a_cluster_that_was_stopped_is_not_healed(cluster, tmp_path):
    class Stops(Heard):
        def handle_event(self, event) -> None:
            super().handle_event(event)
            cluster.stop()

    with pytest.raises(RankError, match="not started"):
        make_training(cluster).fit(DATA, progress=False, save=tmp_path, on_failure="heal", monitor=Stops())
    assert not cluster.is_started


@over_loopback
def test_fewer_ranks_compute_the_same(cluster):
    plan = choose_plan(make_training(cluster), 2)
    assert (plan.ranks, plan.micro_batches, plan.precision) == (2, 2, "float64")
    random.seed(0)
    both_ways = Training(make_model(), Plan(split_size=3, spatial_size=0, bidirectional=True), cluster, SHAPE)
    alone = choose_plan(both_ways, 1)
    assert (alone.ranks, alone.accumulate, alone.micro_batches) == (1, 2, 2)
    three = Training(make_model(), Plan(split_size=1, spatial_size=0, data_parallel=3), cluster, SHAPE)
    assert choose_plan(three, 1).accumulate == 3


@over_loopback
def test_where_each_tile_is_normalised_by_itself_the_tiles_stay(cluster):
    """Without them it would compute something else, and two directions cannot be normalised so."""
    alone = Training(make_model(), Plan(split_size=3, spatial_size=0, sync_batchnorm=False), cluster, SHAPE)
    plan = choose_plan(alone, 2)
    assert not plan.sync_batchnorm
    assert not plan.bidirectional
    assert all(grid.tiles == 1 for grid in plan.grids)
    tiles = Plan(split_size=1, num_spatial_parts=3, slice_method="1x3", sync_batchnorm=False)
    with pytest.raises(PlanError, match="No plan for 2 ranks"):
        choose_plan(Training(make_model(), tiles, cluster, SHAPE), 2)
    # Two tiles of all layers are not the two tiles of the first stage: their norms would see other pixels.
    staged = Plan(split_size=2, num_spatial_parts=2, slice_method="vertical", sync_batchnorm=False)
    with pytest.raises(PlanError, match="No plan for 2 ranks"):
        choose_plan(Training(make_model(), staged, cluster, SHAPE), 2)


@over_loopback
def test_fewer_ranks_need_memory_for_the_plan(cluster, monkeypatch):
    running, small = make_training(cluster), replace(MACHINES["Summit"], memory_bytes=1 << 12)
    monkeypatch.setattr(cluster, "calibrate", lambda **_: small)
    with pytest.raises(PlanError, match=r"No plan for 2 ranks fits: .* but 4\.0 KB are given"):
        choose_plan(running, 2)


def test_what_is_done_again_is_shown_once():
    gathered = ProgressRecorder(PLAN)
    for loss in (3.0, 2.0, 1.0):
        gathered.add(StepResult(0, 0, 2, 0.1, loss, None), ())
    gathered.add(Recovered("healed", 1, 0), ())
    assert gathered.get_progress("runs", running=True).losses == (3.0,)
