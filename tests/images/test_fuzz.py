"""Damaged files, 2,160 of them, in a process of their own: a decoder that crashes would take the tests along."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent / "fuzz.py"
CASES = 2160  # as many of each of the 18 files
MOST_BYTES = 1 << 30


def test_damaged_files_are_read_or_refused_and_nothing_else(tmp_path):
    command = [sys.executable, FUZZ, "--count", str(CASES), "--folder", tmp_path]
    environment = {"PYTHONPATH": str(FUZZ.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    last = (tmp_path / "last.json").read_text()
    assert done.returncode == 0, f"{last}, code {done.returncode}: {done.stdout[-2000:]}"
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["read"] + line["refused"] == CASES
    assert line["read"] > CASES / 10, "nothing gets through: the damage is too large to tell anything"
    assert line["refused"] > CASES / 10
    assert max(line["address_bytes"], line["resident_bytes"]) < MOST_BYTES
