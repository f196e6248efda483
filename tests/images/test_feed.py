"""The order of images, what is read ahead, what a bad image does, and how a feed goes on after a break."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from types import NoneType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, make_loopback_worlds, run_ranks
from mpi4dl_nb.engines.errors import ImageError, PlanError, ReleasedError
from mpi4dl_nb.engines.geometry.tiles import Grid, Tile
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.images.dataset import SyntheticImages, shuffle_indices
from mpi4dl_nb.engines.images.loader import LoadedBatch, LoaderOptions, RankLoader
from mpi4dl_nb.engines.images.shard_reader import Sampler, SamplerState, ShardReader
from mpi4dl_nb.engines.server.rank_server import Failure

SIZE, COUNT = (8, 12), 4


class Numbered(SyntheticImages):
    """Every pixel of an image is its number, and one channel its draw; some images cannot be read, in some tiles."""

    def __init__(
        self, count: int, bad: tuple[int, ...] = (), where: Callable[[Tile], bool] = lambda tile: True
    ) -> None:
        super().__init__(count, SIZE, 1000)
        self.bad, self.where, self.asked = bad, where, []

    def name(self, index: int) -> str:
        return f"folder/{index}.png"

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        self.asked.append((index, tile))
        if index in self.bad and self.where(tile):
            raise ImageError(f"folder/{index}.png is damaged")
        pixels = torch.full((3, *tile.shape), float(index), dtype=torch.float64)
        pixels[1] = float(draw % 1_000_003)
        return pixels

    def label(self, index: int) -> int:
        return index


class Cut:
    """Stands for a rank of a plan that cuts columns; the last rank has the labels alone, the one before it nothing."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def cut(self, inputs: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        if self.ranks == 1:
            return {0: inputs}
        if self.rank == self.ranks - 1:
            return {0: {"labels": inputs["labels"]}}
        if self.rank == self.ranks - 2:
            return {0: {}}
        tile = Grid(1, self.ranks - 2).cut(*SIZE)[self.rank]
        return {0: {"images": inputs["images"][..., tile.cols.start : tile.cols.stop]}}


def make_loader(
    world: LoopbackWorld, images: SyntheticImages, feeding: LoaderOptions | None = None, count: int = COUNT
) -> RankLoader:
    specs = {"images": TensorSpec((count, 3, *SIZE), "float64"), "labels": TensorSpec((count,), "int64")}
    return RankLoader(world, ShardReader(Cut(world.rank, world.size).cut, images, specs), count, feeding)


def read_numbers(served: LoadedBatch, name: str = "images") -> list[int]:
    """Which images a step has."""
    tensor = served.parts[0][name]
    return (tensor[:, 0, 0, 0] if name == "images" else tensor).long().tolist()


def read_draws(served: LoadedBatch) -> list[int]:
    return served.parts[0]["images"][:, 1, 0, 0].long().tolist()


def load_epochs(feed: RankLoader, count: int) -> list[list[LoadedBatch]]:
    """All steps of so many epochs."""
    found: list[list[LoadedBatch]] = []
    with closing(feed):
        for _ in range(count):
            found.append([])
            while (served := feed.load_next()) is not None:
                feed.advance()
                found[-1].append(served)
    return found


def list_numbers(feed: RankLoader, count: int = 1) -> list[list[int]]:
    return [read_numbers(served) for steps in load_epochs(feed, count) for served in steps]


def make_single_loader(images: SyntheticImages, feeding: LoaderOptions | None = None, count: int = COUNT) -> RankLoader:
    return make_loader(make_loopback_worlds(1)[0], images, feeding, count)


# ---- order


@pytest.mark.parametrize("workers", [0, 3])
def test_the_order_is_the_seeds_and_steps_are_full(workers: int):
    steps = list_numbers(make_single_loader(Numbered(10), LoaderOptions(seed=7, workers=workers, drop_last=True)), 3)
    orders = [shuffle_indices(10, 7, epoch) for epoch in range(3)]
    assert steps == [order[start : start + COUNT] for order in orders for start in (0, 4)]
    assert orders[0] != orders[1] != orders[2]


