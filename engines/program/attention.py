"""Attention to blocks of keys, one after another, without a matrix of all scores; and dropout by position.

A running maximum and sum for each query make the result the same as that of all keys at once, whatever their order
(Rabe and Staats, 2021, arXiv:2112.05682, section 2). Backward computes the scores of each block again from the queries,
the keys and the logarithm of that sum (Dao et al., 2022, arXiv:2205.14135, appendix B.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.geometry.places import Ranges
from mpi4dl_nb.engines.program.kernels import get_sum_type, register_kernel
from mpi4dl_nb.engines.program.ring import ScoreRule, TokenPlaces, can_fuse, count_chunk_scores
from mpi4dl_nb.engines.program.rng import number_positions, sample_numbered


def number_tokens(tokens: TokenPlaces, device: torch.device) -> Tensor:
    """Return the numbers of a rank's tokens in the whole image.

    >>> number_tokens(TokenPlaces([(2, 0, 2), (3, 0, 1)], lead=1), torch.device("cpu"))
    tensor([0, 1, 4])
    """
    pixels = number_positions(tokens.pixels, device).flatten() + tokens.lead
    return torch.cat([torch.arange(tokens.lead, device=device), pixels]) if tokens.has_lead else pixels


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries (..., T, C) of one rank, with their places in the whole image as far as the `rule` asks for them.

    `groups` are the places along the axes before the tokens (batch and heads), `tokens` those of the queries.
    `key_count` is the number of keys of the whole image. `mask` (or None) broadcasts to (..., T, key_count): added to
    the scores, or of bool, where False hides a key. `seed` is that of the micro-batch.
    """

    query: Tensor
    rule: ScoreRule
    groups: Ranges
    tokens: TokenPlaces
    key_count: int
    mask: Tensor | None
    seed: int

    def chunk_rows(self, key: Tensor, value: Tensor) -> Iterator[slice]:
        """Yield the queries in chunks of which the scores with a block of keys are no more than its numbers."""
        *groups, rows, _ = self.query.shape
        most = count_chunk_scores(key.numel() + value.numel())
        size = max(1, most // max(1, math.prod(groups) * key.shape[-2]))
        return (slice(start, min(rows, start + size)) for start in range(0, rows, size))

    def repeat_heads(self, x: Tensor) -> Tensor:
        """Return keys or values (..., heads, K, C) with as many heads as the queries, if several of these share one."""
        if x.shape[:-2] == self.query.shape[:-2]:
            return x
        return x.repeat_interleave(self.query.shape[-3] // x.shape[-3], -3)

    def can_fuse(self, key: Tensor, value: Tensor) -> bool:
        """Return whether a kernel of PyTorch computes a block."""
        is_plain = can_fuse(self.rule, self.mask is not None, key.shape[-1], value.shape[-1])
        return is_plain and self.query.device.type == "cpu" and self.query.is_floating_point()

    def compute_scores(self, rows: slice, key: Tensor, columns: Tensor) -> Tensor:
        """Return the scores (..., rows, keys), in the type of sums; `columns` are the places of the keys."""
        query = self.query[..., rows, :]
        kind = get_sum_type(query)
        scores = (query.to(kind) * self.rule.scale) @ key.to(kind).mT
        if self.mask is not None:
            mask = _cut_rows(self.mask, rows)
            mask = mask.index_select(-1, columns) if _differs_by_key(mask) else mask
            scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
        if self.rule.causal:
            places = self._number_tokens()[rows]
            scores.masked_fill_(columns > places[:, None], -math.inf)
        return scores

    def draw_noise(self, rows: slice, columns: Tensor) -> Tensor | None:
        """Return what dropout multiplies the weights (..., rows, keys) by, or None without dropout."""
        if not self.rule.dropout:
            return None
        device = self.query.device
        groups = number_positions(self.groups, device).view(*self.query.shape[:-2], 1, 1)
        index = (groups * self.tokens.count + self._number_tokens()[rows, None]) * self.key_count + columns
        kept = sample_numbered(self.seed, 2 * self.rule.draw, index) < 1 - self.rule.dropout
        return kept.to(get_sum_type(self.query)).div_(1 - self.rule.dropout or 1.0)

    def _number_tokens(self) -> Tensor:
        return number_tokens(self.tokens, self.query.device)


class RunningAttention:
    """The result of the queries for the blocks of keys added so far: `add` each block once, then `finish`."""

    def __init__(self, queries: Queries, value_size: int) -> None:
        self.queries, query = queries, queries.query
        kind = get_sum_type(query)
        self.peaks = query.new_full((*query.shape[:-1], 1), -math.inf, dtype=kind)
        self.sums = torch.zeros_like(self.peaks)
        self.totals = query.new_zeros((*query.shape[:-1], value_size), dtype=kind)

    def add(self, key: Tensor, value: Tensor, columns: Tensor) -> None:
        """Add a block of keys (..., K, C) and their values (..., K, V), at the places `columns` of the whole image."""
        chunks = self.queries.chunk_rows(key, value)
        key, value = self.queries.repeat_heads(key), self.queries.repeat_heads(value)
        if self.queries.can_fuse(key, value):
            result, log_sums = attend_fused(self.queries.query, key, value, self.queries.rule.scale)
            self._join(slice(None), log_sums, torch.ones_like(log_sums), result)
            return
        for rows in chunks:
            self._add_rows(rows, key, value, columns)

    def _add_rows(self, rows: slice, key: Tensor, value: Tensor, columns: Tensor) -> None:
        """Add a block for some of the queries: a method, so that no other chunk of scores is alive meanwhile."""
        scores = self.queries.compute_scores(rows, key, columns)
        peaks = scores.amax(-1, keepdim=True)
        # Of a query that sees no key of the block, all weights are 0: -inf - -inf would be NaN.
        weights = scores.sub_(peaks.masked_fill(peaks == -math.inf, 0.0)).exp_()
        sums = weights.sum(-1, keepdim=True)
        if (noise := self.queries.draw_noise(rows, columns)) is not None:
            weights *= noise
        self._join(rows, peaks, sums, weights @ value.to(weights.dtype))

    def _join(self, rows: slice, peaks: Tensor, sums: Tensor, totals: Tensor) -> None:
        """Add the sums of a block, relative to the peaks of its scores, to those so far."""
        before = self.peaks[..., rows, :]
        joint = torch.maximum(before, peaks)
        shift = joint.masked_fill(joint == -math.inf, 0.0)
        old, new = (before - shift).exp_(), (peaks - shift).exp_()
        self.sums[..., rows, :].mul_(old).addcmul_(sums, new)
        self.totals[..., rows, :].mul_(old).addcmul_(totals.to(new.dtype), new)
        before.copy_(joint)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the result (..., T, V), and the logarithms (..., T, 1) of the sums of all exponentials.

        A query that sees no key gets 0, as in PyTorch.
        """
        seen = self.sums > 0
        result = self.totals / torch.where(seen, self.sums, 1.0)
        log_sums = torch.where(seen, self.peaks + self.sums.log(), 0.0)
        return result.to(self.queries.query.dtype), log_sums


class AttentionGradient:
    """The gradients of the queries and of a trained mask so far, and those of each block of keys.

    From the `grad` of the result; `mask` is None if that of a mask is not wanted.
    """

    def __init__(
        self, queries: Queries, result: Tensor, log_sums: Tensor, grad: Tensor, trains_mask: bool = False
    ) -> None:
        self.queries, self.result, self.log_sums = queries, result, log_sums
        self.grad = grad.to(log_sums.dtype)
        self.shift = (self.grad * result).sum(-1, keepdim=True)
        self.query = _make_sum(queries.query, log_sums.dtype)
        self.mask = _make_sum(queries.mask, log_sums.dtype) if trains_mask and queries.mask is not None else None

    def add(self, key: Tensor, value: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the gradients of queries and mask, and return those of a block of keys and of its values."""
        queries, kind = self.queries, self.log_sums.dtype
        block = queries.repeat_heads(key), queries.repeat_heads(value)
        if queries.can_fuse(*block):
            of_query, *grads = compute_fused_gradients(
                self.grad, queries.query, *block, self.result, self.log_sums, queries.rule.scale
            )
            self.query += of_query
        else:
            wide = [x.to(kind) for x in block]
            grads = [_make_sum(x, kind) for x in wide]
            for rows in queries.chunk_rows(key, value):
                self._add_rows(rows, wide, columns, grads)
        return _sum_heads(grads[0], key), _sum_heads(grads[1], value)

    def _add_rows(self, rows: slice, block: Sequence[Tensor], columns: Tensor, grads: Sequence[Tensor]) -> None:
        """Add what some of the queries contribute to their own gradient, and to those of keys and values, in place."""
        queries, (key, value), (of_key, of_value) = self.queries, block, grads
        weights = queries.compute_scores(rows, key, columns).sub_(self.log_sums[..., rows, :]).exp_()
        noise, grad = queries.draw_noise(rows, columns), self.grad[..., rows, :]
        of_value += (weights if noise is None else weights * noise).mT @ grad
        of_weights = grad @ value.mT
        if noise is not None:
            of_weights *= noise
        of_scores = of_weights.sub_(self.shift[..., rows, :]).mul_(weights)
        if self.mask is not None:
            _add_to_mask(_cut_rows(self.mask, rows), columns, of_scores)
        of_scores *= queries.rule.scale
        self.query[..., rows, :] += of_scores @ key
        of_key += of_scores.mT @ queries.query[..., rows, :].to(key.dtype)


def _make_sum(x: Tensor, kind: torch.dtype) -> Tensor:
    return torch.zeros_like(x, dtype=kind, memory_format=torch.contiguous_format)


def _sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of keys or values `x` from that of each head of the queries."""
    grad = grad if grad.shape == x.shape else grad.reshape(*x.shape[:-2], -1, *x.shape[-2:]).sum(-3)
    return grad.to(x.dtype)


def _cut_rows(mask: Tensor, rows: slice) -> Tensor:
    return mask[..., rows, :] if mask.dim() > 1 and mask.shape[-2] > 1 else mask


def _differs_by_key(mask: Tensor) -> bool:
    return mask.dim() > 0 and mask.shape[-1] > 1


def _add_to_mask(total: Tensor, columns: Tensor, of_scores: Tensor) -> None:
    """Add the gradient of a block of scores to that of a mask, summed over what the mask is broadcast to."""
    if _differs_by_key(total):
        total[..., columns] += of_scores.sum_to_size(*total.shape[:-1], len(columns))
    else:
        total += of_scores.sum_to_size(total.shape)


# Blocks by PyTorch's kernel for attention (Dao et al., as above), which has twice the speed on a CPU. It takes what has
# at most two axes before the tokens. The kernels of other devices are not used: on none of them was this measured.


def attend_fused(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result of one block of keys, and the logarithms (..., T, 1) of the sums of its exponentials."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, log_sums = kernel(*map(_to_heads, (query, key, value)), 0.0, False, scale=scale)
    shape = query.shape[:-1]
    return result.reshape(*shape, value.shape[-1]), log_sums.reshape(*shape, 1)


def compute_fused_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, log_sums: Tensor, scale: float
) -> list[Tensor]:
    """Return what a block of keys adds to the gradient of the queries, and the gradients of the keys and values.

    `grad`, `result` and `log_sums` are those of all blocks: with them, the sum over blocks is exact.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    tensors = map(_to_heads, (grad.to(query.dtype), query, key, value, result))
    grads = kernel(*tensors, _to_heads(log_sums).squeeze(-1), 0.0, False, scale=scale)
    return [part.reshape(x.shape) for part, x in zip(grads, (query, key, value), strict=True)]


def _to_heads(x: Tensor) -> Tensor:
    """Return (..., T, C) as (N, heads, T, C), with the channels of a token side by side in memory."""
    x = x.reshape(-1, *(1, *x.shape)[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attend(torch.autograd.Function):
    """Attention to keys that are all here, chunk by chunk, as one block of keys."""

    @staticmethod
    def forward(ctx: Any, queries: Queries, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        queries = replace(queries, query=query, mask=mask)
        running = RunningAttention(queries, value.shape[-1])
        running.add(key, value, torch.arange(key.shape[-2], device=key.device))
        result, log_sums = running.finish()
        ctx.save_for_backward(query, key, value, mask, result, log_sums)
        ctx.queries = replace(queries, query=query.new_empty(0), mask=None)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, result, log_sums = ctx.saved_tensors
        queries, trains_mask = replace(ctx.queries, query=query, mask=mask), ctx.needs_input_grad[4]
        gradient = AttentionGradient(queries, result, log_sums, grad, trains_mask)
        grads = gradient.add(key, value, torch.arange(key.shape[-2], device=key.device))
        of_mask = None if gradient.mask is None else gradient.mask.to(mask.dtype)
        return None, gradient.query.to(query.dtype), *grads, of_mask


@register_kernel("tile.attention")
def attend_by_place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: int,
    rule: ScoreRule,
    groups: Ranges,
    tokens: TokenPlaces,
) -> Tensor:
    """Return the result for queries that have all of their keys here; their order and dropout are those by place."""
    queries = Queries(query, rule, groups, tokens, key.shape[-2], mask, seed)
    result: Tensor = _Attend.apply(queries, query, key, value, mask)
    return result
