"""Command lines with words changed, before the judge of all fuzzers; and each kind of fault that it has found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpi4dl_nb.engines.cli import command, options
from mpi4dl_nb.engines.comm.device import choose_device
from mpi4dl_nb.engines.errors import ImageError, PlanError, RankError, TraceError
from mpi4dl_nb.engines.images.picture_reader import ArrayPicture
from mpi4dl_nb.engines.inference.rank_predictor import make_padded_region
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import check_fits
from tests.fuzz.commands import OneOfMany, run, write_files

ROOT = Path(__file__).parents[2]
CASES = 240


@pytest.mark.nightly
def test_changed_command_lines_run_or_are_refused_in_one_sentence():
    words = [sys.executable, "-m", "tests.fuzz", "commands", "--count", str(CASES)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["cases"] == CASES
    assert min(line["read"], line["refused"]) > CASES / 10


@pytest.mark.parametrize("seed", ["9223372036854775808", "-99999999999999999999"])
def test_a_seed_has_64_bits(seed):
    with pytest.raises(PlanError, match="must be a whole number of 64 bits"):
        options.make_parser("Test.").parse_args([f"--seed={seed}"])
    assert options.make_parser("Test.").parse_args(["--seed=-9"]).seed == -9


@pytest.mark.parametrize("text", ["9" * 5000, "1x" + "9" * 5000, "1000000000"])
def test_sizes_have_few_digits(text):
    with pytest.raises(PlanError, match="must be one number of pixels"):
        options.parse_image_size(text)
    with pytest.raises(PlanError, match="is unknown"):
        Plan(slice_method="1x" + "9" * 5000)


@pytest.mark.parametrize("name", ["split_size", "parts", "data_parallel", "num_spatial_parts", "local_dp"])
def test_a_plan_has_no_more_of_anything_than_can_be_counted(name):
    with pytest.raises(PlanError, match=rf"{name} must be a whole number of at most|{name}=.* of at least"):
        Plan(**{name: 10**20})
    with pytest.raises(PlanError, match=r"makes 1,000,000,000,000 tiles"):
        Plan(slice_method="1000000x1000000")


def test_a_plan_of_a_million_ranks_is_refused_in_few_words():
    with pytest.raises(
        PlanError, match=r"^The plan needs 1000000 ranks \(over 1000000 stages\), but there are 1"
    ) as told:
        check_fits(Plan(split_size=1_000_000, spatial_size=0), 1)
    assert len(str(told.value)) < 250


def test_a_step_whose_images_fit_no_memory_is_refused_before_they_are_listed(tmp_path):
    line = "train --model torch.nn:Conv2d --model-args [3,4,3] --image-size 16 --split-size 1 --spatial-size 0"
    more = "--app synthetic --held-out 0.5 --max-steps 1 --num-classes 4 --batch-size 1000000000000"
    with pytest.raises(PlanError, match=r"images of one step take 2794.0 TB, but a machine"):
        run(tmp_path, 1, f"{line} {more}".split())


def test_an_argument_of_two_dashes_is_reported():
    with pytest.raises(PlanError, match="Argument --model: expected one argument"):
        options.make_parser("Test.").parse_args(["--model=--"])


def test_what_follows_a_command_may_be_nothing():
    """`python -m mpi4dl_nb` alone: the engines then name the commands there are."""
    flags = options.FlagParser()
    flags.add_argument("command", nargs=options.argparse.REMAINDER)
    assert flags.parse_args([]).command == []


def test_a_model_that_ends_the_process_is_refused():
    with pytest.raises(TraceError, match="sys:exit failed with SystemExit"):
        options.build_model(options.make_parser("Test.").parse_args(["--model", "sys:exit"]))


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_a_stage_takes_some_seconds(seconds):
    with pytest.raises(options.argparse.ArgumentTypeError, match="must be a number of seconds"):
        options.parse_seconds(seconds)


def test_there_is_no_device_without_memory():
    with pytest.raises(PlanError, match="device='meta' is nothing that ranks compute on"):
        choose_device("meta", 0)


def test_a_region_is_no_larger_than_a_slide():
    picture = ArrayPicture("a", np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ImageError, match=r"1 x 99,999,999,999 px are more than any slide has"):
        make_padded_region(picture, (0, 0, 1, 99_999_999_999))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "there is not enough memory for what the flags ask. Use"),
        (RuntimeError("[enforce] can't allocate memory: you tried to allocate 8000000000000 bytes."), r"\(7.3 TB were"),
    ],
)
def test_that_memory_has_run_out_is_reported(monkeypatch, error, told):
    def raise_error(world, arguments):
        raise error

    monkeypatch.setattr(command, "run_verify", raise_error)
    with pytest.raises(RankError, match=told):
        command._run_command("verify", OneOfMany(1), [])


def test_other_faults_keep_their_traceback(monkeypatch):
    def raise_error(world, arguments):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(command, "run_verify", raise_error)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        command._run_command("verify", OneOfMany(1), [])


@pytest.mark.parametrize("words", [["no-such"], ["bench"], [], ["gpu-check", "--only", "none such"]], ids=str)
def test_what_is_no_command_is_reported_as_every_fault_is(words, tmp_path):
    write_files(tmp_path)
    with pytest.raises(PlanError, match=r"^PlanError: (Unknown command|No check begins)"):
        run(tmp_path, 1, words)
