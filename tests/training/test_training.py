"""A training as a notebook uses it, held against one process: mostly over threads, once over MPI.

Models, losses and optimisers are defined inside the tests, as in a cell: the ranks can't import this file.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import ImageError, LossError, PlanError, RankError, TraceError
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.program.update import UpdateRules
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, TrainingRecord, compare, train_reference
from mpi4dl_nb.engines.train.recipe import sgd
from mpi4dl_nb.engines.train.training import RankTraining

N = 4
TILES = Plan(split_size=1, num_spatial_parts=4, precision="float64")  # every rank has a part of the loss
STRIPS = Plan(split_size=2, num_spatial_parts=3, slice_method="vertical", precision="float64")  # only the last has it
SHAPE = 2, 3, 12, 20

Batch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(N, backend="loopback") as cluster:
        yield cluster


@pytest.fixture
def untouched():
    """A cluster that is not started: whoever calls its ranks fails with another error."""
    return Cluster(N, backend="loopback")


def make_unet() -> UNet:
    torch.manual_seed(0)
    return UNet(num_classes=3, width=4)


def make_resnet() -> nn.Module:
    torch.manual_seed(0)
    return resnet20_v1()


def make_batches(steps: int, shape: tuple[int, ...] = SHAPE, classes: int = 3, per_pixel: bool = True) -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    labels = (shape[0], *shape[2:]) if per_pixel else shape[:1]
    return [
        (torch.randn(shape, generator=random), torch.randint(classes, labels, generator=random)) for _ in range(steps)
    ]


def train_in_one_process(model: nn.Module, data: list[Batch], optimiser: Optimiser = sgd, loss=None) -> TrainingRecord:
    whole = [{"images": images, "labels": labels} for images, labels in data]
    return train_reference(ReferenceTraining(model, loss or nn.CrossEntropyLoss(), optimiser, torch.float64), whole)


def make_approx(value: float | tuple[float, ...]) -> object:
    """Equal but for the order of sums in float64."""
    return pytest.approx(value, rel=1e-10, abs=0)


def is_equal(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


# ---- the same as one process


@dataclass(frozen=True)
class Trained:
    """Three steps of a training on the ranks, and of the plain model."""

    model: nn.Module
    losses: tuple[float, ...]
    state: Mapping[str, Tensor]
    oracle: TrainingRecord


@pytest.fixture(
    scope="module",
    params=[
        (make_unet, TILES, make_batches(3)),
        (make_unet, STRIPS, make_batches(3)),
        (make_resnet, STRIPS, make_batches(3, (2, 3, 32, 32), classes=10, per_pixel=False)),
        (make_resnet, TILES, make_batches(3, (1, 3, 37, 32), classes=10, per_pixel=False)),
    ],
    ids=["unet-tiles", "unet-strips", "resnet-strips", "resnet-uneven-tiles"],
)
def trained(request, cluster) -> Trained:
    make, plan, data = request.param
    model = make()
    training = Training(model, plan, cluster, data[0][0].shape)
    losses = tuple(training.step(*batch) for batch in data)
    return Trained(model, losses, training.state_dict(), train_in_one_process(model, data))


@pytest.mark.nightly
def test_rules_of_the_update_are_those_of_one_process(cluster):
    """Gradients bounded over all ranks, and a rate that falls."""
    data = make_batches(3)
    rules = UpdateRules(clip_norm=0.3, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1))
    training = Training(
        make_unet(), STRIPS, cluster, data[0][0].shape, clip_norm=rules.clip_norm, scheduler=rules.scheduler
    )  # fmt: skip
    losses = tuple(training.step(*batch) for batch in data)
    whole = [{"images": images, "labels": labels} for images, labels in data]
    process = ReferenceTraining(make_unet(), nn.CrossEntropyLoss(), sgd, torch.float64, rules=rules)
    oracle = train_reference(process, whole)
    assert losses == make_approx(oracle.mean_losses)
    assert training.verify(data)["ok"]


@pytest.mark.nightly
def test_half_precision_is_verified_beside_one_process(cluster):
    training = Training(make_unet(), replace(STRIPS, precision="bfloat16"), cluster, SHAPE)
    images, labels = make_batches(1)[0]
    assert math.isfinite(training.step(images, labels))
    proof = training.verify(precision="bfloat16")
    assert proof["ok"], proof
    assert proof["dtype"] == "bfloat16"
    assert training.verify()["dtype"] == "float64"


@pytest.mark.sampled(1)
def test_the_losses_are_those_of_one_process(trained: Trained):
    assert trained.losses == make_approx(trained.oracle.mean_losses)


@pytest.mark.sampled(1)
def test_the_trained_state_loads_into_the_plain_model(trained: Trained):
    plain = copy.deepcopy(trained.model).double()
    plain.load_state_dict(trained.state, strict=True)
    oracle = {**trained.oracle.weights, **trained.oracle.buffers}
    loaded = plain.state_dict()
    assert loaded.keys() == oracle.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, oracle[name], rtol=1e-8, atol=1e-12)


@pytest.mark.sampled(1)
def test_training_leaves_the_model_that_was_given_as_it_was(trained: Trained):
    fresh = make_resnet() if isinstance(trained.model, nn.Sequential) else make_unet()
    assert is_equal(trained.model.state_dict(), fresh.state_dict())
    assert not is_equal(trained.state, fresh.double().state_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["loopback", "mpi"])
def test_what_a_cell_defines_trains(backend: str):
    """Model, loss and optimiser; over MPI the ranks are other processes, that know nothing of this one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            return self.head(torch.relu(self.wide(x)))

    def compute_loss(prediction, labels):
        return nn.functional.cross_entropy(prediction, labels) + prediction.square().mean()

    rate = 1e-2
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=rate)  # noqa: E731
    net, data = Net(), make_batches(3)
    plan = Plan(split_size=1, slice_method="2x1", precision="float64")
    with Cluster(2, backend=backend) as cluster:
        training = Training(net, plan, cluster, SHAPE, loss=compute_loss, optimiser=adam)
        losses = tuple(training.step(*batch) for batch in data)
        assert training.verify(data)["ok"]
    assert losses == make_approx(train_in_one_process(net, data, adam, compute_loss).mean_losses)


