"""What leaves a GPU, and what arrives there, goes beside what it computes, and overtakes nothing that it needs."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from mpi4dl_nb.engines.comm import streams
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program import exchange_runner, update
from mpi4dl_nb.engines.train.oracle import TrainingRecord
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import compare_records, make_batches, record_rank_run
from tests.program.streams import RaceError, rank, use_streams, watch_streams

plan64 = partial(Plan, precision="float64")
CASES = {
    "tiles": (resnet20_v1, plan64(split_size=1, slice_method="1x2")),
    "halos meanwhile": (resnet20_v1, plan64(split_size=1, slice_method="2x2", overlap_halos=True)),
    "tiles to the loss": (UNet, plan64(split_size=1, slice_method="1x2")),
    "fused halos, again": (
        resnet20_v1,
        plan64(split_size=1, slice_method="1x2", halo_d2=True, fused_layers=2, checkpoint_activations=True),
    ),
    "pipeline behind tiles": (resnet20_v1, plan64(split_size=3, slice_method="1x2", parts=2, schedule="1f1b")),
    "both ways, replicas": (
        resnet20_v1,
        plan64(split_size=2, spatial_size=0, bidirectional=True, parts=2, data_parallel=2),
    ),
    "zero bubble, shared batch": (
        resnet20_v1,
        plan64(split_size=2, num_spatial_parts=2, slice_method="vertical", local_dp=2, parts=2, schedule="zero_bubble"),
    ),
}


def is_exact(name: str) -> bool:
    make, plan = CASES[name]
    model = make(num_classes=3)
    recipe = prepare(model, plan, (4, 3, 16, 16), device="cpu")
    whole = make_batches(recipe, 0)

    def work(world: LoopbackWorld) -> TrainingRecord:
        with watch_streams(world) as one:
            training = RankTraining(one, recipe)
            return record_rank_run(training, map(training.cut, whole))

    records = run_ranks(plan.ranks, work)
    return compare_records(recipe, model, torch.nn.CrossEntropyLoss(), whole, records)["ok"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_nothing_overtakes_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch):
    use_streams(monkeypatch)
    assert is_exact(name)


def test_what_leaves_too_early_is_found(monkeypatch: pytest.MonkeyPatch):
    use_streams(monkeypatch)

    @contextmanager
    def send_early(device, memory, read):
        with streams.torch.cuda.stream(rank().beside[0]):
            yield

    monkeypatch.setattr(exchange_runner, "use_send_stream", send_early)
    with pytest.raises(RaceError, match="in leaving, which has not waited for computing"):
        is_exact("tiles")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "name"), [(exchange_runner, "tiles"), (exchange_runner, "halos meanwhile"), (update, "tiles")]
)
def test_what_is_used_before_it_has_arrived_is_found(module, name: str, monkeypatch: pytest.MonkeyPatch):
    use_streams(monkeypatch)

    def copy_early(arrived, device, memory):
        with streams.torch.cuda.stream(rank().beside[1]):
            return [tensor.to(device, non_blocking=True, copy=True) for tensor in arrived]

    monkeypatch.setattr(module, "copy_to_device", copy_early)
    with pytest.raises(RaceError, match="in computing, which has not waited for arriving"):
        is_exact(name)


@pytest.mark.nightly
@pytest.mark.parametrize(("module", "name"), [(exchange_runner, "tiles"), (update, "both ways, replicas")])
def test_a_message_that_leaves_before_it_is_packed_is_found(module, name: str, monkeypatch: pytest.MonkeyPatch):
    use_streams(monkeypatch)
    monkeypatch.setattr(module, "record_event", lambda device, memory: streams._PASSED)
    with pytest.raises(RaceError, match="a message in host, which has not waited for leaving"):
        is_exact(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tiles", "pipeline behind tiles"])
def test_memory_that_is_not_recorded_with_the_allocator_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    use_streams(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    with pytest.raises(RaceError, match="memory is used again in"):
        is_exact(name)
