"""Lowers the model for each rank: the values received from other stages, the stage's nodes, and the values sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import mpi4dl_nb.engines.compiler.entries  # noqa: F401  (fills the operator table)
from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.crossings import Crossings, cut_value, find_batch_axis, find_crossings
from mpi4dl_nb.engines.compiler.operator_table import lower
from mpi4dl_nb.engines.compiler.stages import cut_stages, find_layers
from mpi4dl_nb.engines.compiler.value_layout import Memo, ValueLayout
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.places import to_places
from mpi4dl_nb.engines.geometry.tiles import Span
from mpi4dl_nb.engines.geometry.windows import ExtendedTiles, HaloCost, Shift, extend_tiles, group_cheapest
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout, Role, StageRanks
from mpi4dl_nb.engines.program.instructions import ModelInstruction
from mpi4dl_nb.engines.program.program import ShardSpec

# Tags in blocks of STAGE_TAGS, for S stages:
#
#   block 0           transfers between stages  |  sums of gradients (second half of the block)
#   block 1 + s       exchanges within stage s  |  counts of labels (second half, last stage only)
#   block 1 + S + s   the same in the mirrored direction
STAGE_TAGS = 1 << 14
"""The number of message tags in one block. Tags are even.

The odd tag after each is that of the exchange's gradient, or of a sum's second round.

Each stage has a block for its exchanges in each direction. Transfers between stages use the first half of block 0. Some
transports allow no tags above 2 ** 23.
"""


def add_inputs(builder: Builder, gradient: bool = False) -> None:
    """Add the inputs of the graph to a stage's values: by images if ranks share them, else as tiles where they fit."""
    for name, spec in builder.graph.inputs.items():
        axes = builder.image_axes
        if builder.stage.shares > 1:
            axes = find_batch_axis(spec, builder.stage.shares)
        elif name != "images" and not (len(spec.shape) > len(axes) and builder.can_tile(builder.get_image_px(spec))):
            axes = ()
        builder.values[name] = ValueLayout(name, spec, to_places(axes), gradient and spec.is_floating)
        builder.hold_extended(name)