@pytest.mark.nightly
def test_two_trainings_on_one_cluster_do_not_mix(cluster):
    data = make_batches(4)
    one, other = (Training(make_unet(), plan, cluster, SHAPE) for plan in (TILES, STRIPS))
    losses = [(one.step(*data[0]), other.step(*data[2])), (one.step(*data[1]), other.step(*data[3]))]
    assert tuple(a for a, _ in losses) == make_approx(train_in_one_process(make_unet(), data[:2]).mean_losses)
    assert tuple(b for _, b in losses) == make_approx(train_in_one_process(make_unet(), data[2:]).mean_losses)


@pytest.mark.nightly
def test_steps_from_several_threads_come_one_after_another(cluster):
    """Each is a whole step, in some order; the batch is the same, so the losses are those of one thread."""
    ((images, labels),) = make_batches(1)
    first, second = (Training(make_unet(), TILES, cluster, SHAPE) for _ in range(2))
    wanted = sorted(first.step(images, labels) for _ in range(6))
    with ThreadPoolExecutor(3) as threads:
        losses = [threads.submit(second.step, images, labels) for _ in range(6)]
        assert sorted(loss.result() for loss in losses) == wanted
    assert second.steps == 6


@pytest.mark.nightly
def test_images_may_be_arrays(cluster):
    (images, labels), *_ = make_batches(1)
    training = Training(make_unet(), TILES, cluster, SHAPE)
    assert training.step(images.numpy(), labels.numpy()) == make_approx(
        train_in_one_process(make_unet(), [(images, labels)]).mean_losses[0]
    )


# ---- fit


@pytest.mark.nightly
def test_fit_learns_a_batch_that_it_sees_again(cluster):
    batch = make_batches(1)
    history = Training(make_unet(), TILES, cluster, SHAPE).fit(batch * 3, epochs=4, progress=False)
    assert history.losses == make_approx(train_in_one_process(make_unet(), batch * 12).mean_losses)
    assert history.losses[-1] < 0.9 * history.losses[0]
    assert history.images_per_s > 0


@pytest.mark.nightly
def test_fit_sees_a_generator_in_every_epoch(cluster):
    data = make_batches(2)
    history = Training(make_unet(), TILES, cluster, SHAPE).fit((batch for batch in data), epochs=2, progress=False)
    assert history.losses == make_approx(train_in_one_process(make_unet(), data * 2).mean_losses)


def test_fit_goes_on_where_the_last_one_ended(cluster):
    data = make_batches(2)
    training = Training(make_unet(), TILES, cluster, SHAPE)
    losses = [training.fit(data, progress=False).losses for _ in range(2)]
    assert losses[0] + losses[1] == make_approx(train_in_one_process(make_unet(), data * 2).mean_losses)


