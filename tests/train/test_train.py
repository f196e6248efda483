"""Trainings from images: what each rank reads, what is told, and the predecessor's command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mpi4dl_nb.engines.cli import options, train_command, train_images
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.comm.world import run_on_all, run_on_first
from mpi4dl_nb.engines.errors import ImageError, PlanError, ReleasedError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import LabelledImages, SyntheticImages, shuffle_indices
from mpi4dl_nb.engines.images.loader import LoaderOptions
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.images.shard_reader import ShardReader
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.server.rank_server import Failure, RankServer, recover_and_reset
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.recipe import Recipe, count_step_images, prepare, sgd
from mpi4dl_nb.engines.train.train_loop import CollectiveTrainLoop, RankTrainLoop, run
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.training_events import Counts, EpochResult, StepResult, summarise

SIZE, BATCH, COUNT = (20, 26), 4, 40


class Tiny(nn.Module):
    """A classifier whose space is reduced early enough for any plan."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

    def forward(self, x):
        return self.head(self.body(x))


def make_seeded(make: type[nn.Module], **arguments: int) -> nn.Module:
    torch.manual_seed(0)
    return make(**arguments)


MODELS = {"classifier": make_seeded(Tiny), "segmenter": make_seeded(UNet, num_classes=3, width=4, depth=1)}
PLANS = {
    "one rank": Plan(split_size=1, spatial_size=0, precision="float64"),
    "two stages": Plan(split_size=2, slice_method="2x2", precision="float64"),
    "tiles to the loss": Plan(split_size=1, slice_method="1x3", precision="float64"),
    "micro-batches": Plan(split_size=3, slice_method="2x1", parts=2, schedule="1f1b", precision="float64"),
    "both ways": Plan(split_size=2, slice_method="1x3", bidirectional=True, parts=2, precision="float64"),
    "replicas": Plan(split_size=1, slice_method="1x2", data_parallel=2, accumulate=2, precision="float64"),
    "shares": Plan(split_size=2, slice_method="1x2", local_dp=2, precision="float64"),
}


def make_recipe(model: nn.Module, plan: Plan) -> Recipe:
    return prepare(model, plan, (BATCH, 3, *SIZE), device="cpu")


def read_whole_batch(images: LabelledImages, numbers: Sequence[int], per_pixel: bool) -> dict[str, torch.Tensor]:
    whole = Tile.whole(*SIZE)
    found = [images.mask(number, whole) if per_pixel else torch.tensor(images.label(number)) for number in numbers]
    pixels = torch.stack([images.part(number, whole) for number in numbers])
    return {"images": pixels.double(), "labels": torch.stack(found)}


# ---- what a rank reads


def read_shard(training: RankTraining, images: LabelledImages, numbers: Sequence[int]) -> Inputs:
    reader = ShardReader(training.cut, images, training.recipe.step_specs)
    return reader.assemble([(number, None) for number in numbers], reader.fetch)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_each_rank_reads_what_is_cut_for_it_from_the_whole(model: str, plan: Plan):
    images, made = SyntheticImages(COUNT, SIZE, 3), make_recipe(MODELS[model], plan)
    numbers = shuffle_indices(COUNT, 1, 0)[: count_step_images(made)]
    whole = read_whole_batch(images, numbers, per_pixel=model == "segmenter")

    def check(world: LoopbackWorld) -> list[str]:
        training = RankTraining(world, made)
        read, cut = read_shard(training, images, numbers), training.cut(whole)
        assert {number: part.keys() for number, part in read.items()} == {n: part.keys() for n, part in cut.items()}
        for number, part in cut.items():
            for name, tensor in part.items():
                assert torch.equal(read[number][name], tensor)
                assert read[number][name].dtype == tensor.dtype
        return [name for part in cut.values() for name in part]

    assert set().union(*run_ranks(plan.ranks, check)) == {"images", "labels"}


