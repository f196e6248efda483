"""All-reduce of the loss denominators: the ranks of the last stage count the labels of all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engines.comm.all_reduce import all_reduce
from engines.comm.world import World
from engines.layer.graph import ModelGraph
from engines.layout import Layout
from engines.plan import Plan
from engines.program.instructions import CountLabels
from engines.program.program import Program
from engines.program.worker import Worker

__all__ = ["LabelCounter"]


class LabelCounter:
    """The totals over the labels of all micro-batches, on one rank: `values` by name, which the loss reads.

    They are valid once `count` has returned, and equal on every rank of the last stage. `program` is the rank's
    training program; `owned` are its weights and buffers. `sharers` is the number of ranks that each hold a shard of
    a micro-batch's labels.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        program: Program,
        world: World,
        owned: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.world, self.totals, self.micro_batches = world, graph.totals, plan.micro_batches
        self.values = {
            total.name: torch.ones(total.spec.shape, dtype=getattr(torch, total.spec.dtype), device=device)
            for total in graph.totals
        }
        ways = program.direction_programs.values()
        feeds = [way.input_shards["labels"] for way in ways if "labels" in way.input_shards]
        spread = any(feed.axes or (feed.tile and feed.tile.images) for feed in feeds)
        self.sharers = len(Layout.of(plan).stages[-1].ranks) if spread else 1
        # A program like that of a forward pass, whose only inputs are labels.
        self.worker = None
        for own in (each.program for each in program.select_instructions(CountLabels)):
            found = {name: owned[name].detach() for name in own.buffers}
            self.worker = Worker(own, world, {}, found, device=device)
            self.worker.step_labels = [b"counts the labels of the whole batch"] * len(own.steps)

    def count(self, instruction: CountLabels, labels: Mapping[int, Tensor]) -> int:
        """Update `values` from this rank's `labels`, by micro-batch, and return the bytes sent.

        Collective over the ranks of the last stage.
        """
        worker, group = self.worker, instruction.group
        worker.run({number: {"labels": labels[number]} for number in worker.program.directions})
        # All totals travel in one float64 vector, so that a step needs a single all-reduce.
        sums = torch.cat([self._sum(total.source) for total in self.totals])
        sent_bytes = sum(event.bytes for event in worker.events)
        worker.restart({})
        if len(group) > 1:
            under_way = all_reduce(self.world, sums, group)
            under_way.wait()
            sent_bytes += under_way.sent_bytes
        parts = sums.split([total.spec.numel for total in self.totals])
        for total, part in zip(self.totals, parts, strict=True):
            mean = part / self.micro_batches**total.degree
            self.values[total.name].copy_(mean.view(total.spec.shape))
        return sent_bytes

    def _sum(self, source: str) -> Tensor:
        """Return the sum over this rank's micro-batches, (n,), float64."""
        worker = self.worker
        # Only the rank that seeds the loss of a micro-batch contributes, so that the all-reduce counts each one once.
        found = [
            worker.peek(source, number).detach().double().cpu().flatten()
            for number in worker.program.directions
            if worker.program.get_direction_program(number).seeds_loss
        ]
        size = next(total.spec.numel for total in self.totals if total.source == source)
        return torch.stack(found).sum(0) if found else torch.zeros(size, dtype=torch.float64)
