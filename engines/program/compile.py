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
from engines.program.gradient_buckets import insert_gradient_sums, make_buckets
from engines.program.instructions import (
    Compute,
    ExchangeHalf,
    FiniteCheckAllReduce,
    Instruction,
    Phase,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from engines.program.label_counts import make_count_steps
from engines.program.lowering import STAGE_TAGS, Lowering
from engines.program.program import DirectionProgram, Program, Step

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
        roles, plan = self.layout.roles[rank], self.plan
        ways = {
            direction: self._make_direction_program([role for role in roles if role.direction == direction])
            for direction in sorted({role.direction for role in roles})
        }
        # All replicas follow one schedule; micro-batches are numbered over the replicas, one after another.
        first = roles[0].replica * plan.replica_batches * plan.parts
        work = [
            replace(action, micro_batch=first + action.micro_batch)
            for action in self.schedule.get_actions(rank % plan.replica_ranks)
            if self.graph.loss or action.kind is ActionKind.FORWARD
        ]
        held = {role.stage for role in roles}
        sums = [each for each in self.gradient_buckets if rank in each.group]
        trained = self._get_trained_weights if self.overlap else lambda _: set()
        # Each sum appears twice: its start among the backward steps here, its end in `ends`.
        #
        #   F0 F1 B0 B1(last layers) start(bucket 0) B1(first layers) start(bucket 1) | end, end, agree, update
        steps = insert_gradient_sums(self._make_steps(work, ways), sums, trained)
        ends = (*sums, *self._make_updates(rank, roles, work)) if self.graph.loss else ()
        program = Program(
            rank=rank,
            steps=(*steps, *(Step(item, Phase.UPDATE) for item in ends)),
            direction_programs=ways,
            directions={item.micro_batch: item.direction for item in work},
            micro_batches=plan.micro_batches,
            weights=self.lowering.select_read_names(held, self.graph.weights),
            buffers=self.lowering.select_read_names(held, self.graph.buffers),
        )
        before = make_count_steps(self.graph, plan, self.layout, program)
        return replace(program, steps=(*before, *program.steps))

    def _make_steps(self, work: Iterable[PipelineAction], ways: dict[int, DirectionProgram]) -> Iterable[Step]:
        apart = self.plan.rule.splits
        for item in work:
            forward = ways[item.direction].stages[item.stage]
            if item.kind is ActionKind.FORWARD:
                yield from (Step(each, Phase.FORWARD, item.micro_batch) for each in forward)
                continue
            phase = Phase.WEIGHTS if item.kind is ActionKind.WEIGHTS else Phase.INPUTS if apart else Phase.BACKWARD
            for each in reversed(forward):
                # The weights' pass has work only in segments with matrices or convolutions: the gradients of all other
                # weights cost next to nothing and come with those of the inputs (see `Segment.late`).
                late = not self.graph.matrices.isdisjoint(self._get_trained_weights(each))
                if each.differentiable and (late or phase is not Phase.WEIGHTS):
                    # In reverse order, each half of an overlapped exchange takes the place of the other one:
                    #   forward   start, interior, end, border       backward   border', start', interior', end'
                    yield Step(each.adjoint if isinstance(each, ExchangeHalf) else each, phase, item.micro_batch)

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
        shard = self.lowering.get_prediction_shard(last) if last else None
        # Tile 0 alone reports a prediction that all tiles hold whole.
        if shard and shard.axes is None and (shard.tile is None or shard.tile.images is None) and last.tile != 0:
            shard = None
        return DirectionProgram(
            stages={role.stage: self.lowering.build_forward(role, lasting) for role in roles},
            input_shards={name: feed for role in roles for name, feed in self.lowering.get_input_shards(role)},
            loss=self.graph.loss if last else None,
            prediction=self.graph.prediction if last else None,
            prediction_shard=shard,
            seeds_loss=self.graph.loss is not None and last is not None and last.tile == 0,
            kept_to_end=frozenset(lasting),
        )

    def _make_updates(self, rank: int, roles: Sequence[Role], work: Sequence[PipelineAction]) -> Iterable[Instruction]:
        """Yield the instructions after the gradient sums: statistics, the finite check, and the optimiser step."""
        stages = sorted({role.stage for role in roles})
        builders = {role.stage: self.lowering.get_builder(role) for role in roles}
        for stage in stages:
            moments = tuple(entry.moments for entry in builders[stage].statistics if not entry.mean_over)
            # Replicas and directions see different micro-batches, while the running statistics follow all of them. Tile
            # 0 speaks for the tiles of a stage: with synchronised batch norm all of them have the same moments.
            if moments and len(self.layout.pipes) > 1:
                first = {role.direction for role in roles if role.stage == stage and role.tile == 0}
                tells = sorted({item.micro_batch for item in work if item.stage == stage and item.direction in first})
                values = builders[stage].values
                count = self.plan.micro_batches * sum(values[name].spec.bytes for name in moments)
                group = self.layout.find_ranks([stage])
                yield ReduceBatchStats(f"statistics{stage}", moments, tuple(tells), count, group)
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
            for stage in stages
            for entry in builders[stage].statistics
        )
        counters = {name: grown for builder in builders.values() for name, grown in builder.counters.items()}
        yield Update("update", statistics, {name: self.plan.micro_batches * grown for name, grown in counters.items()})
