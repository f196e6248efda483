"""Damaged files before the judge, in a process of their own: a decoder that crashes would take the tests along."""

from __future__ import annotations

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz.judge import MOST_BYTES

CASES = {"pictures": 2160, "tables": 70, "zarr": 70}
"""As many of each of the 18 files, the 7 kinds of folders, and the 14 stores."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_damaged_files_are_read_or_refused_and_nothing_else(name: str):
    tally = fuzz.run_elsewhere(name, 0, CASES[name], seed=0)
    line = tally.make_line(name, 0)
    assert (tally.wrong, tally.warned, tally.canaries) == ([], {}, 0)
    assert line["read"] + line["refused"] == CASES[name]
    # Of damaged Zarr stores a tenth is read: most damage is in JSON, where a wrong scale or level is refused, too.
    assert line["read"] > CASES[name] / 20, "nothing gets through: the damage is too large to tell anything"
    assert line["refused"] > CASES[name] / 10
    assert max(line["address_bytes"], line["resident_bytes"]) < MOST_BYTES


def test_the_judge_finds_what_is_wrong():
    tally = fuzz.run_elsewhere("faulty", 0, 12, seed=0)
    found = {each["told"]: str(each["why"]).partition(":")[0] for each in tally.wrong}
    assert found == {
        "untyped": "IndexError",
        "nameless": "names no file",
        "no memory": "asked for more memory than there is",
        "canary": "what was not given was opened",
        "canary, refused": "what was not given was opened",
        "memory": found["memory"],
        "crash": "ended the process, by SIGSEGV",
        "hang": "took too long",
        "exit": "SystemExit",
    }
    assert found["memory"].startswith("took 1,0"), found["memory"]
    assert (tally.outcomes["read"], tally.outcomes["refused"], tally.canaries) == (2, 1, 2)
