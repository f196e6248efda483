"""The count, before a step, of what the loss of the whole batch is divided by; done by the ranks of the last stage.

Each rank counts over its own labels, micro-batch by micro-batch, with a small program; one all-reduce adds the counts
over all replicas and directions. A loss whose divisor does not depend on labels has no such program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engines.layer.graph import BatchLoss, ModelGraph
from engines.layout import Layout, Role
from engines.plan import Plan
from engines.program.builder import Builder
from engines.program.instructions import CountLabels, Phase
from engines.program.lowering import STAGE_TAGS, add_inputs
from engines.program.program import DirectionProgram, Program, Step
from engines.spatial.batch_sharding import find_sharded_names, shard_graph
from engines.spatial.operator_table import lower

__all__ = ["make_count_steps"]


def make_count_steps(graph: ModelGraph, plan: Plan, layout: Layout, program: Program) -> Iterator[Step]:
    """Yield the step before a rank's `program`, if the rank has labels of the last stage and the loss counts them."""
    last = plan.split_size - 1
    roles = {role.direction: role for role in layout.roles[program.rank] if role.stage == last}
    if not (graph.totals and roles):
        return
    ways = {direction: _make_direction_program(graph, plan, layout, role) for direction, role in roles.items()}
    numbers = {number: way for number, way in sorted(program.directions.items()) if way in ways}
    steps = [Step(item, Phase.FORWARD, number) for number, way in numbers.items() for item in ways[way].forward]
    buffers = sorted(graph.whole.reads - graph.inputs.keys())
    own = Program(program.rank, tuple(steps), ways, numbers, program.micro_batches, (), tuple(buffers))
    count = 8 * sum(total.spec.numel for total in graph.totals)  # in float64
    counting = CountLabels("labels", own, count, layout.find_ranks([last]))
    yield Step(counting, Phase.FORWARD, program.steps[0].micro_batch)


def _make_direction_program(graph: ModelGraph, plan: Plan, layout: Layout, role: Role) -> DirectionProgram:
    """Return a rank's work on the labels of a micro-batch of one direction."""
    stage = layout.get_pipeline(role).stages[role.stage]
    labels, parted = _extract_label_graph(graph, graph.whole), frozenset[str]()
    if stage.shares > 1:
        share = _extract_label_graph(graph.share, graph.share.whole)
        labels, parted = shard_graph(labels, share, labels.nodes), find_sharded_names(labels, share)
    # The second half of the last stage's block of tags: the stage's own exchanges count up from its start.
    block = 1 + role.stage + role.direction * plan.split_size
    builder = Builder(labels, stage, role.tile, STAGE_TAGS * block + STAGE_TAGS // 2, batch_sharded=parted)
    add_inputs(builder)
    for node in labels.nodes:
        lower(builder, node)
    sources = frozenset(total.source for total in graph.totals)
    return DirectionProgram({role.stage: tuple(builder.finish(sources))}, {}, None, None, role.tile == 0, sources)


def _extract_label_graph(graph: ModelGraph, whole: BatchLoss) -> ModelGraph:
    """Return the part of a graph that depends on the labels alone."""
    inputs = {"labels": graph.inputs["labels"]}
    return replace(graph, inputs=inputs, nodes=whole.nodes, trainable=frozenset(), share=None, whole=None)
