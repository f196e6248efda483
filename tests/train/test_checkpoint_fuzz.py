"""A few dozen damaged checkpoints before the judge; `python -m tests.fuzz checkpoints` takes hundreds."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import run_elsewhere


@pytest.mark.nightly
def test_damaged_checkpoints_are_refused_or_loaded_whole():
    found = run_elsewhere("checkpoints", first=0, count=48, seed=11)
    assert not found.wrong
    assert not found.canaries
    assert found.outcomes["read"] > 4
    assert found.outcomes["refused"] > 12
