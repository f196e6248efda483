"""The receptive field: the pixels of the image, and of all values between, on which one output pixel depends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from engines.errors import PlanError
from engines.formatting import describe_unknown
from engines.graph.model_graph import ModelGraph
from engines.plan import Plan
from engines.program.builder import Builder
from engines.program.lowering import Lowering
from engines.spatial.layout import Role
from engines.spatial.tiles import Span, Tile
from engines.spatial.windows import WindowRead, compute_window

__all__ = ["ReceptiveField", "ReceptiveFields"]


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive field of pixel `pixel` of the value `node`: of each earlier value the smallest rectangle.

    `fields` are keyed by the values' names, in pixels of each value. Statistics of norms over all pixels do not count.
    """

    node: str
    pixel: tuple[int, int]
    fields: Mapping[str, Tile]

    @property
    def image(self) -> Tile:
        """The pixels of the image; empty if the layer reads none."""
        return self.fields.get("images", Tile(Span(0, 0), Span(0, 0)))


class ReceptiveFields:
    """Traces windows backward through a model by the rules of the operator table, which are looked up once.

    >>> from torch import nn
    >>> from engines.train.training import prepare
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1))
    >>> fields = ReceptiveFields(prepare(model, Plan(split_size=1), (1, 3, 32, 32)).graph)
    >>> fields.compute_field("conv2d_1", 5, 5).image.shape
    (8, 8)
    """

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph

    def compute_field(self, node: str, row: int, col: int) -> ReceptiveField:
        """Return the receptive field of one pixel of the value that `node` makes.

        Raises PlanError if there is no such value with rows and columns, or no such pixel.
        """
        rows, cols = self.get_size_px(node)
        if row not in range(rows) or col not in range(cols):
            raise PlanError(
                f"Pixel ({row}, {col}) is not one of the {rows} x {cols} of {node}: "
                f"use rows 0 to {rows - 1} and columns 0 to {cols - 1}."
            )
        # Backward through the nodes: all readers of a value come after it, so its rectangle is complete when it is
        # reached. Two branches that read different windows of one value are joined to the smallest rectangle of both.
        found, values = {node: Tile(Span(row, row + 1), Span(col, col + 1))}, self._builder.values
        for each in reversed(self.graph.nodes):
            if each.name not in found:
                continue
            outputs, made = found[each.name], values.get(each.name)
            for name in dict.fromkeys(each.reads):
                value = values.get(name)
                if value is None or not value.axes:
                    continue
                whole = Tile.whole(*value.size_px)
                if rules := self._rules.get((each.name, name)):
                    windows = [compute_window(outputs, rule.rules) for rule in rules]
                else:
                    # No window rule: a pointwise operator reads the pixel at the same position; any other one reads the
                    # whole value, as does one whose input was all-gathered.
                    beneath = made is not None and made.axes and made.size_px == whole.shape
                    windows = [outputs if beneath and f"{name}.whole" not in values else whole]
                for tile in windows:
                    found[name] = found[name] | tile & whole if name in found else tile & whole
        return ReceptiveField(node, (row, col), found)

    def get_size_px(self, node: str) -> tuple[int, int]:
        """Return the rows and columns of a node's value. Raises PlanError if it has none."""
        value = self._builder.values.get(node)
        if value is None or not value.axes:
            known = [name for name, each in self._builder.values.items() if each.axes]
            problem = f"{node!r} is no value of rows and columns: it has no receptive field"
            raise PlanError(describe_unknown(problem, node, known))
        return value.size_px

    @cached_property
    def _builder(self) -> Builder:
        """The whole model built for one rank, which records what each operator reads."""
        plan = Plan(split_size=1, spatial_size=0)
        return Lowering(self.graph, plan).get_builder(Role(0, 0))

    @cached_property
    def _rules(self) -> Mapping[tuple[str, str], list[WindowRead]]:
        found: dict[tuple[str, str], list[WindowRead]] = defaultdict(list)
        for read in self._builder.reads:
            found[read.node, read.value].append(read)
        return found
