"""Halos that travel while a tile's interior is computed: the order of work, exactness, and no message more."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb.engines.bench.communication import ThrottledWorld
from mpi4dl_nb.engines.bench.halo import run_forward
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import make_exchange_runners
from mpi4dl_nb.engines.program.instructions import Compute
from mpi4dl_nb.engines.program.message_buffers import SendQueue
from mpi4dl_nb.engines.program.program import Program, count_traffic
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import verify
from tests.compiler.drawn import Calls, Geometry, generate_geometries, seeds
from tests.exact import assert_exact, make_tiled_plan, make_whole_numbers, with_whole_weights
from tests.predict.measured import get_live_values
from tests.sampling import set_trials
from tests.zoo import Segmenter, Skips


def make_overlapping_plan(grid: object, fused: int = 0) -> Plan:
    return replace(make_tiled_plan(grid, fused), overlap_halos=True)


def compile_program(model: nn.Module, plan: Plan, rank: int = 0) -> Program:
    """With a loss that sums, as any shape of output has one."""
    recipe = prepare(model.double(), plan, (2, 3, 12, 16), lambda x, _: x.sum(), device="cpu")
    return compile_plan(recipe.graph, plan)[rank]


def describe_instructions(program: Program, phase: Phase) -> list[str]:
    """The instructions of one way: halves by what they do, segments by whether they are an interior."""
    names = {
        Exchange: lambda item: "halo" if item.begins and item.ends else "begins" if item.begins else "ends",
        Compute: lambda item: "interior" if item.interior else "segment",
    }
    items = (step.instruction for step in program.steps if step.phase is phase)
    return [names[type(item)](item) for item in items if type(item) in names]


def is_half(item: object) -> bool:
    return isinstance(item, Exchange) and not (item.begins and item.ends)


def list_halves(program: Program) -> list[Exchange]:
    return list(filter(is_half, program.forward))


# ---- the order of work


def test_backward_is_the_mirror_and_begins_where_forward_ends():
    """The image's own gradient is not asked for, so the first halo does not go back."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1))
    program = compile_program(model, make_overlapping_plan("1x2"))
    there = ["begins", "interior", "ends", "segment"]
    assert describe_instructions(program, Phase.FORWARD)[:8] == there * 2
    mirrored = ["segment", "begins", "interior", "ends", "segment", "interior"]
    assert describe_instructions(program, Phase.BACKWARD)[-6:] == mirrored
    back = [step.instruction for step in program.steps if step.phase is Phase.BACKWARD]
    names = [item.name for item in back if is_half(item)]
    assert names == [half.name for half in list_halves(program)[2:]]
    assert names[0].startswith("stage0.relu.window")
    assert names[0].endswith(" begins")


class Read(nn.Module):
    """One value read by several operators."""

    def __init__(self, *readers: nn.Module) -> None:
        super().__init__()
        self.readers = nn.ModuleList(readers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([reader(x) for reader in self.readers], 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "grid"),
    [
        (nn.Conv2d(3, 2, 1), "1x2"),
        (nn.Conv2d(3, 2, 9, padding=4), "1x4"),
        (nn.BatchNorm2d(3), "1x2"),
        (nn.AdaptiveAvgPool2d(1), "1x2"),
    ],
    ids=["no halo", "a tile without interior", "a sum over ranks", "a mean"],
)
def test_what_cannot_be_split_stays_as_it_was(model: nn.Module, grid: str):
    assert (
        compile_program(model, make_overlapping_plan(grid), 1).steps
        == compile_program(model, make_tiled_plan(grid), 1).steps
    )


@pytest.mark.nightly
def test_readers_that_read_alike_share_strips_and_others_do_not():
    same = [nn.Conv2d(3, 2, 3, padding=1) for _ in range(2)]
    assert len(list_halves(compile_program(Read(*same), make_overlapping_plan("2x2")))) == 2
    different = Read(*same, nn.Conv2d(3, 2, 5, padding=2))
    assert len(list_halves(compile_program(different, make_overlapping_plan("2x2")))) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("model", [UNet(num_classes=3, width=2), Skips()], ids=["UNet", "Skips"])
