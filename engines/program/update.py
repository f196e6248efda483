"""The end of a training step: gradients summed over the ranks that share a weight, and the buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engines.comm.total import all_reduce
from engines.comm.world import World
from engines.program.instructions import RunningStatistics, SumGradients, Update
from engines.spatial.kernels import batch_statistics

__all__ = ["sum_gradients", "update_buffers"]


def sum_gradients(weights: Mapping[str, Tensor], bucket: SumGradients, world: World) -> int:
    """Replace each weight's gradient by its sum over the group, in one message; its bytes."""
    shared = [weights[name] for name in bucket.weights]
    flat = torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in shared])
    all_reduce(world, flat, bucket.group).wait()
    for weight, total in zip(shared, flat.split([w.numel() for w in shared]), strict=True):
        weight.grad = total.view_as(weight)
    return flat.nbytes


def update_buffers(buffers: Mapping[str, Tensor], update: Update, moments: Callable[[str], list[Tensor]]) -> None:
    """Running mean and (unbiased) variance move by `momentum`, once for each micro-batch; counters count.

    What an instance norm counts for each image, its buffers keep as the mean over all images.
    """
    with torch.no_grad():
        for entry in update.statistics:
            for counted in moments(entry.moments):
                _move(buffers, entry, counted)
        for name, amount in update.counters.items():
            buffers[name].add_(amount)


def _move(buffers: Mapping[str, Tensor], entry: RunningStatistics, counted: Tensor) -> None:
    """Move running statistics by what one micro-batch counted."""
    mean, variance = batch_statistics(counted, entry.counts)
    unbiased = variance * (sum(entry.counts) / max(1, sum(entry.counts) - 1))
    for name, now in ((entry.mean_buffer, mean), (entry.variance_buffer, unbiased)):
        buffer = buffers[name]
        buffer.lerp_(now.view(-1, *buffer.shape).mean(0).to(buffer.dtype), entry.momentum)