# ---- verify


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [TILES, replace(STRIPS, precision="float32")], ids=["tiles", "strips in float32"])
def test_verify_compares_in_float64(cluster, plan: Plan):
    proof = Training(make_unet(), plan, cluster, SHAPE).verify()
    assert proof["ok"], proof
    assert proof["dtype"] == "float64"
    assert proof["ranks"] == N
    assert 0 < proof["grad_rel"] < 1e-10


@pytest.mark.nightly
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_ranks_and_the_one_process_train_where_gradients_are_off(cluster, off):
    (batch,) = make_batches(1)
    training = Training(make_unet(), TILES, cluster, SHAPE)
    with off():
        loss = training.step(*batch)
        assert training.verify()["ok"]
    assert loss == Training(make_unet(), TILES, cluster, SHAPE).step(*batch)


@pytest.mark.nightly
def test_verify_leaves_the_training_untouched(cluster):
    """Weights, buffers and the optimiser's momentum."""
    first, second, *others = make_batches(5)
    training = Training(make_unet(), TILES, cluster, SHAPE)
    before = training.step(*first)
    state = training.state_dict()
    assert training.verify()["ok"]
    assert training.verify(others)["ok"]
    assert is_equal(training.state_dict(), state)
    assert (before, training.step(*second)) == make_approx(
        train_in_one_process(make_unet(), [first, second]).mean_losses
    )


def test_verify_tells_a_difference(cluster):
    """It cannot pass by saying nothing: the plain model's loss is made another one, by a millionth."""
    training = Training(make_unet(), TILES, cluster, SHAPE)
    training.loss = lambda prediction, labels: nn.functional.cross_entropy(prediction, labels) * (1 + 1e-6)
    prepared = training.recipe
    training._prepare = lambda plan: prepared
    proof = training.verify()
    assert not proof["ok"]
    assert proof["loss_rel"] == pytest.approx(1e-6, rel=1e-3)
    assert proof["grad_rel"] == pytest.approx(1e-6, rel=1e-3)


# ---- a precision that the plan changes


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "plan"), [("double", "float32"), ("half", "float32"), ("bfloat16", "bfloat16")])
def test_a_precision_that_the_plan_changes_is_reported_once(cluster, kind: str, plan: str):
    model = getattr(make_unet(), kind)()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    with pytest.warns(
        UserWarning, match=rf"tensors are {dtype} .*ranks hold them in float32.*precision='{plan}'"
    ) as told:
        training = Training(model, replace(TILES, precision=plan), cluster, SHAPE)
    assert len(told) == 1
    assert told[0].filename == __file__
    training.step(*make_batches(1)[0])  # a second warning would be an error
    assert training.verify()["ok"]


@pytest.mark.nightly
def test_a_precision_that_the_plan_keeps_or_that_was_nobodys_choice_is_not_reported(cluster):
    for model, precision in ((make_unet().double(), "float64"), (make_unet(), "float64"), (make_unet(), "float32")):
        Training(model, replace(TILES, precision=precision), cluster, SHAPE)


@pytest.mark.nightly
def test_one_buffer_in_another_precision_is_named(cluster):
    model = make_unet()
    model.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    with pytest.warns(
        UserWarning, match=r"^1 of the model's \d+ tensors are float64 \(scale\), but ranks hold them in float"
    ):
        Training(model, replace(TILES, precision="float32"), cluster, SHAPE)


# ---- timeline


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [TILES, STRIPS], ids=["tiles", "strips"])
def test_the_timeline_has_every_instruction_of_every_rank_once(cluster, plan: Plan):
    """Of the last step only."""
    training = Training(make_unet(), plan, cluster, SHAPE)
    training.fit(make_batches(2), progress=False)
    timeline = training.timeline()
    assert timeline.ranks == tuple(range(N))
    for program in training.programs:
        done = [event for event in timeline.events if event.rank == program.rank]
        steps = [(step.instruction.name, step.phase.value) for step in program.steps]
        assert [(event.name, event.phase) for event in done] == steps
        assert len(set(steps)) == len(steps)
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(done))


def test_close_frees_the_ranks(cluster):
    training = Training(make_unet(), TILES, cluster, SHAPE)
    name = training.name
    assert cluster.call(lambda host: name in host.get_kept(RankTraining)) == [True] * N
    training.close()
    assert cluster.call(lambda host: name in host.get_kept(RankTraining)) == [False] * N
    with pytest.raises(PlanError, match="do not hold this training any more: it was closed"):
        training.step(*make_batches(1)[0])
    training.close()


@pytest.mark.nightly
def test_a_training_that_nothing_refers_to_is_freed_with_the_next_one():
    with Cluster(1, backend="loopback") as alone:
        for _ in range(3):
            training = None
            gc.collect()
            training = Training(make_unet(), Plan(split_size=1, spatial_size=0), alone, SHAPE)
        assert alone.call(lambda host: list(host.get_kept(RankTraining))) == [[training.name]]
        assert alone.freed == []


