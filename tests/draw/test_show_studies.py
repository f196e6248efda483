"""Figures of capabilities, scaling and limits: legible, and with the forecasts' numbers in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from legible import find_unreadable, read

from mpi4dl_nb import (
    capabilities,
    forecast,
    largest_image,
    scaling,
    show_capabilities,
    show_limits,
    show_scaling,
    show_timeline,
)
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes, format_number, format_percent
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.explain import describe_plan
from mpi4dl_nb.engines.predict.sizes import Sizes
from mpi4dl_nb.engines.predict.studies import select_plans
from tests.predict.test_simulate import FLAT
from tests.zoo import Chain

MODEL = Sizes(Chain(), title="a chain")
SMALL = replace(FLAT, memory_bytes=2 << 20)
ONE = Plan(split_size=1, spatial_size=0)


@pytest.fixture(scope="module")
def found():
    return capabilities(MODEL, SMALL, 4, (32, 128, 1024), batch=2, asked=list(select_plans(4, batch=2, each=2)))


@pytest.mark.nightly
def test_each_cell_says_what_fits_and_how_fast_it_is(found):
    figure = show_capabilities(found)
    assert find_unreadable(figure) == []
    words = read(figure)
    for size in found.by_size:
        assert f"{size:,}" in words
        for kind in found.kinds:
            verdict = found.get_verdict(kind, size)
            rate, need = format_number(verdict.best.images_per_s), format_bytes(verdict.best.peak_bytes)
            last = "fastest" if verdict.share == 1 else format_percent(verdict.share)
            assert (f"{rate}/s {last}" if verdict.fits else f"needs {need}") in words
        assert found.by_size[size].words in figure.alt
    assert "none fits" in words
    hatches = {patch.get_hatch() for patch in figure.axes[0].patches}
    assert hatches == {None, "////"}  # what does not fit is not told by colour alone


@pytest.mark.nightly
def test_all_sizes_of_the_usual_picture_have_room(found):
    sizes = (256, 512, 1024, 2048, 4096, 8192, 16384)
    wide = replace(found, by_size=dict.fromkeys(sizes, found.by_size[128]))
    assert find_unreadable(show_capabilities(wide)) == []


@pytest.mark.nightly
def test_scaling_has_speeds_efficiencies_and_shares():
    strong = scaling(MODEL, SMALL, ONE, (8, 3, 32, 32), "strong", ranks=(1, 2, 4, 8))
    grids = [ONE, *(replace(ONE, spatial_size=1, slice_method=grid) for grid in ("1x2", "2x2"))]
    weak = scaling(MODEL, SMALL, grids, (1, 3, 32, 32), "weak")
    for studies in (strong, {"replicas": strong}, {"replicas": strong, "tiles": weak}):
        figure = show_scaling(studies)
        assert find_unreadable(figure) == []
        for point in strong.points:
            rate, efficiency = format_number(point.images_per_s), format_percent(strong.compute_efficiency(point))
            assert f"{rate} images/s, efficiency {efficiency}" in figure.alt
            assert efficiency in read(figure)
    assert "megapixels per second" in read(show_scaling(weak))
    assert "images per second" in read(show_scaling(strong))
    line = show_scaling(strong).axes[0].lines[0]
    assert list(line.get_ydata()) == [point.images_per_s for point in strong.points]
    with pytest.raises(PlanError, match="0 studies"):
        show_scaling({})


@pytest.mark.nightly
def test_limits_are_bars_with_their_numbers():
    plans = (ONE, Plan(split_size=1, slice_method="2x2"))
    limits = [largest_image(MODEL, plan, SMALL, step_px=32) for plan in plans]
    limits.append(largest_image(MODEL, ONE, SMALL, step_px=32, rank_bytes=100))
    limits.append(largest_image(MODEL, ONE, SMALL, step_px=32, most_px=64))
    figure = show_limits(limits, "a small machine")
    assert find_unreadable(figure) == []
    for each in limits[:2]:
        said = f"{each.size_px:,} px: {format_bytes(each.bytes)} of 2.0 MB"
        assert said in figure.alt
        assert said in read(figure)
    assert "none fits: 32 px need" in read(figure)
    assert "no larger one was tried" in read(figure)
    assert find_unreadable(show_limits([replace(limits[-1], size_px=40960)] * 3, "a small machine")) == []
    assert describe_plan(plans[1]) in read(figure)
    with pytest.raises(PlanError, match="no limit to show"):
        show_limits([])


def test_a_step_on_thousands_of_ranks_can_be_drawn():
    made = forecast(MODEL, Plan(split_size=2, slice_method="1x2", data_parallel=1000), (2, 3, 32, 32), "Summit")
    assert made.ranks == 3000
    assert "One training step" in show_timeline(made.timeline).alt
