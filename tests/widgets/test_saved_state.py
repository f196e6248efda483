"""What a saved notebook contains of a picture: with `save_picture=False` neither its pixels nor its file's name."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import pytest
import torch
from ipywidgets.embed import dependency_state, embed_data
from PIL import Image
from torch import nn

from mpi4dl_nb import Cluster, Plan, Slicer, Stepper, Training, Workbench

NAME = "Jane_Doe_1958.png"
PLAN = Plan(split_size=1, slice_method="2x2")
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / NAME)
    return tmp_path / NAME


def list_texts(value: Any) -> Iterator[str | bytes]:
    """All texts and bytes within a saved value; what is in base64 is decoded as well."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from list_texts(key)
            yield from list_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from list_texts(item)
    elif isinstance(value, bytes | bytearray | memoryview):
        yield bytes(value)
    elif isinstance(value, str):
        yield value
        for part in value.replace('"', ",").split(","):
            if len(part) > 100 and "\n" not in part:
                try:
                    yield base64.b64decode(part, validate=True)
                except ValueError:
                    continue


def find_saved(widget: ipywidgets.Widget) -> tuple[bool, bool]:
    """Whether the state of the widget and its parts, or what it displays, has images, and the file's name."""
    # Of this widget and its parts: other widgets of the process may be open.
    own = dependency_state([widget], drop_defaults=False)
    state = embed_data([widget], state=own)["manager_state"]["state"]
    for model in state.values():  # the code of the widgets is the same whatever they show
        model["state"] = {key: value for key, value in model["state"].items() if key not in ("_esm", "_css")}
    texts = [*list_texts(state), *list_texts(widget._repr_mimebundle_()), *list_texts(widget._snapshot_html)]
    images = any(sign in text for text in texts if isinstance(text, bytes) for sign in SIGNATURES)
    names = any(NAME.split(".", maxsplit=1)[0] in text for text in texts if isinstance(text, str))
    json.dumps(widget._repr_mimebundle_(), default=str)
    return images, names


@pytest.mark.parametrize("save_picture", [True, False])
def test_a_slicer(path: Path, save_picture: bool):
    predicted = np.random.default_rng(1).integers(0, 3, (32, 48))
    model = nn.Conv2d(3, 4, 3, padding=1)
    slicer = Slicer(path, PLAN, model, prediction=predicted, save_picture=save_picture)
    slicer.layer.value = slicer.tile.value = 0
    assert find_saved(slicer) == (save_picture, save_picture)
    slicer.close()


def test_pictures_that_are_not_saved_are_sent_to_a_page_that_asks(path: Path, monkeypatch):
    slicer, sent = Slicer(path, PLAN, prediction=np.ones((32, 48), int), save_picture=False), []
    monkeypatch.setattr(slicer.view, "send", lambda content, buffers: sent.append((content, buffers)))
    slicer.view._handle_custom_msg({"pictures": True}, [])
    ((content, (preview, overlay)),) = sent
    assert content == {"pictures": True}
    assert [Image.open(BytesIO(each)).size for each in (preview, overlay)] == [(48, 32), (48, 32)]
    assert NAME.split(".", maxsplit=1)[0] in slicer.figure.alt  # who asks for the figure gets it
    slicer.close()


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    with Cluster(4, backend="loopback") as cluster:
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        training = Training(model, PLAN, cluster, (1, 3, 32, 48))
        training.step(torch.randn(1, 3, 32, 48), torch.tensor([1]))
        yield training


@pytest.mark.parametrize("save_picture", [True, False])
def test_a_workbench(path: Path, training: Training, save_picture: bool):
    workbench = Workbench(training, path, save_picture=save_picture)
    images, name = find_saved(workbench.slicer)
    assert (images, name) == (save_picture, save_picture)
    assert find_saved(workbench)[1] == save_picture
    assert ("<img" in workbench._snapshot_html) == save_picture
    workbench.close()


@pytest.mark.parametrize("save_picture", [True, False])
def test_a_stepper(training: Training, save_picture: bool):
    """The values of the images are in the saved state of the view, or nowhere in it."""
    images = torch.rand(1, 3, 32, 48)
    stepper = Stepper(training, images, torch.tensor([1]), save_picture=save_picture)
    tile = images[0, 0, :16, :24].numpy().tobytes()[: 24 * 4]
    state = {**stepper.view.get_state()}
    assert any(tile in text for text in list_texts(state) if isinstance(text, bytes)) == save_picture
    assert ("<img" in stepper._snapshot_html) == save_picture
    sent: list[tuple[Any, Any]] = []
    stepper.view.send = lambda content, buffers=(): sent.append((content, buffers))
    stepper.view._handle_custom_msg({"newest": True}, [])
    assert tile in bytes(sent[0][1][0])
    stepper.close()
