"""Writes one rank's forward pass: the operator table says what each operator needs, this makes it instructions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.layer.graph import WITHOUT_GRADIENT, ModelGraph, Node, Ref, TensorSpec, references
from engines.layout import StageRanks
from engines.program.instructions import AllReduce, Compute, Exchange, LocalOp, RunningStatistics
from engines.spatial.moves import moves
from engines.spatial.tiles import Tile
from engines.spatial.windows import SpanRule, window

__all__ = ["POINT", "Builder", "Value", "Window"]

POINT = Tile.whole(1, 1)
"""What a rank holds of a value that has no pixels."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor in a stage. `spec` is that of the whole image.

    `axes` are its spatial axes counted from the end, along which each rank holds its own tile; None
    where every rank of the stage holds all of it.
    """

    name: str
    spec: TensorSpec
    axes: tuple[int, int] | None
    differentiable: bool

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width of the whole image that this (tiled) value is."""
        rows, cols = self.axes or (-2, -1)
        return self.spec.shape[rows], self.spec.shape[cols]


@dataclass(frozen=True, slots=True)
class Window:
    """The local tensor `name` holds the pixels `held`; the kernel is to read `wanted`, filled outside them."""

    name: str
    held: Tile
    wanted: Tile
    fill: float

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """Pixels to add (or, negative, to drop) left, right, above and below, in the order of `F.pad`."""
        held, wanted = self.held, self.wanted
        return (
            held.cols.start - wanted.cols.start,
            wanted.cols.stop - held.cols.stop,
            held.rows.start - wanted.rows.start,
            wanted.rows.stop - held.rows.stop,
        )


