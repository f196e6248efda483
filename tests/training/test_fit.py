"""`fit` on images that the ranks read by themselves: the losses of one process, breaks, bad images, what is told."""

from __future__ import annotations

import _thread
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.augmented import Augmented
from mpi4dl_nb.engines.images.dataset import LabelledImages, SyntheticImages, shuffle_indices
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.program.rng import compute_step_seed
from mpi4dl_nb.engines.train.history import History
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.recipe import sgd
from mpi4dl_nb.engines.train.train_loop import RankTrainLoop
from mpi4dl_nb.engines.train.training_events import count_predictions
from mpi4dl_nb.training import fit_run

SIZE, BATCH = (12, 20), 2
TILES = Plan(split_size=1, num_spatial_parts=4, precision="float64")
MIXED = Plan(split_size=2, num_spatial_parts=2, slice_method="vertical", precision="float64", parts=2)
ALONE = Plan(split_size=1, spatial_size=0, precision="float64")


@pytest.fixture(scope="module", params=[(TILES, 4), (MIXED, 3)], ids=["tiles", "mixed"])
def ranks(request):
    plan, count = request.param
    with Cluster(count, backend="loopback") as cluster:
        yield plan, cluster


@pytest.fixture(scope="module")
def one():
    with Cluster(1, backend="loopback") as cluster:
        yield ALONE, cluster


def make_unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet(num_classes=3, width=4, depth=1)


def make_training(ranks: tuple[Plan, Cluster]) -> Training:
    plan, cluster = ranks
    return Training(make_unet(), plan, cluster, (BATCH, 3, *SIZE))


def make_images(count: int = 7) -> LabelledImages:
    return Augmented(SyntheticImages(count, SIZE, 3, seed=1), ("flip", "rotate", "contrast"))


class Bad(SyntheticImages):
    """Some cannot be read, and only in the last columns."""

    def __init__(self, bad: tuple[int, ...], count: int = 7) -> None:
        super().__init__(count, SIZE, 3, seed=1)
        self.bad = bad

    def name(self, index: int) -> str:
        return f"pictures/{index}.png"

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        if index in self.bad and tile.cols.stop == SIZE[1]:
            raise ImageError(f"pictures/{index}.png is damaged")
        return super().part(index, tile, draw)


def compute_reference_losses(
    found: LabelledImages, numbers: list[tuple[int, int]], seed: int = 0, micro_batches: int = 1
) -> list[float]:
    """One process on whole images, `numbers` of (epoch, image), with the draws that the seed gives them."""
    alone = ReferenceTraining(make_unet(), nn.CrossEntropyLoss(), sgd, torch.float64, micro_batches=micro_batches)
    whole, losses = Tile.whole(*SIZE), []
    for start in range(0, len(numbers), BATCH):
        drawn = [
            (i, compute_step_seed(compute_step_seed(seed, epoch), 1 + i)) for epoch, i in numbers[start : start + BATCH]
        ]
        batch = {
            "images": torch.stack([found.part(i, whole, draw) for i, draw in drawn]).double(),
            "labels": torch.stack([found.mask(i, whole, draw) for i, draw in drawn]),
        }
        losses.append(alone.step(batch))
    return losses


def test_no_other_thread_comes_between_a_step_and_its_count(one, tmp_path, monkeypatch):
    """Or it would be refused, as if the training had been stopped while ranks changed their weights."""
    mine, asked = make_training(one), []
    call, record_step, cluster = mine.cluster.call, mine.record_step, mine.cluster

    def is_free() -> bool:
        free: list[bool] = []

        def take() -> None:
            free.append(cluster.turn.acquire(blocking=False))
            if free[0]:
                cluster.turn.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return free[0]

    def look(function, *args, **more):
        asked.append((function.__name__, is_free()))
        return call(function, *args, **more)

    def count(*given) -> None:
        asked.append(("count", is_free()))
        record_step(*given)

    monkeypatch.setattr(cluster, "call", look)
    monkeypatch.setattr(mine, "record_step", count)
    batch = torch.rand(BATCH, 3, *SIZE), torch.zeros(BATCH, *SIZE, dtype=torch.long)
    mine.step(*batch)
    mine.stepping(*batch).finish()
    mine.fit(make_images(2), progress=False)
    mine.state_dict()
    assert mine.is_whole()
    mine.load(mine.save(tmp_path))
    counted = {"step", "call_debug_step", "step_loop", "end_loop", "get_tensors", "get_updates", "save", "load"}
    counted.add("count")
    assert counted <= {name for name, _ in asked}
    assert [name for name, free in asked if free and name in counted] == []


