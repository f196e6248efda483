"""Attention to blocks of keys, one after another, without a matrix of all scores; and dropout by position.

A running maximum and sum for each query make the result the same as that of all keys at once, whatever their order
(Rabe and Staats, 2021, arXiv:2112.05682, section 2). Backward computes the scores of each block again from the queries,
the keys and the logarithm of that sum (Dao et al., 2022, arXiv:2205.14135, appendix B.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpi4dl_nb.engines.geometry.places import Ranges
from mpi4dl_nb.engines.program.kernels import get_sum_type, register_kernel
from mpi4dl_nb.engines.program.ring import ScoreRule, TokenPlaces, count_chunk_scores
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

    def compute_scores(self, rows: slice, key: Tensor, columns: Tensor) -> Tensor:
        """Return the scores (..., rows, keys), in the type of sums; `columns` are the places of the keys."""
        query = self.query[..., rows, :]
        kind = get_sum_type(query)
        scores = (query.to(kind) * self.rule.scale) @ key.to(kind).mT
        if self.mask is not None:
            mask = self.mask if self.mask.dim() < 2 or self.mask.shape[-2] == 1 else self.mask[..., rows, :]
            mask = mask if mask.shape[-1] == 1 else mask.index_select(-1, columns)
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if self.rule.causal:
            places = self._number_tokens()[rows]
            scores = scores.masked_fill(columns > places[:, None], -math.inf)
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
        for rows in self.queries.chunk_rows(key, value):
            self._add_rows(rows, key, value, columns)

    def _add_rows(self, rows: slice, key: Tensor, value: Tensor, columns: Tensor) -> None:
        """Add a block for some of the queries: a method, so that no other chunk of scores is alive meanwhile."""
        scores, before = self.queries.compute_scores(rows, key, columns), self.peaks[..., rows, :]
        peaks = torch.maximum(before, scores.amax(-1, keepdim=True))
        # Of a query that has seen no key so far, all weights are 0: -inf - -inf would be NaN.
        shift = peaks.masked_fill(peaks == -math.inf, 0.0)
        weights, old = scores.sub_(shift).exp_(), (before - shift).exp_()
        self.sums[..., rows, :] = self.sums[..., rows, :] * old + weights.sum(-1, keepdim=True)
        if (noise := self.queries.draw_noise(rows, columns)) is not None:
            weights *= noise
        self.totals[..., rows, :] = self.totals[..., rows, :] * old + weights @ value.to(weights.dtype)
        self.peaks[..., rows, :] = peaks

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the result (..., T, V), and the logarithms (..., T, 1) of the sums of all exponentials.

        A query that sees no key gets 0, as in PyTorch.
        """
        seen = self.sums > 0
        result = self.totals / torch.where(seen, self.sums, 1.0)
        log_sums = torch.where(seen, self.peaks + self.sums.log(), 0.0)
        return result.to(self.queries.query.dtype), log_sums


class AttentionGradient:
    """The gradient of the queries so far, and those of each block of keys, from the `grad` of the result."""

    def __init__(self, queries: Queries, result: Tensor, log_sums: Tensor, grad: Tensor) -> None:
        self.queries, self.log_sums = queries, log_sums
        self.grad = grad.to(log_sums.dtype)
        self.shift = (self.grad * result).sum(-1, keepdim=True)
        self.query = torch.zeros_like(queries.query, dtype=log_sums.dtype, memory_format=torch.contiguous_format)

    def add(self, key: Tensor, value: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the gradient of the queries, and return those of a block of keys and of its values."""
        wide = [x.to(self.log_sums.dtype) for x in (key, value)]
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in wide]
        for rows in self.queries.chunk_rows(key, value):
            self._add_rows(rows, wide, columns, grads)
        return grads[0].to(key.dtype), grads[1].to(value.dtype)

    def _add_rows(self, rows: slice, block: Sequence[Tensor], columns: Tensor, grads: Sequence[Tensor]) -> None:
        """Add what some of the queries contribute to their own gradient, and to those of keys and values, in place."""
        queries, (key, value), (of_key, of_value) = self.queries, block, grads
        weights = queries.compute_scores(rows, key, columns).sub_(self.log_sums[..., rows, :]).exp_()
        noise, grad = queries.draw_noise(rows, columns), self.grad[..., rows, :]
        of_value += (weights if noise is None else weights * noise).mT @ grad
        of_weights = grad @ value.mT
        if noise is not None:
            of_weights *= noise
        of_scores = of_weights.sub_(self.shift[..., rows, :]).mul_(weights).mul_(queries.rule.scale)
        self.query[..., rows, :] += of_scores @ key
        of_key += of_scores.mT @ queries.query[..., rows, :].to(key.dtype)


@register_kernel("tile.attention")
def attend_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: int,
    rule: ScoreRule,
    groups: Ranges,
    tokens: TokenPlaces,
) -> Tensor:
    """Return the result for queries that have all of their keys here; the weights are dropped by position.

    With the matrix of scores, as PyTorch computes dropout: so autograd finds the gradient, that of a trained mask too.
    """
    count = key.shape[-2]
    queries, columns = Queries(query, rule, groups, tokens, count, mask, seed), torch.arange(count, device=query.device)
    scores = queries.compute_scores(slice(None), key, columns)
    peaks = scores.detach().amax(-1, keepdim=True)
    weights = (scores - peaks.masked_fill(peaks == -math.inf, 0.0)).exp()
    sums = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(sums > 0, sums, 1.0)
    noise = queries.draw_noise(slice(None), columns)
    weights = weights if noise is None else weights * noise
    return (weights @ value.to(weights.dtype)).to(query.dtype)