@dataclass
class Builder:
    """Collects the instructions of tile `tile` of one stage, in graph order.

    Tags count up from `tag`, which is even; every rank of the stage counts the same exchanges, so equal tags meet.
    """

    graph: ModelGraph
    stage: StageRanks
    tile: int
    tag: int
    values: dict[str, Value] = field(default_factory=dict)
    instructions: list[Compute | Exchange | AllReduce] = field(default_factory=list)
    statistics: list[RunningStatistics] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    _open: list[LocalOp] = field(default_factory=list)
    _windows: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _module: str = ""

    @property
    def rank(self) -> int:
        """The rank that runs what is built."""
        return self.stage.ranks[self.tile]

    def at(self, node: Node) -> None:
        """What follows belongs to this node."""
        self._module = node.module

    def forget(self, node: Node) -> None:
        """Take back what was begun for a node."""
        self._open = [op for op in self._open if op.out.split(".")[0] != node.name]

    def is_tiled(self, ref: Any) -> bool:
        """Whether an argument is a value of which each rank holds a tile."""
        return isinstance(ref, Ref) and ref.name in self.values and self.values[ref.name].axes is not None

    def value(self, ref: Ref) -> Value:
        """The value that an argument refers to."""
        return self.values[ref.name]

    def tiles(self, size_px: tuple[int, int]) -> dict[int, Tile]:
        """The tiles of an image of that size, by rank."""
        return dict(zip(self.stage.ranks, self.stage.grid.cut(*size_px), strict=True))

    def local(
        self,
        out: str,
        kernel: str,
        *arguments: Any,
        like: TensorSpec,
        axes: tuple[int, int] | None = None,
        **keywords: Any,
    ) -> Ref:
        """Run a kernel on what this rank holds; `like` is the spec of the result for the whole image."""
        self._open.append(LocalOp(out, kernel, arguments, keywords, self._module))
        differentiable = (
            like.is_floating
            and kernel not in WITHOUT_GRADIENT
            and any(self._carries(name) for name in references((arguments, keywords)))
        )
        self.values[out] = Value(out, like, axes, differentiable)
        return Ref(out)

    def _carries(self, name: str) -> bool:
        return name in self.graph.trainable or (name in self.values and self.values[name].differentiable)

    def all_reduce(self, ref: Ref) -> Ref:
        """The sum of a value over the ranks of the stage."""
        if len(self.stage.ranks) == 1:
            return ref
        value = self.value(ref)
        self.flush()
        target = f"{value.name}.total"
        self.instructions.append(
            AllReduce(target, value.name, target, value.spec.shape, self.stage.ranks, value.differentiable)
        )
        self.values[target] = Value(target, value.spec, None, value.differentiable)
        return Ref(target)

    def window(self, ref: Ref, out_px: tuple[int, int], rows: SpanRule, cols: SpanRule, fill: float = 0.0) -> Window:
        """Borrow what the outputs of this rank's tile of an `out_px` image read of a tiled value."""
        value = self.value(ref)
        wanted = {rank: window(tile, rows, cols) for rank, tile in self.tiles(out_px).items()}
        mine, own = wanted[self.rank], self.tiles(value.size_px)[self.rank]
        name = self._exchange(value, wanted, fill)
        return Window(name, own if name == value.name else mine, mine, fill)

    def _exchange(self, value: Value, wanted: Mapping[int, Tile], fill: float) -> str:
        key = (value.name, tuple(wanted.values()), fill)
        if key not in self._windows:
            self.tag += 2
            target = f"{value.name}.window{self.tag}"
            owned = self.tiles(value.size_px)
            self._windows[key] = self.transfer(value, "halo", target, target, self.tag, owned, wanted, fill)
        return self._windows[key]

    def transfer(
        self, value: Value, purpose: str, name: str, target: str, tag: int,
        owned: Mapping[int, Tile], wanted: Mapping[int, Tile], fill: float = 0.0,
    ) -> str:  # fmt: skip
        """Fill each rank's `wanted` tile; the name under which this rank has its own, if it had to borrow for it."""
        whole = Tile.whole(*value.size_px) if value.axes else POINT
        travelling = [
            move
            for move in moves(owned, {rank: tile & whole for rank, tile in wanted.items()})
            if move.source != move.target
        ]
        sends = tuple(move for move in travelling if move.source == self.rank)
        receives = tuple(move for move in travelling if move.target == self.rank)
        if not (sends or receives):
            return value.name
        self.flush()
        window = wanted[self.rank] if receives else None
        self.instructions.append(
            Exchange(
                name, purpose, value.name, target, value.axes, value.spec.shape, value.spec.dtype,
                owned.get(self.rank), window, fill, sends, receives, tag, value.differentiable,
            )
        )  # fmt: skip
        if receives:
            self.values[target] = Value(target, value.spec, value.axes, value.differentiable)
        return target if receives else value.name

    def padded(self, window: Window) -> Ref:
        """The window as one tensor, with what lies outside the image filled in."""
        if not any(window.margins):
            return Ref(window.name)
        value = self.values[window.name]
        name = f"{window.name}.padded{len(self._open)}_{len(self.instructions)}"
        return self.local(
            name, "tile.pad", Ref(window.name), window.margins, window.fill,
            like=value.spec, axes=value.axes,
        )  # fmt: skip

    def flush(self) -> None:
        """End the open segment: a communication follows."""
        if self._open:
            name = f"segment{len(self.instructions)}"
            self.instructions.append(Compute(name, tuple(self._open), (), (), False))
            self._open = []

    def finished(self, kept: Iterable[str]) -> list[Compute | Exchange | AllReduce]:
        """All instructions, each segment with its inputs and outputs; `kept` values stay to the end."""
        self.flush()
        wanted, done = set(kept), []
        for instruction in reversed(self.instructions):
            if isinstance(instruction, Compute):
                instruction = self._bounded(instruction, wanted)
                wanted.update(instruction.inputs)
            else:
                wanted.add(instruction.source)
            done.append(instruction)
        return done[::-1]

    def _bounded(self, segment: Compute, wanted: set[str]) -> Compute:
        made = {op.out for op in segment.ops}
        read = dict.fromkeys(name for op in segment.ops for name in references((op.arguments, op.keywords)))
        inputs = tuple(name for name in read if name in self.values and name not in made)
        outputs = tuple(op.out for op in segment.ops if op.out in wanted)
        differentiable = any(self.values[name].differentiable for name in outputs)
        return Compute(segment.name, segment.ops, inputs, outputs, differentiable)
