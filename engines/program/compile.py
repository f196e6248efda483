"""From a traced model, a plan and a rank to that rank's program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import engines.spatial.entries  # noqa: F401  (fills the operator table)
from engines.errors import PlanError
from engines.layer.graph import ModelGraph, Node, Ref, references
from engines.layer.stages import cut, layers
from engines.layout import Layout, Role, StageRanks
from engines.pipeline.schedule import Batch, Kind, Schedule, Work, schedule
from engines.plan import Plan
from engines.program.builder import POINT, Builder, Value
from engines.program.gradients import buckets, woven
from engines.program.instructions import (
    Agree,
    Compute,
    Instruction,
    Linear,
    Phase,
    ShareStatistics,
    SumGradients,
    Update,
)
from engines.program.program import Feed, Program, Step, Way
from engines.spatial.fusion import Wide, widened
from engines.spatial.grouping import HaloCost, cheapest, evenly
from engines.spatial.ops import lower
from engines.spatial.share import of_share, parted_names
from engines.spatial.tiles import Grid, Span, Tile

__all__ = ["Compiler", "compile_plan"]

# Tags are even, the next odd one is for the gradient going home. Each stage's exchanges, in each direction, lie in one
# such block, transfers between stages in the first; some transports allow no more than 2 ** 23.
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
    """Compiles rank by rank; what does not depend on the rank is computed once.

    `overlap`: sums of gradients begin while backward still runs.
    """

    def __init__(self, graph: ModelGraph, plan: Plan, input_gradient: bool = False, overlap: bool = True) -> None:
        self.graph, self.plan, self.overlap = graph, plan, overlap
        self.layout = Layout.of(plan)
        self.input_gradient = input_gradient
        self.spans = cut(graph, plan)
        self.stage_of = {node.name: index for index, span in enumerate(self.spans) for node in self._nodes(span)}
        self.reads = [{name for node in self._nodes(span) for name in node.reads} for span in self.spans]
        self.crossings = tuple(self._crossings())
        self.crossing_values: dict[str, Value] = {}
        self._builders: dict[Role, Builder] = {}
        self._wides: dict[Role, Wide] = {}
        for stage in range(len(self.spans)):
            builder = self._builder(Role(stage, 0))
            made = {node.name for node in self._nodes(self.spans[stage])}
            self.crossing_values.update({name: builder.values[name] for name in made & builder.values.keys()})

        self._check_statistics()

    @cached_property
    def _trained_by(self) -> dict[str, tuple[int, ...]]:
        """The ranks that hold each trained weight, in any stage of any copy of the model."""
        stages = range(len(self.spans))
        return {
            name: self._ranks_of(stage for stage in stages if name in self.reads[stage])
            for name in self.graph.weights
            if name in self.graph.trainable
        }

    @cached_property
    def sums(self) -> tuple[SumGradients, ...]:
        """The sums of gradients over all ranks that hold the same weights."""
        return buckets(self.graph, self._trained_by, _TAGS // 2)

    @cached_property
    def parted(self) -> frozenset[str]:
        """The values of which ranks that share a micro-batch hold their own images each."""
        return parted_names(self.graph, self.graph.share) if self.graph.share else frozenset()

    def _seen(self, stage: int) -> ModelGraph:
        """The model as the ranks of a stage have it."""
        if self.layout.stages[stage].shares == 1 or self.graph.share is None:
            return self.graph
        return of_share(self.graph, self.graph.share, self._nodes(self.spans[stage]))

    @cached_property
    def schedule(self) -> Schedule:
        """The order of work of one replica, whose ranks and micro-batches are numbered from 0."""
        plan = self.plan
        placement = [[stage.ranks for stage in p.stages] for p in self.layout.pipes if p.replica == 0]
        numbers = range(plan.replica_batches * plan.parts)
        batches = [numbers[index * plan.parts :][: plan.parts] for index in range(plan.replica_batches)]
        flushes = [Batch(index % len(placement), tuple(batch)) for index, batch in enumerate(batches)]
        return schedule(plan.schedule, placement, flushes)

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
        roles = self.layout.roles[rank]
        ways = {
            direction: self._way([role for role in roles if role.direction == direction])
            for direction in sorted({role.direction for role in roles})
        }
        work = self._order(roles[0].replica, rank)
        held = {role.stage for role in roles}
        sums = [each for each in self.sums if rank in each.group]
        trained = self._trained if self.overlap else lambda _: set()
        steps = woven(self._walked(work, ways), sums, trained)
        ends = (*sums, *self._updates(rank, roles, work))
        return Program(
            rank=rank,
            steps=(*steps, *(Step(item, Phase.UPDATE) for item in ends)),
            ways=ways,
            directions={item.micro_batch: item.direction for item in work},
            micro_batches=self.plan.micro_batches,
            weights=self._owned(held, self.graph.weights),
            buffers=self._owned(held, self.graph.buffers),
        )

    def _order(self, replica: int, rank: int) -> list[Work]:
        """What a rank does in turn; its replica's micro-batches follow those of the replica before."""
        first = replica * self.plan.replica_batches * self.plan.parts
        order = self.schedule.order(rank % self.plan.replica_ranks)
        return [replace(work, micro_batch=first + work.micro_batch) for work in order]

    def _walked(self, work: Iterable[Work], ways: dict[int, Way]) -> Iterable[Step]:
        apart = self.plan.schedule == "zero_bubble"
        for item in work:
            forward = ways[item.direction].stages[item.stage]
            if item.kind is Kind.FORWARD:
                yield from (Step(each, Phase.FORWARD, item.micro_batch) for each in forward)
            else:
                phase = Phase.WEIGHTS if item.kind is Kind.WEIGHTS else Phase.INPUTS if apart else Phase.BACKWARD
                back = (each for each in reversed(forward) if self._goes_back(each, phase))
                yield from (Step(each, phase, item.micro_batch) for each in back)

    def _goes_back(self, item: Linear, phase: Phase) -> bool:
        late = any(len(self.graph.weights[name].shape) > 1 for name in self._trained(item))
        return item.differentiable and (phase is not Phase.WEIGHTS or late)

    def _trained(self, item: Instruction) -> set[str]:
        """The weights that a segment reads and that are trained."""
        ops = item.ops if isinstance(item, Compute) else ()
        return self.graph.trainable & {name for op in ops for name in references((op.arguments, op.keywords))}

    def _way(self, roles: Sequence[Role]) -> Way:
        """What a rank does in one direction, for each of its stages."""
        builders = {role: self._builder(role) for role in roles}
        last = next((role for role in roles if role.stage == len(self.spans) - 1), None)
        lasting = {entry.moments for builder in builders.values() for entry in builder.statistics}
        lasting.update((self.graph.loss, self.graph.prediction) if last else ())
        return Way(
            stages={role.stage: self._forward(builder, role, lasting) for role, builder in builders.items()},
            feeds={name: feed for role, builder in builders.items() for name, feed in self._feeds(builder, role)},
            loss=self.graph.loss if last else None,
            prediction=self.graph.prediction if last else None,
            seeds_loss=last is not None and last.tile == 0,
            lasting=frozenset(lasting),
        )

    def _forward(self, builder: Builder, role: Role, lasting: Iterable[str]) -> tuple[Linear, ...]:
        kept = {crossing.value for crossing in self.crossings if crossing.source == role.stage}
        prefix = f"{'mirrored.' * role.direction}stage{role.stage}."
        return tuple(replace(item, name=f"{prefix}{item.name}") for item in builder.finished(kept.union(lasting)))

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
            builder = self._lowered(role, self._wide(role))
            self._send(builder, role)
            self._builders[role] = builder
        return self._builders[role]

    def _ranks(self, role: Role, stage: int) -> StageRanks:
        """The ranks of a stage of the same copy of the model."""
        return self.layout.pipe(role).stages[stage]

    def _lowered(self, role: Role, wide: Wide) -> Builder:
        block = 1 + role.stage + role.direction * len(self.spans)
        ranks = self._ranks(role, role.stage)
        parted = self.parted if ranks.shares > 1 else frozenset()
        builder = Builder(
            self._seen(role.stage), ranks, role.tile, _TAGS * block, wide=wide, parted=parted,
            sync_batchnorm=self.plan.sync_batchnorm,
        )  # fmt: skip
        self._receive(builder, role)
        span = self.spans[role.stage]
        for node in builder.graph.nodes[span.start : span.stop]:
            if node.name in self._ends_segment:
                builder.flush()
            try:
                lower(builder, node)
            except PlanError as error:
                raise PlanError(f"{node.operator} in {node.where}, stage {role.stage}: {error}") from error
        return builder

    @cached_property
    def _ends_segment(self) -> set[str]:
        """The nodes before which a segment ends even where nothing is communicated: the first of each layer.

        Where gradients of weights are computed apart, an operator with weights stands alone: the rest of its segment
        would be walked back twice.
        """
        if self.plan.schedule != "zero_bubble":
            return {self.graph.nodes[layer.nodes.start].name for layer in layers(self.graph)}
        weighted = [any(len(w.shape) > 1 for name in node.reads if (w := self.graph.weights.get(name)))
                    for node in self.graph.nodes]  # fmt: skip
        after = [False, *weighted[:-1]]
        return {n.name for n, here, before in zip(self.graph.nodes, weighted, after, strict=True) if here or before}

    def _wide(self, role: Role) -> Wide:
        """What the ranks of a stage hold beyond their tiles, for fused halos; found once without them."""
        first = replace(role, tile=0)
        if first not in self._wides:
            self._wides[first] = Wide()
            if self.plan.halo_d2 and self._ranks(role, role.stage).grid.tiles > 1:
                scout = self._lowered(first, Wide())
                self._wides[first] = widened(scout.reads, self._groups(role.stage, scout), scout.extent)
        return self._wides[first]

    def _receive(self, builder: Builder, role: Role) -> None:
        for name, spec in builder.graph.inputs.items():
            axes = (-2, -1) if len(spec.shape) > 2 and builder.stage.shares == 1 else None
            differentiable = self.input_gradient and spec.is_floating
            builder.values[name] = Value(name, spec, axes, differentiable)
        for crossing in self.crossings:
            if crossing.target == role.stage:
                value = self.crossing_values[crossing.value]
                self._cross(builder, role, crossing, value)
                spec = builder.graph.specs.get(value.name, value.spec)
                axes = value.axes if builder.stage.shares == 1 else None
                builder.values[value.name] = replace(value, spec=spec, axes=axes)

    def _send(self, builder: Builder, role: Role) -> None:
        for crossing in self.crossings:
            if crossing.source == role.stage:
                value = builder.value(builder.owned(Ref(crossing.value)))
                self._cross(builder, role, crossing, value)

    def _cross(self, builder: Builder, role: Role, crossing: _Crossing, value: Value) -> None:
        """Carry a value between two stages: the joint, a repartition or a copy, by their tiles alone."""
        whole = replace(value, spec=self.graph.specs.get(crossing.value, value.spec))
        stages = (self._ranks(role, stage) for stage in (crossing.source, crossing.target))
        owned, wanted = (self._parts(stage, whole, crossing.value) for stage in stages)
        if len(set(owned.values())) == 1:
            owned = dict(list(owned.items())[:1])  # all source ranks hold the same: the first one sends
        name = f"{value.name}.stage{crossing.source}to{crossing.target}"
        tag = crossing.tag + 2 * role.direction * len(self.crossings)
        builder.transfer(whole, "stage", name, value.name, tag, owned, wanted)

    def _feeds(self, builder: Builder, role: Role) -> Iterable[tuple[str, Feed]]:
        for name in self.graph.inputs:
            if name in self.reads[role.stage]:
                value = replace(builder.values[name], spec=self.graph.inputs[name])
                yield name, Feed(self._parts(builder.stage, value, name)[builder.rank], value.axes)

    def _owned(self, stages: Iterable[int], names: Iterable[str]) -> tuple[str, ...]:
        reads = set().union(*(self.reads[stage] for stage in stages))
        return tuple(name for name in names if name in reads)

    def _updates(self, rank: int, roles: Sequence[Role], work: Sequence[Work]) -> Iterable[Instruction]:
        """What follows when all gradients are summed: statistics, agreement, and the optimiser's step."""
        stages = {role.stage for role in roles}
        builders = {role.stage: self._builder(role) for role in roles}
        for stage in sorted(stages):
            yield from self._shared_statistics(stage, builders[stage], roles, work)
        if self.layout.size > 1:
            counted = tuple(name for name in self._owned(stages, self._trained_by) if self._trained_by[name][0] == rank)
            yield Agree("agree", tuple(range(self.layout.size)), counted)
        statistics = tuple(
            replace(entry, mean_over=self._ranks_of([stage])) if entry.mean_over else entry
            for stage in sorted(stages)
            for entry in builders[stage].statistics
        )
        counters = {name: grown for builder in builders.values() for name, grown in builder.counters.items()}
        yield Update("update", statistics, {name: self.plan.micro_batches * grown for name, grown in counters.items()})

    def _shared_statistics(
        self, stage: int, builder: Builder, roles: Sequence[Role], work: Sequence[Work]
    ) -> Iterable[ShareStatistics]:
        """Where copies of the model see different micro-batches, each learns what the others counted."""
        moments = tuple(entry.moments for entry in builder.statistics if not entry.mean_over)
        if not moments or len(self.layout.pipes) == 1:
            return
        first = {role.direction for role in roles if role.stage == stage and role.tile == 0}
        tells = sorted({item.micro_batch for item in work if item.stage == stage and item.direction in first})
        count = self.plan.micro_batches * sum(builder.values[name].spec.bytes for name in moments)
        yield ShareStatistics(f"statistics{stage}", moments, tuple(tells), count, self._ranks_of([stage]))

    def _ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """All ranks that hold one of these stages in any copy of the model, ascending."""
        pipes = self.layout.pipes
        return tuple(sorted({rank for stage in stages for pipe in pipes for rank in pipe.stages[stage].ranks}))

    def _parts(self, stage: StageRanks, value: Value, name: str) -> dict[int, Tile]:
        """What each rank of a stage holds of what the model calls `name`, and how it lies, for all images.

        Without pixels it is a point that all hold, or their images.
        """
        if stage.shares > 1:
            tile = Tile.whole(*value.size_px) if value.axes else POINT
            if name not in self.parted:
                return dict.fromkeys(stage.ranks, tile)
            images = Grid.spans(value.spec.shape[0], stage.shares)
            return {rank: replace(tile, images=span) for rank, span in zip(stage.ranks, images, strict=True)}
        if value.axes is None:
            return dict.fromkeys(stage.ranks, POINT)
        return dict(zip(stage.ranks, stage.grid.cut(*value.size_px), strict=True))
