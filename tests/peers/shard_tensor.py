"""NVIDIA PhysicsNeMo's ShardTensor on the jobs. As its guide says, the module is a plain one."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.peers.dtensor import MESHES
from tests.peers.forked import run_forked
from tests.peers.jobs import Arrays, Job, make_cotangent
from tests.peers.outcome import Outcome
from tests.peers.torch_operators import JobNetwork, compute_loss, to_arrays


def get_version() -> str:
    """Return the version of PhysicsNeMo."""
    return version("nvidia-physicsnemo")


def run_jobs(names: list[str], ranks: int) -> Iterator[Outcome]:
    """Do jobs in as many processes, one job after another."""
    from physicsnemo.distributed import DistributedManager
    from physicsnemo.domain_parallel import register_custom_ops, scatter_tensor

    register_custom_ops()  # which is done at the import where there is a GPU

    def compute(job: Job, rank: int, folder: Path) -> Iterator[Arrays]:
        torch.set_num_threads(1)
        _set_environment(rank, ranks, folder)
        with patch.object(dist, "init_process_group", _begin_on_cpu):
            DistributedManager.initialize()
        shape, placements = MESHES[ranks]
        mesh = DistributedManager().initialize_mesh(shape, ("rows", "columns")[: len(shape)])
        inputs = job.make_inputs()
        network = JobNetwork(job, inputs)
        image = scatter_tensor(torch.from_numpy(inputs["image"]), 0, mesh, placements, requires_grad=True)
        output = network(image).full_tensor()
        yield to_arrays(output=output)
        compute_loss(output, torch.from_numpy(make_cotangent(tuple(output.shape)))).backward()
        grads = {name: weight.grad for name, weight in zip(network.names, network.weights, strict=True)}
        yield to_arrays(image=image.grad.full_tensor(), **grads)

    yield from run_forked(names, ranks, compute)


_begin = dist.init_process_group


def _begin_on_cpu(*arguments: Any, device_id: object = None, **settings: Any) -> None:
    """Begin without naming the CPU as a device, as PhysicsNeMo does and PyTorch refuses."""
    _begin(*arguments, **settings)


def _set_environment(rank: int, ranks: int, folder: Path) -> None:
    """Set the variables from which PhysicsNeMo knows its processes; the first one chooses a free port."""
    path = folder / "port"
    if rank == 0:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            ready = folder / "port.new"
            ready.write_text(str(listener.getsockname()[1]), encoding="utf-8")
        ready.rename(path)
    while not path.exists():
        time.sleep(0.01)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": path.read_text(encoding="utf-8"),
    }  # fmt: skip