class Spied(SyntheticImages):
    """Writes down which parts are asked for."""

    def __init__(self) -> None:
        super().__init__(9, SIZE, 3)
        self.asked: set[tuple[int, Tile]] = set()
        self.masks: set[tuple[int, Tile]] = set()

    def part(self, index: int, tile: Tile, draw: int | None = None) -> torch.Tensor:
        self.asked.add((index, tile))
        return super().part(index, tile, draw)

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> torch.Tensor:
        self.masks.add((index, tile))
        return super().mask(index, tile, draw)


def test_no_rank_reads_more_than_its_own_tile():
    plan = PLANS["two stages"]
    made = make_recipe(MODELS["classifier"], plan)

    def list_asked(world: LoopbackWorld) -> set[tuple[int, Tile]]:
        images = Spied()
        read_shard(RankTraining(world, made), images, [2, 4, 6, 8])
        return images.asked

    *tiles, last = run_ranks(plan.ranks, list_asked)
    cut = plan.grids[0].cut(*SIZE)
    assert tiles == [{(number, tile) for number in (2, 4, 6, 8)} for tile in cut]
    assert last == set()


def test_masks_travel_tiled():
    plan = PLANS["tiles to the loss"]
    made = make_recipe(MODELS["segmenter"], plan)

    def list_asked(world: LoopbackWorld) -> tuple[set[tuple[int, Tile]], set[tuple[int, Tile]]]:
        images = Spied()
        read_shard(RankTraining(world, made), images, [2, 4, 6, 8])
        return images.asked, images.masks

    expected = [{(number, tile) for number in (2, 4, 6, 8)} for tile in plan.grids[0].cut(*SIZE)]
    assert run_ranks(plan.ranks, list_asked) == [(tiles, tiles) for tiles in expected]


