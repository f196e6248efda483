"""The log of a training: always whole, of all trainings that wrote to it."""

from __future__ import annotations

import csv
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.train.training_events import EpochLog

ONE = {"epoch": 0, "images_per_s": 2.5, "dice": None, "loss": 1e-7}
TWO = {"epoch": 1, "images_per_s": 3.0, "dice": 0.25, "loss": 0.5}
KINDS = (".csv", ".json", ".jsonl")


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    """Whether it is installed or not."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def read(path: Path) -> list[dict[str, object]]:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: float(cell) if cell else None for name, cell in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("ending", KINDS)
def test_records_are_added_to_those_that_are_there(ending: str, tmp_path: Path):
    path = tmp_path / f"log{ending}"
    with closing(EpochLog(path)) as log:
        log.add(ONE)
        assert read(path) == [ONE]
    with closing(EpochLog(path)) as log:
        log.add(TWO)
    assert read(path) == [ONE, TWO]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", KINDS)
def test_a_full_disk_leaves_the_log_as_it_was(ending: str, tmp_path: Path, monkeypatch):
    """And does not end the training; when there is room again nothing is missing."""
    path = tmp_path / f"log{ending}"
    log = EpochLog(path)
    log.add(ONE)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.warns(UserWarning, match="cannot be written now: No space left on device"):
            log.add(TWO)
    assert read(path) == [ONE]
    assert list(tmp_path.iterdir()) == [path]
    log.add(TWO)
    assert read(path) == [ONE, TWO, TWO]


def test_a_place_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(PlanError, match=r"The log .*gone/log\.csv cannot be written: No such file or directory"):
        EpochLog(tmp_path / "gone" / "log.csv")


def test_an_ending_that_says_nothing(tmp_path: Path):
    with pytest.raises(PlanError, match=r"ends in '\.txt'\. Choose one of \.csv, \.json, \.jsonl"):
        EpochLog(tmp_path / "log.txt")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", "{}"),
        ("a.json", "3"),
        ("a.json", '[{"image": "a.png", "label": "cat"}]'),
        ("a.json", '[{"epoch": 1, "label": "cat"}]'),
        ("a.jsonl", "[1]\n"),
        ("a.csv", "a\nb\n"),
        ("a.csv", "epoch,loss\n"),
        ("a.csv", "width,height\n3,4\n"),
    ],
)
def test_another_file_is_not_written_over(name: str, text: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlanError, match=f"{name} is there already, and is no log of a training"):
        EpochLog(path)
    assert path.read_text() == text


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_a_loss_that_is_no_number_is_null_in_json(ending: str, tmp_path: Path):
    path = tmp_path / f"log{ending}"
    with closing(EpochLog(path)) as log:
        log.add({"epoch": 0, "held_out_loss": float("nan"), "loss": float("inf")})
    assert read(path) == [{"epoch": 0, "held_out_loss": None, "loss": None}]


def test_scalars_go_to_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch):
    written: list[object] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            written.append(folder)

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            written.append((name, value, epoch))

        def flush(self) -> None:
            written.append("flushed")

        close = flush

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with closing(EpochLog(tmp_path / "log.csv")) as log:
        log.add(TWO)
    folder = str(tmp_path / "log.tensorboard")
    assert written == [folder, ("images_per_s", 3.0, 1), ("dice", 0.25, 1), ("loss", 0.5, 1), "flushed", "flushed"]


def test_a_disk_that_is_full_for_tensorboard_ends_nothing_else(tmp_path: Path, monkeypatch):
    class Writer:
        def __init__(self, folder: str) -> None:
            pass

        def add_scalar(self, name: str, value: float, epoch: int) -> None:
            raise OSError(28, "No space left on device")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with closing(EpochLog(tmp_path / "log.json")) as log:
        with pytest.warns(UserWarning, match="No more is written for TensorBoard: .*No space left"):
            log.add(TWO)
        log.add(TWO)
    assert len(json.loads((tmp_path / "log.json").read_text())) == 2