class Lowering:
    """The forward pass of every stage as seen by each of its ranks; what ranks have in common is computed once.

    `reads` are the names that each stage reads. `tile_by_tile`: the tiles of the only stage are computed one after
    another, with all layers fused from the image on, so that a tile depends on others only through sums over the image.

    Raises PlanError or TraceError if the plan does not fit the model.
    """

    def __init__(self, graph: ModelGraph, plan: Plan, input_gradient: bool = False, tile_by_tile: bool = False) -> None:
        plan = plan.fit(graph.inputs["images"].shape[2:])
        self.graph, self.plan, self.layout = graph, plan, Layout.of(plan)
        self.input_gradient, self.tile_by_tile = input_gradient, tile_by_tile
        self.layers = find_layers(graph)
        self.spans = cut_stages(self.layers, plan)
        self.stage_of = {node.name: index for index, span in enumerate(self.spans) for node in self._get_nodes(span)}
        self.reads = [{name for node in self._get_nodes(span) for name in node.reads} for span in self.spans]
        if graph.whole:
            self.reads[-1] |= graph.whole.reads  # the last stage counts what the loss divides by
        crossings = tuple(find_crossings(graph, self.layout, self.stage_of))
        self.crossings = Crossings(crossings, self.layout, graph.inputs["images"].shape[0])
        blocks = 1 + 2 * len(self.spans)
        if self.crossings.end_tag > STAGE_TAGS // 2 or blocks * STAGE_TAGS > 1 << 23:
            raise PlanError(
                f"split_size={len(self.spans)} with {len(crossings)} values read in later stages needs more tags "
                "for messages than there are. Use fewer stages (up to 255), or cut where fewer values pass."
            )
        self._builders: dict[Role, Builder] = {}
        self._commons: dict[Role, Memo] = defaultdict(Memo)
        self._wides: dict[Role, ExtendedTiles] = {}
        self._scouts: dict[Role, Builder] = {}
        for stage in range(len(self.spans)):
            builder = self.get_builder(Role(stage, 0))
            # In stage order: a stage can be lowered only once the layouts of all values that it receives are recorded.
            names = {node.name for node in self._get_nodes(self.spans[stage])}
            self.crossings.values.update({name: builder.values[name] for name in names & builder.values.keys()})
        # A stage must not read a buffer that another stage writes at its update.
        for stage in range(len(self.spans)):
            builder = self.get_builder(Role(stage, 0))
            written = {name for entry in builder.statistics for name in (entry.mean_buffer, entry.variance_buffer)}
            for other, reads in enumerate(self.reads):
                if other != stage and (shared := sorted((written | builder.counters.keys()) & reads)):
                    raise PlanError(
                        f"stages {stage} and {other} both use {shared[0]}, which counts what it saw, in "
                        "their order. Put the layers that share it into one stage (balance, or a smaller split_size)."
                    )

    def get_builder(self, role: Role) -> Builder:
        """Return the builder of a stage for tile `role.tile`: values received, the stage's nodes, values sent."""
        if role not in self._builders:
            builder = self._lower_stage(role, self._get_extended_tiles(role), self.plan.overlap_halos)
            builder.end_nodes()
            self.crossings.send(builder, role)
            self._builders[role] = builder
        return self._builders[role]

    def drop_builder(self, role: Role) -> None:
        """Discard a tile's builder, so that of many tiles computed in turn only the current one is kept."""
        self._builders.pop(role, None)
        self._wides.pop(role, None)

    def build_forward(self, role: Role, lasting: Iterable[str]) -> tuple[ModelInstruction, ...]:
        """Return the forward instructions of a rank's stage; `lasting` values live to the end of the step."""
        passing = (item for item in self.crossings.crossings if role.stage in (item.source, item.target))
        kept = {crossing.value for crossing in passing}
        prefix = f"{'mirrored.' * role.direction}stage{role.stage}."
        items = self.get_builder(role).finish(kept.union(lasting))
        return tuple(replace(item, name=f"{prefix}{item.name}") for item in items)

    def get_input_shards(self, role: Role) -> Iterable[tuple[str, ShardSpec]]:
        """Yield the name of each input that a rank needs for its stage, and its part of it."""
        builder = self.get_builder(role)
        for name in self.graph.inputs:
            if name in self.reads[role.stage]:
                yield name, self._make_shard_spec(builder, name)

    def get_prediction_shard(self, role: Role) -> ShardSpec:
        """Return the part of the prediction that a rank of the last stage computes.

        Raises PlanError if the last stage does not have it.
        """
        builder = self.get_builder(role)
        if self.graph.prediction not in builder.values:
            raise PlanError(
                f"Predictions come from the last stage, but stage {role.stage} neither makes nor reads the model's "
                f"first output ({self.graph.prediction}). Use fewer stages, choose a balance that puts the layer that "
                "makes it into the last stage, or let the model return it after an output that the last stage makes."
            )
        return self._make_shard_spec(builder, self.graph.prediction)

    def _make_shard_spec(self, builder: Builder, name: str) -> ShardSpec:
        value = builder.values[name]
        pixels = value.separate()[0]
        split, lead = pixels.split(), (value.places[0].dim, value.lead) if value.lead else None
        shape = None if split is pixels else split.spec.shape
        if self.tile_by_tile and split.places:
            return ShardSpec(builder.get_held_tiles(Ref(name))[builder.rank], split.axes, shape, lead)
        return ShardSpec(cut_value(builder.stage, split.spec, split.axes)[builder.rank], split.axes, shape, lead)

    def select_read_names(self, stages: Iterable[int], names: Iterable[str]) -> tuple[str, ...]:
        """Return those of the names that any of the stages read."""
        reads = set().union(*(self.reads[stage] for stage in stages))
        return tuple(name for name in names if name in reads)

    def _get_extended_tiles(self, role: Role) -> ExtendedTiles:
        """Return what the ranks of a stage hold beyond their tiles, for fused halos; for tiles in turn, of one tile at
        a time.
        """
        first = replace(role, tile=0)
        key = role if self.tile_by_tile else first
        if key in self._wides:
            return self._wides[key]
        if not self.plan.halo_d2 or self._get_stage_ranks(role, role.stage).grid.tiles == 1:
            self._wides[key] = ExtendedTiles()
            return self._wides[key]
        # What each node reads is known only after lowering. The stage is therefore lowered twice: first without fused
        # halos, by a scout that records the reads (the same for every tile), then with them.
        #
        #   scout: reads of each node --> groups --> extend_tiles --> builder of every tile
        if first not in self._scouts:
            self._scouts[first] = self._lower_stage(first, ExtendedTiles(), overlaps=False)
        scout = self._scouts[first]
        scout.tile = key.tile
        # What a reduction reads of its own pixels, of which it makes a value that is not cut, needs no others.
        reads = [read for read in scout.reads if scout.is_tiled(Ref(read.node)) or {*read.rules} != {Shift(0)}]
        if self.tile_by_tile:
            groups = dict.fromkeys((*self.graph.inputs, *(node.name for node in self.graph.nodes)), 0)
        else:
            layers = [layer.nodes for layer in self.layers if layer.nodes.start in self.spans[role.stage]]
            names = [[node.name for node in self._get_nodes(nodes)] for nodes in layers]
            fused = self.plan.fused_layers
            if isinstance(fused, str):
                work = {name: scout.estimate_cost(name) for name in scout.values if scout.is_tiled(Ref(name))}
                sizes = group_cheapest(names, reads, scout.get_image_tiles, work, HaloCost())
                numbers = [group for group, size in enumerate(sizes) for _ in range(size)]
            else:
                numbers = [index // fused for index in range(len(names))]
            groups = {name: group for group, layer in zip(numbers, names, strict=True) for name in layer}
            # The prediction has a group of its own: the loss, and a caller that collects the prediction, read the own
            # tile of each rank, even if later layers read more.
            groups |= {self.graph.prediction: -1}
        self._wides[key] = extend_tiles(reads, groups, scout.get_image_tiles)
        return self._wides[key]

    @cached_property
    def _segment_starts(self) -> set[str]:
        """The nodes at which a new segment begins even without a communication: the first node of each layer.

        If the gradients of weights are computed separately (zero bubble), each operator with weights has a segment of
        its own: backward would run the rest of its segment twice.
        """
        if not self.plan.rule.splits:
            return {self.graph.nodes[layer.nodes.start].name for layer in self.layers}
        # A `getitem` stays with the operator whose outputs it picks: no value holds all of them.
        nodes = [node for node in self.graph.nodes if node.operator != "getitem"]
        weighted = [not self.graph.matrices.isdisjoint(node.reads) for node in nodes]
        after = [False, *weighted[:-1]]
        return {n.name for n, here, before in zip(nodes, weighted, after, strict=True) if here or before}

    def _get_nodes(self, span: Span) -> Sequence[Node]:
        return self.graph.nodes[span.start : span.stop]

    def _get_stage_ranks(self, role: Role, stage: int) -> StageRanks:
        """Return the ranks of a stage in the replica and direction of `role`."""
        return self.layout.get_pipeline(role).stages[stage]

    def _lower_stage(self, role: Role, wide: ExtendedTiles, overlaps: bool) -> Builder:
        block = 1 + role.stage + role.direction * len(self.spans)
        ranks = self._get_stage_ranks(role, role.stage)
        builder = Builder(
            self.graph,
            ranks,
            role.tile,
            STAGE_TAGS * block,
            extended=wide,
            tile_by_tile=self.tile_by_tile,
            sync_batchnorm=self.plan.sync_batchnorm,
            attention_keys=self.plan.attention_keys,
            overlaps=overlaps and ranks.shares == 1,
            copies=tuple(rank for pipe in self.layout.pipes for rank in pipe.stages[role.stage].ranks),
            memo=self._commons[replace(role, tile=0)],
        )
        add_inputs(builder, self.input_gradient)
        self.crossings.receive(builder, role)
        span = self.spans[role.stage]
        for node in self._get_nodes(span):
            if node.name in self._segment_starts:
                builder.flush()
            try:
                lower(builder, node)
            except PlanError as error:
                raise PlanError(f"{node.operator} in {node.where}, stage {role.stage}: {error}") from error
        return builder
