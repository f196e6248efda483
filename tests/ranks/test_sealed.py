"""What a failure has cut short is never unpickled."""

from __future__ import annotations

import pickle

import pytest

from engines.comm import sealed
from engines.comm.sealed import seal, unseal
from engines.errors import ReleasedError


def test_what_is_sealed_comes_back():
    for value in (None, b"", list(range(10_000)), {"rank": 1}):
        assert unseal(seal(value)) == value


WHOLE = seal(["a", "value"])


@pytest.mark.parametrize(
    "found",
    [b"", bytes(12), WHOLE[:-1], WHOLE + b"x", WHOLE[:-1] + b"?", bytes(len(WHOLE)), pickle.dumps(["a", "value"])],
    ids=["nothing", "zeros", "too short", "too long", "another byte", "zeros of the length", "not sealed"],
)
def test_other_bytes_are_not_unpickled(found: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealed.pickle, "loads", lambda *_: pytest.fail("it was unpickled"))
    with pytest.raises(ReleasedError, match="did not come whole"):
        unseal(found)
