"""Dropout and other draws: the same numbers for the same pixels, however the image is cut."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program import rng
from mpi4dl_nb.engines.program.rng import compute_step_seed, sample_uniform
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from tests.compiler.drawn import Pair, check, generate_images_on_grids, seeds
from tests.exact import (
    assert_exact,
    close,
    finish,
    make_tiled_plan,
    make_whole_numbers,
    prepare_worker,
    with_whole_weights,
)
from tests.sampling import set_trials

CPU = torch.device("cpu")


def drop_paths(x: Tensor) -> Tensor:
    """Stochastic depth (Huang et al., 2016, arXiv:1603.09382) as timm writes it."""
    return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5).div_(0.5)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of most": lambda x: F.dropout(x, 0.75),
    "dropout of all": lambda x: F.dropout(x, 1.0) + x,
    "dropout of nothing": lambda x: F.dropout(x, 0.0) * 2,
    "dropout in place": lambda x: F.dropout(2 * x, 0.5, inplace=True),
    "dropout of channels": lambda x: F.dropout2d(x, 0.5),
    "dropout behind permute": lambda x: F.dropout(x.permute(0, 2, 3, 1), 0.5).permute(0, 3, 1, 2),
    "one dropout behind another": lambda x: F.dropout(F.dropout(x, 0.5), 0.5),
    "dropout twice": lambda x: F.dropout(x, 0.5) - F.dropout(x, 0.5),
    "switched off and on": lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.5),
    "stochastic depth": drop_paths,
    "stochastic depth by rand": lambda x: x * (torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype) + 0.5).floor(),
    "a mask for every pixel": lambda x: x * (torch.rand_like(x) > 0.5),
    "a mask for all images": lambda x: x * (torch.rand(x.shape[1:], dtype=x.dtype) > 0.5),
    "bernoulli of a probability": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli by number": lambda x: x * torch.bernoulli(x.detach(), 0.5),
    "whole numbers from zero": lambda x: x * torch.randint(5, (2, 1, 1, 1)),
    "whole numbers": lambda x: x * torch.randint(0, 5, (2, 1, 1, 1)),
    "behind the global pool": lambda x: x * F.dropout(x.sum((2, 3), keepdim=True), 0.5),
}
FLOATS = {
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "dropout of few": lambda x: F.dropout(x, 0.1),
    "leaky at random": lambda x: F.rrelu(x, training=True),
    "leaky at random, in place": lambda x: F.rrelu(F.dropout(2 * x, 0.5), 0.1, 0.4, True, inplace=True),
    "leaky at random, at rest": lambda x: F.rrelu(x) * F.rrelu(F.dropout(x, 0.5), training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise for channels": lambda x: x * torch.randn(1, x.shape[1], 1, 1, dtype=x.dtype),
    "noise in place": lambda x: x + torch.empty_like(x).normal_(2.0, 0.5),
    "uniform in place": lambda x: x * torch.empty_like(x).uniform_(-1, 3),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DRAWS)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_draws(name: str, case: tuple[Grid, Pair], seed: int):
    """Bit for bit those of one process, forward and backward."""
    grid, size_px = case
    check(DRAWS[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FLOATS)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_draws_of_fractions(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(FLOATS[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid, same=close)


@pytest.mark.parametrize("grids", [("2x2",), ("1x3", "2x2")], ids=" then ".join)
def test_draws_in_several_stages(grids: tuple[str, ...]):
    """A draw is numbered in the whole model, and on a stage of one rank it is the same."""
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout2d(0.5)]
    plan = Plan(split_size=2, spatial_size=len(grids), slice_method=grids, precision="float64")
    assert_exact(with_whole_weights(nn.Sequential(*layers)), make_whole_numbers(2, 2, 6, 7), plan)


@pytest.mark.parametrize(
    "plan", [make_tiled_plan("2x2"), Plan(split_size=2, num_spatial_parts=3, slice_method="vertical")]
)
def test_verify_draws_what_the_ranks_draw(plan: Plan):
    """Three steps of a classifier with dropout and stochastic depth, against the plain model in one process."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + drop_paths(F.dropout2d(self.body(x.relu()), 0.2))
            return self.head(self.drop(x.mean((2, 3))))

    with Cluster(4, backend="loopback") as cluster:
        proof = Training(Net(), plan, cluster, (2, 3, 11, 13)).verify()
    assert proof["ok"], proof


def test_another_step_draws_another_mask():
    ones = torch.ones(2, 3, 16, 16).double()
    start = prepare_worker(nn.Sequential(nn.Dropout(0.5)), ones, ones, make_tiled_plan("1x1"))

    def draw_two_masks(world: LoopbackWorld) -> list[Tensor]:
        worker, made = finish(start(world)), []
        for _ in range(2):
            made.append(worker.peek(worker.program.get_direction_program(0).prediction).clone())
            worker.restart({0: {"images": ones, "labels": ones}})
            finish(worker)
        return made

    (first, second), *_ = run_ranks(1, draw_two_masks)
    assert 0.4 < (first != second).double().mean() < 0.6