@pytest.mark.nightly
def test_a_timeline_before_the_first_step(cluster):
    with pytest.raises(PlanError, match=r"none was run yet, or since load\(\)\. Call step"):
        Training(make_unet(), TILES, cluster, SHAPE).timeline()


# ---- said before a rank is touched


def test_a_plan_for_more_ranks_than_there_are(untouched):
    with pytest.raises(PlanError, match=r"needs 5 ranks \(4 \+ 1 over 2 stages\), but there are 4. Start 5 ranks"):
        Training(make_unet(), Plan(), untouched, SHAPE)


@pytest.mark.nightly
def test_more_tiles_than_rows(untouched):
    four_rows = replace(TILES, slice_method="horizontal")
    with pytest.raises(PlanError, match=r"stage 0: 3 rows of pixels cannot be cut into 4 tiles. Use a slice_method"):
        Training(make_resnet(), four_rows, untouched, (1, 3, 3, 32))
    with pytest.raises(PlanError, match=r"max_pool2d.* in pool, .*: 2 rows of pixels cannot be cut into 4 tiles"):
        Training(make_unet(), four_rows, untouched, (1, 3, 4, 8192))  # too many pixels for every rank to hold all


@pytest.mark.parametrize("shape", [(12, 20), (2, 3, 0, 20), (2, 3, 12, -1), ()])
def test_a_shape_that_is_no_batch_of_images(untouched, shape: tuple[int, ...]):
    with pytest.raises(ImageError, match=r"must be \(N, C, H, W\), four positive whole numbers"):
        Training(make_unet(), TILES, untouched, shape)


def test_a_model_that_decides_by_values(untouched):
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.one(x) if x.mean() > 0 else self.other(x)

    with pytest.raises(
        TraceError, match=r"test_training\.py\", line \d+: .*x\.mean\(\) > 0.* asks for the numbers \(bool\)"
    ):
        Training(Moody(), TILES, untouched, SHAPE)


def test_images_that_the_model_cannot_take(untouched):
    with pytest.raises(TraceError, match=r"UNet cannot be traced with images of shape \(2, 4, 12, 20\): "):
        Training(make_unet(), TILES, untouched, (2, 4, 12, 20))


def test_an_operator_without_an_entry(untouched):
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return torch.fft.fft2(self.stem(x)).real

    with pytest.raises(
        TraceError, match=r"(?s)^aten.fft_fft2.default .*return torch.fft.fft2\(self.stem\(x\)\).*write a rule"
    ):
        Training(Spectrum(), TILES, untouched, (2, 3, 129, 128))


def test_a_cluster_that_is_not_started(untouched):
    with pytest.raises(RankError, match="not started"):
        Training(make_unet(), TILES, untouched, SHAPE)


# ---- batches that do not fit


Change = Callable[[Batch], Batch]

BAD_BATCHES: dict[str, tuple[Change, str]] = {
    "size": (lambda b: (b[0][..., :16], b[1]), r"images have shape \(2, 3, 12, 16\) .* made for \(2, 3, 12, 20\)"),
    "channels": (lambda b: (b[0][:, :1], b[1]), r"images have shape \(2, 1, 12, 20\) .* made for \(2, 3, 12, 20\)"),
    "batch": (lambda b: (b[0][:1], b[1][:1]), r"images have shape \(1, 3, 12, 20\) .* made for \(2, 3, 12, 20\)"),
    "one image": (
        lambda b: (b[0][0], b[1][0]),
        r"images have shape \(3, 12, 20\), which is one image, but a step takes 2",
    ),
    "labels": (lambda b: (b[0], b[1][..., :16]), r"labels have shape \(2, 12, 16\) .* made for \(2, 12, 20\)"),
    "kind": (lambda b: (b[0], b[1] + 0.5), r"labels are torch.float32, but .* made for int64"),
    "bytes": (lambda b: (b[0].byte(), b[1]), r"images are torch.uint8, but the training computes in float64"),
    "complex": (lambda b: (b[0] * 1j, b[1]), r"images are torch.complex64, but .* made for float64: the imaginary"),
    "class": (lambda b: (b[0], b[1] + 7), r"A label is 9, but the loss takes numbers of 3 classes \(0 to 2\)"),
}


