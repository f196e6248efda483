"""Measure the idle share of a schedule's time on stages of one fixed duration, next to the formula.

Programs, messages and waits are those of any training. Only the computation of a stage is replaced by a sleep, so that
all stages are equal and it does not matter if there are more ranks than cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import check_fits
from mpi4dl_nb.engines.plan.make_schedule import compute_plan_bubble
from mpi4dl_nb.engines.program.segment import Segment
from mpi4dl_nb.engines.program.timeline import Timeline, identify_clock
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import cut_inputs

_PIXELS, _CHANNELS, _STEPS = 12, 3, 3


class _DelayedBackward(torch.autograd.Function):
    """Identity whose backward pass sleeps for `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class _DelayedSegment(Segment):
    """A segment that sleeps `seconds` forward, and as long again for its inputs' gradient and for its weights'."""

    def __init__(self, segment: Segment, seconds: float) -> None:
        vars(self).update(vars(segment))
        self.held, self.seconds = segment.owned, seconds

    def __call__(self, values: Mapping[str, Tensor], seed: int, again: bool = False) -> tuple[Tensor, ...]:
        time.sleep(self.seconds)
        # The sleeps of the backward pass hang on the inputs and weights themselves, as nodes of autograd's graph:
        #
        #     image  --sleep-->  segment's kernels  -->  outputs
        #     weight --sleep-->
        #
        # So a schedule that computes the weights' gradients later (zero bubble) also sleeps for them later.
        self.owned = {name: self._delay_gradient(held) for name, held in self.held.items()}
        return super().__call__({name: self._delay_gradient(values[name]) for name in self.inputs}, seed, again)

    def _delay_gradient(self, held: Any) -> Any:
        return _DelayedBackward.apply(held, self.seconds) if isinstance(held, Tensor) and held.requires_grad else held


def bench_bubble(world: World, plan: Plan, stage_s: float) -> dict[str, object]:
    """Return the idle share of a step (median of several) and the formula's; the same line on every rank.

    A stage takes `stage_s` seconds forward and twice that backward. `against_layers` is the speed-up over plain layer
    parallelism with as many micro-batches, one after another: a schedule's share of work over 1 / ranks.
    """
    shape = (plan.parts * plan.local_dp, _CHANNELS, _PIXELS, _PIXELS)
    # One weight for each stage, as each weight's gradient sleeps.
    model = nn.Sequential(*(nn.Conv2d(_CHANNELS, _CHANNELS, 1, bias=False) for _ in range(plan.split_size)))
    labels = TensorSpec(shape, plan.precision)
    recipe = prepare(model, plan, shape, lambda prediction, labels: (prediction * labels).sum(), labels=labels)
    program = Compiler(recipe.graph, plan, input_gradient=True).compile_rank(world.rank)
    dtype = getattr(torch, plan.precision)
    weights = {name: recipe.state[name].to(dtype).requires_grad_() for name in program.weights}
    worker = Worker(program, world, weights, {})
    for name, segment in worker.runtime.segments.items():
        if segment.late:
            worker.runtime.segments[name] = _DelayedSegment(segment, stage_s)
    whole = {name: torch.ones(spec.shape, dtype=dtype) for name, spec in recipe.step_specs.items()}
    inputs = cut_inputs(program, whole)
    shares = []
    for _ in range(_STEPS + 1):
        world.barrier()
        # Fresh leaves in each step: the image takes part in the backward pass, as every other stage's input does, so
        # that all stages cost the same.
        worker.run(
            {m: {name: t.clone().requires_grad_(name == "images") for name, t in p.items()} for m, p in inputs.items()}
        )
        per_rank, clocks = zip(*world.all_gather((worker.events, identify_clock())), strict=True)
        shares.append(Timeline.of(per_rank, clocks).idle)
    del shares[0]  # the warm-up
    measured = statistics.median(shares)
    formula = compute_plan_bubble(plan)
    depth = plan.spatial_size + (plan.split_size - plan.spatial_size) // plan.stages_per_rank
    return {
        "schedule": plan.schedule,
        "stages": plan.split_size,
        "micro_batches": plan.micro_batches,
        "idle": round(measured, 4),
        "formula": None if formula is None else round(formula, 4),
        "difference": None if formula is None else round(measured - formula, 4),
        "spread": round(max(shares) - min(shares), 4),
        "against_layers": round((1 - measured) * depth, 3),
    }


def run_bench_bubble(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench bubble`."""
    flags = options.make_parser(
        "Measure the idle share of ranks in a schedule of equal stages, and compare with the formula."
    )
    flags.add_argument("--stage-seconds", type=options.parse_seconds, default=0.02, help="forward time of a stage")
    flags.set_defaults(spatial_size=0)
    chosen = flags.parse_args(arguments)
    plan = options.make_plan(chosen)
    check_fits(plan, world.size)
    return bench_bubble(world, plan, chosen.stage_seconds)
