"""Ranks in one process take turns, whoever has come furthest first."""

from __future__ import annotations

import threading
import time

import pytest

from engines.errors import RankError
from engines.streaming.baton import Relay, _Baton


@pytest.fixture
def relay():
    made = Relay(3)
    for rank in range(3):
        made.enter(rank, lambda: None, lambda rank=rank: 10 * rank)
    return made


def test_one_works_at_a_time(relay):
    inside = []

    def work(world):
        for _ in range(5):
            assert not inside
            inside.append(world.rank)
            time.sleep(0.001)
            inside.remove(world.rank)
            world.gather(world.rank)
        return world.rank

    assert relay.run([lambda world=world: work(world) for world in relay.worlds]) == [0, 1, 2]


def test_a_failure_releases_the_others_and_the_relay_goes_on(relay):
    def work(world, fails):
        if world.rank == 1 and fails:
            raise RankError("rank 1 has had enough")
        return world.gather(world.rank)

    with pytest.raises(RankError, match="had enough"):
        relay.run([lambda world=world: work(world, True) for world in relay.worlds])
    again = relay.run([lambda world=world: work(world, False) for world in relay.worlds])
    assert again == [[0, 1, 2]] * 3


def test_the_furthest_of_those_that_wait_is_next():
    baton, order = _Baton(), []

    def wants(progress):
        with baton.held(lambda: progress):
            order.append(progress)

    with baton.held(lambda: 0):
        threads = [threading.Thread(target=wants, args=(progress,)) for progress in (1, 3, 2)]
        for thread in threads:
            thread.start()
        while len(baton._waiting) < 3:
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [3, 2, 1]
