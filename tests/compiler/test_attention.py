"""Attention to more keys than each rank may hold: they travel in a ring, and the result is that of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb import Cluster, Training, forecast, show_step
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler import joined_attention, local_rules
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.rank_memory import predict_rank_memory
from mpi4dl_nb.engines.predict.rank_tally import build_tally
from mpi4dl_nb.engines.predict.tallies import ATTENTION
from mpi4dl_nb.engines.program import attention, ring
from mpi4dl_nb.engines.program.attention import AttentionGradient, Queries, RunningAttention
from mpi4dl_nb.engines.program.program import Traffic, count_traffic
from mpi4dl_nb.engines.program.ring import RingAttention, ScoreRule, TokenPlaces
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, verify
from tests.compiler.drawn import Calls, Pair, generate_images_on_grids, seeds
from tests.compiler.test_tokens import to_image, to_tokens
from tests.compiler.test_whole import make_compiler
from tests.exact import assert_exact, close, make_tiled_plan
from tests.predict.measured import measure_live_bytes
from tests.sampling import set_trials

FEW_PX = 3
"""So few positions may be gathered here that all keys travel."""


@pytest.fixture(autouse=True, scope="module")
def _few_keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_rules, "WHOLE_PX", FEW_PX)
        patch.setattr(joined_attention, "WHOLE_PX", FEW_PX)
        yield


def attend(x: Tensor, **how: object) -> Tensor:
    t = to_tokens(x)
    return to_image(F.scaled_dot_product_attention(t, t * 0.5, 2 * t, **how), x)


def attend_by_hand(x: Tensor, scale: float = 1.0, mask: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    t = to_tokens(x)
    scores = (t @ t.transpose(1, 2)) * scale
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return to_image(F.dropout(weights, dropout) @ t, x)


def attend_by_einsum(x: Tensor) -> Tensor:
    t = to_tokens(x)
    weights = (torch.einsum("nid,njd->nij", t, t) / 2).softmax(dim=-1)
    return to_image(torch.einsum("nij,njd->nid", weights, t), x)


def make_places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2] * x.shape[3], device=x.device)


def hide_all_for_some(x: Tensor) -> Tensor:
    """(tokens, tokens): the first queries see no key, and the others those at or before their place."""
    place = make_places(x)
    return (place[:, None] >= place) & (place[:, None] > 1)


def use_heads(x: Tensor) -> Tensor:
    t = to_tokens(x).unflatten(-1, (2, 2)).transpose(1, 2)
    return to_image(F.scaled_dot_product_attention(t, t, t).transpose(1, 2).flatten(2), x)


def attend_along(x: Tensor, order: tuple[int, ...], **how: object) -> Tensor:
    """Each row, or column, by itself (Ho et al., 2019, arXiv:1912.12180)."""
    lines = x.permute(order)
    back = tuple(order.index(axis) for axis in range(4))
    return F.scaled_dot_product_attention(lines, lines, lines, **how).permute(back)


def make_class_token(x: Tensor, count: int = 1) -> Tensor:
    return torch.arange(4.0 * count, dtype=x.dtype, device=x.device).reshape(1, count, 4).expand(x.shape[0], -1, -1) / 3


def use_class_tokens(x: Tensor, count: int = 1, **how: object) -> Tensor:
    """Pixels behind what attends with them: class tokens and registers (Darcet et al., 2024, arXiv:2309.16588)."""
    t = torch.cat([make_class_token(x, count), to_tokens(x)], 1)
    t = t + torch.arange(t.shape[1], dtype=x.dtype, device=x.device)[:, None] / 8
    t = F.layer_norm(t, (4,))
    heads = t.unflatten(-1, (2, 2)).transpose(1, 2)
    return t + F.scaled_dot_product_attention(heads, heads, heads, **how).transpose(1, 2).flatten(2)


def attend_in_groups(x: Tensor, **how: object) -> Tensor:
    """Four heads of queries, two of keys (Ainslie et al., 2023, arXiv:2305.13245)."""
    heads = to_tokens(x).unflatten(-1, (4, 1)).transpose(1, 2)
    keys = to_tokens(x * x)[..., :2].unflatten(-1, (2, 1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, keys, keys * 2, enable_gqa=True, **how)
    return to_image(mixed.transpose(1, 2).flatten(2), x)


RINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": attend,
    "scaled": lambda x: attend(x, scale=0.25),
    "causal": lambda x: attend(x, is_causal=True),
    "a mask of bool": lambda x: attend(x, attn_mask=hide_all_for_some(x)),
    "a mask of numbers": lambda x: attend(x, attn_mask=make_places(x).to(x.dtype) / 8),
    "a mask for each query": lambda x: attend(x, attn_mask=to_tokens(x)[..., :1].detach()),
    "dropout": lambda x: attend(x, dropout_p=0.4),
    "causal, with dropout": lambda x: attend(x, is_causal=True, dropout_p=0.4),
    "heads": use_heads,
    "heads that share keys": attend_in_groups,
    "heads that share keys, with dropout": lambda x: attend_in_groups(x, dropout_p=0.4),
    "a mask with a gradient": lambda x: attend(x, attn_mask=to_tokens(x)[..., 1:2]),
    "fewer keys": lambda x: to_image(
        F.scaled_dot_product_attention(
            to_tokens(x), *[to_tokens(F.max_pool2d(x, (1, 2), ceil_mode=True, stride=1, padding=(0, 1)))] * 2
        ),
        x,
    ),
    "other values than keys": lambda x: F.scaled_dot_product_attention(
        to_tokens(x), to_tokens(x), to_tokens(torch.cat([x, x], 1))
    ).sum(-1),
    "rows": lambda x: attend_along(x, (0, 2, 3, 1)),
    "columns": lambda x: attend_along(x, (0, 3, 2, 1)),
    "columns, with dropout": lambda x: attend_along(x, (0, 3, 2, 1), dropout_p=0.4),
    "without a gradient": lambda x: attend(x.detach()) * x,
    "of another's gradient": lambda x: attend(x) * x.sigmoid(),
    "by hand": attend_by_hand,
    "by hand, scaled": lambda x: attend_by_hand(x, 0.5),
    "by hand, with a mask": lambda x: attend_by_hand(x, 0.5, make_places(x).to(x.dtype) / 8),
    "by hand, with dropout": lambda x: F.dropout(attend_by_hand(F.dropout(x, 0.2), dropout=0.4), 0.2),
    "by einsum": attend_by_einsum,
    "a class token": lambda x: to_image(use_class_tokens(x)[:, 1:], x),
    "registers, and dropout": lambda x: to_image(use_class_tokens(x, 3, dropout_p=0.4)[:, 3:], x),
    "registers, causal": lambda x: to_image(use_class_tokens(x, 3, is_causal=True)[:, 3:], x),
    "what the class token has seen": lambda x: use_class_tokens(x)[:, 0],
    "what the registers have seen": lambda x: use_class_tokens(x, 3)[:, :2] * 2,
    "both": lambda x: to_image(use_class_tokens(x)[:, 1:], x) * use_class_tokens(x)[:, 0, :, None, None],
    "twice": lambda x: attend(attend(x)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RINGS)
@set_trials(3)
@given(case=generate_images_on_grids(), seed=seeds)
def test_attention_in_a_ring(name: str, case: tuple[Grid, Pair], seed: int):
    check_rule(name, case, seed, "auto")


def check_rule(name: str, case: tuple[Grid, Pair], seed: int, attention_keys: str, fused: int = 0) -> None:
    grid, size_px = case
    size_px = max(2, size_px[0]), max(2, size_px[1])  # of a single column, tokens are rows, and few
    images = torch.randn(2, 4, *size_px, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    plan = replace(make_tiled_plan(grid, fused), attention_keys=attention_keys)
    assert_exact(Calls(RINGS[name]), images, plan, same=close)


class TokenMixer(nn.Module):
    """A block of a vision transformer between two convolutions (Dosovitskiy et al., 2021, arXiv:2010.11929)."""

    def __init__(self, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.norm, self.qkv, self.project = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.dropout, self.causal = dropout, causal

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        t = to_tokens(x)
        query, key, value = self.qkv(self.norm(t)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, None, self.dropout, self.causal)
        return self.head(to_image(t + self.project(mixed.transpose(1, 2).flatten(2)), x))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("fused", [0, 2])
@pytest.mark.parametrize("grid", ["1x1", "1x3", "2x2", "3x2"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_transformer_between_convolutions(
    dropout: float, grid: str, fused: int, pieces: int, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(1)
    monkeypatch.setattr(ring, "PIECE_BYTES", 1 << 20 if pieces == 1 else 64)
    monkeypatch.setattr(ring, "_MOST_PIECES", pieces)
    assert_exact(
        TokenMixer(dropout).double(), torch.randn(2, 3, 7, 9).double(), make_tiled_plan(grid, fused), same=close
    )


@pytest.mark.parametrize(
    ("grid", "dropout", "causal", "kind"),
    [
        ("1x1", 0.0, True, "attention"),
        ("1x1", 0.3, False, "dropped"),
        ("2x1", 0.0, False, "attention"),
        ("2x1", 0.0, True, "scores"),
        ("2x1", 0.3, False, "dropped"),
    ],
)
def test_attention_is_forecast_by_what_it_computes(grid: str, dropout: float, causal: bool, kind: str):
    compiler = make_compiler(TokenMixer(dropout, causal), (1, 3, 8, 8), grid)
    tally = build_tally(compiler.compile_rank(0), compiler.lowering.graph)
    ops = [op for segment in tally.ways[0].segments.values() for op in segment.ops]
    (attention,) = (op for op in ops if op.kind in ATTENTION)
    assert (attention.kind, attention.shape) == (kind, (4, 64 if grid == "1x1" else 32, 64))


def test_keys_do_not_meet_on_any_rank():
    """Each rank sends its own keys and values to every other one, and backward once more, with their gradients."""
    program = make_compiler(TokenMixer(), (1, 3, 8, 8), "2x2").compile_rank(0)
    (item,) = (item for item in program.forward if isinstance(item, RingAttention))
    assert [block.key.shape for block in item.blocks] == [(1, 2, 16, 4)] * 4
    assert item.spec.shape == (1, 2, 16, 4)


class Biased(nn.Module):
    """A trained mask that is added to the scores: for each pair, or broadcast over heads, queries or keys."""

    def __init__(self, *shape: int, dropout: float = 0.0, by_hand: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
        self.dropout, self.by_hand = dropout, by_hand

    def forward(self, x: Tensor) -> Tensor:
        heads = to_tokens(x).unflatten(-1, (2, 2)).transpose(1, 2)
        if self.by_hand:
            scores = heads @ heads.mT / 2 + self.bias
            mixed = F.dropout(scores.softmax(-1), self.dropout) @ heads
        else:
            mixed = F.scaled_dot_product_attention(heads, heads * 2, heads, self.bias, self.dropout)
        return to_image(mixed.transpose(1, 2).flatten(2), x)


BIASES = {
    "each pair": Biased(2, 42, 42),
    "each pair, with dropout": Biased(42, 42, dropout=0.3),
    "each query": Biased(1, 42, 1),
    "each key": Biased(2, 1, 42),
    "each key alone": Biased(42),
    "each head": Biased(2, 1, 1),
    "by hand": Biased(2, 42, 42, by_hand=True, dropout=0.3),
    "by hand, one number": Biased(by_hand=True),
}


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("grid", ["1x3", "3x2"])
@pytest.mark.parametrize("name", BIASES)
def test_a_trained_mask_gets_its_gradient(name: str, grid: str, pieces: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring, "PIECE_BYTES", 1 << 20 if pieces == 1 else 64)
    plan = make_tiled_plan(grid)
    program = make_compiler(BIASES[name], (2, 4, 6, 7), grid).compile_rank(0)
    (item,) = (item for item in program.forward if isinstance(item, RingAttention))
    assert item.trained_mask
    images = torch.randn(2, 4, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_exact(BIASES[name].double(), images, plan, same=close)


def make_queries(rule: ScoreRule, seed: int = 0, mask: Tensor | None = None) -> tuple[Queries, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, 3, count, 4, dtype=torch.float64, generator=make) for count in (9, 11, 11))
    groups, tokens = [(2, 0, 2), (3, 0, 3)], TokenPlaces([(9, 0, 9)])
    return Queries(query, rule, groups, tokens, 11, mask, seed), key, value


def attend_with_all_scores(queries: Queries, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * queries.rule.scale
    if queries.rule.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    noise = queries.draw_noise(slice(None), torch.arange(key.shape[-2]))
    weights = scores.softmax(-1)
    return (weights if noise is None else weights * noise) @ value


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
@pytest.mark.parametrize("cuts", [(11,), (4, 7), (1, 1, 9)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_blocks_in_any_order_and_chunks_of_any_size(
    chunk: int, cuts: tuple[int, ...], dropout: float, causal: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "count_chunk_scores", lambda numel: chunk)
    rule = ScoreRule(0.5, causal=causal, dropout=dropout)
    queries, key, value = make_queries(rule)
    whole = attend_with_all_scores(queries, *(x.requires_grad_() for x in (queries.query, key, value)))
    grad = torch.randn_like(whole)
    whole.backward(grad)
    columns = torch.arange(11).split(cuts)[::-1]
    blocks = [(key.detach()[..., part, :], value.detach()[..., part, :], part) for part in columns]
    with torch.no_grad():
        running = RunningAttention(queries, 4)
        for block in blocks:
            running.add(*block)
        result, log_sums = running.finish()
        torch.testing.assert_close(result, whole, rtol=1e-12, atol=1e-12)
        gradient = AttentionGradient(queries, result, log_sums, grad)
        for keys, values, part in blocks:
            of_key, of_value = gradient.add(keys, values, part)
            torch.testing.assert_close(of_key, key.grad[..., part, :], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(of_value, value.grad[..., part, :], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient.query, queries.query.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype):
    queries, key, value = make_queries(ScoreRule(0.5))
    low = Queries(queries.query.to(dtype), *[getattr(queries, n) for n in ("rule", "groups", "tokens")], 11, None, 0)
    running = RunningAttention(low, 4)
    running.add(key.to(dtype), value.to(dtype), torch.arange(11))
    result, log_sums = running.finish()
    wide = (part.to(dtype).double() for part in (low.query, key, value))
    exact = F.scaled_dot_product_attention(*wide, scale=0.5)
    assert result.dtype == dtype
    assert log_sums.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


REFUSED: dict[str, tuple[nn.Module | Callable[[Tensor], Tensor], str]] = {
    "keys of all images": (
        lambda x: F.scaled_dot_product_attention(to_tokens(x), to_tokens(x)[:1], to_tokens(x)[:1]),
        "has queries, keys and values for other images and heads",
    ),
    "keys along another axis": (
        lambda x: F.scaled_dot_product_attention(x.permute(0, 2, 3, 1), x.permute(0, 3, 2, 1), x.permute(0, 3, 2, 1)),
        "sharded along different axes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_ring_cannot_do_is_refused(name: str):
    model, why = REFUSED[name]
    with pytest.raises(TraceError, match=why):
        make_compiler(model if isinstance(model, nn.Module) else Calls(model), (2, 4, 6, 6))


# In every kind of plan, as users train.


PLANS = {
    "tiles": Plan(split_size=1, num_spatial_parts=4),
    "tiles and other tiles": Plan(split_size=2, spatial_size=2, slice_method=("1x2", "3x1")),
    "a pipeline of tiles and one rank": Plan(split_size=2, spatial_size=1, slice_method="1x2", parts=2),
    "both directions": Plan(split_size=2, spatial_size=0, bidirectional=True, schedule="gems"),
    "zero bubble": Plan(split_size=2, spatial_size=2, slice_method="1x2", parts=2, schedule="zero_bubble"),
    "replicas": Plan(split_size=1, slice_method="1x2", data_parallel=2),
    "shares of a batch behind tiles": Plan(split_size=2, spatial_size=1, slice_method="1x2", local_dp=2),
    "computed again": Plan(split_size=1, slice_method="1x2", checkpoint_activations=True),
    "offloaded": Plan(split_size=1, slice_method="1x2", offload_activations=True),
    "layers": Plan(split_size=3, spatial_size=0),
}


class ClassTokens(nn.Module):
    """A vision transformer with a class token and registers, of pixels as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.tokens = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.randn(1, 3, 8))
        self.places = nn.Parameter(torch.randn(1, 51, 8))
        self.norm, self.qkv, self.project = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        pixels = to_tokens(self.stem(x))
        t = torch.cat([self.tokens.expand(len(x), -1, -1), pixels], 1) + self.places
        query, key, value = self.qkv(self.norm(t)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2)
        t = self.last(t + self.project(mixed.transpose(1, 2).flatten(2)))
        return self.head(t[:, 0]) + self.head(t[:, 3:].mean(1))