class Coarse(nn.Module):
    """Answers for one of nine pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 3, 3, stride=3)

    def forward(self, x):
        return self.body(x)


def test_an_answer_for_several_pixels_is_for_the_one_in_their_middle():
    images, plan = SyntheticImages(COUNT, (18, 27), 3), PLANS["tiles to the loss"]
    made = prepare(Coarse(), plan, (1, 3, 18, 27), device="cpu")
    whole = {"images": torch.zeros(1, 3, 18, 27), "labels": images.mask(4, Tile.whole(18, 27))[None, 1::3, 1::3]}

    def check(world: LoopbackWorld) -> None:
        training = RankTraining(world, made)
        read = read_shard(training, images, [4])
        assert torch.equal(read[0]["labels"], training.cut(whole)[0]["labels"])

    run_ranks(plan.ranks, check)


# ---- what is told


def run_oracle(model: nn.Module, plan: Plan, images: LabelledImages, epochs: int, seed: int) -> list[tuple[float, int]]:
    """Loss, and how many predictions are right, of each step in one process."""
    alone = ReferenceTraining(model, nn.CrossEntropyLoss(), sgd, torch.float64, micro_batches=plan.micro_batches)
    heard: list[torch.Tensor] = []
    alone.model.register_forward_hook(lambda _, __, answer: heard.append(answer.detach()))
    found, count = [], BATCH * plan.batches
    for epoch in range(epochs):
        order = shuffle_indices(len(images), seed, epoch)
        for start in range(0, len(images) - count + 1, count):
            batch = read_whole_batch(images, order[start : start + count], per_pixel=isinstance(model, UNet))
            heard.clear()
            loss = alone.step(batch)
            found.append((loss, int((torch.cat(heard).argmax(1) == batch["labels"]).sum())))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_loss_and_accuracy_are_those_of_one_process(model: str, plan: Plan):
    made = make_recipe(MODELS[model], plan)
    count = count_step_images(made)
    assert count == BATCH * plan.batches
    images = SyntheticImages(2 * count + 1, SIZE, 3)

    def run_epochs(world: LoopbackWorld) -> list[object]:
        training, feeding = RankTraining(world, made), LoaderOptions(seed=5, drop_last=True)
        with closing(RankTrainLoop(world, training, made.step_specs, images, feeding)) as course:
            return list(run(CollectiveTrainLoop(course), epochs=2))

    expected = run_oracle(MODELS[model], plan, images, epochs=2, seed=5)
    for events in run_ranks(plan.ranks, run_epochs):
        steps = [event for event in events if isinstance(event, StepResult)]
        assert [event.epoch for event in events if isinstance(event, EpochResult)] == [0, 1]
        assert [(step.epoch, step.step) for step in steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [step.loss for step in steps] == pytest.approx([loss for loss, _ in expected], rel=1e-10)
        assert [sum(step.counts.right) for step in steps] == [right for _, right in expected]
        assert all(
            sum(step.counts.true) == count * (SIZE[0] * SIZE[1] if model == "segmenter" else 1) for step in steps
        )
        assert all(step.images_per_s > 0 for step in steps)


def make_counts(right: int) -> Counts:
    return Counts((right, 0), (8, 0), (right, 8 - right))


def test_a_summary_is_of_the_last_epoch():
    steps = [
        StepResult(0, 0, 8, 2.0, 3.0, make_counts(1)),
        StepResult(1, 0, 8, 1.0, 2.0, make_counts(4)),
        StepResult(1, 1, 8, 4.0, 1.0, make_counts(6)),
    ]
    assert summarise(steps, EpochResult.of(steps[1:], left_out=2)) == {
        "epochs": 2, "steps": 3, "images_per_step": 8, "images_per_s_mean": 4.6667, "images_per_s_median": 4.0,
        "loss": 1.5, "accuracy": 0.625, "data_wait": 0.0, "left_out": 2,
    }  # fmt: skip


def test_what_is_not_judged_has_no_accuracy():
    steps = [StepResult(0, 0, 8, 2.0, 3.0, Counts())]
    assert summarise(steps, EpochResult.of(steps))["accuracy"] is None


class Broken(SyntheticImages):
    """One image cannot be read where the tile is not the first."""

    def part(self, index: int, tile: Tile, draw: int | None = None) -> torch.Tensor:
        if tile.cols.start:
            raise ImageError("picture 7 is damaged")
        return super().part(index, tile, draw)


def test_what_one_rank_cannot_read_is_reported_on_every_rank():
    plan = PLANS["two stages"]
    made = make_recipe(MODELS["classifier"], plan)

    def read_message(world: LoopbackWorld) -> str:
        with pytest.raises(ImageError) as caught:
            RankTrainLoop(world, RankTraining(world, made), made.step_specs, Broken(8, SIZE, 3), LoaderOptions()).step()
        return str(caught.value)

    assert [text.partition(": ")[2] for text in run_ranks(plan.ranks, read_message)] == [
        "picture 7 is damaged"
    ] * plan.ranks


def test_what_the_system_says_of_a_file_reaches_every_rank():
    def read_message(world: LoopbackWorld) -> str:
        with pytest.raises(ImageError) as caught:
            run_on_all(world, lambda: Path("not/there").read_bytes() if world.rank else b"")
        return str(caught.value)

    assert run_ranks(2, read_message) == ["[Errno 2] No such file or directory: 'not/there'"] * 2


def test_an_error_of_one_rank_keeps_its_type_on_every_rank():
    def get_cause_type(world: LoopbackWorld) -> str:
        with pytest.raises(TraceError, match="no model on this host") as caught:
            run_on_all(world, lambda: fail_on_rank_1(world), PlanError)
        return type(caught.value.__cause__).__name__

    def fail_on_rank_1(world: LoopbackWorld) -> None:
        if world.rank == 1:
            raise TraceError("no model on this host")

    assert run_ranks(3, get_cause_type) == ["ReleasedError", "NoneType", "ReleasedError"]


def test_together_gives_back_what_each_rank_made():
    assert run_ranks(3, lambda world: run_on_all(world, lambda: world.rank * 2)) == [0, 2, 4]


def raise_released(*_: object) -> None:
    raise ReleasedError("released: another rank has failed")


def test_what_a_rank_knows_itself_is_reported_also_if_the_others_have_left_already(monkeypatch):
    """They may have all values, and fail of them, before this rank has theirs."""

    def fail() -> None:
        raise ImageError("no picture") from ValueError("its cause")

    def check_error(world: LoopbackWorld) -> None:
        monkeypatch.setattr(world, "all_gather", raise_released)
        for work in (run_on_all, run_on_first):
            with pytest.raises(ImageError, match="no picture") as caught:
                work(world, fail)
            assert not Failure.of(caught.value).released
            with pytest.raises(ReleasedError):
                work(world, lambda: 1)

    run_ranks(1, check_error)


def test_an_error_that_is_its_own_cause_is_reported_once():
    error = ValueError("no such pixel")
    with pytest.raises(ValueError, match="no such pixel") as caught:
        raise error from error
    told = Failure.of(caught.value)
    assert (told.kind, told.message, len(told.links)) == ("ValueError", "no such pixel", 1)


def test_what_is_discarded_after_a_failure_is_closed_first():
    closed: list[str] = []

    def make_resource(name: str) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: closed.append(name))

    host = RankServer(SimpleNamespace(recover=lambda: closed.append("recovered")))
    host.get_kept(SimpleNamespace)["a"] = make_resource("loop")
    host.get_kept(object).update({"b": make_resource("prediction"), "c": object()})
    recover_and_reset(host)
    assert closed == ["recovered", "loop", "prediction"]
    assert not host.get_kept(SimpleNamespace)
    assert not host.get_kept(object)


def test_an_error_of_the_first_rank_is_reported_on_every_rank():
    def read_failure(world: LoopbackWorld) -> tuple[str, bool]:
        with pytest.raises(ImageError) as caught:
            run_on_first(world, lambda: open_image("not/there"))
        return str(caught.value), Failure.of(caught.value).released

    (first, *others) = run_ranks(3, read_failure)
    assert not first[1]
    assert others == [(first[0], True)] * 2


def test_fewer_images_than_a_step_takes():
    made = make_recipe(MODELS["classifier"], PLANS["one rank"])
    with pytest.raises(ImageError, match=r"There are 3 images, but a step takes 4\. Use smaller batches"):
        run_ranks(
            1,
            lambda world: RankTrainLoop(
                world, RankTraining(world, made), made.step_specs, SyntheticImages(3, SIZE, 3), LoaderOptions()
            ),
        )


# ---- flags


def parse_flags(*flags: str):
    return train_command.make_train_parser().parse_args(flags)


def test_the_predecessors_defaults():
    given = parse_flags()
    assert options.make_plan(given) == Plan()
    assert (given.batch_size, given.image_size, given.num_epochs, given.num_classes, given.app) == (
        32,
        "32",
        1,
        10,
        "3",
    )
    assert (given.datapath, given.num_workers, given.verbose) == (Path("train"), 0, False)


EVERY_FLAG = """
--batch-size 2 --parts 1 --split-size 3 --num-spatial-parts 4,2 --spatial-size 2 --times 1 --image-size 64
--num-epochs 2 --num-layers 6 --num-filters 64 --num-classes 5 --balance 1,2,3 --halo-D2 --fused-layers 2
--local-DP 1 --slice-method vertical --app 2 --datapath data --num-workers 3 --enable-master-comm-opt -v
"""


def test_every_flag_of_the_predecessor_is_taken():
    given = parse_flags(*EVERY_FLAG.split())
    assert options.make_plan(given) == Plan(
        split_size=3, spatial_size=2, num_spatial_parts=(4, 2), balance=(1, 2, 3), halo_d2=True, fused_layers=2,
        slice_method="vertical",
    )  # fmt: skip
    assert (given.num_layers, given.num_filters, given.num_classes, given.num_epochs) == (6, 64, 5, 2)
    assert given.enable_master_comm_opt


@pytest.mark.parametrize(("name", "number"), [("synthetic", "3"), ("cifar", "2"), ("medical", "1")])
def test_applications_have_names_and_numbers(name: str, number: str, tmp_path: Path):
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        Image.fromarray(np.zeros((5, 5, 3), np.uint8)).save(tmp_path / kind / "1.png")
    made = [
        train_images.make_dataset(parse_flags("--app", app, "--datapath", str(tmp_path), "--image-size", "8x9"), 4)
        for app in (name, number)
    ]
    assert type(made[0]) is type(made[1])
    assert len(made[0]) == (40 if name == "synthetic" else 2)
    assert made[0].part(0, Tile.whole(8, 9)).shape == (3, 8, 9)


def test_applications_that_do_not_fit(tmp_path: Path):
    with pytest.raises(PlanError, match=r"--app '4' is unknown. Choose one of 1, medical, 2"):
        train_images.make_dataset(parse_flags("--app", "4"), 4)
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        Image.fromarray(np.zeros((5, 5, 3), np.uint8)).save(tmp_path / kind / "1.png")
    flags = ("--app", "1", "--datapath", str(tmp_path), "--num-classes", "1")
    with pytest.raises(PlanError, match=r"2 classes, but --num-classes is 1\. Use --num-classes 2"):
        train_images.make_dataset(parse_flags(*flags), 4)


# ---- as a shell starts it

FLAGS = ("--model", "resnet_v1", "--num-layers", 8, "--image-size", 16, "--batch-size", 2)


@pytest.mark.nightly
def test_a_training_is_reported_as_by_the_predecessor(mpiexec):
    more = ("--num-epochs", 2, "--max-steps", 2, "-v", "--enable-master-comm-opt", "--learning-rate", 0.01)
    done = mpiexec(5, "-m", "mpi4dl_nb.engines", "train", *FLAGS, *more)
    assert done.returncode == 0, done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("--enable-master-comm-opt has no effect")
    assert sum(line.startswith("Epoch: ") and " images per sec:" in line for line in lines) == 4
    assert sum(line.startswith("Step: ") and "loss: " in line and "accuracy: " in line for line in lines) == 4
    assert [line[:21] for line in lines if "Global loss" in line] == ["Epoch 0 Global loss: ", "Epoch 1 Global loss: "]
    assert lines[-1].startswith("Mean ")
    line = json.loads(last)
    assert (line["epochs"], line["steps"], line["images_per_step"]) == (2, 4, 2)
    assert line["images_per_s_mean"] > 0
    assert 0 <= line["accuracy"] <= 1
    assert line["loss"] > 0


@pytest.mark.nightly
def test_a_damaged_picture_is_left_out_and_others_judge(mpiexec, tmp_path: Path):
    """Read ahead by workers, told once; what held-out pictures say goes to the log."""
    random = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "pictures" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "pictures" / "b" / "11.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    log = tmp_path / "log.csv"
    images = ("--app", "medical", "--datapath", tmp_path / "pictures", "--held-out", 0.2)
    more = ("--num-workers", 2, "--on-bad-image", "skip", "--log", log, "--num-epochs", 2, "--drop-last")
    done = mpiexec(5, "-m", "mpi4dl_nb.engines", "train", *FLAGS, *images, *more)
    assert done.returncode == 0, done.stderr
    left_out = [line for line in done.stdout.splitlines() if line.startswith("Left out from now on: ")]
    assert len(left_out) == 1
    assert "11.png" in left_out[0]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["steps"] == 8
    assert 0 <= line["held_out_accuracy"] <= 1
    header, *records = log.read_text().splitlines()
    assert len(records) == 2
    assert records[1].split(",")[header.split(",").index("held_out_loss")] == str(line["held_out_loss"])


@pytest.mark.nightly
def test_a_damaged_picture_ends_every_rank(mpiexec, tmp_path: Path):
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "b" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    done = mpiexec(5, "-m", "mpi4dl_nb.engines", "train", *FLAGS, "--app", "medical", "--datapath", tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("ImageError: ")
    assert "2.png" in line


@pytest.mark.nightly
def test_what_cannot_be_trained_is_said_in_one_line(mpiexec):
    done = mpiexec(2, "-m", "mpi4dl_nb.engines", "train", "--num-layers", 19)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("PlanError: The plan needs 5 ranks")
