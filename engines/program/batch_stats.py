"""The moments that batch norms counted per micro-batch, shared with every rank that keeps the running statistics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.comm.all_reduce import all_reduce
from engines.comm.world import World
from engines.program.instructions import ReduceBatchStats
from engines.program.micro_batch import MicroBatchState

__all__ = ["BatchStats"]


class BatchStats:
    """The moments of one training step, in the order of its micro-batches."""

    def __init__(self, lanes: Mapping[int, MicroBatchState], micro_batches: int) -> None:
        self.lanes, self.micro_batches = lanes, micro_batches
        self._shared: dict[str, Tensor] = {}

    def reduce(self, share: ReduceBatchStats, world: World) -> int:
        """All-reduce the moments over the ranks of all replicas and directions; return the bytes sent."""
        rows = []
        for name in share.moments:
            like = next(iter(self._get_own(name).values()))
            row = like.new_zeros((self.micro_batches, like.numel()))
            # Every row is non-zero on exactly one contributor, so the sum is a gather that keeps the bits of each row.
            for number in share.own_micro_batches:
                row[number] = self._get_own(name)[number].flatten()
            rows.append(row)
        total = torch.cat(rows, dim=1)
        under_way = all_reduce(world, total, share.group)
        under_way.wait()
        parts = total.split([row.shape[1] for row in rows], dim=1)
        self._shared.update(zip(share.moments, parts, strict=True))
        return under_way.sent_bytes

    def _get_own(self, name: str) -> dict[int, Tensor]:
        """Return the moments that this rank counted, by micro-batch."""
        return {number: lane.leaves[name].detach() for number, lane in self.lanes.items() if name in lane.leaves}

    def __call__(self, name: str) -> list[Tensor]:
        """Return the moments of one batch norm, for each micro-batch of the step."""
        own = self._get_own(name)
        if name not in self._shared:
            return list(own.values())
        like = next(iter(own.values()))
        return [row.view(like.shape) for row in self._shared[name]]