class Rows(nn.Module):
    """A function of the pixels in rows, (N, H * W, 4), between two layers."""

    def __init__(self, function: Callable[[Rows, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), function
        self.recurrent = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).relu().flatten(2).transpose(1, 2)
        return self.last(self.function(self, rows).sigmoid().mean(1))


OF_THE_GENERATOR = {
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "recurrent": lambda m, x: m.recurrent(x)[0],
    "poisson": lambda m, x: x * torch.poisson(torch.full_like(x, 3.0)),
    "some rows": lambda m, x: x[:, torch.multinomial(torch.ones(20, dtype=x.dtype), 9)],
    "rows in another order": lambda m, x: x * x[:, torch.randperm(x.shape[1])],
}


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of torch.export, for weights of the LSTM
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OF_THE_GENERATOR)
def test_draws_of_the_generator_are_the_same_when_computed_again(name: str):
    """And in another process: they follow from the seed of the training, and leave the generator as it was."""

    def train(again: bool, state: int) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model, batch = Rows(OF_THE_GENERATOR[name]), {"images": torch.randn(4, 3, 8, 8), "labels": torch.arange(4)}
        plan = Plan(split_size=2, spatial_size=0, parts=2, precision="float64", checkpoint_activations=again)
        recipe = prepare(model, plan, (4, 3, 8, 8))
        torch.manual_seed(state)
        before = torch.get_rng_state()

        def work(world: LoopbackWorld) -> tuple[list[float], list[Tensor]]:
            training = RankTraining(world, recipe)
            whole = {name: tensor.to(getattr(torch, recipe.step_specs[name].dtype)) for name, tensor in batch.items()}
            losses = [loss for _ in range(3) for loss in training.step(training.cut(whole)).losses.values()]
            return losses, [weight.detach().clone() for weight in training.weights.values()]

        (*_, first), (losses, second) = run_ranks(2, work)
        assert torch.equal(torch.get_rng_state(), before)
        return losses, [*first, *second]

    (losses, plain), (others, again) = train(again=False, state=1), train(again=True, state=2)
    assert losses == others
    assert len(set(losses)) == 6
    assert all(torch.equal(one, two) for one, two in zip(plain, again, strict=True))


@set_trials(50)
@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**31))
def test_seeds_of_steps_are_words(seed: int, step: int):
    assert 0 <= compute_step_seed(seed, step) < 2**64 != compute_step_seed(seed, step + 1)


def test_numbers_are_those_of_splitmix():
    """The first outputs for seed 1234567, as published with the reference implementation (Vigna, splitmix64.c)."""
    state, mixed = 1234567, []
    for _ in range(3):
        state = (state + rng._GOLDEN) % 2**64
        mixed.append(rng._mix(state))
    assert mixed == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("part", [(0, 64, 0, 64), (3, 40, 7, 64)])
def test_a_part_is_cut_out_of_the_whole(part: tuple[int, int, int, int]):
    r0, r1, c0, c1 = part
    whole = sample_uniform(5, 2, [(3, 0, 3), (64, 0, 64), (64, 0, 64)], CPU)
    assert torch.equal(sample_uniform(5, 2, [(3, 0, 3), (64, r0, r1), (64, c0, c1)], CPU), whole[:, r0:r1, c0:c1])


def test_numbers_are_uniform_and_do_not_follow_from_their_neighbours():
    """Mean and variance within five deviations of what they estimate; so are products of neighbours of all kinds."""
    n = 2**20
    u = sample_uniform(1, 0, [(1024, 0, 1024), (1024, 0, 1024)], CPU)
    assert 0 <= u.min() < u.max() < 1
    centred = (u - 0.5) * 12**0.5
    assert abs(centred.mean()) < 5 / n**0.5
    assert abs(centred.square().mean() - 1) < 5 / n**0.5
    others = [
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll((1, 1), (0, 1)),
        (sample_uniform(1, 1, [(1024, 0, 1024)] * 2, CPU) - 0.5) * 12**0.5,
        (sample_uniform(2, 0, [(1024, 0, 1024)] * 2, CPU) - 0.5) * 12**0.5,
    ]
    assert all(abs((centred * other).mean()) < 5 / n**0.5 for other in others)
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - n / 64).square() / (n / 64)).sum() < 130  # chi squared, 63 degrees of freedom


def test_an_oracle_draws_as_pytorch_does_when_it_is_not_asked():
    """Outside of `CounterRNGMode` nothing changes."""
    model = nn.Dropout(0.5)
    torch.manual_seed(0)
    first = model(torch.ones(8, 8))
    torch.manual_seed(0)
    assert torch.equal(first, copy.deepcopy(model)(torch.ones(8, 8)))
