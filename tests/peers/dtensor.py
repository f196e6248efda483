"""PyTorch's DTensor on the jobs: the image is sharded along its rows, or along rows and columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.peers.forked import run_forked
from tests.peers.jobs import Arrays, Job, make_cotangent
from tests.peers.outcome import Outcome
from tests.peers.torch_operators import TorchOperators, compute_loss, to_arrays

MESHES = {2: ((2,), (Shard(2),)), 4: ((2, 2), (Shard(2), Shard(3)))}


def get_version() -> str:
    """Return the version of PyTorch, without that of its build."""
    return torch.__version__.partition("+")[0]


def open_mesh(rank: int, ranks: int, folder: Path) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Join the processes by gloo, and return their mesh and how an image lies on it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks)
    shape, placements = MESHES[ranks]
    return init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns")[: len(shape)]), placements


def run_jobs(names: list[str], ranks: int) -> Iterator[Outcome]:
    """Do jobs in as many processes, one job after another."""

    def compute(job: Job, rank: int, folder: Path) -> Iterator[Arrays]:
        mesh, placements = open_mesh(rank, ranks, folder)
        inputs = {name: torch.from_numpy(values) for name, values in job.make_inputs().items()}
        image = distribute_tensor(inputs["image"], mesh, placements).requires_grad_()
        weights = {
            name: distribute_tensor(inputs[name], mesh, [Replicate()] * mesh.ndim).requires_grad_()
            for name in job.shapes
        }
        output = job.forward(TorchOperators(), image, weights).full_tensor()
        yield to_arrays(output=output)
        compute_loss(output, torch.from_numpy(make_cotangent(tuple(output.shape)))).backward()
        yield to_arrays(image=image.grad.full_tensor(), **{n: w.grad.full_tensor() for n, w in weights.items()})

    yield from run_forked(names, ranks, compute)
