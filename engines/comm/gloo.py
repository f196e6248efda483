"""torch.distributed's own sum over the same ranks: what else a user could have."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from engines.comm.world import World

__all__ = ["GlooSum", "gloo_sum"]

_PATIENCE = timedelta(seconds=60)


class GlooSum:
    """`torch.distributed.all_reduce` over gloo, in place, over all ranks."""

    def __call__(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)


@contextmanager
def gloo_sum(world: World) -> Iterator[GlooSum | None]:
    """Gloo among the ranks of a world while it lasts, None where it cannot be had; collective.

    Rank 0 listens, and its address reaches the others through the world.
    """
    store = _store(world) if all(world.gather(dist.is_available() and dist.is_gloo_available())) else None
    if store is None:
        yield None
        return
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=_PATIENCE)
    try:
        yield GlooSum()
    finally:
        dist.destroy_process_group()


def _store(world: World) -> dist.TCPStore | None:
    """Where the ranks tell each other their addresses."""
    hosts = world.gather(socket.gethostname())
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    served = None
    if world.rank == 0:
        served = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    port = world.gather(served and served.port)[0]
    return served or dist.TCPStore(host, port, world.size, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