@pytest.mark.parametrize("name", PLANS)
def test_class_tokens_train_in_every_kind_of_plan(name: str):
    torch.manual_seed(1)
    model, plan, loss = ClassTokens(), replace(PLANS[name], precision="float64"), nn.CrossEntropyLoss()
    recipe = prepare(model, plan, (4, 3, 8, 6), loss)
    results = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, loss, 0))
    assert [told for told in results if not told["ok"]] == []


@pytest.mark.parametrize("name", PLANS)
def test_it_trains_in_every_kind_of_plan(name: str):
    torch.manual_seed(1)
    model, plan = TokenMixer(0.2), replace(PLANS[name], precision="float64")
    loss = nn.CrossEntropyLoss()
    recipe = prepare(model, plan, (4, 3, 8, 6), loss)
    results = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, loss, 0))
    assert [told for told in results if not told["ok"]] == []


@pytest.mark.parametrize("plan", [PLANS["tiles"], PLANS["computed again"]], ids=str)
@pytest.mark.parametrize("how", [{"causal": True}, {"dropout": 0.2}], ids=str)
def test_memory_is_as_forecast(how: dict[str, Any], plan: Plan, monkeypatch: pytest.MonkeyPatch):
    check_memory(TokenMixer(**how), plan, monkeypatch)


