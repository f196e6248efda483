"""A module on tiles, held bit for bit against the same module on the whole image in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.graph.model_graph import MODEL, TensorSpec
from mpi4dl_nb.engines.graph.outputs import call_loss, collect_from_prediction
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.rng import CounterRNGMode
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import cut_inputs

Same = Callable[[Tensor, Tensor], bool]


def close(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of float64 are equal but for rounding, of which the largest values decide how much there may be.

    A small element can be the sum of large terms, each of which is rounded: its own size says nothing of its error.
    """
    largest = b.abs().masked_fill(~b.isfinite(), 0).amax().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=max(1e-12, 2e-13 * largest))


def make_whole_numbers(*shape: int, seed: int = 0, low: int = -3, high: int = 3, step: int = 1) -> Tensor:
    """Multiples of `step` from low * step to high * step as float64, which add without rounding."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=random).double() * step


def with_whole_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same model in float64, every parameter made of whole numbers."""
    for index, parameter in enumerate(model.double().parameters()):
        parameter.data = make_whole_numbers(*parameter.shape, seed=seed + index)
    return model


def compute_weighted_sum(prediction: Tensor, labels: Tensor) -> Tensor:
    """A loss that gives every output a gradient of its own."""
    return (prediction * labels).sum()


def make_tiled_plan(grid: object, fused: int = 0) -> Plan:
    """One stage, spatial to the end, in float64; halos are exchanged for `fused` layers at once, if any."""
    halos = {"halo_d2": True, "fused_layers": fused} if fused else {}
    return Plan(split_size=1, spatial_size=1, slice_method=str(grid), precision="float64", **halos)


def prepare_worker(
    model: nn.Module, images: Tensor, labels: Tensor, plan: Plan, loss: Loss = compute_weighted_sum
) -> Callable[[LoopbackWorld], Worker]:
    """From a rank's world to its worker, at the start of a step that leads back to the images."""
    dtype = str(labels.dtype).removeprefix("torch.")
    recipe = prepare(model, plan, images.shape, loss, labels=TensorSpec(tuple(labels.shape), dtype))
    compiler = Compiler(recipe.graph, plan, input_gradient=True)
    programs = [compiler.compile_rank(rank) for rank in range(plan.ranks)]

    def start(world: LoopbackWorld) -> Worker:
        program, trainable = programs[world.rank], recipe.graph.trainable
        weights = {n: recipe.state[n].clone().requires_grad_(n in trainable) for n in program.weights}
        buffers = {n: recipe.state[n].clone() for n in program.buffers}
        (parts,) = cut_inputs(program, {"images": images, "labels": labels}).values()
        worker = Worker(program, world, weights, buffers)
        worker.restart({0: {n: part.clone().requires_grad_(n == "images") for n, part in parts.items()}})
        return worker

    return start


def finish(worker: Worker) -> Worker:
    """Every instruction that is left."""
    while not worker.done:
        worker.step()
    return worker


def assert_exact(
    model: nn.Module, images: Tensor, plan: Plan, labels: Tensor | None = None, loss: Loss = compute_weighted_sum,
    same: Same = torch.equal,
) -> None:  # fmt: skip
    """Output, loss, gradients of image and weights, and buffers of every rank are those of one process."""
    oracle, pixels = copy.deepcopy(model), images.clone().requires_grad_()
    with CounterRNGMode(seed=0):
        answer = oracle(pixels)
        output = next(iter(collect_from_prediction(answer).values()))
        labels = make_whole_numbers(*output.shape, seed=1) if labels is None else labels
        value, _ = call_loss(loss, answer, labels)
    value.backward()
    owned = {f"{MODEL}{name}": tensor for name, tensor in oracle.state_dict(keep_vars=True).items()}
    start = prepare_worker(model, images, labels, plan, loss)
    for rank, worker in enumerate(run_ranks(plan.ranks, lambda world: finish(start(world)))):
        way, whose = worker.program.get_direction_program(0), f"rank {rank} of {plan.summary}"
        if "images" in way.input_shards:
            theirs = way.input_shards["images"].cut(pixels.grad)
            assert same(worker.peek("images").grad, theirs), f"image gradient, {whose}"
        if way.loss:
            made = worker.peek(way.prediction)
            assert made.dtype == output.dtype, f"type of the output, {whose}"
            if way.prediction_shard is None or not way.prediction_shard.axes:
                assert same(made, output), f"output, {whose}"
            else:
                whole = torch.zeros_like(output).contiguous()
                way.prediction_shard.fill(whole, made)
                mine = torch.zeros_like(whole)
                way.prediction_shard.fill(mine, torch.ones_like(made))
                assert mine.sum() == made.numel() > 0, f"size of the output, {whose}"
                assert same(whole, output * mine), f"output, {whose}"
            assert same(worker.peek(way.loss), value), f"loss, {whose}"
        for name, weight in worker.weights.items():
            theirs = owned[name].grad
            assert (weight.grad is None) == (theirs is None), f"whether {name} has a gradient, {whose}"
            assert theirs is None or same(weight.grad, theirs), f"gradient of {name}, {whose}"
        for name in worker.buffers.keys() & owned.keys():
            assert same(worker.buffers[name], owned[name]), f"{name}, {whose}"
