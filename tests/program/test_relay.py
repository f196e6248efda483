"""Ranks in one thread take turns, whoever has most messages first."""

from __future__ import annotations

import threading

import pytest
import torch

from mpi4dl_nb.engines.comm.world import Message
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.program.rank_scheduler import RankScheduler


@pytest.fixture
def relay():
    return RankScheduler(3)


def test_each_waits_inside_its_work_and_all_are_one_thread(relay):
    def work(world):
        told = [world.all_gather((world.rank, number)) for number in range(3)]
        return threading.get_ident(), told

    ranks = relay.run([lambda world=world: work(world) for world in relay.worlds])
    assert ranks == [(threading.get_ident(), [[(peer, n) for peer in range(3)] for n in range(3)])] * 3


def test_a_failure_ends_the_others_and_the_relay_goes_on(relay):
    ended = []

    def work(world, fails):
        try:
            if world.rank == 1 and fails:
                raise RankError("rank 1 has had enough")
            return world.all_gather(world.rank)
        finally:
            ended.append(world.rank)

    with pytest.raises(RankError, match="had enough"):
        relay.run([lambda world=world: work(world, True) for world in relay.worlds])
    assert sorted(ended) == [0, 1]  # rank 2 had not begun
    again = relay.run([lambda world=world: work(world, False) for world in relay.worlds])
    assert again == [[0, 1, 2]] * 3


def test_of_those_that_can_go_on_the_one_with_most_messages_is_next(relay):
    order = []

    def work(world):
        order.append(world.rank)
        world.all_gather(None)
        order.append(world.rank)

    relay.run([lambda world=world: work(world) for world in relay.worlds])
    assert order == [0, 1, 2, 2, 0, 1]  # rank 2 waits for nobody: all had told it what it asks for


def test_whether_gradients_are_wanted_is_each_ranks_own(relay):
    seen = {}

    def work(world):
        with torch.set_grad_enabled(world.rank == 1):
            world.all_gather(None)
            seen[world.rank] = torch.is_grad_enabled()

    relay.run([lambda world=world: work(world) for world in relay.worlds])
    assert seen == {0: False, 1: True, 2: False}
    assert torch.is_grad_enabled()


def test_ranks_that_wait_for_each_other_are_reported_and_do_not_hang(relay):
    def work(world):
        world.exchange([], [Message((world.rank + 1) % 3, 7, torch.empty(1))]).wait()

    with pytest.raises(RankError, match=r"ranks \[0, 1, 2\] all wait for each other"):
        relay.run([lambda world=world: work(world) for world in relay.worlds])