def test_memory_of_blocks_by_a_kernel_is_as_forecast(monkeypatch: pytest.MonkeyPatch):
    check_memory(TokenMixer(), PLANS["tiles"], monkeypatch)


@pytest.mark.parametrize("grid", ["1x1", "2x1", "1x2"])
def test_memory_of_keys_that_are_all_here_is_as_forecast(grid: str, monkeypatch: pytest.MonkeyPatch):
    plan = Plan(split_size=1, slice_method=grid, attention_keys="gather")
    check_memory(TokenMixer(), plan, monkeypatch)


def check_memory(model: nn.Module, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "PIECE_BYTES", 1 << 14)  # ranks that are threads copy what they send, unlike MPI
    recipe = prepare(model, plan, (1, 3, 96, 64), nn.CrossEntropyLoss())
    for measured in measure_live_bytes(recipe):
        memory = predict_rank_memory(measured.program, recipe.graph, plan, 1)
        assert memory.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.1)


def test_what_a_ring_sends_is_counted_beforehand(monkeypatch: pytest.MonkeyPatch):
    """In one message for each piece, and back again with gradients."""
    monkeypatch.setattr(ring, "PIECE_BYTES", 1 << 10)
    plan = PLANS["tiles"]
    recipe = prepare(TokenMixer(), plan, (2, 3, 16, 16), nn.CrossEntropyLoss())
    batch = make_batches(recipe, 0, steps=1)[0]

    def work(world: LoopbackWorld) -> tuple[Traffic, int]:
        training = RankTraining(world, recipe)
        training.step(training.cut(batch))
        sent = sum(event.bytes for event in training.worker.events if event.kind == "ring")
        return count_traffic(training.program)["ring"], sent

    for counted, sent in run_ranks(plan.ranks, work):
        block = 2 * 2 * (8 * 8) * (4 + 4) * 4  # images, heads, tokens, channels of keys and values, bytes
        assert counted.bytes == sent == 3 * 3 * block  # to three ranks: the block, once more, and a gradient
        assert counted.messages == 3 * 3 * 8


