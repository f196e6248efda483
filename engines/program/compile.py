"""From a traced model, a plan and a rank to that rank's program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import engines.spatial.entries  # noqa: F401  (fills the operator table)
from engines.errors import PlanError
from engines.layer.graph import ModelGraph, Node, Ref
from engines.layer.stages import cut, layers
from engines.layout import Layout, Role, StageRanks
from engines.plan import Plan
from engines.program.builder import POINT, Builder, Value
from engines.program.instructions import (
    Agree,
    AllReduce,
    Compute,
    Exchange,
    Feed,
    Instruction,
    Phase,
    Program,
    Step,
    SumGradients,
    Update,
)
from engines.spatial.fusion import Wide, widened
from engines.spatial.grouping import HaloCost, cheapest, evenly
from engines.spatial.ops import lower
from engines.spatial.tiles import Span, Tile

__all__ = ["Compiler", "compile_plan"]

# Tags are even, the next odd one is for the gradient going home. Each stage's exchanges lie in one such block,
# transfers between stages in the first; some transports allow no more than 2 ** 23.
_TAGS = 1 << 14


def compile_plan(graph: ModelGraph, plan: Plan, input_gradient: bool = False) -> tuple[Program, ...]:
    """The program of every rank, in rank order.

    `input_gradient`: carry the gradient back to the image itself, which training does not need.
    Raises PlanError or TraceError where the plan does not fit the model.
    """
    compiler = Compiler(graph, plan, input_gradient)
    return tuple(compiler.program(rank) for rank in range(compiler.layout.size))


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A value made in one stage and read in a later one."""

    value: str
    source: int
    target: int
    tag: int


