"""`engines train` over MPI: saved on five ranks and resumed on three, stopped by a signal, killed without warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from mpi4dl_nb.engines.cli.train_command import run_train
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import CheckpointError, ImageError, PlanError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import SyntheticImages, shuffle_indices
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.engines.train.checkpoint_load import optimiser_state
from tests.survival import kill_trainings
from tests.train.survivor import make_survivor

MODEL = (
    "--model", "tests.train.survivor:make_survivor", "--image-size", 24, "--batch-size", 2, "--optimiser", "adam",
)  # fmt: skip
FIVE = ("--split-size", 2, "--num-spatial-parts", 4, "--slice-method", "square")
THREE = ("--split-size", 3, "--spatial-size", 0)
COURSE = ("--num-epochs", 2, "--max-steps", 3, "--dtype", "float64", "-v")


def train(*flags: object) -> tuple[object, ...]:
    return ("-m", "mpi4dl_nb.engines", "train", *MODEL, *flags)


def read_losses(printed: str) -> list[str]:
    return re.findall(r"^Step: \d+, (loss: [\d.]+)", printed, re.MULTILINE)


@pytest.mark.nightly
def test_five_ranks_save_three_resume_and_plain_pytorch_predicts_the_same(mpiexec, tmp_path: Path):
    """The break is in the middle of the second epoch; float64: 1e-12."""
    five, three = tmp_path / "five", tmp_path / "three"
    whole = mpiexec(5, *train(*FIVE, *COURSE, "--save", five, "--save-every", 4))
    assert whole.returncode == 0, whole.stderr
    assert [path.name for path in list_checkpoints(five)] == ["00001-step-4", "00002-step-6"]
    rest = mpiexec(3, *train(*THREE, *COURSE, "--resume", five / "00001-step-4", "--save", three))
    assert rest.returncode == 0, rest.stderr
    assert "Resumed after 4 steps" in rest.stdout
    assert read_losses(rest.stdout) == read_losses(whole.stdout)[4:]
    ends = [list_checkpoints(folder)[-1] for folder in (five, three)]
    assert [path.name for path in ends] == ["00002-step-6", "00001-step-6"]
    stored = [safetensors.torch.load_file(path / "model.safetensors") for path in ends]
    answers, images = [], torch.randn(3, 3, 24, 24, dtype=torch.float64)
    for state in stored:
        model = make_survivor().double().eval()
        model.load_state_dict(state, strict=True)
        answers.append(model(images))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-12, atol=1e-14)
    before = safetensors.torch.load_file(list_checkpoints(five)[0] / "model.safetensors")
    assert not torch.equal(stored[0]["0.weight"], before["0.weight"])
    moves = optimiser_state(ends[1], model, torch.optim.Adam(model.parameters()))
    assert [float(each["step"]) for each in moves["state"].values()] == [6.0] * 8


@pytest.mark.nightly
def test_a_signal_to_one_rank_stops_all_when_the_step_is_done_and_saved(mpiexec, tmp_path: Path):
    stopping = ("--model", "tests.train.survivor:make_stopping_survivor")
    done = mpiexec(3, *train(*THREE, *stopping, "--num-epochs", 10**6, "--save", tmp_path))
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("Stopped by")]
    told = re.fullmatch(r"Stopped by SIGTERM after (\d+) steps\. Saved as (.*): go on from there\.", said)
    assert told, said
    assert list_checkpoints(tmp_path)[-1] == Path(told[2])
    assert told[2].endswith(f"-step-{told[1]}")
    assert done.returncode == 128 + 15


@pytest.mark.nightly
def test_what_cannot_be_resumed_is_said_in_one_line(mpiexec):
    done = mpiexec(1, *train("--split-size", 1, "--spatial-size", 0, "--max-steps", 1, "--resume", "nowhere"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        "CheckpointError: nowhere: there is no such folder. Name a checkpoint, or a folder of checkpoints."
    ]
    assert done.stdout == ""


def run_on_one_rank(*flags: object) -> None:
    """The command on one rank, in this process."""
    plan = ("--split-size", 1, "--spatial-size", 0, "--max-steps", 2, *flags)
    given = [str(flag) for flag in train(*plan)[3:]]
    run_ranks(1, lambda world: run_train(world, given))


def test_what_cannot_be_saved_is_said_before_the_first_step(capsys):
    with pytest.raises(CheckpointError, match="/proc/nowhere: no checkpoint can be written here"):
        run_on_one_rank("--save", "/proc/nowhere")
    with pytest.raises(PlanError, match="--resume without a folder goes on from that of --save, which is not given"):
        run_on_one_rank("--resume")
    assert capsys.readouterr().out == ""


def test_resume_alone_begins_where_there_is_nothing_and_ends_where_all_is_done(tmp_path: Path, capsys):
    run_on_one_rank("--save", tmp_path, "--resume")
    assert "Resumed" not in capsys.readouterr().out
    run_on_one_rank("--save", tmp_path, "--resume", "--num-epochs", 2)
    assert f"Resumed after 2 steps: {tmp_path}/00001-step-2" in capsys.readouterr().out
    run_on_one_rank("--save", tmp_path, "--resume", "--num-epochs", 2)
    assert "No steps are left to do: all epochs are done." in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path)] == ["00001-step-2", "00002-step-4"]


def test_a_folder_of_several_trainings_is_reported_and_not_guessed(tmp_path: Path, capsys):
    run_on_one_rank("--save", tmp_path)
    assert capsys.readouterr().err == ""
    run_on_one_rank("--save", tmp_path)
    assert f"{tmp_path} has 1 checkpoint of 1 other training: saving leaves them there" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="of 2 trainings"):
        run_on_one_rank("--save", tmp_path, "--resume")
    run_on_one_rank("--save", tmp_path, "--resume", tmp_path / "00001-step-2", "--num-epochs", 2, "--keep", 1)
    assert f"Resumed after 2 steps: {tmp_path}/00001-step-2" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path)] == ["00002-step-2", "00003-step-4"]


def test_images_that_were_left_out_are_named_again(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    bad, read = shuffle_indices(20, 0, 0)[0], SyntheticImages.part

    def part(self: SyntheticImages, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        if index == bad:
            raise ImageError("it is damaged")
        return read(self, index, tile, draw)

    monkeypatch.setattr(SyntheticImages, "part", part)
    run_on_one_rank("--save", tmp_path, "--on-bad-image", "skip")
    assert f"Left out from now on: random image {bad}: it is damaged" in capsys.readouterr().out
    run_on_one_rank("--save", tmp_path, "--on-bad-image", "skip", "--resume", "--num-epochs", 2)
    assert f"random image {bad}: left out before, as unreadable" in capsys.readouterr().out


def test_other_images_cannot_go_on_in_the_middle(tmp_path: Path):
    run_on_one_rank("--save", tmp_path)
    with pytest.raises(ImageError, match="The training that is to go on had 20 images, but there are 40"):
        run_on_one_rank("--resume", tmp_path, "--batch-size", 4, "--num-epochs", 2)


def test_another_seed_would_train_on_held_out_images(tmp_path: Path):
    run_on_one_rank("--save", tmp_path, "--seed", 3, "--held-out", 0.5)
    with pytest.raises(ImageError, match=r"ordered by seed 3, but --seed is 0\. Give --seed 3"):
        run_on_one_rank("--resume", tmp_path, "--num-epochs", 2, "--held-out", 0.5)


def test_the_learning_rate_of_a_checkpoint_wins_and_this_is_said(tmp_path: Path, capsys):
    run_on_one_rank("--save", tmp_path, "--learning-rate", 0.01)
    run_on_one_rank("--resume", tmp_path, "--num-epochs", 1)
    assert "--learning-rate has no effect" not in capsys.readouterr().out
    run_on_one_rank("--resume", tmp_path, "--num-epochs", 1, "--learning-rate", 0.001)
    assert "--learning-rate has no effect: the optimiser goes on with the" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--save-every", "--keep"])
def test_flags_of_checkpoints_need_a_folder(flag: str):
    with pytest.raises(PlanError, match=f"{flag} 3 has no effect without --save FOLDER"):
        run_on_one_rank(flag, 3)


@pytest.mark.nightly
def test_a_training_that_is_killed_resumes_every_time(tmp_path: Path):
    """Three times here; `python -m tests.survival` does it twenty times."""
    report = kill_trainings(tmp_path, kills=3, seed=1)
    assert report.wrong == []
    assert sum(report.kills.values()) == 3
    assert report.resumed_at
    assert report.losses_compared > 0
