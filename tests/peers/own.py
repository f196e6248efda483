"""This project on the jobs: programs compiled from an unedited module, run by the ranks of an MPI cluster."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.errors import Mpi4dlError
from mpi4dl_nb.engines.graph.model_graph import MODEL, TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.server.rank_server import RankServer
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import cut_inputs
from tests.peers.jobs import Arrays, find_job, make_cotangent
from tests.peers.outcome import Outcome
from tests.peers.torch_operators import JobNetwork, compute_loss, to_arrays

GRIDS = {2: "2x1", 4: "2x2"}


def get_version() -> str:
    """Return the version of this project."""
    return version("mpi4dl_nb")


def run_jobs(names: list[str], ranks: int) -> Iterator[Outcome]:
    """Do jobs on a cluster of as many ranks, one after another."""
    plan = Plan(split_size=1, spatial_size=1, slice_method=GRIDS[ranks], precision="float64")
    with Cluster(ranks) as cluster:
        for name in names:
            try:
                yield Outcome(name, _join(cluster.call(compute_on_rank, name, plan)))
            except Mpi4dlError as error:
                yield Outcome(name, refusal=str(error))


def compute_on_rank(host: RankServer, name: str, plan: Plan) -> dict[str, tuple[Any, Any, tuple[int, ...]]]:
    """Return this rank's part of each result of a job, where it lies, and the shape of the whole."""
    job = find_job(name)
    inputs = job.make_inputs()
    network, image = JobNetwork(job, inputs), torch.from_numpy(inputs["image"])
    with torch.no_grad():
        shape = tuple(network(image).shape)
    cotangent = torch.from_numpy(make_cotangent(shape))
    recipe = prepare(network, plan, image.shape, compute_loss, labels=TensorSpec(shape, "float64"), device="cpu")
    program = Compiler(recipe.graph, plan, input_gradient=True).compile_rank(host.world.rank)
    weights = {weight: recipe.state[weight].clone().requires_grad_() for weight in program.weights}
    worker = Worker(program, host.world, weights, {})
    (parts,) = cut_inputs(program, {"images": image, "labels": cotangent}).values()
    worker.restart({0: {feed: part.clone().requires_grad_(feed == "images") for feed, part in parts.items()}})
    while not worker.done:
        worker.step()
    way = program.get_direction_program(0)
    results = {
        "output": (worker.peek(way.prediction).detach(), way.prediction_shard, shape),
        "image": (worker.peek("images").grad, way.input_shards["images"], tuple(image.shape)),
    }
    for weight, number in zip(network.names, range(len(network.names)), strict=True):
        grad = weights[f"{MODEL}weights.{number}"].grad
        results[weight] = grad, None, tuple(grad.shape)
    return results


def _join(of_ranks: list[dict[str, tuple[Any, Any, tuple[int, ...]]]]) -> Arrays:
    """Put the parts of all ranks together. Values that each rank has whole are those of the last one."""
    whole = {name: torch.empty(shape, dtype=torch.float64) for name, (_, _, shape) in of_ranks[0].items()}
    for parts in of_ranks:
        for name, (part, shard, _) in parts.items():
            (whole[name] if shard is None else shard.cut(whole[name])).copy_(part)
    return to_arrays(**whole)
