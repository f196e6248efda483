"""Plans and programs show themselves in a notebook: in few words, with their own numbers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engines.models import resnet20_v1
from engines.plan import Plan
from engines.program.compile import compile_plan
from engines.program.program import count_traffic
from engines.train.training import prepare


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
    program = compile_plan(prepare(resnet20_v1(), plan, (2, 3, 32, 32)).graph, plan)[0]
    card, words = program._repr_html_(), repr(program)
    assert words.startswith("<Program of rank 0: stages: 0, 1 (mirrored); micro-batches: 2 of 2; ")
    for kind, count in Counter(step.instruction.kind for step in program.steps).items():
        assert f"{count:,} {kind}" in card
    for kind, sent in count_traffic(program).items():
        assert f"sends ({kind}): {sent.messages:,} messages, {sent.bytes:,} bytes" in words
