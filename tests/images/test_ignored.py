"""Pixels without a class: they reach a loss as what it leaves out, on all ranks, or the loss is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.augmented import Augmented
from mpi4dl_nb.engines.images.dataset import IGNORED, find_ignored_label
from mpi4dl_nb.engines.images.tables import table_images
from mpi4dl_nb.engines.plan import Plan

SIZE, COUNT, VOID = 16, 4, 255
PLANS = {
    "2x2": Plan(split_size=1, num_spatial_parts=4),
    "stages, tiles": Plan(split_size=2, num_spatial_parts=2, slice_method="vertical"),
    "copies": Plan(split_size=1, data_parallel=2),
}
STILL = partial(torch.optim.SGD, lr=0.0)  # what is judged is what the first step saw
Loss = Callable[[Tensor, Tensor], Tensor]


def make_model(classes: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, classes, 1))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Four pictures, and masks of three classes and void, as many void pixels in each."""
    random, lines = np.random.default_rng(0), ["path,mask"]
    for number in range(COUNT):
        Image.fromarray(random.integers(0, 256, (SIZE, SIZE, 3), np.uint8)).save(tmp_path / f"{number}.png")
        mask = random.integers(0, 3, (SIZE, SIZE)).astype(np.uint8)
        mask[number : number + 5, 3:9] = VOID
        Image.fromarray(mask).save(tmp_path / f"m{number}.png")
        lines.append(f"{number}.png,m{number}.png")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    return tmp_path / "t.csv"


def compute_plain_losses(table: Path, loss: Loss, void: int) -> list[float]:
    """The loss before training of every image, in float64, read by Pillow alone."""
    plain, found = make_model().double(), []
    for number in range(COUNT):
        pixels = np.array(Image.open(table.parent / f"{number}.png")).astype(np.float64)
        labels = np.array(Image.open(table.parent / f"m{number}.png")).astype(np.int64)
        labels[labels == VOID] = void
        scores = plain(torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)[None])
        found.append(loss(scores, torch.from_numpy(labels)[None]).item())
    return found


def compute_by_function(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels, ignore_index=VOID)


def compute_by_comparison(scores: Tensor, labels: Tensor) -> Tensor:
    valid = labels != IGNORED
    each = functional.cross_entropy(scores, labels.clamp(min=0), reduction="none")
    return (each * valid).sum() / valid.sum()


def compute_by_order(scores: Tensor, labels: Tensor) -> Tensor:
    valid = labels >= 0
    each = functional.cross_entropy(scores, labels.clamp(min=0), reduction="none")
    return (each * valid).sum() / valid.sum()


def compute_by_own_number(scores: Tensor, labels: Tensor) -> Tensor:
    valid = labels != VOID
    each = functional.cross_entropy(scores, labels.clamp(max=2), reduction="none")
    return (each * valid).sum() / valid.sum()


LOSSES: dict[str, tuple[Loss, int]] = {
    "PyTorch's default": (nn.CrossEntropyLoss(), IGNORED),
    "another ignore_index": (nn.CrossEntropyLoss(ignore_index=VOID), VOID),
    "hidden in a function": (compute_by_function, VOID),
    "by comparison": (compute_by_comparison, IGNORED),
    "by order": (compute_by_order, IGNORED),
    "a number of its own": (compute_by_own_number, VOID),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_says_which_label_it_leaves_out(name: str):
    loss, label = LOSSES[name]
    graph = TraceCache(make_model(), (2, 3, SIZE, SIZE), loss).get_graph(PLANS["2x2"])
    assert find_ignored_label(graph) == label


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_void_pixels_are_left_out_on_all_ranks(table: Path, name: str):
    loss, label = LOSSES[name]
    images, plan = table_images(table, None, classes=3, ignore=VOID), PLANS["2x2"]
    with Cluster(4, backend="loopback") as cluster:
        training = Training(make_model(), plan, cluster, (COUNT, 3, SIZE, SIZE), loss=loss, optimiser=STILL)
        history = training.fit(images, progress=False, held_out=images)
    expected = compute_plain_losses(table, loss, label)
    assert history.losses[0] == pytest.approx(np.mean(expected), rel=1e-6)  # as many pixels count in each image
    assert history.epochs[0].held_out.loss == pytest.approx(np.mean(expected), rel=1e-6)
    assert sum(history.epochs[0].counts.true) == COUNT * (SIZE * SIZE - 5 * 6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_augmented_images_of_any_plan_have_no_class_there_either(table: Path, plan: Plan):
    images = Augmented(table_images(table, None, classes=3, ignore=(VOID,)), ("flip", "rotate"))
    assert list(images.ignore) == [VOID]
    with Cluster(plan.ranks, backend="loopback") as cluster:
        loss = nn.CrossEntropyLoss(ignore_index=VOID)
        training = Training(make_model(), plan, cluster, (2, 3, SIZE, SIZE), loss=loss)
        history = training.fit(images, progress=False)
    assert np.isfinite(history.losses).all()
    assert sum(history.epochs[0].counts.true) == COUNT * (SIZE * SIZE - 5 * 6)


def compute_bce(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores[:, 0], labels.to(scores.dtype))


def compute_dice(scores: Tensor, labels: Tensor) -> Tensor:
    first, share = (labels == 1).to(scores.dtype), scores.softmax(1)[:, 1]
    return 1 - 2 * (first * share).sum() / (first.sum() + share.sum())


def compute_mixed_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels) + ((labels != VOID) * scores[:, 0]).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [compute_bce, compute_dice, compute_mixed_loss])
def test_a_loss_that_leaves_nothing_out_is_refused_before_a_rank_works(table: Path, loss: Loss):
    images, plan = table_images(table, None, classes=3, ignore=VOID), PLANS["2x2"]
    assert find_ignored_label(TraceCache(make_model(), (2, 3, SIZE, SIZE), loss).get_graph(plan)) is None
    with Cluster(4, backend="loopback") as cluster:
        training = Training(make_model(), plan, cluster, (2, 3, SIZE, SIZE), loss=loss)
        says = r"pixels without a class, ignore=\(255,\)\. The loss does not leave these out.*ignore_index"
        with pytest.raises(ImageError, match=says) as caught:
            training.fit(images, progress=False)
        assert "ank" not in str(caught.value)
        assert training.steps == 0


def test_nor_does_it_take_the_edge_of_a_small_image_for_a_class(table: Path):
    """What is cropped larger than the picture has no class around it, whether or not a number is ignored."""
    images = table_images(table, (20, 20), "crop", threshold=1)
    assert (images.mask(0, Tile.whole(20, 20))[0] == IGNORED).all()
    with Cluster(4, backend="loopback") as cluster:
        training = Training(make_model(), PLANS["2x2"], cluster, (2, 3, 20, 20), loss=compute_bce)
        with pytest.raises(ImageError, match=r"png has pixels without a class\. The loss does not leave these out"):
            training.fit(images, progress=False)


def test_without_ignore_void_is_no_class(table: Path):
    images = table_images(table, None, classes=3)
    with pytest.raises(ImageError, match=r"m0\.png holds 255 at row 0, column 3, which is no class.*\(ignore=\)"):
        images.mask(0, Tile.whole(SIZE, SIZE))