@pytest.mark.parametrize("backend", ["loopback", "in_turn"])
def test_a_ring_is_stepped_through(backend: str):
    images, labels = torch.randn(2, 3, 8, 6), torch.zeros(2, 8, 6).long()
    plan = replace(PLANS["tiles"], offload_activations=backend == "in_turn", precision="float64")
    with Cluster(4, backend=backend) as cluster:
        trainings = []
        for _ in range(2):
            torch.manual_seed(1)  # what the model draws follows from it
            trainings.append(Training(TokenMixer(0.2, causal=True), plan, cluster, images.shape))
        ran, walked = trainings
        loss = ran.step(images, labels)
        stepping = walked.stepping(images, labels)
        event = stepping.until(kind="ring")
        assert {rank.did.kind for rank in event.ranks} == {"ring"}
        assert "ring" in show_step(stepping).alt
        stepping.until(kind="ring", phase="backward")
        stepping.finish()
        assert stepping.loss == loss
        assert all(torch.equal(ran.state_dict()[name], part) for name, part in walked.state_dict().items())


def test_seconds_grow_with_the_pairs_of_pixels():
    """Four times the pixels: sixteen times the scores, of all rounds."""
    plan, seconds = PLANS["tiles"], []
    for side_px in (128, 256):
        events = forecast(TokenMixer(), plan, (1, 3, side_px, side_px), "DGX H100").timeline.events
        rings = [event for event in events if event.kind == "ring"]
        assert len(rings) == 2 * plan.ranks
        seconds.append(sum(event.busy_s for event in rings))
    assert 8 < seconds[1] / seconds[0] < 24