class Compiler:
    """Compiles rank by rank; what does not depend on the rank is computed once."""

    def __init__(self, graph: ModelGraph, plan: Plan, input_gradient: bool = False) -> None:
        self.graph, self.plan = graph, plan
        self.layout = Layout.of(plan)
        self.input_gradient = input_gradient
        self.spans = cut(graph, plan)
        self.stage_of = {node.name: index for index, span in enumerate(self.spans) for node in self._nodes(span)}
        self.reads = [{name for node in self._nodes(span) for name in node.reads} for span in self.spans]
        self.crossings = tuple(self._crossings())
        self.crossing_values: dict[str, Value] = {}
        self._builders: dict[Role, Builder] = {}
        self._wides: dict[int, Wide] = {}
        for stage in range(len(self.spans)):
            builder = self._builder(Role(stage, 0))
            made = {node.name for node in self._nodes(self.spans[stage])}
            self.crossing_values.update({name: builder.values[name] for name in made & builder.values.keys()})

        self._check_statistics()

    def _check_statistics(self) -> None:
        """Raises PlanError where a stage reads what another one writes at its update."""
        for stage in range(len(self.spans)):
            builder = self._builder(Role(stage, 0))
            written = {name for entry in builder.statistics for name in (entry.mean_buffer, entry.variance_buffer)}
            for other, reads in enumerate(self.reads):
                if other != stage and (shared := sorted((written | builder.counters.keys()) & reads)):
                    raise PlanError(
                        f"stages {stage} and {other} both use {shared[0]}, which counts what it saw, in "
                        "their order. Put the layers that share it into one stage (balance, or a smaller split_size)."
                    )

    def _groups(self, stage: int, scout: Builder) -> dict[str, int]:
        """The group of each node of a stage. The prediction is one by itself: whoever reads it gets own tiles."""
        span, found = self.spans[stage], layers(self.graph)
        names = [[n.name for n in self._nodes(layer.nodes)] for layer in found if layer.nodes.start in span]
        fused = self.plan.fused_layers
        if isinstance(fused, str):
            work = {name: scout.work(name) for name in scout.values if scout.is_tiled(Ref(name))}
            sizes = cheapest(names, scout.reads, scout.extent, work, HaloCost())
        else:
            sizes = evenly(len(names), fused)
        numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
        groups = {name: number for number, layer in zip(numbers, names, strict=True) for name in layer}
        return groups | {self.graph.prediction: -1}

    def program(self, rank: int) -> Program:
        """What rank `rank` does in one training step."""
        role = self.layout.role(rank)
        builder = self._builder(role)
        last = role.stage == len(self.spans) - 1
        forward = self._forward(builder, role, last)
        steps = [Step(instruction, Phase.FORWARD) for instruction in forward]
        steps += [Step(item, Phase.BACKWARD) for item in reversed(forward) if item.differentiable]
        steps += [Step(item, Phase.UPDATE) for item in self._updates(builder, role)]
        return Program(
            rank=rank,
            stage=role.stage,
            steps=tuple(steps),
            feeds=self._feeds(builder, role),
            weights=self._owned(role.stage, self.graph.weights),
            buffers=self._owned(role.stage, self.graph.buffers),
            loss=self.graph.loss if last else None,
            prediction=self.graph.prediction if last else None,
            seeds_loss=last and role.tile == 0,
        )

    def _forward(self, builder: Builder, role: Role, last: bool) -> list[Compute | Exchange | AllReduce]:
        kept = {crossing.value for crossing in self.crossings if crossing.source == role.stage}
        kept.update(entry.moments for entry in builder.statistics)
        kept.update((self.graph.loss, self.graph.prediction) if last else ())
        return builder.finished(kept)

    def _nodes(self, span: Span) -> Sequence[Node]:
        return self.graph.nodes[span.start : span.stop]

    def _crossings(self) -> Iterable[_Crossing]:
        pairs = dict.fromkeys(
            (name, self.stage_of[name], self.stage_of[node.name])
            for node in self.graph.nodes
            for name in node.reads
            if name in self.stage_of and self.stage_of[name] != self.stage_of[node.name]
        )
        return (_Crossing(*pair, tag=2 + 2 * index) for index, pair in enumerate(pairs))

    def _builder(self, role: Role) -> Builder:
        """The stage as tile `role.tile` sees it: what arrives, its nodes, what leaves."""
        if role not in self._builders:
            builder = self._lowered(role, self._wide(role.stage))
            self._send(builder, role.stage)
            self._builders[role] = builder
        return self._builders[role]

    def _lowered(self, role: Role, wide: Wide) -> Builder:
        builder = Builder(
            self.graph, self.layout.stages[role.stage], role.tile, _TAGS * (role.stage + 1), wide=wide,
            sync_batchnorm=self.plan.sync_batchnorm,
        )  # fmt: skip
        self._receive(builder, role.stage)
        for node in self._nodes(self.spans[role.stage]):
            try:
                lower(builder, node)
            except PlanError as error:
                raise PlanError(f"{node.operator} in {node.where}, stage {role.stage}: {error}") from error
        return builder

    def _wide(self, stage: int) -> Wide:
        """What the ranks of a stage hold beyond their tiles, for fused halos; found once without them."""
        if stage not in self._wides:
            self._wides[stage] = Wide()
            if self.plan.halo_d2 and len(self.layout.stages[stage].ranks) > 1:
                scout = self._lowered(Role(stage, 0), Wide())
                self._wides[stage] = widened(scout.reads, self._groups(stage, scout), scout.extent)
        return self._wides[stage]

    def _receive(self, builder: Builder, stage: int) -> None:
        for name, spec in self.graph.inputs.items():
            axes = (-2, -1) if len(spec.shape) > 2 else None
            differentiable = self.input_gradient and spec.is_floating
            builder.values[name] = Value(name, spec, axes, differentiable)
        for crossing in self.crossings:
            if crossing.target == stage:
                self._cross(builder, crossing, self.crossing_values[crossing.value])

    def _send(self, builder: Builder, stage: int) -> None:
        for crossing in self.crossings:
            if crossing.source == stage:
                value = builder.value(builder.owned(Ref(crossing.value)))
                self._cross(builder, crossing, value)

    def _cross(self, builder: Builder, crossing: _Crossing, value: Value) -> None:
        """Carry a value between two stages: the joint, a repartition or a copy, by their tiles alone."""
        owned, wanted = (_parts(self.layout.stages[stage], value) for stage in (crossing.source, crossing.target))
        if value.axes is None:
            owned = dict(list(owned.items())[:1])  # all source tiles hold the same: the first one sends
        name = f"{value.name}.stage{crossing.source}to{crossing.target}"
        builder.transfer(value, "stage", name, value.name, crossing.tag, owned, wanted)

    def _feeds(self, builder: Builder, role: Role) -> dict[str, Feed]:
        feeds = {}
        for name in self.graph.inputs:
            if name in self.reads[role.stage]:
                value = builder.values[name]
                tile = builder.tiles(value.size_px)[builder.rank] if value.axes else None
                feeds[name] = Feed(tile, value.axes)
        return feeds

    def _owned(self, stage: int, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.reads[stage])

    def _updates(self, builder: Builder, role: Role) -> Iterable[Instruction]:
        """Gradients of weights that several ranks hold are summed over all of them; then the optimiser steps."""
        groups = defaultdict(list)
        for name in self._owned(role.stage, self.graph.weights):
            if name in self.graph.trainable:
                groups[self._holders(name)].append(name)
        for index, (group, names) in enumerate(sorted(groups.items())):
            if len(group) > 1:
                count = sum(self.graph.weights[name].bytes for name in names)
                yield SumGradients(f"gradients{index}", tuple(names), count, group)
        if self.layout.size > 1:
            first = (names for group, names in sorted(groups.items()) if group[0] == builder.rank)
            yield Agree("agree", tuple(range(self.layout.size)), tuple(name for names in first for name in names))
        yield Update("update", tuple(builder.statistics), dict(builder.counters), builder.apart)

    def _holders(self, weight: str) -> tuple[int, ...]:
        stages = [stage for stage in range(len(self.spans)) if weight in self._owned(stage, self.graph.weights)]
        return tuple(rank for stage in stages for rank in self.layout.stages[stage].ranks)


def _parts(stage: StageRanks, value: Value) -> dict[int, Tile]:
    """What each rank of a stage holds of a value; a value without pixels is one point that all hold."""
    if value.axes is None:
        return dict.fromkeys(stage.ranks, POINT)
    return dict(zip(stage.ranks, stage.grid.cut(*value.size_px), strict=True))
