"""A training that the ranks have lost: each error gives the call that continues from its last checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, RankError, Training
from mpi4dl_nb.engines.errors import LostTrainingError

IMAGES, LABELS = torch.ones(2, 3, 8, 8), torch.tensor([0, 1])


def make_training(cluster: Cluster) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return Training(model, Plan(split_size=2, spatial_size=0), cluster, IMAGES.shape)


def execute_note(error: Exception, training: Training) -> int:
    """Execute the call that the last note of an error gives."""
    call = error.__notes__[-1].partition(": ")[2]
    return eval(call, {"training": training})


@pytest.mark.parametrize("use", ["step", "save", "state_dict", "predict", "stepping"])
def test_a_training_that_was_closed_is_loaded_by_the_call_of_the_error(tmp_path, use):
    with Cluster(2, backend="loopback") as cluster:
        training = make_training(cluster)
        ask = {
            "step": lambda: training.step(IMAGES, LABELS),
            "save": lambda: training.save(tmp_path / "another"),
            "state_dict": training.state_dict,
            "predict": lambda: training.predict(IMAGES),
            "stepping": lambda: next(iter(training.stepping(IMAGES, LABELS))),
        }[use]
        training.step(IMAGES, LABELS)
        training.save(tmp_path / "saved")
        training.step(IMAGES, LABELS)
        training.close()
        with pytest.raises(LostTrainingError, match="do not hold this training any more") as caught:
            ask()
        assert execute_note(caught.value, training) == 1
        ask()


def test_a_training_without_a_checkpoint_names_none():
    with Cluster(2, backend="loopback") as cluster:
        training = make_training(cluster)
        training.close()
        with pytest.raises(LostTrainingError) as caught:
            training.step(IMAGES, LABELS)
        assert not getattr(caught.value, "__notes__", ())


@pytest.mark.nightly
def test_after_the_death_of_a_rank_the_error_gives_the_call(tmp_path: Path):
    with Cluster(2) as cluster:
        training = make_training(cluster)
        history = training.fit([(IMAGES, LABELS)] * 2, save=tmp_path, progress=False)
        os.kill(cluster.call(lambda host: os.getpid())[1], signal.SIGKILL)
        for _ in range(2):  # the cluster is dead in every call until it is healed
            with pytest.raises(RankError, match=r"Call heal\(\) on the cluster") as caught:
                training.step(IMAGES, LABELS)
            assert caught.value.__notes__[-1].startswith("After heal() on the cluster, continue from the last")
            assert str(history.saved) in caught.value.__notes__[-1]
        cluster.heal()
        with pytest.raises(LostTrainingError) as caught:
            training.step(IMAGES, LABELS)
        assert execute_note(caught.value, training) == 2
        assert training.step(IMAGES, LABELS) < history.losses[0]
