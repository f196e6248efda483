"""Names of files that are not ASCII, in the locale of LC_ALL=C without UTF-8 mode. Notebooks are processes here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.picture import open_image

ROOT = Path(__file__).parents[2]
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

READS = r"""
import os, sys
from mpi4dl_nb import Cluster, ImageError, Plan, Training, folder_images, open_image, table_images
assert sys.getfilesystemencoding() == "ascii"
for name in ("Hände.png", os.fsdecode("Hände.png".encode())):  # as written in a cell, and as listed
    assert int(open_image(name).read(0, 0, 4, 4)[0, 0, 0]) == 7
assert folder_images("Größen", size=(8, 8)).names == ("groß", "klein")
assert table_images("Größen/Tabelle_ü.csv", size=(8, 8)).names == ("groß",)
try:
    open_image("Häuser.png")
except ImageError as error:
    assert "does not exist" in str(error)
else:
    raise AssertionError
"""
TRAINS = r"""
import torch
from torch import nn
from mpi4dl_nb import Cluster, Plan, Training, optimiser_state
plan, labels = Plan(split_size=1, num_spatial_parts=2, slice_method="vertical"), torch.zeros(1, 8, 8, dtype=torch.long)
model = nn.Conv2d(3, 2, 3, padding=1)
with Cluster(2, backend=BACKEND) as cluster:
    training = Training(model, plan, cluster, (1, 3, 8, 8), optimiser=torch.optim.Adam)
    first = training.step(torch.ones(1, 3, 8, 8), labels)
    saved = training.save("Prüfung")
    second = training.step(torch.ones(1, 3, 8, 8), labels)
    training.load("Prüfung")
    assert training.step(torch.ones(1, 3, 8, 8), labels) == second != first
    training.predict("Hände.png", to="Karte_ä.tif", class_names=["Übriges", "groß"], progress=False)
assert len(optimiser_state("Prüfung", model, torch.optim.Adam(model.parameters()))["state"]) == 2
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in a Python process of its own, where names of files are ASCII; temporary files go to a folder in Greek."""
    (folder / "προσωρινά").mkdir()
    environment = {**os.environ, **C_LOCALE, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "προσωρινά")}
    file = folder / "cell.py"
    file.write_text(code, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        env=environment, capture_output=True, encoding="utf-8", check=False, timeout=120, cwd=folder,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of pictures with German names."""
    for name in ("Hände.png", "Größen/groß/a.png", "Größen/klein/é.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(tmp_path / name)
    (tmp_path / "Größen" / "Tabelle_ü.csv").write_text("path,label\ngroß/a.png,groß\n", encoding="utf-8")
    return tmp_path


@pytest.mark.nightly
def test_pictures_folders_and_tables_of_any_name_are_read_in_the_c_locale(folder):
    done = run(READS, folder)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["loopback", pytest.param("mpi", marks=pytest.mark.nightly)])
def test_checkpoints_and_maps_have_the_same_names_in_the_c_locale_as_in_others(backend, folder):
    done = run(TRAINS.replace("BACKEND", repr(backend)), folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (folder / "Prüfung").iterdir()] == ["00001-step-1"]
    assert open_image(folder / "Karte_ä.tif").shape() == (8, 8)
    left = {path.name.partition("_")[0] for path in (folder / "προσωρινά").iterdir()}
    assert left <= {"torchinductor"}


@pytest.mark.parametrize("name", ["zero\0byte.png", "half \ud83d of a pair.png"])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(ImageError, match="cannot be read: "):
        open_image(name)
