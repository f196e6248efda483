"""What every transport must do: each case runs on four ranks at once, as one of them, with its `world`.

The same cases run over threads and over MPI (test_worlds.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.comm.all_reduce import AllReduceRequest, all_reduce
from mpi4dl_nb.engines.comm.world import Message, World
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.models import UNet, amoebanetd, resnet20_v1, resnet_v2
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import verify

RANKS = 4

CASES: dict[str, Callable[[World], None]] = {}
HEAVY = {
    "verify_amoebanet_with_halos_fused_over_two_cells",
    "verify_resnet_on_2x2_tiles",
    "verify_resnet_with_halos_fused_over_three_blocks",
    "verify_resnet_on_two_strips_and_two_layer_stages",
    "verify_unet_whose_skips_cross_the_joint",
    "verify_resnet_on_three_strips_and_a_layer_stage",
    "check_stepping_computes_what_running_does",
    "verify_unet_tiled_to_the_loss_with_fused_halos",
    "check_very_long_sums_go_piece_by_piece_in_rank_order",
}
"""Those that take longest, and use transports as the others do."""


def register_case(work: Callable[[World], None]) -> Callable[[World], None]:
    CASES[work.__name__] = work
    return work


def fail_and_recover(world: World) -> None:
    """One rank fails, the others are released from a sum, and all find together again."""
    start_s = time.perf_counter()
    if world.rank == 1:
        time.sleep(0.2)  # the others wait by now
        world.revoke()
    else:
        with pytest.raises(RankError, match="released"):
            all_reduce(world, torch.ones(1), (0, 1, 2, 3)).wait()
    assert time.perf_counter() - start_s < 5
    time.sleep(0.3)  # every rank has noticed before the first one recovers
    world.recover()


@register_case
def check_messages_reach_their_rank(world: World) -> None:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent, got = torch.full((3, 5), float(world.rank)), torch.empty(3, 5)
    world.exchange([Message(right, 7, sent)], [Message(left, 7, got)]).wait()
    assert torch.equal(got, torch.full((3, 5), float(left)))


@register_case
def check_tags_separate_messages_in_any_order(world: World) -> None:
    peer = world.rank ^ 1
    first, second = torch.empty(2), torch.empty(2)
    sends = [Message(peer, tag, torch.tensor([float(tag), world.rank])) for tag in (1, 2)]
    world.exchange(sends, [Message(peer, 2, second), Message(peer, 1, first)]).wait()
    assert first.tolist() == [1.0, peer]
    assert second.tolist() == [2.0, peer]


@register_case
def check_a_message_of_megabytes_arrives_whole(world: World) -> None:
    peer = world.rank ^ 2
    sent, got = torch.arange(1 << 20).double() + world.rank, torch.empty(1 << 20, dtype=torch.float64)
    world.exchange([Message(peer, 3, sent)], [Message(peer, 3, got)]).wait()
    assert torch.equal(got, torch.arange(1 << 20).double() + peer)


@register_case
def check_messages_of_any_type_and_size_arrive_whole(world: World) -> None:
    """They are sent as words of other sizes than their elements."""
    peer = world.rank ^ 1
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128):
        for count in (0, 1, 2, 3, 5, 16):
            sent, got = (torch.arange(count).add(rank).to(dtype) for rank in (world.rank, world.rank))
            world.exchange([Message(peer, 9, sent)], [Message(peer, 9, got)]).wait()
            assert torch.equal(got, torch.arange(count).add(peer).to(dtype))


@register_case
def check_sums_are_over_the_group_only(world: World) -> None:
    group = (0, 2) if world.rank % 2 == 0 else (1, 3)
    total = torch.tensor([1.0 + world.rank, 10.0])
    all_reduce(world, total, group).wait()
    assert total.tolist() == [2.0 + sum(group), 20.0]


@register_case
def check_a_long_sum_is_the_same_on_every_rank_to_the_bit(world: World) -> None:
    random = torch.Generator().manual_seed(world.rank)
    total = torch.randn(50_001, generator=random)
    all_reduce(world, total, (0, 1, 2, 3)).wait()
    parts = [torch.randn(50_001, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    assert torch.equal(total, parts[0] + parts[1] + parts[2] + parts[3])


@register_case
def check_very_long_sums_go_piece_by_piece_in_rank_order(world: World) -> None:
    """Two of them under way at once, of sizes that no number of ranks or pieces divides."""
    sizes, group = (4_300_003, 2_100_001), (0, 1, 2, 3)

    def make_part(rank: int, size: int) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(rank + size))

    for _ in range(2):  # the second time in memory that was used before
        totals = [make_part(world.rank, size) for size in sizes]
        for under_way in [all_reduce(world, total, group) for total in totals]:
            under_way.wait()
        for total, size in zip(totals, sizes, strict=True):
            parts = [make_part(rank, size) for rank in group]
            assert torch.equal(total, parts[0] + parts[1] + parts[2] + parts[3])


@register_case
def check_long_sums_of_whole_numbers_and_of_two_ranks(world: World) -> None:
    group = (world.rank & 2, world.rank | 1)
    total = torch.arange(3_000_001) * (world.rank + 1)
    all_reduce(world, total, group).wait()
    assert torch.equal(total, torch.arange(3_000_001) * (sum(group) + 2))


@register_case
def check_a_sum_is_begun_again_and_again_in_the_same_memory(world: World) -> None:
    """Short, long and very long, all under way at once; also after a failure, when the messages are made anew."""
    sizes, group = (5, 50_001, 4_300_003), (0, 1, 2, 3)
    tensors = [torch.empty(size, dtype=torch.float64) for size in sizes]
    sums = [AllReduceRequest(world, tensor, group, tag=2 * index, again=True) for index, tensor in enumerate(tensors)]
    for time_ in range(4):
        if time_ == 2:
            fail_and_recover(world)
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(torch.arange(tensor.numel()) + world.rank * time_)
            total.begin()
        for tensor, total in zip(tensors, sums, strict=True):
            total.wait()
            assert total.is_completed()
            assert torch.equal(tensor, 4 * torch.arange(tensor.numel()) + 6.0 * time_)


@register_case
def check_messages_that_a_failure_left_under_way_keep_their_memory(world: World) -> None:
    """Some ranks drop what others still write into, or read from: that ended their processes."""
    peer = world.rank ^ 1
    for begin in (world.exchange, lambda *messages: world.prepare(*messages)()):
        time.sleep(0.1 * (world.rank == 1))
        sent, got = torch.ones(1 << 20), torch.empty(1 << 20)
        pending = begin([Message(peer, 5, sent)], [Message(peer, 5, got)])
        del sent, got, pending
        fail_and_recover(world)


@register_case
def check_values_are_collected_on_one_rank(world: World) -> None:
    found = world.gather(torch.full((1 << 16,), float(world.rank)))
    assert [tensor[-1].item() for tensor in found] == ([] if world.rank else [0.0, 1.0, 2.0, 3.0])


@register_case
def check_values_are_gathered_in_rank_order(world: World) -> None:
    assert world.all_gather({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]


@register_case
def check_values_of_any_size_are_gathered_and_collected(world: World) -> None:
    value = bytes(world.rank * 70_000)
    assert list(map(len, world.all_gather(value))) == [rank * 70_000 for rank in range(world.size)]
    assert list(map(len, world.gather(value))) == (
        [rank * 70_000 for rank in range(world.size)] if not world.rank else []
    )


@register_case
def check_no_rank_waits_for_one_that_failed(world: World) -> None:
    fail_and_recover(world)
    total = torch.ones(1)
    all_reduce(world, total, (0, 1, 2, 3)).wait()
    assert total.item() == 4


_SEEDING = threading.Lock()


def _make_seeded_model(world: World, model: Callable[[], nn.Module]) -> nn.Module:
    """The same weights on every rank: torch's random numbers are global, and ranks may be threads.

    None goes on before all have theirs: a trace puts the state back that it found.
    """
    with _SEEDING:
        torch.manual_seed(0)
        made = model()
    world.barrier()
    return made


def _verify_model(world: World, model: Callable[[], nn.Module], plan: Plan, size: tuple[int, int]) -> None:
    plain = _make_seeded_model(world, model)
    recipe = prepare(plain, plan, (2, 3, *size), device="cpu")
    line = verify(world, recipe, plain, nn.CrossEntropyLoss(), seed=1)
    assert line["ok"], line


@register_case
def verify_resnet_on_2x2_tiles(world: World) -> None:
    plan = Plan(split_size=1, num_spatial_parts=4, precision="float64")
    _verify_model(world, resnet20_v1, plan, (32, 32))


@register_case
def verify_resnet_on_three_strips_and_a_layer_stage(world: World) -> None:
    plan = Plan(split_size=2, num_spatial_parts=3, slice_method="vertical", precision="float64")
    _verify_model(world, resnet20_v1, plan, (37, 50))


@register_case
def verify_resnet_on_two_strips_and_two_layer_stages(world: World) -> None:
    plan = Plan(split_size=3, num_spatial_parts=2, slice_method="horizontal", precision="float64")
    _verify_model(world, resnet20_v1, plan, (50, 37))


@register_case
def verify_unet_whose_skips_cross_the_joint(world: World) -> None:
    plan = Plan(split_size=2, num_spatial_parts=3, slice_method="3x1", precision="float64")
    _verify_model(world, lambda: UNet(num_classes=3, width=4), plan, (36, 44))


@register_case
def verify_resnet_with_halos_fused_over_three_blocks(world: World) -> None:
    """Batch norms count each pixel once, though two ranks compute it; residual branches want two widths."""
    plan = Plan(split_size=1, num_spatial_parts=4, halo_d2=True, fused_layers=3, precision="float64")
    _verify_model(world, lambda: resnet_v2(29), plan, (37, 50))


@register_case
def verify_amoebanet_with_halos_fused_over_two_cells(world: World) -> None:
    """Cells read two values from before the group, by many windows: each value is fetched once."""
    plan = Plan(
        split_size=2, num_spatial_parts=3, slice_method="vertical", halo_d2=True, fused_layers=2, precision="float64"
    )
    _verify_model(world, lambda: amoebanetd(num_layers=3, num_filters=16), plan, (48, 70))


@register_case
def verify_unet_tiled_to_the_loss_with_fused_halos(world: World) -> None:
    plan = Plan(split_size=1, num_spatial_parts=4, halo_d2=True, fused_layers=4, precision="float64")
    _verify_model(world, lambda: UNet(num_classes=3, width=4), plan, (36, 44))


class Dense(nn.Module):
    """Every layer reads all that came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(first.relu())
        return self.third(torch.cat([first, second], dim=1)).mean((2, 3))


