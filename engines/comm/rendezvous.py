"""The rendezvous of a world's ranks for torch.distributed's backends."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from engines.comm.world import World

__all__ = ["PATIENCE", "make_tcp_store"]

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