@pytest.mark.parametrize("grid", ["2x2", "1x3"])
def test_no_message_more(model: nn.Module, grid: str):
    option, plain = (
        prepare(model, plan, (2, 3, 24, 28)) for plan in (make_overlapping_plan(grid), make_tiled_plan(grid))
    )
    programs = zip(compile_plan(option.graph, option.plan), compile_plan(plain.graph, plain.plan), strict=True)
    for one, other in programs:
        assert list_halves(one)
        assert count_traffic(one) == count_traffic(other)


# ---- exactness, to the bit


@pytest.mark.nightly
@set_trials(25)
@given(g=generate_geometries(), groups=st.integers(1, 2), seed=seeds)
@example(g=Geometry(Grid(2, 2), (9, 12), (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (0, 1)), groups=2, seed=0)
def test_convolution(g: Geometry, groups: int, seed: int):
    conv = nn.Conv2d(groups, groups, g.kernel, g.stride, g.padding, g.dilation, groups)
    pixels = make_whole_numbers(2, groups, *g.image_px, seed=seed)
    assert_exact(with_whole_weights(conv, seed), pixels, make_overlapping_plan(g.grid))


@pytest.mark.nightly
@set_trials(10)
@given(g=generate_geometries(pool=True, dilated=False), seed=seeds)
def test_pools(g: Geometry, seed: int):
    settings = g.kernel, g.stride, g.padding
    pixels = make_whole_numbers(1, 2, *g.image_px, seed=seed)
    assert_exact(nn.MaxPool2d(*settings), pixels, make_overlapping_plan(g.grid))
    divided = Calls(lambda x: functional.avg_pool2d(x, *settings, divisor_override=1))
    assert_exact(divided, pixels, make_overlapping_plan(g.grid))


@pytest.mark.nightly
@set_trials(10)
@given(g=generate_geometries(), seed=seeds)
def test_transposed_convolution(g: Geometry, seed: int):
    conv = nn.ConvTranspose2d(2, 1, g.kernel, g.stride, g.padding, g.spare_px, dilation=g.dilation)
    pixels = make_whole_numbers(1, 2, *g.out_px, seed=seed)
    assert_exact(with_whole_weights(conv, seed), pixels, make_overlapping_plan(g.grid))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fused", [0, 2])
@pytest.mark.parametrize("grid", ["2x2", "3x1", "2x3"])
def test_values_that_several_layers_read(grid: str, fused: int):
    first = Read(nn.Conv2d(3, 2, 3, padding=1), nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 2, (3, 5), padding=(1, 2)))
    model = nn.Sequential(first, nn.ReLU(), Read(nn.Conv2d(7, 2, 3, padding=1), nn.Conv2d(7, 2, 3, padding=1)))
    assert_exact(with_whole_weights(model), make_whole_numbers(1, 3, 19, 22), make_overlapping_plan(grid, fused))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "knobs",
    [
        {"checkpoint_activations": True, "parts": 2},
        {"schedule": "zero_bubble", "parts": 2, "split_size": 3, "spatial_size": 1},
        {"schedule": "zero_bubble", "parts": 2, "split_size": 2, "spatial_size": 1, "checkpoint_activations": True},
        {"bidirectional": True, "split_size": 2, "spatial_size": 1, "halo_d2": True, "fused_layers": 2},
        {"precision": "bfloat16"},
    ],
    ids=lambda knobs: ", ".join(f"{name}={value}" for name, value in knobs.items()),
)
def test_with_other_knobs(knobs: dict[str, Any]):
    plan = Plan(**{"split_size": 1, "slice_method": "1x2", "precision": "float64", "overlap_halos": True, **knobs})
    torch.manual_seed(0)
    model, loss = Segmenter(), nn.CrossEntropyLoss()
    recipe = prepare(model, plan, (2, 3, 20, 24), loss, device="cpu")
    assert any(list_halves(program) for program in compile_plan(recipe.graph, plan))
    told = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, loss, 0))[0]
    assert told["ok"], told


