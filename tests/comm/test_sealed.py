"""What a failure has cut short is never unpickled."""

from __future__ import annotations

import pickle

import pytest

from mpi4dl_nb.engines.comm import world
from mpi4dl_nb.engines.comm.world import pack_value, unpack_value
from mpi4dl_nb.engines.errors import ReleasedError

PLAIN = (None, True, 0, -(2**70), 0.1, float("inf"), "", "Rank 2: für „alle“ \ud800")


@pytest.mark.parametrize("value", [*PLAIN, b"", list(range(10_000)), {"rank": 1}, (1, None)], ids=repr)
def test_what_is_sealed_comes_back(value: object):
    found = unpack_value(pack_value(value))
    assert found == value
    assert type(found) is type(value)


def test_what_ranks_agree_on_is_not_pickled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(world, "pickle", None)
    for value in PLAIN:
        assert unpack_value(pack_value(value)) == value


WHOLE = pack_value(["a", "value"])


@pytest.mark.parametrize(
    "found",
    [b"", bytes(12), WHOLE[:-1], WHOLE + b"x", WHOLE[:-1] + b"?", bytes(len(WHOLE)), pickle.dumps(["a", "value"])],
    ids=["nothing", "zeros", "too short", "too long", "another byte", "zeros of the length", "not sealed"],
)
def test_other_bytes_are_not_unpickled(found: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(world.pickle, "loads", lambda *_: pytest.fail("it was unpickled"))
    with pytest.raises(ReleasedError, match="did not come whole"):
        unpack_value(found)
