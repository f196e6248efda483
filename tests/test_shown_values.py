"""Plans and programs show themselves in a notebook: in few words, with their own numbers."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from html import escape
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.lib.pretty import pretty

from mpi4dl_nb import (
    MACHINES,
    Candidate,
    Cluster,
    Sizes,
    StainCrops,
    Training,
    capabilities,
    find_halo_points,
    forecast,
    immunohistochemistry,
    largest_image,
    scaling,
)
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.formatting import format_bytes, format_seconds
from mpi4dl_nb.engines.models import chain
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.candidates import Measurement
from mpi4dl_nb.engines.program.program import count_traffic
from mpi4dl_nb.engines.program.timeline import Timeline
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.verify import VerifyResult
from mpi4dl_nb.planning.plan_tuner import TuningResult


@given(
    st.builds(
        Plan,
        split_size=st.integers(1, 5),
        spatial_size=st.integers(0, 1),
        slice_method=st.sampled_from(["square", "2x3", "vertical"]),
        data_parallel=st.integers(1, 3),
        precision=st.sampled_from(["float32", "float16"]),
    )
)
def test_a_plan_reads_as_it_is_written(plan: Plan):
    assert eval(repr(plan)) == plan
    assert Plan(**plan.chosen) == plan


def test_the_card_of_a_plan_has_what_differs_from_the_defaults():
    card = Plan(slice_method="2x3", parts=4)._repr_html_()
    for name, fact in {"ranks": "7", "slice_method": "&#x27;2x3&#x27;", "parts": "4"}.items():
        assert f'{name}</th><td style="text-align: left">{fact}</td>' in card
    assert "schedule" not in card
    assert "all knobs" in Plan()._repr_html_()


def test_the_card_of_a_program_has_its_own_numbers():
    plan = Plan(split_size=2, slice_method="1x2", bidirectional=True)
    program = compile_plan(prepare(chain(4, 4), plan, (2, 3, 32, 32)).graph, plan)[0]
    card, words = program._repr_html_(), repr(program)
    assert words.startswith("<Program of rank 0: stages: 0, 1 (mirrored); micro-batches: 2 of 2; ")
    for kind, count in Counter(step.instruction.kind for step in program.steps).items():
        assert f"{count:,} {kind}" in card
    for sent in count_traffic(program).values():
        assert f"{sent.messages:,} messages, {format_bytes(sent.bytes)}" in card
    assert len(words) <= 200


# Whatever a user may leave as the last line of a cell: one line as text, a small table on a page.

MODEL = Sizes(chain(4, 4))
TILES, SHAPE = Plan(split_size=1, slice_method="1x2"), (2, 3, 32, 32)
LARGE = Plan(split_size=1, slice_method="2x2", data_parallel=4)
BATCH = torch.randn(SHAPE), torch.tensor([3, 7])


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    with Cluster(2, backend="loopback") as cluster:
        yield Training(chain(4, 4), TILES, cluster, SHAPE)


@pytest.fixture(scope="module")
def events(training) -> list[object]:
    """Of a `fit`: those that a callback gets, and its history."""
    found: list[object] = []
    callback = SimpleNamespace(
        begin=lambda training, total: None, handle_event=found.append, end=lambda outcome: None, stops=False
    )
    found.append(training.fit([BATCH], epochs=2, progress=False, monitor=callback))
    return found


@pytest.fixture(scope="module")
def results(training, events) -> dict[str, object]:
    """One object of each class, by the name of its class."""
    graph = MODEL.graph(LARGE, SHAPE)
    found = forecast(MODEL, LARGE, SHAPE, "Summit")
    can = capabilities(MODEL, "Summit", 2, (32, 64), 2)
    scaled = scaling(MODEL, "Summit", Plan(split_size=1), SHAPE, "weak", (4, 8, 2048))
    debugger = training.stepping(*BATCH)
    event = debugger.instruction()
    made = [
        *events, found, found.timeline, found.memory[0], Candidate(found), Candidate(found, Measurement((0.1,), (5,))),
        Candidate(found, failure="It is <b>too large</b>."), can, can.by_size[64], *can.by_size[64].verdicts, scaled,
        scaled.points[0], largest_image(MODEL, LARGE, "Summit", most_px=512), MODEL, *MACHINES.values(), LARGE, graph,
        compile_plan(graph, LARGE)[0], find_halo_points(graph, LARGE)[0], training, training.cluster, training.recipe,
        training.reports[0], debugger, event, event.ranks[0], debugger.view(), training.verify(),
        StainCrops(immunohistochemistry(), 64, 8),
        TuningResult((Candidate(found),), MACHINES["Summit"], can.by_size[64]),
    ]  # fmt: skip
    debugger.close()
    return {f"{number} {type(each).__name__}": each for number, each in enumerate(made)}


def test_whatever_a_cell_ends_in_is_one_short_line_and_a_small_table(results):
    for name, each in results.items():
        text, page = pretty(each), each._repr_html_()
        assert len(text.splitlines()) == 1, name
        assert len(text) <= 200, f"{name}: {text}"
        assert text == repr(each), name
        assert len(page) < 4000 or isinstance(each, TuningResult), name
        assert "<b>too" not in page, f"{name} is not escaped"
        assert not re.search(r"object at 0x|functools|TensorSpec|\d{6,}", text), f"{name}: {text}"


def test_a_list_of_results_has_a_line_for_each(results):
    candidates = [each for each in results.values() if isinstance(each, Candidate)]
    assert len(pretty(candidates).splitlines()) == len(candidates)


def test_the_card_of_a_forecast_has_its_own_numbers():
    found = forecast(MODEL, TILES, SHAPE, "Summit")
    card = found._repr_html_()
    for fact in (TILES.summary, format_seconds(found.seconds), format_bytes(found.peak_bytes)):
        assert escape(fact) in card


def test_a_timeline_without_events_is_shown():
    assert repr(Timeline(())) == "<Timeline of 0 ranks: events: 0>"


def test_verify_ends_in_a_sentence_with_the_numbers_beneath(training):
    found = training.verify()
    assert re.fullmatch(r"Same as one process: worst relative difference \de-1\d, in the \w.*", repr(found))
    assert str(found).splitlines() == [repr(found), dict.__repr__(found)]
    assert json.loads(json.dumps(found)) == found
    assert pickle.loads(pickle.dumps(found)) == found
    assert f"{found['grad_rel']:.1e}" in found._repr_html_()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"params_rel": 0.25, "ok": False}, "NOT the same as one process: worst .* 2e-01, in the weights"),
        ({"loss_rel": math.inf, "ok": False}, "NOT the same as one process: the losses cannot be compared"),
        ({"params_rel": 1e-15, "ok": False, "why": "The optimiser does not move a."}, "Same as one process, which"),
        ({"params_rel": 2e-4, "dtype": "float32"}, "Same as one process, as far as float32 is precise: worst .* 2e-04"),
        ({}, "Same as one process: every bit"),
    ],
)  # fmt: skip
def test_verify_says_plainly_what_differs(changes, sentence):
    same = {"ok": True, "dtype": "float64", "loss_rel": 0.0, "buffers_rel": 0.0, "params_rel": 0.0}
    same |= {"worst_parameter": "conv.weight", "worst_parameter_rel": 0.0}
    assert re.match(sentence, repr(VerifyResult(same | changes)))
