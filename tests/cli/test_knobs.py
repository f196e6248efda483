"""Knobs as text, and which of them an error is about."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb.engines.cli.plan_options import find_plan_option, find_plan_options, format_value, parse_value
from mpi4dl_nb.engines.errors import Mpi4dlError
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.train.recipe import prepare
from tests.plan.test_plan import CONTRADICTIONS, REFUSED

WRONG = {kind: case[0] for kind, case in {**REFUSED, **CONTRADICTIONS}.items()}


@pytest.mark.parametrize("kind", WRONG)
def test_a_message_belongs_beside_one_of_the_knobs_that_were_set(kind: str):
    with pytest.raises(Mpi4dlError) as caught:
        Plan(**WRONG[kind])
    named = find_plan_options(str(caught.value))
    assert find_plan_option(str(caught.value)) in named[:2]
    assert WRONG[kind].keys() & named[:2]
    for touched in WRONG[kind]:
        assert find_plan_option(str(caught.value), touched) == (touched if touched in named else named[0])


MISFITS = {
    "split_size": {"split_size": 40, "spatial_size": 1},
    "balance": {"balance": (2, 2)},
    "slice_method": {"slice_method": "1x40"},
    "parts": {"parts": 3},
    "local_dp": {"local_dp": 3},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("knob", MISFITS)
def test_so_does_what_does_not_fit_the_model_or_the_batch(knob: str):
    with pytest.raises(Mpi4dlError) as caught:
        prepare(resnet20_v1(), Plan(**MISFITS[knob]), (2, 3, 32, 32))
    assert find_plan_option(str(caught.value)) == knob


def test_words_that_are_no_knobs():
    assert find_plan_options("parts of the image, many times, on balance") == ()
    assert find_plan_option("The model answers with no tensor.") == ""


@given(st.one_of(st.integers(0, 999), st.tuples(st.integers(1, 99)), st.tuples(st.integers(1, 99), st.integers(1, 9))))
def test_numbers_survive_as_text(value: object):
    assert parse_value(format_value(value)) == value


def test_every_knob_is_described():
    assert list(OPTIONS) == [field.name for field in fields(Plan)]
    for name, option in OPTIONS.items():
        assert option.help[0].islower(), name
        assert option.divides in ("", "step", "micro_batch"), name


def test_what_other_rooms_ask_of_the_knobs():
    """The lists that these rooms once kept by hand."""
    numbers = {"precision", "checkpoint_activations", "offload_activations", "compile_segments", "sync_batchnorm"}
    assert {name for name, option in OPTIONS.items() if option.kept} == numbers
    assert {name for name, option in OPTIONS.items() if option.divides == "step"} == {
        *("parts", "accumulate", "times", "data_parallel", "bidirectional"),
    }


def test_help_lists_every_knob():
    text = inspect.getdoc(Plan)
    for field in fields(Plan):
        assert f"`{field.name}={field.default!r}`: {OPTIONS[field.name].help}" in text
    assert f"({OPTIONS['sync_batchnorm'].results})" in text
