"""Tallies of a model's layers on one rank, for the whole image or for a quarter of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engines.graph.model_graph import ModelGraph
from engines.graph.stages import Layer
from engines.plan import Plan
from engines.predict.rank_tally import build_tally
from engines.predict.tallies import DirectionTally, OpTally
from engines.program.builder import Builder
from engines.program.compile import Compiler
from engines.program.instructions import AllReduce, Compute, LocalOp, ModelInstruction
from engines.spatial.layout import Role

__all__ = ["LayerTally", "build_layer_tallies"]

WHOLE = Plan(split_size=1, spatial_size=0)
QUARTER = Plan(split_size=1, spatial_size=1, slice_method="2x2")


@dataclass(frozen=True)
class LayerTally:
    """One layer on one rank that has the fraction `part` of the image.

    `ops` are its kernel calls, and `fixed` marks those whose size does not depend on `part`. `sums` are the bytes of
    its all-reduces over the ranks of a stage, and `exchanges` is the number of its halo exchanges in forward. Of its
    `instructions`, `goes_back` are differentiable. `kept_bytes` are saved for backward, and `moments_bytes` are the
    moments of a micro-batch for the running statistics.
    """

    part: float
    ops: tuple[OpTally, ...] = ()
    fixed: tuple[bool, ...] = ()
    late: bool = False
    sums: tuple[int, ...] = ()
    exchanges: int = 0
    instructions: int = 0
    goes_back: int = 0
    kept_bytes: int = 0
    moments_bytes: int = 0

    def scale_ops(self, part: float, images: bool = False) -> tuple[OpTally, ...]:
        """Return the calls for another fraction of the image, or of the images of a batch."""
        scaled = []
        of_images = part if images else 1.0
        # Fewer pixels or images mean less work, except for a call whose values are whole on every rank, as those of a
        # classifier behind the pooling: fewer images change that, too.
        for op, fixed in zip(self.ops, self.fixed, strict=True):
            by = of_images if fixed else part / self.part
            if by == of_images == 1:
                scaled.append(op)
                continue
            shape = (*op.shape[:2], *(max(1, int(count * of_images)) for count in op.shape[2:]))
            scaled.append(replace(op, flops=int(op.flops * by), bytes=int(op.bytes * by), shape=shape))
        return tuple(scaled)


def build_layer_tallies(graph: ModelGraph, layers: Sequence[Layer], plan: Plan) -> tuple[LayerTally, ...]:
    """Return the tallies of the model's layers on rank 0 of `WHOLE` or `QUARTER`; equal layers share one object.

    Raises PlanError or TraceError if the plan does not fit the model.
    """
    known: dict[LayerTally, LayerTally] = {}
    return tuple(known.setdefault(each, each) for each in _LayerTallyBuilder(graph, layers, plan).build())


class _LayerTallyBuilder:
    def __init__(self, graph: ModelGraph, layers: Sequence[Layer], plan: Plan) -> None:
        compiler = Compiler(graph, plan)
        program = compiler.compile_rank(0)
        self.part = 1 / plan.ranks
        self.builder: Builder = compiler.lowering.get_builder(Role(0, 0))
        self.way: DirectionTally = build_tally(program, graph).ways[0]
        self.items = program.direction_programs[0].forward
        self.layer_of = {
            n.name: i for i, layer in enumerate(layers) for n in graph.nodes[layer.nodes.start : layer.nodes.stop]
        }
        self.count = len(layers)
        self.seen: set[str] = set()

    def build(self) -> Iterator[LayerTally]:
        items: list[list[ModelInstruction]] = [[] for _ in range(self.count)]
        moments_bytes = [0] * self.count
        layer = 0
        for item in self.items:
            # A segment belongs to the layer of its results. A communication serves what follows: it belongs to the
            # layer of its source, or to the current layer if that is later.
            if isinstance(item, Compute):
                layer = max(self._find_layer(op.out, layer) for op in item.ops)
            else:
                layer = max(layer, self._find_layer(item.source, layer))
            items[layer].append(item)
        for entry in self.builder.statistics:
            moments_bytes[self._find_layer(entry.moments, 0)] += self.builder.values[entry.moments].spec.bytes
        return map(self._build_layer_tally, items, moments_bytes)

    def _find_layer(self, name: str, otherwise: int) -> int:
        return self.layer_of.get(name, self.layer_of.get(name.split(".", maxsplit=1)[0], otherwise))

    def _build_layer_tally(self, items: Sequence[ModelInstruction], moments_bytes: int) -> LayerTally:
        segments = [item for item in items if isinstance(item, Compute)]
        tallies = [self.way.segments[segment.name] for segment in segments]
        calls = [op for segment in segments for op in segment.ops if op.kernel != "getitem"]
        # A block that several layers save is memory of the first of them alone.
        kept = 0
        for each in tallies:
            new = each.keeps - self.seen
            self.seen |= new
            kept += sum(each.fresh.get(key) or self.way.bytes.get(key, 0) for key in new)
        return LayerTally(
            self.part,
            tuple(op for each in tallies for op in each.ops),
            tuple(not self._is_tiled(call) for call in calls),
            late=any(each.late for each in tallies),
            sums=tuple(item.bytes for item in items if isinstance(item, AllReduce)),
            exchanges=sum(not isinstance(item, Compute | AllReduce) for item in items),
            instructions=len(items),
            goes_back=sum(item.differentiable for item in items),
            kept_bytes=kept,
            moments_bytes=moments_bytes,
        )

    def _is_tiled(self, call: LocalOp) -> bool:
        values: Mapping[str, object] = self.builder.values
        names = (name for name in (call.out, *call.reads) if name in values)
        return any(self.builder.values[name].axes is not None for name in names)
