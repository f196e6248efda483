"""Whatever comes in whichever order, no update is more stale than it may be, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb.engines.train.asynchrony import VersionTracker


@given(replicas=st.integers(1, 6), bound=st.integers(0, 7), data=st.data())
def test_the_bound_holds_and_one_replica_may_always_go_on(replicas: int, bound: int, data: st.DataObject) -> None:
    ledger, waiting, arrived = VersionTracker(bound), set(range(replicas)), set()
    for _ in range(40):
        readers = ledger.readers.keys()
        doings = [("read", r) for r in waiting if ledger.can_read]
        doings += [("arrive", r) for r in readers - arrived]
        doings += [("apply", r) for r in arrived if ledger.can_apply(r)]
        assert doings, "all wait"
        kind, replica = data.draw(st.sampled_from(sorted(doings)))
        if kind == "read":
            waiting.remove(replica)
            ledger.read(replica)
        elif kind == "arrive":
            arrived.add(replica)
        else:
            arrived.remove(replica)
            waiting.add(replica)
            assert ledger.apply(replica) <= bound


@given(st.lists(st.integers(0, 4), max_size=30))
def test_without_a_bound_nobody_waits(order: list[int]) -> None:
    ledger = VersionTracker()
    for replica in range(5):
        ledger.read(replica)
    reads = dict.fromkeys(range(5), 0)
    for version, replica in enumerate(order):
        assert ledger.can_apply(replica)
        assert ledger.can_read
        assert ledger.apply(replica) == version - reads[replica]
        ledger.read(replica)
        reads[replica] = version + 1