def list_feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def make_approx(losses: list[float] | tuple[float, ...]) -> object:
    return pytest.approx(losses, rel=1e-10, abs=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_losses_are_those_of_one_process(ranks, workers: int):
    """On augmented images with masks, over two epochs."""
    history = make_training(ranks).fit(make_images(), epochs=2, progress=False, drop_last=True, seed=5, workers=workers)
    numbers = [(epoch, i) for epoch in range(2) for i in shuffle_indices(7, 5, epoch)[:6]]
    assert history.losses == make_approx(compute_reference_losses(make_images(), numbers, 5, ranks[0].micro_batches))
    assert [epoch.steps for epoch in history.epochs] == [3, 3]
    assert not list_feeders()


@pytest.mark.nightly
def test_one_rank_and_several_tell_the_same(ranks, one):
    many, alone = (
        make_training(where).fit(make_images(), epochs=2, progress=False, drop_last=True) for where in (ranks, one)
    )
    if ranks[0].micro_batches == 1:  # otherwise batch norm has other images to norm by
        assert many.losses == make_approx(alone.losses)
        assert [epoch.counts for epoch in many.epochs] == [epoch.counts for epoch in alone.epochs]
    assert all(sum(epoch.counts.true) == 6 * SIZE[0] * SIZE[1] and epoch.counts.pixels for epoch in many.epochs)


@pytest.mark.nightly
def test_the_next_fit_goes_on_with_the_next_epoch(ranks):
    whole = make_training(ranks).fit(make_images(), epochs=3, progress=False, drop_last=True)
    mine = make_training(ranks)
    parts = [mine.fit(make_images(), epochs=epochs, progress=False, drop_last=True) for epochs in (1, 2)]
    assert parts[0].losses + parts[1].losses == whole.losses
    assert [epoch.epoch for part in parts for epoch in part.epochs] == [0, 1, 2]


@pytest.mark.sampled(1)
def test_it_begins_again_where_it_is_asked_to_or_with_other_images(ranks):
    mine = make_training(ranks)
    for found, go_on, state in (
        (make_images(), True, 1),
        (make_images(), False, 1),
        (make_images(), True, 2),
        (make_images(6), True, 1),
    ):
        mine.fit(found, progress=False, drop_last=True, go_on=go_on)
        assert mine.feed_state["epoch"] == state
        assert mine.feed_state["images"] == len(found)


@pytest.mark.nightly
def test_a_break_in_mid_epoch_changes_nothing(ranks):
    """A bad image ends it; when the picture is mended, it goes on in the middle of the epoch."""
    whole = make_training(ranks).fit(SyntheticImages(7, SIZE, 3, seed=1), epochs=2, progress=False, drop_last=True)
    broken = shuffle_indices(7, 0, 1)[2]
    mine = make_training(ranks)
    first = mine.fit(Bad(()), progress=False, drop_last=True)
    with pytest.raises(ImageError, match=rf"pictures/{broken}.png is damaged"):
        mine.fit(Bad((broken,)), progress=False, drop_last=True)
    assert not list_feeders()
    state = json.loads(json.dumps(mine.feed_state))
    assert (state["epoch"], state["step"], state["position"]) == (1, 1, 2)
    with pytest.raises(ImageError, match=r"ended early, at step 1 .* order of seed 0: these are 6 images, seed None"):
        mine.fit(Bad((), 6), progress=False, drop_last=True)
    rest = mine.fit(Bad(()), progress=False, drop_last=True)
    assert first.losses + rest.losses == make_approx([*whole.losses[:3], *whole.losses[4:]])
    assert rest.epochs[0].steps == 2


@pytest.mark.nightly
def test_bad_images_are_left_out_and_reported_once(ranks, capsys):
    order = shuffle_indices(7, 0, 0)
    bad = tuple(order[1:3])
    history = make_training(ranks).fit(Bad(bad), epochs=2, progress=False, drop_last=True, on_bad_image="skip")
    good = [(epoch, i) for epoch in range(2) for i in shuffle_indices(7, 0, epoch) if i not in bad]
    numbers = [*good[:4], *good[5:9]]
    assert history.losses == make_approx(
        compute_reference_losses(SyntheticImages(7, SIZE, 3, seed=1), numbers, 0, ranks[0].micro_batches)
    )
    texts = [f"pictures/{index}.png is damaged" for index in bad]
    assert sorted(history.left_out) == sorted(texts)
    assert [epoch.left_out for epoch in history.epochs] == [2, 2]
    said = capsys.readouterr().out
    assert all(said.count(f"Left out from now on: {text}") == 1 for text in texts)


def test_images_that_are_left_out_are_named_by_each_training(one):
    mine = make_training(one)
    mine.fit(Bad((shuffle_indices(7, 0, 0)[0],)), progress=False, drop_last=True, on_bad_image="skip")
    again = mine.fit(make_images(), progress=False, drop_last=True)
    assert [text.partition(": ")[2] for text in again.left_out] == ["left out before, as unreadable"]
    assert [epoch.left_out for epoch in again.epochs] == [1]
    anew = mine.fit(make_images(), progress=False, drop_last=True, go_on=False)
    assert not anew.left_out


@pytest.mark.sampled(1)
def test_held_out_images_are_judged_and_change_nothing(ranks):
    judge = SyntheticImages(3, SIZE, 3, seed=9)
    mine = make_training(ranks)
    history = mine.fit(make_images(), epochs=2, progress=False, drop_last=True, held_out=judge)
    assert history.losses == make_approx(
        make_training(ranks).fit(make_images(), epochs=2, progress=False, drop_last=True).losses
    )

    model, whole = make_unet().double(), Tile.whole(*SIZE)
    model.load_state_dict(mine.state_dict())
    model.eval()
    scores = model(torch.stack([judge.part(i, whole) for i in range(3)]).double()).detach()
    labels = torch.stack([judge.mask(i, whole) for i in range(3)])
    last = history.epochs[-1].held_out
    assert last.loss == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-10)
    assert last.counts == count_predictions(scores, labels)
    assert last.counts.dice == history.epochs[-1].record["held_out_dice"]


