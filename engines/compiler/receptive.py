"""The receptive field: the pixels of the image, or of any earlier value, on which one output pixel depends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.lowering import Lowering
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.geometry.windows import SpanRule, WindowRead
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Role

_NOWHERE = np.iinfo(np.int64).max // 2  # the start of an empty span: later than any pixel


@dataclass(frozen=True)
class FieldSpans:
    """For each position of a value along one axis, the span of the source on which it depends: (n,) int64 each.

    A position that depends on nothing has a start beyond its stop.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def whole(cls, size: int) -> FieldSpans:
        """Return the spans of the source itself: each position depends on itself."""
        return cls(np.arange(size), np.arange(1, size + 1))

    def __or__(self, other: FieldSpans) -> FieldSpans:
        return FieldSpans(np.minimum(self.starts, other.starts), np.maximum(self.stops, other.stops))

    def find_hull(self, span: Span) -> Span:
        """Return what the positions in `span` depend on together; an empty span if they depend on nothing."""
        part = slice(span.start, span.stop)
        start, stop = int(self.starts[part].min()), int(self.stops[part].max())
        return Span(start, stop) if stop > start else Span(0, 0)

    def read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> FieldSpans:
        """Return the spans of readers that read the positions `starts` to `stops`; none where these are equal."""
        # `reduceat` reduces between the indices at even places, which must differ, and the last of which may be one
        # beyond the end: so one more position is appended, and readers of nothing read something here, which is undone.
        first = np.minimum(starts, len(self.starts) - 1)
        places = np.stack([first, np.maximum(stops, first + 1)], axis=1).ravel()
        low = np.minimum.reduceat(np.append(self.starts, _NOWHERE), places)[::2]
        high = np.maximum.reduceat(np.append(self.stops, -1), places)[::2]
        empty = stops <= starts
        return FieldSpans(np.where(empty, _NOWHERE, low), np.where(empty, -1, high))


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive field of pixel `pixel` of a value: the smallest box `image` of the image.

    It is empty if the pixel depends on no pixel of the image. Statistics of norms over all pixels do not count.
    """

    pixel: tuple[int, ...]
    image: Tile


class ReceptiveFields:
    """Receptive fields of all values of a model, by the window rules of the operator table, axis by axis.

    >>> from torch import nn
    >>> from mpi4dl_nb.engines.train.recipe import prepare
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1))
    >>> fields = ReceptiveFields(prepare(model, Plan(split_size=1), (1, 3, 32, 32)).graph)
    >>> fields.compute_field("conv2d_1", 5, 5).image.shape
    (8, 8)
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self._trace = cache(self._trace_from)

    def compute_field(self, node: str, *at: int) -> ReceptiveField:
        """Return the receptive field of one pixel of the value that `node` makes: of its position along each axis.

        Raises PlanError if there is no such value with rows and columns, or no such pixel.
        """
        sizes = self.get_size_px(node)
        if len(at) != len(sizes) or not all(px in range(size) for px, size in zip(at, sizes, strict=True)):
            raise PlanError(
                f"Pixel {at} is not one of the {' x '.join(map(str, sizes))} of {node}: "
                f"use {Tile.whole(*sizes).describe()}."
            )
        return ReceptiveField(at, self.compute_region(node, Tile(*(Span(px, px + 1) for px in at))))

    def compute_region(self, node: str, tile: Tile, source: str = "images") -> Tile:
        """Return the pixels of the image, or of an earlier value, on which the pixels `tile` of a value depend."""
        hulls = [spans.find_hull(span) for spans, span in zip(self.get_spans(node, source), tile, strict=True)]
        return Tile(*hulls) if all(hulls) else Tile(*(Span(0, 0) for _ in hulls))

    def get_spans(self, node: str, source: str = "images") -> tuple[FieldSpans, ...]:
        """Return the spans of the source for each position of a value, axis by axis. Raises PlanError as above."""
        nothing = tuple(FieldSpans(np.full(size, _NOWHERE), np.full(size, -1)) for size in self.get_size_px(node))
        return self._trace(source).get(node, nothing)

    def has_pixels(self, node: str) -> bool:
        """Return whether a node's value has pixels along sharded axes; a flattened one has not."""
        value = self._builder.values.get(node)
        return value is not None and bool(value.places)

    def get_size_px(self, node: str) -> tuple[int, ...]:
        """Return the rows and columns of a node's value. Raises PlanError if it has none."""
        if not self.has_pixels(node):
            known = [name for name, layout in self._builder.values.items() if layout.places]
            problem = f"{node!r} is no value of rows and columns: it has no receptive field"
            raise PlanError(describe_unknown(problem, node, known))
        return self._builder.values[node].size_px

    def _trace_from(self, source: str) -> Mapping[str, tuple[FieldSpans, ...]]:
        """Return the spans of all values that depend on a source, by one pass through the model."""
        # Forward, since a position's span is the hull of those that it reads, which are known by then:
        #
        #     image       . . [. . . . .] . .
        #     conv2d          [. . .]            each of these three has a span of three in the image
        #     conv2d_1           .               its span is their hull: five
        values = self._builder.values
        fields = {source: tuple(FieldSpans.whole(size) for size in self.get_size_px(source))}
        for node in self.graph.nodes:
            layout = values.get(node.name)
            if layout is None or not layout.places:
                continue
            for name in dict.fromkeys(node.reads):
                if name not in fields or not values[name].places:
                    continue
                whole = Tile.whole(*values[name].size_px)
                for spans in self._find_windows(node.name, name, layout.size_px, whole):
                    read = tuple(known.read(*span) for known, span in zip(fields[name], spans, strict=True))
                    before = fields.get(node.name, read)
                    fields[node.name] = tuple(old | new for old, new in zip(before, read, strict=True))
        return fields

    def _find_windows(
        self, node: str, name: str, out_px: tuple[int, ...], whole: Tile
    ) -> list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]]:
        """Return, for each way in which a node reads a value, the first and last positions by output, axis by axis."""
        if reads := self._rules.get((node, name)):
            return [
                [_apply_rule(rule, size, len(span)) for rule, size, span in zip(read.rules, out_px, whole, strict=True)]
                for read in reads
            ]
        # No window rule: a pointwise operator reads the pixel at the same position; any other one reads the whole
        # value, as does one whose input was all-gathered.
        if out_px == whole.shape and f"{name}.whole" not in self._builder.values:
            return [[(np.arange(size), np.arange(1, size + 1)) for size in out_px]]
        return [[(np.zeros(n, np.int64), np.full(n, len(s))) for n, s in zip(out_px, whole, strict=True)]]

    @cached_property
    def _builder(self) -> Builder:
        """The whole model built for one rank, which records what each operator reads."""
        axes = len(self.graph.inputs["images"].shape) - 2
        plan = Plan(split_size=1, slice_method="x".join("1" * axes))
        return Lowering(self.graph, plan).get_builder(Role(0, 0))

    @cached_property
    def _rules(self) -> Mapping[tuple[str, str], Sequence[WindowRead]]:
        reads: dict[tuple[str, str], list[WindowRead]] = defaultdict(list)
        for read in self._builder.reads:
            reads[read.node, read.value].append(read)
        return reads


def _apply_rule(rule: SpanRule, count: int, limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each of `count` outputs starts and stops to read, within 0 to `limit`."""
    outputs = np.arange(count)
    if getattr(rule, "elementwise", False):
        span = rule(Span(outputs, outputs + 1))  # type: ignore[arg-type]
        starts, stops = span.start, span.stop
    else:
        spans = [rule(Span(output, output + 1)) for output in range(count)]
        starts, stops = np.array([[span.start, span.stop] for span in spans]).T
    low = np.clip(starts, 0, limit)
    return low, np.maximum(low, np.clip(stops, 0, limit))
