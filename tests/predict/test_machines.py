"""Machines of data sheets: complete, sane, and what the rule says of a V100 by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mpi4dl_nb.draw.rank_map import describe_forecast
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.cost import CostModel, estimate_segment_work
from mpi4dl_nb.engines.predict.forecast import Forecast, forecast
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import (
    BUSY,
    HALF_NAME,
    LAUNCH_S,
    MACHINES,
    MEMORY_SHARE,
    PASSES,
    resolve_machine,
)
from mpi4dl_nb.engines.predict.published import RESNET_50
from mpi4dl_nb.engines.predict.published_replay import PublishedReplay, StudyRun
from mpi4dl_nb.engines.predict.sizes import Sizes
from mpi4dl_nb.engines.predict.tallies import BY_ARITHMETIC, CLASSES, OpTally, SegmentTally
from mpi4dl_nb.engines.program.effects import Phase
from tests.predict.test_simulate import FLAT

ALL = pytest.mark.parametrize("name", MACHINES)
SIZES = st.tuples(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(1, 1e8))


@ALL
def test_a_machine_has_all_that_a_forecast_asks_for_and_says_where_it_is_from(name):
    found = resolve_machine(name)
    assert set(found.speeds) == set(CLASSES) == {*PASSES, *BY_ARITHMETIC}
    assert found.name == name
    assert any(letter.isdigit() for letter in found.source), "numbers have sources"
    assert "data sheet" in found.source or "user guide" in found.source
    assert found.memory_bytes > 10 * 10**9
    assert found.get_rank_bytes(4096) == found.memory_bytes
    assert 0 < found.latency_s < 1e-4
    assert found.between.bytes_per_s / found.node_ranks <= found.bytes_per_s, "a node's ranks share what leaves it"


@ALL
def test_a_machine_is_the_same_after_being_stored(name):
    assert Machine.from_json(MACHINES[name].to_json()) == MACHINES[name]


def test_an_unknown_machine_is_refused_with_those_that_are_known():
    with pytest.raises(PlanError, match=r"no machine 'Sumit'. Did you mean 'Summit'.*Summit, Lassen, Pitzer.*Frontera"):
        resolve_machine("Sumit")
    with pytest.raises(PlanError, match=r"no machine \['Summit'\]"):
        resolve_machine(["Summit"])


@given(at=SIZES, more=st.floats(1, 100), axis=st.integers(0, 2), back=st.booleans())
def test_larger_work_is_never_slower_for_each_unit_and_never_above_the_peak(at, more, axis, back):
    larger = tuple(size * more if index == axis else size for index, size in enumerate(at))
    for found in MACHINES.values():
        small, large = (found.estimate_seconds("convolution", 1e9, size, back) for size in (at, larger))
        assert large <= small * (1 + 1e-12)
        assert large >= 1e9 / found.speeds["convolution"][0].per_s


def test_a_convolution_takes_its_arithmetic_and_three_matrices_through_memory():
    dot, filters, outputs = 576, 64, 3136
    flops, moved = 2 * dot * filters * outputs, 4 * (dot * outputs + dot * filters + filters * outputs)
    by_hand = flops / (BUSY * 15.7e12) + moved / (MEMORY_SHARE * 900e9)
    assert resolve_machine("Lassen").estimate_seconds("convolution", flops, (dot, filters, outputs)) == pytest.approx(
        by_hand
    )


def test_a_relu_reads_and_writes_and_backward_half_as_much_again():
    lassen, size = resolve_machine("Lassen"), 10**8
    seconds = [lassen.estimate_seconds("pointwise", size, (size,), back) for back in (False, True)]
    assert seconds == pytest.approx([1e8 / 747e9, 1.5e8 / 747e9])


def test_many_small_kernels_take_what_a_host_takes_to_start_them_and_large_ones_hide_that():
    small, large = (OpTally("aten.relu.default", "pointwise", 0, count, gradients=1) for count in (8, 10**9))
    for ops, forward, back in (
        ((small,) * 10, 10 * LAUNCH_S, 10 * LAUNCH_S),
        ((*(small,) * 9, large), 1e9 / 747e9, 1.5e9 / 747e9),
    ):
        segment = SegmentTally(ops, frozenset(), {}, 0, 0, {}, {}, late=False)
        found = [
            estimate_segment_work(segment, resolve_machine("Lassen"), 1, phase).seconds
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        ]
        assert found == pytest.approx([forward, back], rel=1e-6)


LARGE = (1, 3, 2048, 2048)
TILES = Plan(split_size=1, num_spatial_parts=4)


@pytest.fixture(scope="module")
def chain() -> Sizes:
    return Sizes(nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)))


def predict(chain: Sizes, machine: Machine | str, precision: str) -> Forecast:
    plan = replace(TILES, precision=precision)
    return forecast(chain.graph(plan, LARGE), plan, resolve_machine(machine))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["DGX A100", "DGX H100", "Summit"])
def test_times_follow_the_precision_of_the_plan(chain, name):
    """Whichever of the two machines is named; that both agree is what their numbers say, as before."""
    full, half = (predict(chain, name, precision) for precision in ("float32", "bfloat16"))
    assert half.seconds < full.seconds
    for precision, wanted in (("float32", full), ("bfloat16", half), ("float16", half)):
        for machine in (name, f"{name}{HALF_NAME}"):
            found = predict(chain, machine, precision)
            assert found.seconds == pytest.approx(wanted.seconds, rel=1e-12)
            assert found.time_note == ""
    prices = CostModel(resolve_machine(name))  # plans of several precisions share the prices of a search
    for precision in ("bfloat16", "float32", "bfloat16"):
        plan = replace(TILES, precision=precision)
        shared = forecast(chain.graph(plan, LARGE), plan, prices)
        assert shared.seconds == pytest.approx(predict(chain, name, precision).seconds, rel=1e-12)


def test_times_that_are_not_of_the_plans_precision_say_so(chain):
    own = replace(resolve_machine("DGX A100"), name="DGX A100", latency_s=1e-3)  # described anew under a known name
    for machine, precision in (("Frontera", "bfloat16"), (own, "float16"), ("DGX A100", "float64"), (FLAT, "bfloat16")):
        found = predict(chain, machine, precision)
        assert found.facts["time of a step"].endswith(f" (as in float32, for {precision} is not known)")
        assert found.time_note in describe_forecast(found, resolve_machine(machine))
    assert predict(chain, own, "float32").time_note == ""
    half = replace(resolve_machine(f"DGX A100{HALF_NAME}"), latency_s=1e-3)
    assert predict(chain, half, "bfloat16").time_note == ""
    assert "(as in half precision, for float32 is not known)" in predict(chain, half, "float32").time_note


@pytest.fixture(scope="module")
def rate():
    pytest.importorskip("monai")
    replay = PublishedReplay()

    def compute_images_per_s(images: int, name: str = "Lassen", **changes: float) -> float:
        run = StudyRun(RESNET_50, 224, images, Plan(split_size=1, spatial_size=0), name)
        return replay.forecast_run(run, changes).images_per_s

    return compute_images_per_s


@pytest.mark.nightly
def test_one_v100_trains_resnet_50_as_fast_as_the_number_it_was_made_of(rate):
    assert rate(64) == pytest.approx(334, rel=0.01)


@pytest.mark.nightly
def test_numbers_that_the_rule_was_not_made_of(rate):
    """NVIDIA's container on a V100, and a node's share of what 2048 Frontera nodes did."""
    assert rate(128) == pytest.approx(367, rel=0.1)
    assert 4 * rate(64, "Frontera") == pytest.approx(260_000 / 2048, rel=0.15)


@pytest.mark.nightly
def test_faster_processors_are_faster(rate):
    found = [rate(128, name) for name in ("Pitzer", "Summit", "DGX A100", "DGX H100", "DGX H200")]
    assert found == sorted(found)


@pytest.mark.nightly
def test_a_host_that_starts_kernels_slowly_is_seen_with_one_image_only(rate):
    assert rate(1, least_s=0.0) > 2 * rate(1)
    assert rate(64, least_s=0.0) == pytest.approx(rate(64), rel=0.01)
