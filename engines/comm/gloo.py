"""torch.distributed's all-reduce over the same ranks, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from engines.comm.rendezvous import PATIENCE, make_tcp_store
from engines.comm.world import World

__all__ = ["GlooAllReduce", "connect_gloo"]


class GlooAllReduce:
    """`torch.distributed.all_reduce` over gloo, in place, over all ranks."""

    def __call__(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


@contextmanager
def connect_gloo(world: World) -> Iterator[GlooAllReduce | None]:
    """Connect the ranks of a world by gloo within the context, or yield None if that is not available; collective.

    Rank 0 listens; the world's messages carry its address to the others.
    """
    if not all(world.all_gather(dist.is_available() and dist.is_gloo_available())):
        yield None
        return
    dist.init_process_group(
        "gloo", store=make_tcp_store(world), rank=world.rank, world_size=world.size, timeout=PATIENCE
    )
    try:
        yield GlooAllReduce()
    finally:
        dist.destroy_process_group()
