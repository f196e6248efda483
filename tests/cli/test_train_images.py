"""Trainings from tables and folders: augmentation on the ranks, held-out images, and the flags that ask for them."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mpi4dl_nb.engines.cli import train_command, train_images
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.augmented import KINDS, Augmented
from mpi4dl_nb.engines.images.shard_reader import ShardReader
from mpi4dl_nb.engines.images.tables import table_images
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining

SIZE = (24, 24)
PLANS = {
    "2x2 to the loss": Plan(split_size=1, slice_method="2x2"),
    "strips, micro-batches": Plan(split_size=1, slice_method="1x3", parts=2),
    "stages": Plan(split_size=2, slice_method="2x1"),
}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Eight pictures of two slides each, larger than `SIZE`, with masks of their dark pixels."""
    random, lines = np.random.default_rng(0), ["path,label,mask,slide"]
    for number in range(8):
        pixels = random.integers(0, 256, (40, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        Image.fromarray((pixels[..., 0] < 128).astype(np.uint8) * 255).save(tmp_path / f"{number}-mask.png")
        lines.append(f"{number}.png,{number % 2},{number}-mask.png,slide {number // 2}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    return tmp_path / "table.csv"


def make_unet() -> torch.nn.Module:
    torch.manual_seed(0)
    return UNet(num_classes=2, width=4, depth=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_all_ranks_read_one_augmented_image(plan: Plan, table: Path):
    images = Augmented(table_images(table, None, threshold=127), KINDS, SIZE)
    made, numbers, draws = (
        prepare(make_unet(), plan, (4, 3, *SIZE), device="cpu"),
        [5, 0, 7, 2],
        [11, 2**63 + 5, 13, 17],
    )
    drawn, whole = list(zip(numbers, draws, strict=True)), Tile.whole(*SIZE)
    inputs = {
        "images": torch.stack([images.part(index, whole, draw) for index, draw in drawn]),
        "labels": torch.stack([images.mask(index, whole, draw) for index, draw in drawn]),
    }
    assert not torch.equal(inputs["images"][0], images.part(5, whole))

    def check(world: LoopbackWorld) -> None:
        training = RankTraining(world, made)
        reader = ShardReader(training.cut, images, made.step_specs)
        read = reader.assemble(drawn, reader.fetch)
        cut = training.cut(inputs)
        assert read.keys() == cut.keys()
        for number, part in cut.items():
            assert all(torch.equal(read[number][name], tensor) for name, tensor in part.items())

    run_ranks(plan.ranks, check)


def test_images_travel_to_the_ranks_as_their_paths(table: Path):
    train, _ = table_images(table, None, threshold=127).split(0.25)
    images, whole = Augmented(train, KINDS, SIZE), Tile.whole(*SIZE)
    images.part(0, whole, 1)
    sent = pickle.dumps(images)
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent).part(0, whole, 1), images.part(0, whole, 1))


# ---- flags


def parse_flags(*flags: object):
    return train_command.make_train_parser().parse_args([str(flag) for flag in flags])


def make_medical_datasets(table: Path, *flags: object):
    app = ("--app", "medical", "--datapath", table, "--image-size", "24", "--num-classes", 2)
    return train_images.make_datasets(parse_flags(*app, *flags), 4)


def test_a_table_is_taken_where_a_folder_is(table: Path):
    images, others = make_medical_datasets(table, "--mask-threshold", 127)
    assert (len(images), images.classes, others) == (8, 2, None)
    assert images.part(3, Tile.whole(*SIZE)).shape == (3, *SIZE)
    assert images.mask(3, Tile.whole(*SIZE)).unique().tolist() == [0, 1]
    with pytest.raises(ImageError, match=r"holds 255 at row \d+, column \d+, which is no class: there are 2"):
        make_medical_datasets(table)[0].mask(3, Tile.whole(*SIZE))


def test_ignored_numbers_of_masks_are_given_by_a_flag(table: Path):
    whole = Tile.whole(*SIZE)
    images, others = make_medical_datasets(table, "--mask-ignore", 255, "--held-out", 0.25, "--augment", "flip")
    assert images.mask(3, whole).unique().tolist() == others.mask(0, whole).unique().tolist() == [-100, 0]
    with pytest.raises(PlanError, match="--mask-ignore: 'void' is not whole numbers between commas"):
        parse_flags("--mask-ignore", "void")


def test_images_fit_as_the_flag_says(table: Path):
    scaled, cropped = (
        make_medical_datasets(table, "--mask-threshold", 127, "--fit", fit)[0] for fit in ("scale", "crop")
    )
    pixels = np.asarray(Image.open(table.parent / "3.png"))[8:32, 3:27]
    whole = Tile.whole(*SIZE)
    assert torch.equal(((cropped.part(3, whole) + 1) * 127.5).round().byte().permute(1, 2, 0), torch.tensor(pixels))
    assert not torch.equal(scaled.part(3, whole), cropped.part(3, whole))


def test_what_is_judged_by_is_held_out_by_slide_and_never_augmented(table: Path):
    images, others = make_medical_datasets(
        table, "--mask-threshold", 127, "--held-out", 0.25, "--augment", "flip,rotate,stain,crop"
    )
    assert (len(images), len(others)) == (6, 2)
    assert not {images.slide(index) for index in range(6)} & {others.slide(index) for index in range(2)}
    whole = Tile.whole(*SIZE)
    assert images.shape(0) == others.shape(0) == SIZE
    assert len({images.part(0, whole, draw).numpy().tobytes() for draw in range(6)}) == 6
    judged = next(index for index in range(8) if others.name(0).endswith(f"{index}.png"))
    middle = np.asarray(Image.open(table.parent / f"{judged}.png"))[8:32, 3:27]
    for draw in (None, 1):
        read = ((others.part(0, whole, draw) + 1) * 127.5).round().byte().permute(1, 2, 0)
        assert np.array_equal(read, middle)


def test_crops_that_do_not_fit_are_said_before_training(table: Path):
    flags = ("--mask-threshold", 127, "--augment", "crop", "--image-size", "41x24")
    with pytest.raises(ImageError, match=r"0\.png has 40 x 30 pixels, of which no 41 x 24 can be cropped"):
        make_medical_datasets(table, *flags)
    images, _ = make_medical_datasets(table, *flags, "--on-bad-image", "skip")
    with pytest.raises(ImageError, match=r"3\.png has 40 x 30 pixels"):
        images.part(3, Tile.whole(41, 24), 0)


def test_validation_images_have_the_classes_of_the_training(tmp_path: Path):
    for name in ("train/ill/1.png", "train/well/1.png", "other/well/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.fromarray(np.zeros((24, 24, 3), np.uint8)).save(tmp_path / name)
    images, others = make_medical_datasets(tmp_path / "train", "--validate-path", tmp_path / "other")
    assert [images.label(0), images.label(1), others.label(0)] == [0, 1, 1]
    (tmp_path / "table.csv").write_text("path,label\nother/well/1.png,dead\n")
    with pytest.raises(ImageError, match="line 2: the label 'dead' is none of ill, well"):
        make_medical_datasets(tmp_path / "train", "--validate-path", tmp_path / "table.csv")


def test_folders_beside_cifar_keep_the_classes_of_the_training(tmp_path: Path):
    for name in ("train/ill/1.png", "train/well/1.png", "other/well/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.fromarray(np.zeros((24, 24, 3), np.uint8)).save(tmp_path / name)
    flags = ("--app", "cifar", "--datapath", tmp_path / "train", "--validate-path", tmp_path / "other")
    assert train_images.make_datasets(parse_flags(*flags), 4)[1].label(0) == 1


def test_the_test_batch_of_cifar_judges(tmp_path: Path):
    random = np.random.default_rng(0)
    for name, label in (("data_batch_1", 3), ("data_batch_2", 4), ("test_batch", 7)):
        records = random.integers(0, 256, (5, 3073), dtype=np.uint8)
        records[:, 0] = label
        records.tofile(tmp_path / f"{name}.bin")
    flags = parse_flags("--app", "cifar", "--datapath", tmp_path, "--validate-path", tmp_path, "--augment", "flip")
    images, others = train_images.make_datasets(flags, 4)
    assert {images.label(index) for index in range(len(images))} == {3, 4}
    assert {others.label(index) for index in range(len(others))} == {7}
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(ImageError, match=r"no CIFAR-10 in .*: neither test_batch\.bin nor test_batch, nor a folder"):
        train_images.make_datasets(flags, 4)


def test_flags_that_cannot_be(table: Path):
    with pytest.raises(PlanError, match=r"'spin' is none of flip, rotate, stain, brightness, contrast, crop"):
        parse_flags("--augment", "flip,spin")
    with pytest.raises(PlanError, match=r"--augment crop takes parts of images .* only --app medical"):
        train_images.make_datasets(parse_flags("--app", "synthetic", "--augment", "crop"), 4)
    with pytest.raises(PlanError, match=r"--validate-path pictures names images, but --app 3 makes random ones\. Give"):
        train_images.make_datasets(parse_flags("--validate-path", "pictures"), 4)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--datapath pictures", "--datapath has no effect without --app medical or --app cifar"),
        ("--fit scale", "--fit has no effect without --app medical"),
        ("--app cifar --fit crop", "--fit has no effect without --app medical"),
        ("--app medical --mask-threshold 0", "--mask-threshold has no effect .* --datapath TABLE.csv"),
        ("--app medical --datapath a --mask-ignore 255", "--mask-ignore has no effect .* --datapath TABLE.csv"),
        ("--app cifar --datapath a.csv --within .", "--within has no effect .* --app medical and a --datapath"),
        ("--app synthetic --datapath pictures", ""),
        ("--app medical --datapath a --validate-path b.csv --within . --fit scale", ""),
    ],
)
def test_flags_that_no_images_read(flags: str, said: str):
    parser = train_command.make_train_parser()
    given = parser.parse_args(flags.split()), parser.find_given(flags.split())
    with pytest.raises(PlanError, match=said) if said else nullcontext():
        train_images.check_image_flags(*given)


@pytest.mark.nightly
def test_a_segmenter_learns_from_a_table_as_a_shell_starts_it(mpiexec, table: Path):
    flags = ("--model", "mpi4dl_nb:UNet", "--model-args", '{"num_classes": 2, "width": 4, "depth": 1}')
    plan = ("--split-size", 1, "--slice-method", "1x2", "--num-spatial-parts", 2, "--spatial-size", 1)
    data = ("--app", "medical", "--datapath", table, "--mask-threshold", 127, "--num-classes", 2, "--image-size", 24)
    more = ("--augment", "flip,rotate,crop,stain", "--held-out", 0.25, "--batch-size", 2, "--num-epochs", 2)
    done = mpiexec(2, "-m", "mpi4dl_nb.engines", "train", *flags, *plan, *data, *more, "--learning-rate", 0.05)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["epochs"], line["steps"]) == (2, 6)
    assert 0 < line["loss"] < 1.5
