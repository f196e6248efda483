"""Who has a core when, in programs small enough to be timed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.predict.cores import RunQueue
from mpi4dl_nb.engines.predict.cost import ComputeWork, CostModel
from mpi4dl_nb.engines.predict.simulate import simulate
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.instructions import AllReduce, SumGradients
from tests.predict.test_simulate import BACKWARD, BYTE_PER_S, FORWARD, compute, list_ends, make_rank, transfer

TWO = replace(BYTE_PER_S, cores=2, slice_s=100.0)


def run(machine, *ranks, threads=1):
    programs, tallies = zip(*ranks, strict=True)
    return simulate(programs, tallies, machine, [threads] * len(ranks))


def make_equal_ranks(count: int, seconds: int = 6) -> list:
    return [make_rank(rank, [(compute("a"), FORWARD)], {"a": seconds}) for rank in range(count)]


def test_three_short_works_on_two_cores_take_as_long_as_four():
    assert [run(TWO, *make_equal_ranks(count)).seconds for count in (1, 2, 3, 4, 5)] == [6, 6, 12, 12, 18]


def test_in_short_slices_the_cores_are_shared_evenly():
    timeline = run(replace(TWO, slice_s=0.01), *make_equal_ranks(3))
    assert timeline.seconds == pytest.approx(9, abs=0.05)


def test_a_rank_that_goes_on_keeps_its_core_until_its_slice_is_over():
    works = [(compute(name), FORWARD) for name in "ab"]
    two = [make_rank(rank, works, {"a": 1, "b": 1}) for rank in range(2)]
    one = replace(TWO, cores=1)
    first, second = sorted(tuple(list_ends(run(one, *two), rank)) for rank in range(2))
    assert (first, second) == ((1, 2), (3, 4))
    first, second = sorted(tuple(list_ends(run(replace(one, slice_s=1.0), *two), rank)) for rank in range(2))
    assert (first, second) == ((1, 3), (2, 4))


def test_threads_of_one_rank_take_several_cores():
    queue = RunQueue(TWO, {0: 2, 1: 1})
    queue.start(0, ComputeWork(3.0), 0.0)
    queue.start(1, ComputeWork(1.0), 0.0)
    assert queue.find_next_end() == 3.0
    assert list(queue.advance_to(3.0)) == [0]
    assert queue.find_next_end() == 4.0


def test_who_has_waited_goes_on_later_where_others_have_all_cores():
    """The message comes at 1.5, and its receiver fetches it for half a second; until 2 the first rank computes on."""
    first = make_rank(0, [(compute("a"), FORWARD), (transfer(0), FORWARD), (compute("b"), FORWARD)], {"a": 1, "b": 1})
    second = make_rank(1, [(transfer(1), FORWARD), (compute("c"), FORWARD)], {"c": 2})
    third = make_rank(2, [(compute("d"), FORWARD)], {"d": 10})
    slow = replace(TWO, resume_s=0.75)
    assert list_ends(run(slow, first, second), 1) == [2, 4]
    assert list_ends(run(TWO, first, second, third), 1) == [2.5, 4.5]
    assert list_ends(run(slow, first, second, third), 1) == [2.75, 4.75]


def test_an_idle_core_leaves_others_work_where_it_is_for_a_while():
    """The first and the third rank share a core, and have little to do; from 2 on it could help the other two."""
    ranks = [make_rank(rank, [(compute("a"), FORWARD)], {"a": seconds}) for rank, seconds in enumerate((1, 4, 1, 4))]
    assert run(TWO, *ranks).seconds == 6
    assert run(replace(TWO, resume_s=0.5), *ranks).seconds == 6.5


def test_a_sum_on_a_host_takes_the_cores_of_its_ranks():
    """What each of four ranks fetches keeps its core busy, so that on fewer cores they take turns."""
    group, count_bytes = (0, 1, 2, 3), 16 * 100
    bucket = SumGradients("g", ("w",), count_bytes, group, 2)
    ranks = [make_rank(rank, [(bucket, BACKWARD), (bucket, Phase.UPDATE)], {}) for rank in group]
    machine = replace(TWO, latency_s=0.0, slice_s=1e4)
    fetched_s = CostModel(machine).get_all_reduce_cost(group, count_bytes).fetched_s
    assert fetched_s == 3 * 100
    for cores in (1, 2, 4):
        assert run(replace(machine, cores=cores), *ranks).seconds == pytest.approx(4 / cores * fetched_s)


def test_who_waits_for_nothing_goes_on_at_once():
    first = make_rank(0, [(transfer(0), FORWARD), (compute("a"), FORWARD)], {"a": 9})
    second = make_rank(1, [(compute("b"), FORWARD), (transfer(1), FORWARD)], {"b": 5})
    slow = replace(TWO, cores=1, resume_s=0.75)
    assert list_ends(run(slow, first, second), 1) == list_ends(run(replace(slow, resume_s=0.0), first, second), 1)


def test_what_is_bound_by_memory_suffers_more_from_others_than_what_is_not():
    queue = RunQueue(TWO, {0: 1, 1: 1})
    queue.start(0, ComputeWork(2.0, crowded=3.0), 0.0)
    queue.start(1, ComputeWork(2.0, crowded=1.5), 0.0)
    assert queue.find_next_end() == 3.0
    assert list(queue.advance_to(3.0)) == [1]
    assert queue.find_next_end() == 4.0  # a third is done, and the rest goes on alone


def test_a_rank_that_waits_for_several_waits_for_the_slowest():
    """Work that is longer or shorter at random takes as long on average, and a rank that hears of all others longer."""
    works = [(compute(name), FORWARD) for name in map(str, range(400))]
    alone = make_rank(0, works, {item.name: 1 for item, _ in works})
    shaky = replace(BYTE_PER_S, jitter=0.5)
    assert run(shaky, alone).seconds == pytest.approx(400, rel=0.1)
    assert run(shaky, alone).seconds == run(shaky, alone).seconds
    total = AllReduce("sum", "x", "y", TensorSpec((1, 2), "float32"), (0, 1, 2, 3), True)
    meeting = [make_rank(rank, [*works[:1], (total, FORWARD)] * 40, {"0": 1}) for rank in range(4)]
    quick = replace(BYTE_PER_S, latency_s=0.0, bytes_per_s=1e9)
    assert run(quick, *meeting).seconds == pytest.approx(40)
    assert run(replace(quick, jitter=0.5), *meeting).seconds == pytest.approx(40 * 1.54, rel=0.1)  # the slowest of four