# ---- what it costs in memory, and what it hides


@pytest.mark.nightly
@pytest.mark.parametrize("again", [False, True])
def test_an_interior_is_completed_in_its_memory_or_begun_again(again: bool):
    """What waits for backward takes no memory beside the outputs', or with `checkpoint_activations` does not wait."""
    plan = replace(make_overlapping_plan("1x2"), checkpoint_activations=again)
    recipe = prepare(Net().double(), plan, (1, 3, 16, 20), lambda x, _: x.sum(), device="cpu")

    def compare_addresses(world: LoopbackWorld) -> list[bool]:
        training = RankTraining(world, recipe)
        training.start(training.cut({"images": torch.randn(1, 3, 16, 20).double(), "labels": torch.tensor([1])}))
        while training.program.steps[training.worker.position].phase is Phase.FORWARD:
            training.worker.step()
        live = get_live_values(training.worker)
        begun = [name for name in live if name.endswith(".begun")]
        return [_get_address(live[name]) == _get_address(live[name.removesuffix(".interior.begun")]) for name in begun]

    assert run_ranks(2, compare_addresses) == [[] if again else [True, True]] * 2


def _get_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Net(nn.Module):
    """Convolutions of which the sums follow, so that what they make is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x))))


@pytest.mark.nightly
def test_a_step_given_up_between_halves_leaves_nothing_behind():
    recipe = prepare(Net().double(), make_overlapping_plan("1x2"), (1, 3, 16, 20), lambda x, _: x.sum(), device="cpu")
    images, labels = make_whole_numbers(1, 3, 16, 20), torch.tensor([1])

    def work(world: LoopbackWorld) -> tuple[float, float]:
        training, fresh = RankTraining(world, recipe), RankTraining(world, recipe)
        given_up = training.cut({"images": 7 * images, "labels": labels})
        training.start(given_up)
        while not is_half(training.worker.step().instruction):
            pass
        world.revoke()
        world.recover()
        own = training.cut({"images": images, "labels": labels})
        return training.step(own).losses[0], fresh.step(own).losses[0]

    for after, fresh in run_ranks(2, work):
        assert after == fresh


BYTES_PER_S = 4e5


def test_a_halo_passes_while_the_rank_computes():
    """Over a link that takes 0.1 s for it: waited for at once it takes that, and in halves what is left of it."""
    plan = make_overlapping_plan("1x2")
    recipe = prepare(nn.Conv2d(8, 1, 5, padding=2).double(), plan, (1, 8, 312, 20), lambda x, _: x.sum())

    def measure_exchange(world: LoopbackWorld) -> tuple[float, bool]:
        (half, _) = list_halves(compile_plan(recipe.graph, plan)[world.rank])
        assert half.compute_bytes(half.receives) / BYTES_PER_S == pytest.approx(0.1, rel=0.01)
        link, cpu = ThrottledWorld(world, BYTES_PER_S), torch.device("cpu")
        whole = replace(half, strips=(), ends=True)
        carrier = make_exchange_runners([whole], link, cpu, SendQueue())[whole.key]
        source = torch.randn(half.compute_shape(half.own)).double()
        window = run_forward(carrier, source)
        halves = make_exchange_runners([half], link, cpu, SendQueue())[half.key]
        world.barrier()
        begun, _ = halves.start_forward(source)
        time.sleep(0.2)  # computing
        start_s = time.perf_counter()
        strips = halves.wait_forward(begun)
        waited_s = time.perf_counter() - start_s
        within = [tile.to_slices(half.window) for _, tile in half.strips]
        same = all(torch.equal(strip, window[..., *where]) for strip, where in zip(strips, within, strict=True))
        return waited_s, same

    for waited_s, same in run_ranks(2, measure_exchange):
        assert same
        assert waited_s < 0.09
