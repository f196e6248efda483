"""`predict` on a command line: its line of JSON, and what it refuses in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.cli.predict_command import load_weights, predict
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import CheckpointError, ImageError, PlanError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.inference.rank_predictor import make_padded_region
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.plan import Plan
from tests.inference.test_turns import fill_statistics
from tests.inference.turning import predict_alone, set_head_biases

BOX = (10, 20, 64, 88)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A picture, and weights that the command cannot draw itself."""
    torch.manual_seed(5)
    pixels = np.random.default_rng(0).integers(0, 256, (100, 130, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "in.png")
    images = make_padded_region(open_image(pixels), BOX).read_tile(Tile.whole(64, 88), torch.float64)
    model = set_head_biases(fill_statistics(UNet(num_classes=3, width=4)), images)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    return tmp_path


def make_flags(files: Path, **others: object) -> list[str]:
    given = {
        "model": "mpi4dl_nb:UNet",
        "model-args": '{"width": 4}',
        "num-classes": 3,
        "image": files / "in.png",
        "weights": files / "weights.safetensors",
        "region": "10,20,64,88",
        "to": files / "out.tif",
        "tile-px": 40,
        "precision": "float64",
        "activation": "softmax",
        **others,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


@pytest.mark.parametrize(
    ("loss", "labels", "meaning"),
    [
        (nn.CrossEntropyLoss(), torch.zeros(1, dtype=torch.long), OutputMeaning.CLASSES),
        (nn.BCEWithLogitsLoss(), torch.zeros(1, 2), OutputMeaning.LABELS),
    ],
)
def test_weights_of_a_checkpoint_need_no_other_file_of_it(
    loss: nn.Module, labels: torch.Tensor, meaning: OutputMeaning, tmp_path: Path
):
    model, other = (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 2)) for _ in range(2))
    with Cluster(1, backend="loopback") as cluster:
        plan = Plan(split_size=1, spatial_size=0)
        path = Training(model, plan, cluster, (1, 3, 4, 4), loss=loss, labels=labels).save(tmp_path)
    (path / "training.safetensors").unlink()
    assert load_weights(other, tmp_path) is meaning
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.nightly
def test_a_region_with_given_weights(files: Path):
    lines = run_ranks(2, lambda world: predict(world, make_flags(files)))
    assert lines[0]["answer"] == str(files / "out.tif")
    assert (lines[0]["tiles"], lines[0]["height_px"], lines[0]["width_px"]) == (6, 64, 88)
    assert json.loads(json.dumps(lines[0])) == lines[0]
    model = UNet(num_classes=3, width=4)
    load_weights(model, files / "weights.safetensors")
    images = make_padded_region(open_image(files / "in.png"), BOX).read_tile(Tile.whole(64, 88), torch.float64)
    expected = predict_alone(model, images)[0].argmax(0).numpy()
    assert len(np.unique(expected)) > 1
    assert np.array_equal(tifffile.imread(files / "out.tif"), expected)


@pytest.mark.nightly
def test_the_class_of_an_image(files: Path, capsys: pytest.CaptureFixture[str]):
    asked = {"model": "mpi4dl_nb:resnet20_v1", "model-args": None, "weights": None, "to": None}
    line = run_ranks(2, lambda world: predict(world, make_flags(files, kind="probabilities", **asked)))[1]
    assert sum(line["answer"]) == pytest.approx(1)
    assert (line["per_pixel"], line["walks"]) == (False, 2)
    assert capsys.readouterr().err.count("Without --weights, the model keeps the weights that it was made with") == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ({"region": "1,2,3"}, PlanError, "must be four whole numbers"),
        ({"region": "400,0,10,10"}, ImageError, "outside"),
        ({"region": "0,0,0,10"}, ImageError, "no pixels"),
        ({"image": "nowhere.tif"}, ImageError, "nowhere.tif"),
        ({"to": None}, ImageError, "Say which file"),
        ({"activation": None}, PlanError, "whether each channel is a label of its own, .* Say activation='sigmoid'"),
        ({"activation": "none", "kind": "classes"}, PlanError, "so that there are no classes"),
        ({"activation": "relu"}, PlanError, "invalid choice"),
        ({"kind": "colours"}, PlanError, "invalid choice"),
        ({"memory-mb": 0}, PlanError, "must be a whole number of at least 1"),
        ({"num-classes": 4}, CheckpointError, r"weights of another model: of \d+ tensors 2 do not fit, such as head"),
        ({"weights": "nowhere.safetensors"}, CheckpointError, "no weights can be read"),
    ],
)
def test_what_is_refused(others: dict[str, object], error: type[Exception], message: str, files: Path):
    def check_refusal(world: object) -> None:
        with pytest.raises(error, match=message):
            predict(world, make_flags(files, **others))

    run_ranks(2, check_refusal)
    assert not (files / "out.tif").exists()


def test_a_file_needs_an_answer_per_pixel(files: Path):
    asked = {"model": "mpi4dl_nb:resnet20_v1", "model-args": None, "weights": None}

    def check_refusal(world: object) -> None:
        with pytest.raises(PlanError, match=r"answers once for the whole image, with \(1, 3\)"):
            predict(world, make_flags(files, **asked))

    run_ranks(2, check_refusal)
    assert not (files / "out.tif").exists()


def test_a_file_that_holds_no_weights(files: Path):
    (files / "weights.safetensors").write_bytes(b"not at all")
    with pytest.raises(CheckpointError, match="no weights can be read"):
        load_weights(UNet(), files / "weights.safetensors")