@pytest.fixture(scope="module")
def training(cluster) -> Training:
    return Training(make_unet(), TILES, cluster, SHAPE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
@pytest.mark.parametrize("verb", ["step", "fit", "verify"])
def test_a_batch_that_does_not_fit(training: Training, monkeypatch, change: Change, message: str, verb: str):
    """Is refused with both numbers, before a rank is asked."""
    monkeypatch.setattr(training.cluster, "call", lambda *arguments, **more: pytest.fail("a rank was asked"))
    bad = change(make_batches(1)[0])
    with pytest.raises(ImageError, match=message):
        training.step(*bad) if verb == "step" else getattr(training, verb)([bad])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [TILES, STRIPS], ids=["tiles", "strips"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_changes_nothing(cluster, plan: Plan, value: float):
    """Not the weights, the buffers or the momentum; the next good batch goes as if the bad one had never come."""
    first, second = make_batches(2)
    spoiled = first[0].clone()
    spoiled[1, 0, 0, 0] = value
    training = Training(make_unet(), plan, cluster, SHAPE)
    before = training.step(*first)
    state = training.state_dict()
    for _ in range(2):
        with pytest.raises(LossError, match=r"The loss is nan. No weight was changed. Found on rank 0: 1 value of"):
            training.step(spoiled, first[1])
    assert is_equal(training.state_dict(), state)
    assert (before, training.step(*second)) == make_approx(
        train_in_one_process(make_unet(), [first, second]).mean_losses
    )


@pytest.mark.nightly
def test_a_label_that_the_loss_leaves_out(cluster):
    images, labels = make_batches(1)[0]
    labels[0, :3] = -100
    training = Training(make_unet(), TILES, cluster, SHAPE)
    assert training.step(images, labels) == make_approx(
        train_in_one_process(make_unet(), [(images, labels)]).mean_losses[0]
    )


def test_it_says_what_it_is(training: Training):
    assert repr(training) == "Training(UNet, images (2, 3, 12, 20), 1 stage: 2x2 tiles; 4 ranks)"


# ---- known bugs: whoever mends one strikes its mark


def test_a_verdict_is_never_ok_where_something_is_not_a_number():
    """`verify --learning-rate 1e30` said ok, with params_rel NaN."""
    good, bad = {"weight": torch.ones(2)}, {"weight": torch.tensor([1.0, float("nan")])}
    oracle = TrainingRecord(({0: 1.0},), (good,), good, {})
    for wrong in (TrainingRecord(({0: 1.0},), (good,), bad, {}), TrainingRecord(({0: 1.0},), (bad,), good, {})):
        assert not compare(oracle, [oracle, wrong]).worst <= 1e-3


@pytest.mark.parametrize("plan", [TILES, STRIPS], ids=["in one stage", "in two"])
def test_one_weight_under_two_names_is_trained_as_one(cluster, plan):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model, data = Tied(), make_batches(2)
    training = Training(model, plan, cluster, SHAPE)
    training.fit(data, progress=False)
    state, weights = training.state_dict(), train_in_one_process(model, data).weights
    assert torch.equal(state["a.weight"], state["b.weight"])
    torch.testing.assert_close({name: state[name] for name in weights}, weights, rtol=1e-10, atol=0)


@pytest.mark.nightly
def test_a_label_that_the_loss_leaves_out_by_a_number_of_its_own(cluster):
    """255 is what many masks of pixels say where nobody has looked."""
    images, labels = make_batches(1)[0]
    labels[0, :3] = 255
    loss = nn.CrossEntropyLoss(ignore_index=255)
    training = Training(make_unet(), TILES, cluster, SHAPE, loss=loss)
    assert training.step(images, labels) == make_approx(
        train_in_one_process(make_unet(), [(images, labels)], loss=loss).mean_losses[0]
    )


def test_a_label_below_zero(training: Training):
    images, labels = make_batches(1)[0]
    with pytest.raises(ImageError, match="A label is -1"):
        training.step(images, labels - 1)


@pytest.mark.nightly
def test_a_model_of_which_nothing_is_trained(cluster):
    training = Training(make_unet().requires_grad_(False), TILES, cluster, SHAPE)
    assert training.step(*make_batches(1)[0]) == make_approx(
        train_in_one_process(make_unet(), make_batches(1)).mean_losses[0]
    )
    assert training.verify()["ok"]


@pytest.mark.nightly
def test_an_optimiser_that_cannot_be_made(untouched):
    with pytest.raises(PlanError, match="Invalid learning rate: -1"):
        Training(make_unet(), TILES, untouched, SHAPE, optimiser=lambda parameters: torch.optim.SGD(parameters, lr=-1))


def test_verify_without_a_batch(training: Training):
    with pytest.raises(ImageError):
        training.verify([])