@pytest.mark.nightly
def test_bad_held_out_images_end_it_or_are_left_out(one, capsys):
    judge = Bad((1,), 3)
    with pytest.raises(ImageError, match=r"pictures/1.png is damaged"):
        make_training(one).fit(make_images(), progress=False, drop_last=True, held_out=judge)
    found = make_training(one).fit(
        make_images(), epochs=2, progress=False, drop_last=True, held_out=judge, on_bad_image="skip"
    )
    assert [sum(epoch.held_out.counts.true) for epoch in found.epochs] == [2 * SIZE[0] * SIZE[1]] * 2
    assert [epoch.left_out for epoch in found.epochs] == [0, 0]
    assert capsys.readouterr().out.count("Left out from now on: pictures/1.png is damaged") == 1


@pytest.mark.nightly
def test_epochs_are_logged(ranks, tmp_path: Path):
    mine, path = make_training(ranks), tmp_path / "log.jsonl"
    histories: list[History] = [mine.fit(make_images(), progress=False, drop_last=True, log=path) for _ in range(2)]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [dict(epoch.record) for history in histories for epoch in history.epochs]
    assert [record["epoch"] for record in records] == [0, 1]
    assert all(0 <= record["data_wait"] <= 1 and record["images_per_s"] > 0 for record in records)
    assert all(0 < record["dice"] < 1 and record["held_out_loss"] is None for record in records)


def test_batches_are_reported_by_epoch_too(one):
    random = torch.Generator().manual_seed(1)
    pixels, classes = (
        torch.randn((BATCH, 3, *SIZE), generator=random),
        torch.randint(3, (BATCH, *SIZE), generator=random),
    )
    history = make_training(one).fit([(pixels, classes)] * 2, epochs=2, progress=False, drop_last=True)
    assert [(epoch.epoch, epoch.steps, sum(epoch.counts.true)) for epoch in history.epochs] == [
        (epoch, 2, 2 * BATCH * SIZE[0] * SIZE[1]) for epoch in (0, 1)
    ]


_ENOUGH = threading.Event()


class Waiting(SyntheticImages):
    """The reading of an image of the second step takes until somebody has had enough."""

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        if index == shuffle_indices(7, 0, 0)[3]:
            _ENOUGH.wait(20)
        return super().part(index, tile, draw)


@pytest.mark.nightly
@pytest.mark.parametrize(("interrupts", "done"), [(1, 2), (2, 1)], ids=["after this step", "at once"])
def test_an_interrupt_ends_fit_and_its_workers_and_it_goes_on(ranks, monkeypatch, interrupts: int, done: int):
    whole = make_training(ranks).fit(SyntheticImages(7, SIZE, 3), progress=False, drop_last=True)
    mine = make_training(ranks)
    monkeypatch.setattr(fit_run, "_LAST_S", 60.0)  # a second interrupt does not wait for it
    _ENOUGH.clear()
    second, begin = threading.Event(), mine.cluster.call

    def call(function, *arguments, **more):
        if function.__name__ == "step_loop" and mine.feed_state is not None:
            second.set()
        return begin(function, *arguments, **more)

    monkeypatch.setattr(mine.cluster, "call", call)

    def interrupt() -> None:
        if not second.wait(60):  # `fit` has failed by itself: another test is not to be interrupted
            return
        for _ in range(interrupts):
            time.sleep(1.0)  # until the last one was heard, on a busy machine too
            _thread.interrupt_main()
        time.sleep(0.2)
        _ENOUGH.set()

    patience = threading.Thread(target=interrupt, daemon=True)
    patience.start()
    with pytest.raises(KeyboardInterrupt):
        mine.fit(Waiting(7, SIZE, 3), progress=False, drop_last=True)
    patience.join()
    assert not list_feeders()
    assert mine.feed_state["step"] == done
    rest = mine.fit(SyntheticImages(7, SIZE, 3), progress=False, drop_last=True)
    assert rest.losses == make_approx(whole.losses[done:])


