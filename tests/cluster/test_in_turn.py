"""Ranks in turn: the same results from one thread, of which no two ranks ever compute at once."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from itertools import pairwise
from threading import Timer

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.comm.device import count_cores
from mpi4dl_nb.engines.comm.world import Message
from mpi4dl_nb.engines.errors import LossError, PlanError, RankError
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.offloader import OffloadStore
from tests.zoo import Chain

N = 4
SHAPE = 2, 3, 32, 32
PLANS = {
    "tiles": Plan(split_size=1),
    "tiles and a stage": Plan(slice_method="1x3", num_spatial_parts=3, checkpoint_activations=True),
    "overlapped halos": Plan(split_size=1, slice_method="2x2", overlap_halos=True),
    "pipeline": Plan(split_size=4, spatial_size=0, parts=2, schedule="zero_bubble"),
    "both ways, two replicas": Plan(split_size=2, spatial_size=0, bidirectional=True, data_parallel=2),
}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(N, backend="in_turn") as cluster:
        yield cluster


def gather_ranks(host) -> list[int]:
    return host.world.all_gather(host.world.rank)


def check_usable(cluster: Cluster) -> None:
    assert cluster.call(gather_ranks) == [list(range(N))] * N


@pytest.mark.sampled(1)
@pytest.mark.parametrize("away", [False, True], ids=["in memory", "in a file"])
@pytest.mark.parametrize("name", PLANS)
def test_three_steps_are_those_of_one_process(cluster: Cluster, name: str, away: bool):
    plan = Plan(**PLANS[name].chosen | {"offload_activations": away})
    torch.manual_seed(0)
    told = Training(resnet20_v1(), plan, cluster, SHAPE).verify()
    assert told["ok"], told


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch by torch, when it compiles
def test_so_are_those_of_compiled_segments(cluster: Cluster):
    plan = Plan(split_size=1, slice_method="1x4", compile_segments=True, offload_activations=True)
    told = Training(Chain(), plan, cluster, SHAPE).verify()
    assert told["ok"], told


@pytest.mark.nightly
def test_one_thread_computes_for_one_rank_at_a_time_with_all_cores(cluster: Cluster):
    def identify_thread(host):
        return threading.get_ident(), torch.get_num_threads()

    assert len(set(cluster.call(identify_thread))) == 1
    assert cluster.call(identify_thread)[0][1] == count_cores()
    training = Training(UNet(num_classes=3, width=4), Plan(split_size=1), cluster, SHAPE)
    training.step(torch.randn(SHAPE), torch.zeros(SHAPE[0], *SHAPE[2:], dtype=torch.int64))
    events = sorted(training.timeline().events, key=lambda event: event.start_s)
    work = [event for event in events if event.kind == "compute" and event.phase is not Phase.UPDATE]
    assert {event.rank for event in work} == set(range(N))
    assert all(one.end_s <= other.start_s for one, other in pairwise(work))
    waited_s = sum(event.wait_s for event in events if event.rank == 0)
    assert 0 < waited_s < max(event.end_s for event in events) - events[0].start_s


def test_a_failure_is_that_ranks_and_the_others_are_released(cluster: Cluster):
    def fail_on_rank_2(host):
        host.world.all_gather(None)
        if host.world.rank == 2:
            raise ValueError("no such pixel")
        host.world.all_gather(None)

    with pytest.raises(RankError, match="Rank 2: ValueError: no such pixel") as caught:
        cluster.call(fail_on_rank_2)
    assert caught.value.rank == 2
    check_usable(cluster)


@pytest.mark.nightly
def test_what_ranks_hold_outlives_a_failure(cluster: Cluster):
    training = Training(resnet20_v1(), Plan(split_size=1), cluster, SHAPE)
    labels = torch.tensor([3, 7])
    with pytest.raises(LossError):
        training.step(torch.full(SHAPE, torch.inf), labels)
    first = training.step(torch.ones(SHAPE), labels)
    assert training.step(torch.ones(SHAPE), labels) < first
    training.close()


def test_ranks_that_all_wait_for_each_other_are_reported_at_once(cluster: Cluster):
    def gather_without_rank_0(host):
        if host.world.rank:
            host.world.all_gather(None)

    with pytest.raises(RankError, match=r"ranks \[1, 2, 3\] all wait for each other"):
        cluster.call(gather_without_rank_0)
    check_usable(cluster)


def test_an_interrupt_releases_those_that_wait_and_those_that_have_not_begun(cluster: Cluster, tmp_path):
    def mark_and_wait(host, folder):
        (folder / str(host.world.rank)).touch()
        until_s = time.monotonic() + 1.2
        while host.world.rank == 1 and time.monotonic() < until_s:
            time.sleep(0.01)
        if host.world.rank == 0:
            host.world.exchange([], [Message(1, 7, torch.empty(1))]).wait()

    Timer(0.4, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.call(mark_and_wait, tmp_path)
    check_usable(cluster)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_an_error_without_a_text_ends_neither_the_others_nor_the_thread(cluster: Cluster):
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("it has no words")

    def fail_silently(host):
        if host.world.rank == 1:
            raise SilentError

    with pytest.raises(RankError, match=r"Rank 1: SilentError: \(it has no text: its __str__ raised ValueError\)"):
        cluster.call(fail_silently)
    check_usable(cluster)


def test_what_was_asked_of_some_ranks_alone_is_released():
    from mpi4dl_nb.engines.server.notebook_imports import pack

    with Cluster(2, backend="in_turn") as two:
        asked = two._ranks.submit(0, pack((gather_ranks, ())), pack(()))
        two._ranks.interrupt()
        assert "had not begun" in str(asked.exception(timeout=5))
        two._ranks._relay.worlds[0]._mail.clear()
        assert two.call(gather_ranks) == [[0, 1]] * 2


@pytest.mark.nightly
def test_a_step_is_walked(cluster: Cluster):
    """Messages of one instruction are read by a later one: a call's end does not lose them."""
    torch.manual_seed(0)
    training = Training(resnet20_v1(), Plan(split_size=1), cluster, SHAPE)
    batch = torch.randn(SHAPE), torch.tensor([1, 2])
    assert len(list(training.stepping(*batch))) > N
    walked = training.state_dict()
    torch.manual_seed(0)
    whole = Training(resnet20_v1(), Plan(split_size=1), cluster, SHAPE)
    whole.step(*batch)
    assert all(torch.equal(walked[name], tensor) for name, tensor in whole.state_dict().items())


