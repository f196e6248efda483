"""Links between nodes, and sums over them, small enough to be timed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpi4dl_nb.engines.geometry.tiles import Move
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.predict.cost import CostModel
from mpi4dl_nb.engines.predict.links import AllReduceCost
from mpi4dl_nb.engines.predict.machine import Link, Machine, Speed
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.instructions import AllReduce, SumGradients
from tests.predict.test_simulate import PX, compute, list_ends, make_rank, run

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE
NODES = Machine(
    "two on a node", "by hand", {"pointwise": (Speed((1.0,), 1.0, 0.5),)}, latency_s=0.5, bytes_per_s=16.0,
    node_ranks=2, between=Link(1.0, 4.0),
)  # fmt: skip


def make_message(source: int, target: int, here: int, tag: int = 2) -> Exchange:
    """Eight bytes, as one of the two ranks has it in its program."""
    move, sends = Move(source, target, PX), here == source
    return Exchange(
        f"from {source}", "stage", "x", "x", (-2, -1), (1, 1, 1, 2), "float32", PX if sends else None,
        None if sends else PX, 0.0, (move,) if sends else (), () if sends else (move,), tag, True,
    )  # fmt: skip


def make_first_half(here: int) -> list:
    return [(make_message(here, here + 2, here), FORWARD)]


def make_second_half(here: int) -> list:
    return [(make_message(here - 2, here, here), FORWARD)]


def test_messages_to_another_node_leave_one_after_another():
    ranks = [make_rank(rank, make_first_half(rank) if rank < 2 else make_second_half(rank), {}) for rank in range(4)]
    timeline = run(NODES, *ranks)
    assert [list_ends(timeline, rank)[0] for rank in range(4)] == [0, 0, 2 + 1, 4 + 1]  # 8 bytes at 4 in a second, 1 s


def test_messages_from_two_nodes_arrive_one_after_another():
    steps = [
        [(make_message(0, 4, 0), FORWARD)], [], [(compute("a"), FORWARD), (make_message(2, 5, 2), FORWARD)], [],
        [(make_message(0, 4, 4), FORWARD)], [(make_message(2, 5, 5), FORWARD)],
    ]  # fmt: skip
    timeline = run(NODES, *(make_rank(rank, each, {"a": 1}) for rank, each in enumerate(steps)))
    assert list_ends(timeline, 4) == [2 + 1]
    assert list_ends(timeline, 5) == [2 + 2 + 1]  # it comes at 1 s, and the link of its node is free from 2 s on


def test_within_a_node_messages_do_not_hinder_each_other():
    ranks = [make_rank(rank, [(make_message(0, 1, rank), FORWARD)], {}) for rank in range(2)]
    ranks += [make_rank(rank, [(make_message(2, 3, rank), FORWARD)], {}) for rank in (2, 3)]
    timeline = run(replace(NODES, node_ranks=4), *ranks)
    assert list_ends(timeline, 1) == list_ends(timeline, 3) == [1.0]  # 0.5 s of latency, 8 bytes at 16 in a second


def make_bucket(number: int, count_bytes: int = 8, ranks: int = 4) -> SumGradients:
    return SumGradients(f"g{number}", ("w",), count_bytes, tuple(range(ranks)), 2 * number)


def test_sums_of_gradients_go_on_behind_backward_one_after_another():
    """Each of 4 ranks sends 8 bytes to 3 others: 2 x 2 x 8 leave a node, and take 8 s; latency is 1 s."""
    steps = [(make_bucket(0), BACKWARD), (make_bucket(1), BACKWARD), (compute("a"), BACKWARD)]
    steps += [(make_bucket(0), UPDATE), (make_bucket(1), UPDATE)]
    timeline = run(NODES, *(make_rank(rank, steps, {"a": 2}) for rank in range(4)))
    assert list_ends(timeline, 0) == [0, 0, 4, 8 + 1, 16 + 1]
    assert run(NODES, *(make_rank(rank, steps, {"a": 10}) for rank in range(4))).seconds == 20  # all of it is hidden


def test_what_ranks_wait_for_goes_before_sums_of_gradients():
    begin, end = [(make_bucket(0), BACKWARD)], [(make_bucket(0), UPDATE)]
    steps = [begin + (make_first_half(rank) if rank < 2 else make_second_half(rank)) + end for rank in range(4)]
    timeline = run(NODES, *(make_rank(rank, each, {}) for rank, each in enumerate(steps)))
    assert list_ends(timeline, 2)[1] == 2 + 1
    assert list_ends(timeline, 3)[1] == 4 + 1
    # Both messages, 2 s each, came between.
    assert [list_ends(timeline, rank)[-1] for rank in range(4)] == [8 + 4 + 1] * 4


def test_a_sum_that_is_waited_for_takes_its_turn_on_the_links():
    total = AllReduce("sum", "x", "y", TensorSpec((1, 2), "float32"), (0, 2), True)
    steps = [[(make_message(1, 3, rank), FORWARD)] if rank % 2 else [(total, FORWARD)] for rank in range(4)]
    timeline = run(NODES, *(make_rank(rank, each, {}) for rank, each in enumerate(steps)))
    # Behind the message, which rank 1 has sent at 0 s.
    assert list_ends(timeline, 0) == list_ends(timeline, 2) == [2 + 2 + 1]
    assert list_ends(timeline, 3) == [2 + 2 + 1]  # to its node the sum comes first


def test_the_link_of_a_node_is_shared_by_its_ranks_of_a_sum():
    big = 1 << 20
    machine = replace(NODES, latency_s=0.0, bytes_per_s=1e30, between=Link(0.0, 1.0))
    assert CostModel(machine).get_all_reduce_cost((0, 1), big).carried_s == pytest.approx(0, abs=1e-9)
    half = CostModel(machine).get_all_reduce_cost(
        (0, 2), big
    )  # one of each node: half of the numbers there, their sums back
    assert (half.carried_s, half.crosses) == (big, True)
    assert CostModel(machine).get_all_reduce_cost((0, 1, 2, 3), big).carried_s == 2 * 2 * (
        2 * big / 4
    )  # 2 ranks, 2 others, 2 rounds


def test_each_message_of_a_direct_sum_costs_its_rank_something():
    machine = replace(NODES, between=None, node_ranks=None, bytes_per_s=1e30, message_s=0.25)
    assert CostModel(machine).get_all_reduce_cost(tuple(range(9)), 8) == AllReduceCost(
        pytest.approx(0), 0.5 + 8 * 0.25, False
    )


def test_in_two_levels_the_latency_grows_with_the_logarithm_of_the_nodes():
    machine = replace(NODES, sums="two_level", latency_s=0.0, bytes_per_s=1e30, between=Link(1.0, 1e30))
    found = [
        CostModel(machine).get_all_reduce_cost(tuple(range(2 * nodes)), 8).latency_s for nodes in (1, 2, 4, 1024, 1025)
    ]
    assert found == [0, 1, 2, 10, 11]


def test_in_two_levels_each_number_crosses_a_nodes_link_twice_at_most():
    """Reduce-scatter and all-gather (Thakur et al., 2005): 2 (n - 1) / n of the bytes, whatever is on a node."""
    big = 1 << 20
    machine = replace(NODES, sums="two_level", latency_s=0.0, bytes_per_s=1e30, between=Link(1e-9, 1.0))
    assert CostModel(machine).get_all_reduce_cost(tuple(range(16)), big).carried_s == 2 * 7 / 8 * big
    inside = replace(machine, bytes_per_s=2.0, node_ranks=16)
    assert CostModel(inside).get_all_reduce_cost(tuple(range(16)), big).carried_s == 2 * 15 / 16 * big / 2