@pytest.mark.sampled(1)
def test_weights_that_only_some_ranks_have_changed_are_reported(ranks):
    """As where a second interrupt comes in the midst of an update: which cannot be timed, so it is done by hand."""
    mine = make_training(ranks)

    def add_rank_to_steps(host: object, name: str) -> None:
        host.get_kept(RankTrainLoop)[name].training.worker.steps += host.world.rank

    begin = mine.cluster.call

    def call(function, *arguments, **more):
        if function.__name__ == "step_loop":
            begin(add_rank_to_steps, mine.name)
        return begin(function, *arguments, **more)

    mine.cluster.call = call
    try:
        with (
            pytest.raises(PlanError, match=r"rank \d has done so \d times. Load a checkpoint"),
            pytest.warns(UserWarning, match=rf"1 of {ranks[0].ranks} have not done so"),
        ):
            mine.fit(SyntheticImages(7, SIZE, 3), progress=False, drop_last=True)
    finally:
        del mine.cluster.call


# ---- said before a rank is asked


@pytest.mark.nightly
def test_more_classes_than_the_model_answers_for(one):
    with pytest.raises(ImageError, match="have 5 classes, but the loss takes numbers of 3"):
        make_training(one).fit(SyntheticImages(7, SIZE, 5))
    with pytest.raises(ImageError, match="have 5 classes, but the loss takes numbers of 3"):
        make_training(one).fit(make_images(), held_out=SyntheticImages(7, SIZE, 5))


def test_nothing_to_judge_by(one):
    with pytest.raises(ImageError, match="no held-out images"):
        make_training(one).fit(make_images(), held_out=SyntheticImages(0, SIZE, 3))


class TwoAnswers(nn.Module):
    """Two predictions in training, and one or two in evaluation mode."""

    def __init__(self, in_evaluation: int) -> None:
        super().__init__()
        self.first, self.second, self.in_evaluation = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), in_evaluation

    def forward(self, x: Tensor) -> dict[str, Tensor] | Tensor:
        if not self.training and self.in_evaluation == 1:
            return self.first(x).mean((2, 3))
        return {"main": self.first(x).mean((2, 3)), "other": self.second(x).mean((2, 3))}


def of_both(answer: dict[str, Tensor], labels: Tensor) -> Tensor:
    return sum(nn.functional.cross_entropy(each, labels) for each in answer.values())


def sum_of_both_or_one(answer: dict[str, Tensor] | Tensor, labels: Tensor) -> Tensor:
    return of_both(answer if isinstance(answer, dict) else {"main": answer}, labels)


def of_squeezed(answer: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(answer.squeeze(), labels)


def make_classifier_training(model: nn.Module, loss, one: tuple[Plan, Cluster]) -> Training:
    return Training(model, *one, (BATCH, 3, *SIZE), loss=loss, labels=torch.zeros(BATCH, dtype=torch.long))


@pytest.mark.parametrize(
    ("model", "loss", "text"),
    [
        (TwoAnswers(2), of_both, "answers with 2 tensors in evaluation mode.*The loss of_both takes what"),
        (TwoAnswers(1), of_both, r"The loss of_both fails for the prediction \(1, 3\).*of one image "),
        (
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1)),
            of_squeezed,
            r"the loss fails with labels of shape \(1,\)",
        ),
    ],
)
def test_a_loss_that_cannot_judge_one_image_is_refused_before_the_first_step(one, model: nn.Module, loss, text: str):
    mine = make_classifier_training(model, loss, one)
    with pytest.raises(TraceError, match=text):
        mine.fit(SyntheticImages(4, SIZE, 3), progress=False, held_out=SyntheticImages(3, SIZE, 3))
    assert mine.feed_state is None


@pytest.mark.nightly
def test_a_loss_may_take_another_answer_in_evaluation(one):
    mine = make_classifier_training(TwoAnswers(1), sum_of_both_or_one, one)
    history = mine.fit(SyntheticImages(4, SIZE, 3), progress=False, held_out=SyntheticImages(3, SIZE, 3))
    assert history.epochs[0].held_out.loss > 0


@pytest.mark.nightly
def test_a_log_that_cannot_be_written_ends_it_before_the_first_step(one, tmp_path: Path):
    mine = make_training(one)
    with pytest.raises(PlanError, match="cannot be written"):
        mine.fit(make_images(), log=tmp_path / "gone" / "log.csv")
    assert mine.feed_state is None
    assert not list_feeders()
