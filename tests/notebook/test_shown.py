"""How a cluster, a training and a timeline look in a notebook, and what completion offers of them."""

from __future__ import annotations

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from torch import nn

from mpi4dl_nb import Cluster, Plan, TimelineView, Training
from mpi4dl_nb.engines.formatting import format_bytes


@pytest.fixture(scope="module")
def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with Cluster(2, backend="loopback") as cluster:
        yield Training(model, Plan(split_size=1, slice_method="1x2"), cluster, (2, 3, 8, 8))


def format_thing(thing: object) -> dict[str, str]:
    return DisplayFormatter().format(thing)[0]


def test_a_training_tells_how_far_it_is(training):
    before = format_thing(training)["text/html"]
    assert "Last loss" not in before
    assert '<td style="text-align: left">0</td>' in before
    loss = training.step(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    after = format_thing(training)["text/html"]
    held = training.reports[0].memory_bytes
    assert held > 50 << 20
    for fact in (
        "Sequential",
        "2 × 3 × 8 × 8",
        training.plan.summary,
        "2 ranks, ready",
        f"{loss:.6g}",
        format_bytes(held),
    ):
        assert f">{fact}" in after
    assert "Sequential" in format_thing(training)["text/plain"]


def test_a_timeline_is_its_chart(training):
    training.step(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    timeline = training.timeline()
    assert 'alt="One training step:' in format_thing(timeline)["text/html"]
    assert "rank 1, stage 0, tile 1: compute" in format_thing(timeline)["text/html"]
    assert format_thing(timeline)["text/plain"].startswith("<Timeline of 2 ranks: ")
    assert timeline.ranks == (0, 1)
    assert {event.name for event in timeline.events} == set(timeline.layers)
    named = {timeline.layers[event.name] for event in timeline.events if event.kind == "halo"}
    assert named == {"0 … 1"}, "a halo is that of the layers which need it"
    assert TimelineView(timeline).words["layers"] == [
        timeline.layers[name]
        for name in dict.fromkeys(
            event.name for event in sorted(timeline.events, key=lambda event: (event.rank, event.start_s))
        )
    ]


def test_completion_offers_what_users_need(training):
    for thing, wanted in (
        (training, {"fit", "step", "timeline", "save"}),
        (training.cluster, {"start", "stop", "state"}),
    ):
        names = set(dir(thing))
        assert wanted <= names
        assert not [name for name in names if name.startswith("_")]
        assert len(names) <= 30
        assert all(hasattr(thing, name) for name in names)
