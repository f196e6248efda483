"""Compiles a traced model and a plan into the program of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from engines.errors import PlanError
from engines.layer.graph import ModelGraph
from engines.layout import Layout, Role
from engines.pipeline.schedule import ActionKind, Batch, PipelineAction, Schedule, make_schedule
from engines.plan import Plan
from engines.program.builder import Builder
from engines.program.gradient_buckets import insert_gradient_sums, make_buckets
from engines.program.instructions import (
    Compute,
    ExchangeHalf,
    FiniteCheckAllReduce,
    Instruction,
    ModelInstruction,
    Phase,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from engines.program.label_counts import make_count_steps
from engines.program.lowering import STAGE_TAGS, Lowering
from engines.program.program import DirectionProgram, Program, ShardSpec, Step

__all__ = ["Compiler", "compile_plan"]


def compile_plan(graph: ModelGraph, plan: Plan, input_gradient: bool = False) -> tuple[Program, ...]:
    """Return the program of every rank, in rank order.

    `input_gradient`: compute the gradient of the image as well, which training does not need. Raises PlanError or
    TraceError if the plan does not fit the model.
    """
    compiler = Compiler(graph, plan, input_gradient)
    return tuple(compiler.compile_rank(rank) for rank in range(compiler.layout.size))


class Compiler:
    """Compiles one rank at a time; what does not depend on the rank is computed once.

    If the graph has no loss, a program ends with the forward passes. `overlap`: all-reduces of gradients start while
    the backward pass is still running.
    """

    def __init__(self, graph: ModelGraph, plan: Plan, input_gradient: bool = False, overlap: bool = True) -> None:
        self.graph, self.plan, self.overlap = graph, plan, overlap
        self.layout = Layout.of(plan)
        self.lowering = Lowering(graph, plan, self.layout, input_gradient)

    @cached_property
    def _ranks_by_weight(self) -> dict[str, tuple[int, ...]]:
        """The ranks that hold each trained weight, over all stages and replicas."""
        stages: dict[str, list[int]] = defaultdict(list)
        for stage, reads in enumerate(self.lowering.reads):
            for name in reads:
                stages[name].append(stage)
        return {
            name: self.layout.find_ranks(stages[name]) for name in self.graph.weights if name in self.graph.trainable
        }

    @cached_property
    def gradient_buckets(self) -> tuple[SumGradients, ...]:
        """The all-reduces of gradients, each over all ranks that hold the same weights.

        Raises PlanError if there are more buckets than message tags.
        """
        found = make_buckets(self.graph, self._ranks_by_weight, STAGE_TAGS // 2)
        if found and found[-1].tag + 2 > STAGE_TAGS:
            raise PlanError(
                f"The gradients travel in {len(found)} messages, and there are tags for {STAGE_TAGS // 4}. "
                "Use fewer stages, or train fewer weights."
            )
        return found

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule of one replica, whose ranks and micro-batches are numbered from 0."""
        plan = self.plan
        placement = [[stage.ranks for stage in p.stages] for p in self.layout.pipes if p.replica == 0]
        numbers = range(plan.replica_batches * plan.parts)
        batches = [numbers[index * plan.parts :][: plan.parts] for index in range(plan.replica_batches)]
        flushes = [Batch(index % len(placement), tuple(batch)) for index, batch in enumerate(batches)]
        return make_schedule(plan.schedule, placement, flushes)

    def compile_rank(self, rank: int) -> Program:
        """Return the program of rank `rank` for one training step, or for one prediction."""
        roles = self.layout.roles[rank]
        ways = {
            direction: self._make_direction_program([role for role in roles if role.direction == direction])
            for direction in sorted({role.direction for role in roles})
        }
        work = self._get_rank_actions(roles[0].replica, rank)
        held = {role.stage for role in roles}
        sums = [each for each in self.gradient_buckets if rank in each.group]
        trained = self._get_trained_weights if self.overlap else lambda _: set()
        # Each sum appears twice: its start among the backward steps here, its end in `ends`.
        steps = insert_gradient_sums(self._make_steps(work, ways), sums, trained)
        ends = (*sums, *self._make_updates(rank, roles, work)) if self.graph.loss else ()
        program = Program(
            rank=rank,
            steps=(*steps, *(Step(item, Phase.UPDATE) for item in ends)),
            direction_programs=ways,
            directions={item.micro_batch: item.direction for item in work},
            micro_batches=self.plan.micro_batches,
            weights=self.lowering.select_read_names(held, self.graph.weights),
            buffers=self.lowering.select_read_names(held, self.graph.buffers),
        )
        before = make_count_steps(self.graph, self.plan, self.layout, program)
        return replace(program, steps=(*before, *program.steps))

    def _get_rank_actions(self, replica: int, rank: int) -> list[PipelineAction]:
        """Return a rank's actions in order, with micro-batches numbered over all replicas, one after another."""
        first = replica * self.plan.replica_batches * self.plan.parts
        order = self.schedule.get_actions(rank % self.plan.replica_ranks)
        asked = [work for work in order if self.graph.loss or work.kind is ActionKind.FORWARD]
        return [replace(work, micro_batch=first + work.micro_batch) for work in asked]

    def _make_steps(self, work: Iterable[PipelineAction], ways: dict[int, DirectionProgram]) -> Iterable[Step]:
        apart = self.plan.rule.splits
        for item in work:
            forward = ways[item.direction].stages[item.stage]
            if item.kind is ActionKind.FORWARD:
                yield from (Step(each, Phase.FORWARD, item.micro_batch) for each in forward)
            else:
                phase = Phase.WEIGHTS if item.kind is ActionKind.WEIGHTS else Phase.INPUTS if apart else Phase.BACKWARD
                # The forward order reversed, in which each half of an overlapped exchange takes the place of the other
                # one.
                back = (each for each in reversed(forward) if self._has_backward(each, phase))
                adjoint = (each.adjoint if isinstance(each, ExchangeHalf) else each for each in back)
                yield from (Step(each, phase, item.micro_batch) for each in adjoint)

    def _has_backward(self, item: ModelInstruction, phase: Phase) -> bool:
        late = not self.graph.matrices.isdisjoint(self._get_trained_weights(item))
        return item.differentiable and (phase is not Phase.WEIGHTS or late)

    def _get_trained_weights(self, item: Instruction) -> set[str]:
        """Return the trained weights that a segment reads."""
        ops = item.ops if isinstance(item, Compute) else ()
        return self.graph.trainable & {name for op in ops if op.graded for name in op.reads}

    def _make_direction_program(self, roles: Sequence[Role]) -> DirectionProgram:
        """Return a rank's work in one direction, for each of its stages."""
        builders = {role: self.lowering.get_builder(role) for role in roles}
        last = next((role for role in roles if role.stage == self.plan.split_size - 1), None)
        lasting = {entry.moments for builder in builders.values() for entry in builder.statistics}
        ends = (self.graph.prediction, *([self.graph.loss] if self.graph.loss else []))
        lasting.update(ends if last else ())
        return DirectionProgram(
            stages={role.stage: self.lowering.build_forward(role, lasting) for role in roles},
            input_shards={name: feed for role in roles for name, feed in self.lowering.get_input_shards(role)},
            loss=self.graph.loss if last else None,
            prediction=self.graph.prediction if last else None,
            prediction_shard=self._get_prediction_shard(last) if last else None,
            seeds_loss=self.graph.loss is not None and last is not None and last.tile == 0,
            kept_to_end=frozenset(lasting),
        )

    def _get_prediction_shard(self, role: Role) -> ShardSpec | None:
        """Return the part of the prediction that this rank reports; tile 0 alone reports what all tiles hold."""
        found = self.lowering.get_prediction_shard(role)
        own = found.axes is not None or (found.tile is not None and found.tile.images is not None)
        return found if own or role.tile == 0 else None

    def _make_updates(self, rank: int, roles: Sequence[Role], work: Sequence[PipelineAction]) -> Iterable[Instruction]:
        """Yield the instructions after the gradient sums: statistics, the finite check, and the optimiser step."""
        stages = {role.stage for role in roles}
        builders = {role.stage: self.lowering.get_builder(role) for role in roles}
        for stage in sorted(stages):
            yield from self._make_stats_reduction(stage, builders[stage], roles, work)
        if self.layout.size > 1:
            counted = tuple(
                name
                for name in self.lowering.select_read_names(stages, self._ranks_by_weight)
                # each weight enters the norm once: on the first rank that holds it
                if self._ranks_by_weight[name][0] == rank
            )
            yield FiniteCheckAllReduce("agree", tuple(range(self.layout.size)), counted)
        statistics = tuple(
            replace(entry, mean_over=self.layout.find_ranks([stage])) if entry.mean_over else entry
            for stage in sorted(stages)
            for entry in builders[stage].statistics
        )
        counters = {name: grown for builder in builders.values() for name, grown in builder.counters.items()}
        yield Update("update", statistics, {name: self.plan.micro_batches * grown for name, grown in counters.items()})

    def _make_stats_reduction(
        self, stage: int, builder: Builder, roles: Sequence[Role], work: Sequence[PipelineAction]
    ) -> Iterable[ReduceBatchStats]:
        """Yield the reduction of batch statistics, if replicas or directions see different micro-batches."""
        moments = tuple(entry.moments for entry in builder.statistics if not entry.mean_over)
        if not moments or len(self.layout.pipes) == 1:
            return
        first = {role.direction for role in roles if role.stage == stage and role.tile == 0}
        tells = sorted({item.micro_batch for item in work if item.stage == stage and item.direction in first})
        count = self.plan.micro_batches * sum(builder.values[name].spec.bytes for name in moments)
        yield ReduceBatchStats(f"statistics{stage}", moments, tuple(tells), count, self.layout.find_ranks([stage]))