@register_case
def verify_a_value_that_two_later_stages_read(world: World) -> None:
    """A skip to two stages was let go of after the first had been sent (AmoebaNet on three stages)."""
    plan = Plan(split_size=3, num_spatial_parts=2, slice_method="vertical", precision="float64")
    _verify_model(world, Dense, plan, (9, 14))


@register_case
def verify_unet_tiled_to_the_loss_with_a_repartition(world: World) -> None:
    plan = Plan(split_size=2, spatial_size=2, num_spatial_parts=(1, 3), slice_method="vertical", precision="float64")
    _verify_model(world, lambda: UNet(num_classes=3, width=4), plan, (36, 44))


@register_case
def verify_float32(world: World) -> None:
    model = _make_seeded_model(world, lambda: UNet(num_classes=3, width=4))
    recipe = prepare(model, Plan(split_size=1, num_spatial_parts=4), (2, 3, 32, 32), device="cpu")
    assert verify(world, recipe, model, nn.CrossEntropyLoss(), seed=1)["ok"]


@register_case
def check_stepping_computes_what_running_does(world: World) -> None:
    recipe = prepare(_make_seeded_model(world, resnet20_v1), Plan(split_size=1), (1, 3, 32, 32), device="cpu")
    batch = {
        "images": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        "labels": torch.tensor([3]),
    }
    ran, stepped = RankTraining(world, recipe), RankTraining(world, recipe)
    losses = ran.step(ran.cut(batch)).losses
    stepped.start(stepped.cut(batch))
    names = []
    while not stepped.worker.done:
        names.append(stepped.worker.step().instruction.name)
    assert names == [step.instruction.name for step in ran.program.steps]
    assert stepped.worker.losses == losses
    assert torch.equal(stepped.worker.peek("model.stem.0.weight"), ran.worker.peek("model.stem.0.weight"))


class TwoViewsAdded(nn.Module):
    """Both terms reach the sum through a view, and a convolution each: autograd gives them one gradient buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.c, self.d = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.a(x), self.b(x)
        both = (a.permute(0, 2, 3, 1) + b.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (self.c(a) + self.d(b) * both).mean((2, 3))


@register_case
def verify_gradients_that_share_a_buffer(world: World) -> None:
    """The adjoint of one term's halo was added to the other term's gradient as well: 29 % wrong."""
    _verify_model(world, TwoViewsAdded, Plan(split_size=1, num_spatial_parts=4, precision="float64"), (8, 10))


class Norms(nn.Module):
    """Batch norms of every kind: twice in a row, without weights, without statistics; and a detached branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.twice, self.bare = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
        self.loose = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bare(self.twice(self.first(x)).relu())
        return self.loose(self.twice(self.second(y)) + self.second(y.detach())).mean((2, 3))


@register_case
def verify_batch_norms_of_every_kind(world: World) -> None:
    _verify_model(world, Norms, Plan(split_size=1, num_spatial_parts=4, precision="float64"), (8, 10))
