"""Where the ranks of a world find each other for what does not travel by its messages: torch.distributed's own."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from engines.comm.world import World

__all__ = ["PATIENCE", "make_tcp_store"]

PATIENCE = timedelta(seconds=60)
"""For the others to come."""


def make_tcp_store(world: World) -> dist.TCPStore:
    """A store on rank 0, as each rank sees it; collective. Its address reaches the others through the world."""
    hosts = world.all_gather(socket.gethostname())
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    own = None
    if world.rank == 0:
        own = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    port = world.all_gather(own and own.port)[0]
    return own or dist.TCPStore(host, port, world.size, is_master=False, wait_for_workers=False, timeout=PATIENCE)