def test_the_same_on_every_number_of_ranks_and_workers():
    def run_on(ranks: int, workers: int) -> list[Any]:
        def work(world: LoopbackWorld) -> list[list[LoadedBatch]]:
            return load_epochs(make_loader(world, Numbered(9, bad=(5,)), LoaderOptions(3, None, workers, "skip")), 2)

        first = run_ranks(ranks, work)[0]
        return [(served.place, read_numbers(served), read_draws(served)) for steps in first for served in steps]

    expected = run_on(1, 0)
    assert len(expected) == 4
    for ranks, workers in ((1, 2), (4, 0), (4, 2), (5, 1)):
        assert run_on(ranks, workers) == expected


def test_an_images_draw_follows_from_seed_epoch_and_image():
    by_image: dict[tuple[int, int, int], int] = {}
    for seed in (0, 1):
        for epoch, steps in enumerate(load_epochs(make_single_loader(Numbered(8), LoaderOptions(seed)), 2)):
            for served in steps:
                by_image |= {(seed, epoch, i): d for i, d in zip(read_numbers(served), read_draws(served), strict=True)}
    assert len(by_image) == len(set(by_image.values())) == 32
    # All eight in one step.
    (first, *_), *_ = load_epochs(make_single_loader(Numbered(8), LoaderOptions(0), count=8), 1)
    assert all(by_image[0, 0, i] == d for i, d in zip(read_numbers(first), read_draws(first), strict=True))


def test_an_epoch_may_end_early():
    steps = list_numbers(make_single_loader(Numbered(12), LoaderOptions(steps=1)), 2)
    assert steps == [shuffle_indices(12, 0, epoch)[:COUNT] for epoch in (0, 1)]


# ---- who reads what


def test_each_rank_reads_its_own_and_no_more():
    def list_tiles(world: LoopbackWorld) -> set[tuple[int, Tile]]:
        images = Numbered(8)
        with closing(make_loader(world, images, LoaderOptions(workers=1))) as mine:
            assert mine.load_next() is not None
        return {tile for _, tile in images.asked}

    tiles = Grid(1, 2).cut(*SIZE)
    assert run_ranks(4, list_tiles) == [{tiles[0]}, {tiles[1]}, set(), set()]


# ---- ahead


class Slow(Numbered):
    """Reading takes a while; how many at once is counted."""

    def __init__(self, count: int, reading_s: float = 0.02) -> None:
        super().__init__(count)
        self.reading_s, self.at_once, self.most, self.lock = reading_s, 0, 0, threading.Lock()

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(self.reading_s)
        with self.lock:
            self.at_once -= 1
        return super().part(index, tile, draw)


def test_workers_read_while_a_step_is_computed():
    def measure_wait(workers: int) -> float:
        total = 0.0
        with closing(make_single_loader(Slow(16), LoaderOptions(workers=workers))) as mine:
            for step in range(4):
                served = mine.load_next()
                mine.advance()
                total += served.wait_s if step else 0.0  # nobody can have read the first one ahead
                time.sleep(0.1)
        return total

    assert measure_wait(0) > 3 * 4 * 0.02
    assert measure_wait(2) < 0.08


def test_what_is_read_ahead_is_bounded():
    images = Slow(400, reading_s=0.0)
    with closing(make_single_loader(images, LoaderOptions(workers=3))) as mine:
        mine.load_next()
        time.sleep(0.2)
        assert len(images.asked) == 3 * COUNT  # this step and two more
        assert images.most <= 3


def list_workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def test_no_worker_outlives_its_feed():
    with closing(make_single_loader(Slow(16), LoaderOptions(workers=2))) as mine:
        mine.load_next()
        assert len(list_workers()) == 2
    assert not list_workers()
    with (
        pytest.raises(ImageError),
        closing(make_single_loader(Numbered(16, bad=tuple(range(16))), LoaderOptions(workers=2))) as mine,
    ):
        mine.load_next()
    assert not list_workers()


