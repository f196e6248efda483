"""`fit(on_failure="heal")` goes back to the newest whole checkpoint, and says which was damaged."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import DamagedError, UnreadableError
from mpi4dl_nb.engines.train import checkpoint_reader
from mpi4dl_nb.training.recovery import FailureRecovery, FitPosition
from mpi4dl_nb.training.training import Training
from tests.chaos.training import Heard
from tests.training.test_healing import DATA, insert_fault, make_training


@pytest.fixture(scope="module")
def cluster():
    with Cluster(3, backend="loopback", hang_after_s=5) as started:
        yield started


def cut_saves_from(found: Training, step: int) -> None:
    """Whatever is saved from then on is damaged at once."""
    save = found.save

    def save_and_cut(*given: Any) -> Path:
        path = save(*given)
        if found.steps >= step:
            os.truncate(path / "model.safetensors", 100)
        return path

    found.save = save_and_cut  # type: ignore[method-assign]


def fit_two_epochs(cluster: Cluster, folder: Path, note: Path, spoiled: int, steps: int = 6) -> tuple[Any, Any, Heard]:
    """Two epochs of four steps, saved after each step; a rank fails in the midst of an update."""
    found, heard = make_training(cluster), Heard()
    if spoiled:
        cut_saves_from(found, spoiled)
        insert_fault(found, "raise", note, steps=steps, at=len(found.programs[1].steps) - 1, pause_s=0.5)
    losses = found.fit(
        DATA, epochs=2, progress=False, save=folder, save_every=1, keep=4, on_failure="heal", monitor=heard
    ).losses
    return losses, found.state_dict(), heard


@pytest.mark.nightly
@pytest.mark.parametrize("spoiled", [6, 5, 4])
def test_it_goes_on_from_the_newest_that_is_whole(cluster, tmp_path, spoiled):
    """Six steps are done, and the last one, two or three checkpoints are damaged, once over an epoch's end."""
    losses, state, heard = fit_two_epochs(cluster, tmp_path / "spoiled", tmp_path, spoiled)
    wanted, weights, _ = fit_two_epochs(cluster, tmp_path / "whole", tmp_path, 0)
    assert losses == wanted
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    (healed,) = heard.healed
    assert healed.text.count("Passed over: ") == 7 - spoiled
    assert "00007-step-6: this checkpoint is damaged: model.safetensors has 100 bytes" in healed.text
    assert (healed.steps, healed.epochs) == (spoiled - 1, (spoiled - 1) // 4)


def test_where_none_is_whole_all_are_listed(cluster, tmp_path):
    with pytest.raises(DamagedError, match="There is no whole checkpoint to go back to") as caught:
        fit_two_epochs(cluster, tmp_path / "spoiled", tmp_path, -1, steps=3)
    assert str(caught.value).count("this checkpoint is damaged") == 4


def test_a_checkpoint_that_is_gone_is_passed_over(cluster, tmp_path):
    """Whoever makes room on a disk may remove the newest one."""
    found = make_training(cluster)
    healing = FailureRecovery(found, False, lambda: None)
    for steps in range(2):
        healing.record_checkpoint(FitPosition(steps, 0, (), None, is_over=False), found.save(tmp_path / "saved"))
        found.step(*DATA[steps])
    shutil.rmtree(tmp_path / "saved" / "00002-step-1")
    healing._load(found.plan)
    assert (healing.mark.steps, found.steps) == (0, 0)


def test_want_of_handles_is_no_reason_to_go_further_back(cluster, tmp_path, monkeypatch):
    def refuse_handles(*given: object) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "it")

    monkeypatch.setattr(checkpoint_reader, "open_regular", refuse_handles)
    with pytest.raises(UnreadableError, match=r"00007-step-6: .* cannot be read now: Too many open files"):
        fit_two_epochs(cluster, tmp_path / "saved", tmp_path, 99)
