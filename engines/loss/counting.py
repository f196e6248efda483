"""Before a step, the ranks of the last stage count in the labels what the loss of the whole batch divides by.

Each counts its own labels, micro-batch by micro-batch, by a small program of its own; one message adds that up over all
replicas and directions. A loss that divides by nothing that labels say has no such program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from engines.comm.total import all_reduce
from engines.comm.world import World
from engines.layer.graph import ModelGraph, WholeLoss
from engines.layout import Layout, Role
from engines.plan import Plan
from engines.program.builder import Builder
from engines.program.instructions import Phase
from engines.program.lowering import STAGE_TAGS, receive_inputs
from engines.program.program import Program, Step, Way
from engines.program.worker import Inputs, Worker
from engines.spatial.ops import lower
from engines.spatial.share import of_share, parted_names

__all__ = ["Counting", "counting_program"]


class Counting:
    """What one rank knows of the labels of all micro-batches: `values` by name, which the loss reads.

    They are ready when `count` has come back, the same on every rank of the last stage. `program` is that of the rank
    in the training; `owned` are its weights and buffers. `sharers` ranks have a part each of a micro-batch's labels.
    """

    def __init__(
        self, graph: ModelGraph, plan: Plan, program: Program, world: World, owned: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.world, self.totals, self.micro_batches = world, graph.totals, plan.micro_batches
        self.values = {
            total.name: torch.ones(total.spec.shape, dtype=getattr(torch, total.spec.dtype), device=device)
            for total in graph.totals
        }
        self.group = Layout.of(plan).ranks_of([plan.split_size - 1])
        feeds = [way.feeds["labels"] for way in program.ways.values() if "labels" in way.feeds]
        spread = any(feed.axes or (feed.tile and feed.tile.images) for feed in feeds)
        self.sharers = len(Layout.of(plan).stages[-1].ranks) if spread else 1
        self.worker = None
        if graph.totals and world.rank in self.group:
            own = counting_program(graph, plan, program)
            found = {name: owned[name].detach() for name in own.buffers}
            self.worker = Worker(own, world, {}, found, device=device)
            self.worker.words = [b"counts the labels of the whole batch"] * len(own.steps)

    def count(self, inputs: Inputs) -> None:
        """Of a step's labels; collective over the ranks of the last stage, and nothing on the others."""
        if self.worker is None:
            return
        numbers = self.worker.program.directions
        self.worker.run({number: {"labels": inputs[number]["labels"]} for number in numbers})
        sums = torch.cat([self._sum(total.source) for total in self.totals])
        self.worker.restart({})
        if len(self.group) > 1:
            all_reduce(self.world, sums, self.group).wait()
        parts = sums.split([total.spec.numel for total in self.totals])
        for total, part in zip(self.totals, parts, strict=True):
            mean = part / self.micro_batches**total.degree
            self.values[total.name].copy_(mean.view(total.spec.shape))

    def _sum(self, source: str) -> Tensor:
        """(n,), float64, over this rank's own micro-batches; what several ranks hold, the first of them tells."""
        worker = self.worker
        found = [
            worker.peek(source, number).detach().double().cpu().flatten()
            for number in worker.program.directions
            if worker.program.way(number).seeds_loss
        ]
        size = next(total.spec.numel for total in self.totals if total.source == source)
        return torch.stack(found).sum(0) if found else torch.zeros(size, dtype=torch.float64)


def counting_program(graph: ModelGraph, plan: Plan, program: Program) -> Program:
    """The program that counts the labels of a rank's micro-batches in the last stage, one after another."""
    layout, last = Layout.of(plan), plan.split_size - 1
    roles = {role.direction: role for role in layout.roles[program.rank] if role.stage == last}
    ways = {direction: _way(graph, plan, layout, role) for direction, role in roles.items()}
    numbers = {number: way for number, way in sorted(program.directions.items()) if way in ways}
    steps = [Step(item, Phase.FORWARD, number) for number, way in numbers.items() for item in ways[way].forward]
    buffers = sorted(graph.whole.reads - graph.inputs.keys())
    return Program(program.rank, tuple(steps), ways, numbers, program.micro_batches, (), tuple(buffers))


def _way(graph: ModelGraph, plan: Plan, layout: Layout, role: Role) -> Way:
    """What a rank does with the labels of a micro-batch of one direction."""
    stage = layout.pipe(role).stages[role.stage]
    labels, parted = _labels(graph, graph.whole), frozenset[str]()
    if stage.shares > 1:
        share = _labels(graph.share, graph.share.whole)
        labels, parted = of_share(labels, share, labels.nodes), parted_names(labels, share)
    block = 1 + role.stage + role.direction * plan.split_size
    builder = Builder(labels, stage, role.tile, STAGE_TAGS * block + STAGE_TAGS // 2, parted=parted)
    receive_inputs(builder)
    for node in labels.nodes:
        lower(builder, node)
    sources = frozenset(total.source for total in graph.totals)
    return Way({role.stage: tuple(builder.finished(sources))}, {}, None, None, role.tile == 0, sources)


def _labels(graph: ModelGraph, whole: WholeLoss) -> ModelGraph:
    """The part of a graph that follows from the labels alone."""
    inputs = {"labels": graph.inputs["labels"]}
    return replace(graph, inputs=inputs, nodes=whole.nodes, trainable=frozenset(), share=None, whole=None)
