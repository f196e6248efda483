"""Compiles a traced model and a plan into the program of each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.lowering import STAGE_TAGS, Lowering, add_inputs
from mpi4dl_nb.engines.compiler.operator_table import lower
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, is_synced_count
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Role
from mpi4dl_nb.engines.plan.make_schedule import make_schedule
from mpi4dl_nb.engines.plan.schedule import ActionKind, Batch, PipelineAction, Schedule
from mpi4dl_nb.engines.program.effects import Instruction, Phase
from mpi4dl_nb.engines.program.instructions import (
    FINITE_CHECK,
    FiniteCheckAllReduce,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from mpi4dl_nb.engines.program.program import CountLabels, DirectionProgram, Program, Step

# Buckets of gradients: which weights are reduced together, and where in a program their all-reduce starts.


def make_buckets(
    graph: ModelGraph, holders: Mapping[str, tuple[int, ...]], tag: int, bucket_bytes: int = 1 << 22
) -> tuple[SumGradients, ...]:
    """Return the gradient all-reduces of a training step; `holders` are the ranks that hold each weight, ascending.

    Weights held by the same ranks share buckets of `bucket_bytes` or a little more, the last layers first, as the
    backward pass reaches them first (Li et al., 2020, PyTorch Distributed, arXiv:2006.15704, section 3.2.3). Ranks may
    start the buckets in different orders; each bucket therefore has its own tag, from `tag` on.
    """
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in reversed(tuple(graph.weights)):
        if name in graph.trainable and len(holders[name]) > 1:
            groups[holders[name]].append(name)
    buckets: list[SumGradients] = []
    for group, names in sorted(groups.items()):
        part: list[str] = []
        for name in names:
            part.append(name)
            filled = sum(graph.weights[weight].bytes for weight in part)
            if filled >= bucket_bytes or name == names[-1]:
                index = len(buckets)
                buckets.append(SumGradients(f"gradients{index}", tuple(part), filled, group, tag + 2 * index))
                part = []
    return tuple(buckets)


def compile_plan(graph: ModelGraph, plan: Plan) -> tuple[Program, ...]:
    """Return the program of every rank, in rank order. Raises PlanError or TraceError if plan and model do not fit.

    >>> from mpi4dl_nb import Plan, Sizes, compile_plan, resnet20_v1
    >>> plan = Plan(split_size=2, spatial_size=0)
    >>> programs = compile_plan(Sizes(resnet20_v1()).graph(plan, (2, 3, 32, 32)), plan)
    >>> [program.rank for program in programs]
    [0, 1]
    """
    compiler = Compiler(graph, plan)
    return tuple(compiler.compile_rank(rank) for rank in range(compiler.layout.size))


class Compiler:
    """Compiles one rank at a time; what does not depend on the rank is computed once.

    If the graph has no loss, a program ends with the forward passes. `input_gradient`: compute the gradient of the
    image as well, which training does not need. `overlap`: all-reduces of gradients start while
    the backward pass is still running.
    """

    def __init__(self, graph: ModelGraph, plan: Plan, input_gradient: bool = False, overlap: bool = True) -> None:
        self.graph, self.overlap = graph, overlap
        self.lowering = Lowering(graph, plan, input_gradient)
        self.plan, self.layout = self.lowering.plan, self.lowering.layout

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
        buckets = make_buckets(self.graph, self._ranks_by_weight, STAGE_TAGS // 2)
        if buckets and buckets[-1].tag + 2 > STAGE_TAGS:
            raise PlanError(
                f"The gradients travel in {len(buckets)} messages, and there are tags for {STAGE_TAGS // 4}. "
                "Use fewer stages, or train fewer weights."
            )
        return buckets

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
        sums = [bucket for bucket in self.gradient_buckets if rank in bucket.group]
        steps = self._insert_gradient_sums(list(self._make_steps(work, ways)), sums)
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
        return replace(program, steps=(*self._make_count_steps(program), *program.steps))

    def _make_count_steps(self, program: Program) -> Iterator[Step]:
        """Yield the step before a rank's `program`, if the rank has labels of the last stage and the loss counts them.

        It counts what the loss of the whole batch is divided by. Each rank counts over its own labels, micro-batch by
        micro-batch, with a small program; one all-reduce adds the counts over all replicas and directions. A loss whose
        divisor does not depend on labels has no such program.
        """
        graph, last = self.graph, self.plan.split_size - 1
        roles = {role.direction: role for role in self.layout.roles[program.rank] if role.stage == last}
        if not (graph.whole and graph.totals and roles):
            return
        labels = {"labels": graph.inputs["labels"]}
        counting = replace(graph, inputs=labels, nodes=graph.whole.nodes, trainable=frozenset(), whole=None)
        sources, ways = frozenset(total.source for total in graph.totals), {}
        for direction, role in roles.items():
            stage = self.layout.get_pipeline(role).stages[last]
            # The second half of the last stage's block of tags: the stage's own exchanges count up from its start.
            tag = STAGE_TAGS * (1 + last + direction * self.plan.split_size) + STAGE_TAGS // 2
            builder = Builder(counting, stage, role.tile, tag)
            add_inputs(builder)
            for node in counting.nodes:
                lower(builder, node)
            forward = {last: tuple(builder.finish(sources))}
            ways[direction] = DirectionProgram(forward, {}, None, None, role.tile == 0, sources)
        numbers = {micro_batch: way for micro_batch, way in sorted(program.directions.items()) if way in ways}
        steps = [
            Step(item, Phase.FORWARD, micro_batch) for micro_batch, way in numbers.items() for item in ways[way].forward
        ]
        buffers = sorted(graph.whole.reads - graph.inputs.keys())
        count_program = Program(program.rank, tuple(steps), ways, numbers, program.micro_batches, (), tuple(buffers))
        count = 8 * sum(total.spec.numel for total in graph.totals)  # in float64
        instruction = CountLabels("labels", count_program, count, self.layout.find_ranks([last]))
        yield Step(instruction, Phase.FORWARD, program.steps[0].micro_batch)

    def _make_steps(self, work: Iterable[PipelineAction], ways: dict[int, DirectionProgram]) -> Iterable[Step]:
        splits = self.plan.rule.splits
        for item in work:
            forward = ways[item.direction].stages[item.stage]
            if item.kind is ActionKind.FORWARD:
                yield from (Step(instruction, Phase.FORWARD, item.micro_batch) for instruction in forward)
                continue
            phase = Phase.WEIGHTS if item.kind is ActionKind.WEIGHTS else Phase.INPUTS if splits else Phase.BACKWARD
            for instruction in reversed(forward):
                # The weights' pass has work only in segments with matrices or convolutions: the gradients of all other
                # weights cost next to nothing and come with those of the inputs (see `Segment.late`).
                late = not self.graph.matrices.isdisjoint(self._get_trained_weights(instruction))
                if instruction.differentiable and (late or phase is not Phase.WEIGHTS):
                    # In reverse order, each half of an overlapped exchange takes the place of the other one:
                    #   forward   start, interior, end, border       backward   border', start', interior', end'
                    yield Step(instruction.adjoint, phase, item.micro_batch)

    def _insert_gradient_sums(self, steps: Sequence[Step], sums: Sequence[SumGradients]) -> Iterator[Step]:
        """Yield a rank's steps, with each all-reduce started after the last step that adds to a gradient in its bucket.

        Each sum appears twice: its start among the backward steps here, its end in the update.
        """
        #   F0 F1 B0 B1(last layers) start(bucket 0) B1(first layers) start(bucket 1) | end, end, agree, update
        last: dict[str, int] = {}
        for index, step in enumerate(steps):
            if self.overlap and step.phase is not Phase.FORWARD:
                last.update(dict.fromkeys(self._get_trained_weights(step.instruction), index))
        begun: dict[int, list[SumGradients]] = defaultdict(list)
        for bucket in sums:
            # A weight that no step trains here has no gradient; the bucket then starts at the end, as other ranks still
            # take part.
            begun[max(last.get(name, len(steps) - 1) for name in bucket.weights)].append(bucket)
        for index, step in enumerate(steps):
            yield step
            yield from (Step(bucket, Phase.BACKWARD, step.micro_batch) for bucket in begun[index])

    def _get_trained_weights(self, item: Instruction) -> frozenset[str]:
        """Return the trained weights that a segment reads."""
        return self.graph.trainable & {name for op in item.local_ops if op.graded for name in op.reads}

    def _make_direction_program(self, roles: Sequence[Role]) -> DirectionProgram:
        """Return a rank's work in one direction, for each of its stages."""
        builders = {role: self.lowering.get_builder(role) for role in roles}
        last = next((role for role in roles if role.stage == self.plan.split_size - 1), None)
        lasting = {entry.moments for builder in builders.values() for entry in builder.statistics}
        ends = (self.graph.prediction, *([self.graph.loss] if self.graph.loss else []))
        lasting.update(ends if last else ())
        shard = self.lowering.get_prediction_shard(last) if last else None
        # Tile 0 alone reports a prediction that all tiles hold whole.
        if last and shard and not shard.axes and last.tile != 0:
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
            norms = (entry for entry in builders[stage].statistics if not (entry.mean_over or entry.whole))
            moments = tuple(entry.moments for entry in norms)
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
            yield FiniteCheckAllReduce(FINITE_CHECK, tuple(range(self.layout.size)), counted)
        statistics = tuple(
            replace(
                entry,
                mean_over=self.layout.find_ranks([stage]),
                mean_bytes=sum(self.graph.buffers[name].bytes for name in (entry.mean_buffer, entry.variance_buffer)),
            )
            if entry.mean_over
            else entry
            for stage in stages
            for entry in builders[stage].statistics
        )
        again = self.graph.recomputed
        # Backward comes to the last norm first.
        statistics += tuple(
            replace(entry, turn=turn)
            for turn in range(1, max(again.values(), default=1))
            for entry in reversed(statistics)
            if again.get(entry.mean_buffer, 1) > turn
        )
        whole = {node.arguments["self"].name for node in self.graph.nodes if is_synced_count(self.graph, node)}
        counters = {
            name: (1 if name in whole else self.plan.micro_batches) * grown * again.get(name, 1)
            for builder in builders.values()
            for name, grown in builder.counters.items()
        }
        yield Update("update", statistics, counters)
