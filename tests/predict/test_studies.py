"""Capabilities, scaling and largest images: each number is that of a forecast, and each limit is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor, nn

from mpi4dl_nb.draw.scaling import show_limits
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.explain import KINDS, classify_plan
from mpi4dl_nb.engines.predict.forecast import forecast
from mpi4dl_nb.engines.predict.rank_memory import predict_plan_memory
from mpi4dl_nb.engines.predict.search import generate_plans
from mpi4dl_nb.engines.predict.sizes import Sizes, largest_image
from mpi4dl_nb.engines.predict.studies import capabilities, scaling, select_plans
from mpi4dl_nb.engines.program.timeline import compute_time_shares
from tests.predict.test_simulate import FLAT
from tests.zoo import Chain

MODEL = Sizes(Chain(), title="a chain")
ROOM = 2 << 20
SMALL = replace(FLAT, cores=None, memory_bytes=ROOM)
ONE = Plan(split_size=1, spatial_size=0)


def test_plans_are_spread_over_all_that_there_are_of_each_kind():
    chosen = list(select_plans(8, batch=4, each=3))
    assert {classify_plan(plan) for plan in chosen} == set(KINDS)
    assert max(sum(classify_plan(plan) == kind for plan in chosen) for kind in KINDS) == 3
    assert set(chosen) <= set(generate_plans(8, batch=4))
    assert len(set(chosen)) == len(chosen)
    assert len({plan.replica_ranks for plan in chosen if classify_plan(plan) == "spatial"}) > 1


@pytest.mark.nightly
def test_small_images_are_for_replicas_and_large_ones_for_tiles():
    seen = []
    chosen, told = list(select_plans(4, batch=1, each=3)), lambda done, of: seen.append((done, of))
    found = capabilities(MODEL, SMALL, 4, (32, 64, 128, 512), batch=1, asked=chosen, seen=told)
    assert (found.model, found.rank_bytes, tuple(found.by_size)) == ("a chain", ROOM, (32, 64, 128, 512))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    small, large = found.get_verdict("data", 32), found.get_verdict("data", 512)
    plan = Plan(split_size=1, spatial_size=0, data_parallel=4)
    for verdict, size in ((small, 32), (large, 512)):
        assert verdict.best == forecast(MODEL.graph(plan, (1, 3, size, size)), plan, SMALL)
        assert verdict.fits == (verdict.best.peak_bytes <= ROOM)
    assert small.fits
    assert not large.fits
    sizes_that_fit = {
        kind: [s for s in found.by_size if found.get_verdict(kind, s).fits] for kind in ("data", "spatial")
    }
    assert max(sizes_that_fit["data"]) < max(sizes_that_fit["spatial"])
    assert found.kinds == tuple(kind for kind in KINDS if kind != "pipeline")  # one image is one micro-batch


def test_capabilities_by_memory_and_within_a_limit():
    """The leanest plan at each size; and the fastest of those that fit into a given memory of a rank."""
    plans = list(select_plans(4, 1, each=2))
    lean = capabilities(MODEL, SMALL, 4, (64,), batch=1, asked=plans, by="memory")
    fast = capabilities(MODEL, SMALL, 4, (64,), batch=1, asked=plans)
    known = [verdict.best for kind in fast.kinds if (verdict := fast.get_verdict(kind, 64)).best]
    least = lean.by_size[64].best.best
    assert least.peak_bytes <= min(each.peak_bytes for each in known)
    assert format_bytes(least.peak_bytes) in lean.facts["64 px"]
    assert "the least memory by the side" in lean.caption
    limit = fast.by_size[64].best.best.peak_bytes - 1
    within = capabilities(MODEL, SMALL, 4, (64,), batch=1, asked=plans, rank_bytes=limit).by_size[64].best.best
    assert within.peak_bytes <= limit
    assert within.images_per_s <= fast.by_size[64].best.best.images_per_s
    with pytest.raises(PlanError, match="by='bytes' is unknown"):
        capabilities(MODEL, SMALL, 4, (64,), by="bytes")


def test_capabilities_need_plans_and_sizes():
    with pytest.raises(PlanError, match="at least one plan"):
        capabilities(MODEL, SMALL, 4, ())
    with pytest.raises(PlanError, match="no machine 'nowhere'"):
        capabilities(MODEL, "nowhere", 4)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [ONE, Plan(split_size=1, slice_method="2x2"), Plan(split_size=2, slice_method="1x3")])
def test_the_largest_image_fits_and_the_next_does_not(plan):
    found = largest_image(MODEL, plan, SMALL, batch=2, step_px=16)
    held = {
        side: predict_plan_memory(MODEL.graph(plan, (2, 3, side, side)), plan).peak_bytes
        for side in (found.size_px, found.size_px + 16)
    }
    assert found.bytes == held[found.size_px] <= ROOM < held[found.size_px + 16] == found.next_bytes
    assert found.rank_bytes == ROOM
    more = largest_image(MODEL, plan, SMALL, batch=2, step_px=16, rank_bytes=2 * ROOM)
    assert more.size_px > found.size_px


@pytest.mark.nightly
def test_limits_at_the_ends(monkeypatch):
    none = largest_image(MODEL, ONE, SMALL, rank_bytes=100, step_px=32)
    assert (none.size_px, none.bytes) == (0, 0)
    assert none.next_bytes > 100
    all_of_them = largest_image(MODEL, ONE, SMALL, most_px=128, step_px=64, rank_bytes=1 << 30)
    assert (all_of_them.size_px, all_of_them.next_bytes) == (128, None)
    monkeypatch.setattr("mpi4dl_nb.engines.predict.sizes.START_PX", 16)  # 16 rows of pixels cannot be cut so
    found = largest_image(MODEL, Plan(split_size=1, slice_method="40x1"), SMALL, step_px=16)
    assert found.bytes <= ROOM < found.next_bytes
    with pytest.raises(PlanError, match=r"is not known\. Say it: rank_bytes="):
        largest_image(MODEL, ONE, FLAT)
    with pytest.raises(PlanError, match="step_px=0"):
        largest_image(MODEL, ONE, SMALL, step_px=0)
    with pytest.raises(PlanError, match="only"):
        largest_image(MODEL, Plan(split_size=40, spatial_size=0), SMALL, most_px=512)


def test_the_next_size_is_the_one_whose_memory_is_reported():
    plan = Plan(split_size=1, slice_method="9x1")  # 4 and 8 rows of pixels cannot be cut so
    found = largest_image(MODEL, plan, SMALL, step_px=4, most_px=64, rank_bytes=100)
    graph = MODEL.graph(plan, (1, 3, found.next_px, found.next_px))
    assert found.size_px == 0
    assert found.next_px > found.step_px
    assert found.next_bytes == predict_plan_memory(graph, plan).peak_bytes
    told = f"{found.next_px} px", format_bytes(found.next_bytes)
    assert found.facts[f"memory with {told[0]} a side"] == told[1]
    assert "none fits: {} need {}".format(*told) in show_limits([found]).alt


def test_strong_scaling_shares_the_images_of_a_step():
    study = scaling(MODEL, SMALL, ONE, (8, 3, 32, 32), "strong", ranks=(1, 2, 4))
    for point, ranks in zip(study.points, (1, 2, 4), strict=True):
        plan = replace(ONE, data_parallel=ranks)
        assert point.image_shape == (8 // ranks, 3, 32, 32)
        assert point.forecast == forecast(MODEL.graph(plan, point.image_shape), plan, SMALL)
        assert point.forecast.images == 8
        assert study.compute_efficiency(point) == pytest.approx(
            point.images_per_s / ranks / study.points[0].images_per_s
        )
        assert point.shares == compute_time_shares(point.forecast.timeline)
    assert study.compute_efficiency(study.points[0]) == 1 > study.compute_efficiency(study.points[-1])
    assert not study.images_grow


@pytest.mark.nightly
def test_weak_scaling_gives_every_rank_as_much():
    replicas = scaling(MODEL, SMALL, ONE, (2, 3, 32, 32), "weak", ranks=(1, 4))
    assert [(point.image_shape, point.forecast.images) for point in replicas.points] == [
        ((2, 3, 32, 32), 2),
        ((2, 3, 32, 32), 8),
    ]
    grids = [replace(ONE, spatial_size=1, slice_method=grid) for grid in ("2x2", "4x4")]
    tiles = scaling(MODEL, SMALL, [grids[1], ONE, grids[0]], (1, 3, 64, 32), "weak")
    assert [point.image_shape[2:] for point in tiles.points] == [(64, 32), (128, 64), (256, 128)]
    assert [point.ranks for point in tiles.points] == [1, 4, 16]
    assert tiles.images_grow
    first, last = tiles.points[0], tiles.points[-1]
    ratio = last.images_per_s * 16 / first.images_per_s  # of pixels
    assert tiles.compute_efficiency(last) == pytest.approx(ratio / 16)


def test_studies_that_make_no_sense_are_refused():
    for arguments, said in [
        ({"plans": ONE, "ranks": (1, 3)}, "8 images of a step cannot be shared by the 3 batches"),
        ({"plans": ONE, "how": "medium"}, "how='medium' is unknown. Choose one of strong, weak"),
        ({"plans": Plan(split_size=2), "ranks": (5, 8)}, "8 ranks are no multiple of the 5"),
        ({"plans": [ONE], "ranks": (1, 2)}, "ranks are for one plan"),
        ({"plans": []}, "no plan to scale"),
    ]:
        with pytest.raises(PlanError, match=said):
            scaling(MODEL, SMALL, image_shape=(8, 3, 32, 32), **arguments)


def test_thousands_of_ranks_are_foreseen_from_one_replica():
    study = scaling(MODEL, "Summit", ONE, (2, 3, 64, 64), "weak", ranks=(6, 2048 * 3))
    assert study.points[-1].forecast.images == 2 * 2048 * 3
    assert study.points[-1].images_per_s > 100 * study.points[0].images_per_s


def test_a_loss_is_that_of_the_traces():
    with pytest.raises(PlanError, match=r"Give the loss to it: Sizes\(model, loss\)"):
        largest_image(MODEL, ONE, SMALL, loss=nn.L1Loss())


class Rows(nn.Module):
    """Attends to all pixels of a map: ranks refuse to gather a large one."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(rows, rows, rows).mean(1)


def test_where_a_layer_needs_the_whole_image_the_largest_is_one_that_it_can_compute():
    model, plan = nn.Sequential(nn.Conv2d(3, 4, 3, stride=8, padding=1), Rows()), Plan(split_size=1, slice_method="1x2")
    found = largest_image(model, plan, SMALL, rank_bytes=1 << 40, step_px=512, most_px=4096)
    assert found.size_px >= 512
    assert found.next_px is None
