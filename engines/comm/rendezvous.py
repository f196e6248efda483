"""The rendezvous of a world's ranks for torch.distributed's backends, and gloo over it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from engines.comm.world import World

__all__ = ["PATIENCE", "GlooAllReduce", "connect_gloo", "make_tcp_store"]


# The rendezvous of a world's ranks for torch.distributed's backends.

PATIENCE = timedelta(seconds=60)
"""How long to wait for the other ranks."""


def make_tcp_store(world: World) -> dist.TCPStore:
    """Return this rank's client of a TCP store on rank 0; collective. The world's messages carry its address."""
    hosts = world.all_gather(socket.gethostname())
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    own = None
    if world.rank == 0:
        # Port 0: the system chooses a free one. Rank 0 must not wait for the others here, as they still need the port.
        own = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    port = world.all_gather(own and own.port)[0]
    return own or dist.TCPStore(host, port, world.size, is_master=False, wait_for_workers=False, timeout=PATIENCE)


# torch.distributed's all-reduce over the same ranks, for comparison.


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