# ---- bad images


def test_a_rank_tells_of_its_bad_image_also_if_the_others_have_left_already(monkeypatch):
    """They may know of it, and fail, before this rank knows what they have read."""

    def raise_released(_: object) -> None:
        raise ReleasedError("released: another rank has failed")

    def load_bad_image(world: LoopbackWorld) -> None:
        monkeypatch.setattr(world, "all_gather", raise_released)
        with closing(make_loader(world, Numbered(12, bad=(shuffle_indices(12, 0, 0)[0],)))) as mine:
            with pytest.raises(ImageError, match="is damaged") as caught:
                mine.load_next()
            assert not Failure.of(caught.value).released

    run_ranks(1, load_bad_image)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_ends_the_training_when_its_step_comes(workers: int):
    """And not before, though it was read before; on all ranks, though rank 1 alone has seen it: that one is named."""
    order = shuffle_indices(12, 0, 0)
    images = Numbered(12, bad=(order[9],), where=lambda tile: tile.cols.start > 0)

    def load_until_error(world: LoopbackWorld) -> tuple[int, str, type]:
        with closing(make_loader(world, images, LoaderOptions(workers=workers))) as mine:
            for step in range(3):
                try:
                    assert mine.load_next() is not None
                except ImageError as error:
                    return step, str(error), type(error.__cause__)
                mine.advance()
        return 3, "", NoneType

    said = 2, f"folder/{order[9]}.png is damaged"
    assert run_ranks(4, load_until_error) == [(*said, ImageError if rank == 1 else ReleasedError) for rank in range(4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_image_is_as_if_it_were_not_in_the_order(workers: int):
    order = shuffle_indices(11, 0, 0)
    bad = (order[1], order[5])
    images = Numbered(11, bad, where=lambda tile: tile.cols.start > 0)

    def work(world: LoopbackWorld) -> tuple[list[str], list[list[int]]]:
        mine = make_loader(world, images, LoaderOptions(workers=workers, on_bad_image="skip", drop_last=True))
        name = "labels" if world.rank == 3 else "images"
        steps = load_epochs(mine, 2)
        return mine.bad, [read_numbers(served, name) for steps in steps for served in steps if served.parts[0]]

    first, second = ([index for index in shuffle_indices(11, 0, epoch) if index not in bad] for epoch in (0, 1))
    expected = [first[:4], first[4:8], second[:4], second[4:8]]
    said = [f"folder/{index}.png is damaged" for index in bad]
    assert run_ranks(4, work) == [(said, [] if rank == 2 else expected) for rank in range(4)]


class Scanned(tuple):
    """A tuple that is not searched from its beginning for each image."""

    def __contains__(self, item: object) -> bool:
        raise AssertionError("a search for every image takes as long as there are bad ones")


def test_many_skipped_images_are_not_searched_one_by_one():
    (step, place) = Sampler(9, 2).get_step(SamplerState(0, skipped=Scanned((3, 5))))
    assert [index for index, _ in step] == [index for index in shuffle_indices(9, 0, 0) if index not in {3, 5}][:2]
    assert place.step == 1


def test_where_no_full_step_is_left_it_is_said():
    images = Numbered(8, bad=(0, 1, 2, 3, 4))
    with pytest.raises(ImageError, match=r"(?s)5 of 8 images cannot be read.*step of 4.*\nfolder/\d.png is damaged"):
        list_numbers(make_single_loader(images, LoaderOptions(on_bad_image="skip")))


def test_an_epoch_that_bad_images_shorten_ends_in_order():
    order = shuffle_indices(8, 0, 0)
    mine = make_single_loader(Numbered(8, bad=(order[6],)), LoaderOptions(on_bad_image="skip", drop_last=True))
    assert [len(steps) for steps in load_epochs(mine, 2)] == [1, 1]
    assert mine.bad == [f"folder/{order[6]}.png is damaged"]


def test_a_fault_of_the_program_is_not_skipped():
    class Faulty(Numbered):
        def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
            return super().part(index, tile, draw) / self.nothing

    with pytest.raises(ImageError, match=r"folder/\d.png: AttributeError: .*nothing") as caught:
        make_single_loader(Faulty(8), LoaderOptions(workers=1, on_bad_image="skip")).load_next()
    assert isinstance(caught.value.__cause__, AttributeError)


def test_what_the_system_says_is_reported_with_the_images_name():
    class Gone(Numbered):
        def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
            raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(ImageError, match=r"^folder/\d.png: \[Errno 2\] No such file or directory"):
        make_single_loader(Gone(8)).load_next()


# ---- going on


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", range(6))
def test_it_goes_on_as_if_there_had_been_no_break(done: int, workers: int):
    """After any number of steps, in any epoch, with images that were left out before."""
    feeding = LoaderOptions(11, None, workers, "skip")
    images = Numbered(14, bad=tuple(shuffle_indices(14, 11, 0)[2:4]))
    whole = [served for steps in load_epochs(make_single_loader(images, feeding), 2) for served in steps]
    assert len(whole) == 6

    with closing(make_single_loader(images, feeding)) as first:
        while first.place.epoch * 3 + first.place.step < done:
            if first.load_next() is not None:
                first.advance()
        state = json.loads(json.dumps(first.get_state()))
    second = make_single_loader(images, feeding)
    second.resume(state)
    with closing(second):
        rest = []
        while len(rest) < 6 - done:
            served = second.load_next()
            if served is not None:
                second.advance()
                rest.append(served)
    for mine, theirs in zip(rest, whole[done:], strict=True):
        assert (mine.place, read_numbers(mine), read_draws(mine)) == (
            theirs.place,
            read_numbers(theirs),
            read_draws(theirs),
        )


def test_a_step_that_was_not_done_comes_again():
    mine = make_single_loader(Numbered(8))
    first = mine.load_next()
    assert mine.get_state()["step"] == 0
    assert read_numbers(mine.load_next()) == read_numbers(first)


def test_a_state_of_other_images_is_refused():
    state = make_single_loader(Numbered(8)).get_state()
    with pytest.raises(ImageError, match="had 8 images, but there are 9"):
        make_single_loader(Numbered(9)).resume(state)


def test_an_image_of_another_size_is_refused():
    """Its corner would be trained on, and nobody would know."""

    class Large(Numbered):
        def shape(self, index: int) -> tuple[int, int]:
            return (9, 12) if index == 3 else SIZE

    with pytest.raises(ImageError, match=r"folder/3.png has 9 x 12 pixels, but the training was made for 8 x 12"):
        list_numbers(make_single_loader(Large(4)))


# ---- what a user's own images give, which would train on other numbers without an error


class Own(Numbered):
    """Images of a user; `given` are what its methods return for image 3."""

    def __init__(self, **given: object) -> None:
        super().__init__(4)
        self.classes, self.given = 4, given

    def shape(self, index: int) -> Any:
        return self.given.get("shape", SIZE) if index == 3 else SIZE

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Any:
        pixels = super().part(index, tile, draw)
        return self.given.get("part", pixels) if index == 3 else pixels

    def label(self, index: int) -> Any:
        return self.given.get("label", index) if index == 3 else index

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Any:
        return self.given.get("mask", torch.zeros(tile.shape).long())


def read_own(labels: str = "int64", pixels: bool = False, **given: object) -> list[Tensor]:
    shape = (4, *SIZE) if pixels else (4,)
    specs = {"images": TensorSpec((4, 3, *SIZE), "float32"), "labels": TensorSpec(shape, labels)}
    reader = ShardReader(lambda inputs: {0: inputs}, Own(**given), specs)
    return [reader.fetch(piece) for piece in reader.make_read_requests([(index, 0) for index in range(4)])]


WHOLE = torch.zeros(3, *SIZE)
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": ({"part": WHOLE.byte()}, "images are torch.uint8, .* a cast would not scale them"),
    "other pixels than the tile's": (
        {"part": torch.zeros(3, 9, 12)},
        r"shape \(3, 9, 12\), but \(3, 8, 12\) is wanted",
    ),
    "no channels": ({"part": torch.zeros(SIZE)}, r"shape \(8, 12\), but \(3, 8, 12\) is wanted"),
    "a class beyond": ({"label": 4}, "folder/3.png has the label 4, but its data set has 4 classes, 0 to 3"),
    "a class below": ({"label": -1}, "folder/3.png has the label -1"),
    "a share of a class": ({"label": 1.5}, "labels are torch.float32, but the training was made for int64"),
    "two labels": ({"label": [0, 1]}, r"shape \(2,\), but \(\) is wanted: one number"),
    "a pixel's class beyond": (
        {"pixels": True, "mask": torch.full(SIZE, 4)},
        "has the label 4, but its data set has 4",
    ),
    "another mask": ({"pixels": True, "mask": torch.zeros(9, 12).long()}, r"shape \(9, 12\), but \(8, 12\) is wanted"),
}


@pytest.mark.parametrize(("given", "said"), UNFIT.values(), ids=UNFIT)
def test_what_is_no_image_or_label_is_refused_by_name(given: dict[str, Any], said: str):
    with pytest.raises(ImageError, match=said):
        read_own(**given)


def test_what_means_the_same_is_taken():
    for given in ({"shape": list(SIZE)}, {"part": WHOLE.numpy()}, {"label": torch.tensor(3, dtype=torch.uint8)}):
        *_, label = read_own(**given)
        assert (label.item(), label.dtype) == (3, torch.int64)
    *_, amount = read_own("float32", label=17.5)
    assert amount.item() == 17.5


def test_a_class_that_the_type_of_the_labels_cannot_hold_is_refused():
    images, specs = Numbered(301), {"images": TensorSpec((1, 3, *SIZE), "float32"), "labels": TensorSpec((1,), "uint8")}
    reader = ShardReader(lambda inputs: {0: inputs}, images, specs)
    (_, wanted) = reader.make_read_requests([(300, 0)])
    with pytest.raises(ImageError, match=r"folder/300.png: labels have the number 300 .* fit into uint8"):
        reader.fetch(wanted)


# ---- said before anything starts


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"on_bad_image": "ignore"}, "on_bad_image='ignore' is unknown. Choose one of raise, skip"),
        ({"workers": -1}, "workers=-1 must be a whole number"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"seed": "7"}, "seed='7' must be a whole number"),
        ({"seed": True}, "seed=True must be a whole number"),
        ({"seed": 1 << 64}, r"seed=18446744073709551616 must be a whole number between -2\*\*64 and 2\*\*64"),
    ],
)
def test_what_cannot_be_asked_for(wrong: dict[str, Any], said: str):
    with pytest.raises(PlanError, match=said):
        LoaderOptions(**wrong)


def test_a_seed_of_numpy_is_a_seed():
    assert type(LoaderOptions(np.int64(7)).seed) is int


def test_too_few_images():
    with pytest.raises(ImageError, match="There are 3 images, but a step takes 4"):
        make_single_loader(Numbered(3))


@pytest.mark.parametrize(
    "change",
    [lambda array: array[..., ::-1], lambda array: array.astype(array.dtype.newbyteorder())],
    ids=["flipped", "other bytes"],
)
def test_arrays_are_read_as_they_lie_in_memory(change: Callable[[np.ndarray], np.ndarray]):
    """Flipped, or in the byte order of another machine: PyTorch takes neither."""
    pixels = np.arange(3 * math.prod(SIZE), dtype=np.float32).reshape(3, *SIZE)
    classes = np.arange(math.prod(SIZE)).reshape(SIZE) % 4
    fetched = read_own(pixels=True, part=change(pixels), mask=change(classes))
    image, mask = fetched[3], fetched[-1]
    torch.testing.assert_close(image, torch.from_numpy(change(pixels).astype(np.float32)), rtol=0, atol=0)
    torch.testing.assert_close(mask, torch.from_numpy(change(classes).astype(np.int64)), rtol=0, atol=0)