@pytest.mark.nightly
def test_a_checkpoint_goes_on_elsewhere(cluster: Cluster, tmp_path):
    torch.manual_seed(0)
    training = Training(resnet20_v1(), Plan(split_size=1), cluster, SHAPE)
    training.step(torch.randn(SHAPE), torch.tensor([1, 2]))
    training.save(tmp_path)
    with Cluster(N, backend="loopback") as threads:
        other = Training(resnet20_v1(), Plan(split_size=1), threads, SHAPE)
        assert other.load(tmp_path) == 1
        assert all(torch.equal(training.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


def test_it_is_not_calibrated(cluster: Cluster):
    with pytest.raises(PlanError, match="Ranks in turn cannot be calibrated"):
        cluster.calibrate()


def test_stopped_it_holds_nothing():
    cluster = Cluster(2, backend="in_turn").start()
    before = threading.active_count()
    cluster.stop()
    until_s = time.monotonic() + 5
    while threading.active_count() >= before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert threading.active_count() == before - 1


BOUNDED = """
import resource, sys, torch
from torch import nn
from mpi4dl_nb.engines.comm.device import keep_memory_tight, read_process_bytes
from mpi4dl_nb import Cluster, Plan, Training
backend, away, bound_mb, side_px = sys.argv[1], sys.argv[2] == "away", int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Conv2d(8 if n else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for n in range(10)]
model = nn.Sequential(*blocks, nn.Conv2d(8, 2, 1))
plan = Plan(split_size=1, slice_method="8x1", offload_activations=away)
keep_memory_tight(True)
with Cluster(8, backend=backend) as cluster:
    training = Training(model, plan, cluster, (1, 3, side_px, side_px))
    images, labels = torch.randn(1, 3, side_px, side_px), torch.zeros(1, side_px, side_px, dtype=torch.int64)
    most = read_process_bytes("VmData") + (bound_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    losses = [training.step(images, labels) for _ in range(2)]
print(*losses)
"""


def run_bounded(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BOUNDED, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's bound")
def test_an_image_trains_that_does_not_fit_at_once():
    """Of some 700 MB of activations a rank in turn holds its own eighth, and of that no more than it computes with."""
    in_turn = run_bounded("in_turn", "away", 200, 768)
    assert in_turn.returncode == 0, in_turn.stderr
    at_once = run_bounded("loopback", "", 200, 768)
    assert at_once.returncode != 0
    unbounded = run_bounded("loopback", "", 20_000, 768)
    assert [float(loss) for loss in in_turn.stdout.split()] == pytest.approx(
        [float(loss) for loss in unbounded.stdout.split()], rel=1e-4
    )


def test_the_disk_that_is_full_is_reported(cluster: Cluster, monkeypatch):
    def refuse_to_store(*_: object) -> None:
        raise RankError("/tmp is full: 1 MB more are to be stored.")

    training = Training(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)),
                        Plan(split_size=1, offload_activations=True), cluster, (1, 3, 64, 64))  # fmt: skip
    monkeypatch.setattr(OffloadStore, "put", refuse_to_store)
    with pytest.raises(RankError, match="is full"):
        training.step(torch.randn(1, 3, 64, 64), torch.zeros(1, 64, 64, dtype=torch.int64))
