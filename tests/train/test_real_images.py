"""Real pictures, where they are there: 1 rank and 4 ranks tell the same losses, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.images.augmented import Augmented
from mpi4dl_nb.engines.images.dataset import LabelledImages
from tests import real

pytestmark = pytest.mark.skipif(
    real.find_data() is None, reason="there is no ../shared/data, and no folder that MPI4DL_NB_DATA names"
)

STRIPS = Plan(split_size=2, spatial_size=2, num_spatial_parts=2, slice_method="horizontal", precision="float64")
TILES = Plan(split_size=1, spatial_size=1, num_spatial_parts=4, precision="float64")
MIXED = Plan(split_size=2, spatial_size=1, num_spatial_parts=3, slice_method="vertical", precision="float64")
ALONE = Plan(split_size=1, spatial_size=0, precision="float64")
EPSILON = 1e-9


def compute_losses(plan: Plan, images: LabelledImages, segments: bool) -> tuple[float, ...]:
    model, loss = (real.make_segmenter(0), real.compute_nuclei_loss) if segments else (real.make_classifier(0), None)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(model, plan, cluster, (2, 3, *images.shape(0)), loss)
        history = training.fit(images, epochs=2, progress=False, steps=3, seed=1, workers=plan.ranks % 2)
    assert len(history.losses) == 6
    assert history.epochs[0].counts.pixels == segments
    return history.losses


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [TILES, STRIPS], ids=["tiles", "strips in two stages"])
def test_nuclei_by_one_rank_and_by_four(plan: Plan, tmp_path: Path):
    """Crops of BreCaHAD with their masks, mirrored and turned."""
    train, judge = real.make_brecahad(real.find_data(), tmp_path, None)
    assert (len(train), len(judge)) == (18, 6)
    crops = Augmented(train, ("flip", "rotate", "stain"), (64, 96))
    one, four = (compute_losses(each, crops, segments=True) for each in (ALONE, plan))
    assert four == pytest.approx(one, rel=EPSILON, abs=0)
    assert len(set(one)) == 6


@pytest.mark.nightly
def test_cells_by_one_rank_and_by_four(tmp_path: Path):
    """BCCD, three kinds of cells."""
    train, judge = real.make_bccd(real.find_data(), tmp_path, 32)
    assert len(train) > 600
    assert len(judge) > 150
    assert train.classes == judge.classes == 3
    one, four = (compute_losses(each, train, segments=False) for each in (ALONE, MIXED))
    assert four == pytest.approx(one, rel=EPSILON, abs=0)


def test_no_picture_is_on_both_sides(tmp_path: Path):
    for sides in (real.make_brecahad(real.find_data(), tmp_path), real.make_bccd(real.find_data(), tmp_path)):
        train, judge = ({images.slide(index) for index in range(len(images))} for images in sides)
        assert train
        assert judge
        assert not train & judge
