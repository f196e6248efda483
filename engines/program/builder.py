"""Writes one rank's forward pass: the operator table says what each operator needs, this makes it instructions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.layer.graph import WITHOUT_GRADIENT, ModelGraph, Node, Ref, TensorSpec, references
from engines.layout import StageRanks
from engines.program.instructions import AllReduce, Compute, Exchange, LocalOp, RunningStatistics
from engines.spatial.fusion import Read, Wide
from engines.spatial.grouping import Work
from engines.spatial.moves import moves
from engines.spatial.tiles import Tile
from engines.spatial.windows import Shift, SpanRule, window

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

    `parted` are the values of which the ranks hold different images. Tags count up from `tag`, which is even; every
    rank of the stage counts the same exchanges, so equal tags meet.
    """

    graph: ModelGraph
    stage: StageRanks
    tile: int
    tag: int
    values: dict[str, Value] = field(default_factory=dict)
    instructions: list[Compute | Exchange | AllReduce] = field(default_factory=list)
    statistics: list[RunningStatistics] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    wide: Wide = field(default_factory=Wide)
    sync_batchnorm: bool = True
    parted: frozenset[str] = frozenset()
    reads: list[Read] = field(default_factory=list)
    _held: dict[str, Mapping[int, Tile]] = field(default_factory=dict)
    _open: list[LocalOp] = field(default_factory=list)
    _windows: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _module: str = ""
    _node: str = ""
    _flops: dict[str, int] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank that runs what is built."""
        return self.stage.ranks[self.tile]

    @property
    def apart(self) -> tuple[int, ...]:
        """The ranks of the stage, where each has batch norm's statistics of its own tile."""
        return () if self.sync_batchnorm or len(self.stage.ranks) == 1 else self.stage.ranks

    def at(self, node: Node) -> None:
        """What follows belongs to this node."""
        self._module, self._node = node.module, node.name
        self._flops[node.name] = node.flops

    def forget(self, node: Node) -> None:
        """Take back what was begun for a node."""
        self._open = [op for op in self._open if op.out.split(".")[0] != node.name]

    def is_tiled(self, ref: Any) -> bool:
        """Whether an argument is a value of which each rank holds a tile."""
        return isinstance(ref, Ref) and ref.name in self.values and self.values[ref.name].axes is not None

    def is_parted(self, ref: Any) -> bool:
        """Whether an argument is a value of which each rank holds other images."""
        return isinstance(ref, Ref) and ref.name in self.parted

    def is_spread(self, ref: Any) -> bool:
        """Whether no rank of the stage holds all of an argument."""
        return self.is_tiled(ref) or self.is_parted(ref)

    def counts(self, ref: Ref, groups: int) -> list[int]:
        """How many of a value's elements each rank has, of each of `groups`; one number where all hold the same."""
        value = self.value(ref)
        if self.is_parted(ref):
            return [value.spec.numel // groups] * self.stage.shares
        if value.axes is None:
            return [value.spec.numel // groups]
        per_px = value.spec.numel // groups // math.prod(value.size_px)
        return [per_px * tile.pixels for tile in self.tiles(value.size_px).values()]

    def value(self, ref: Ref) -> Value:
        """The value that an argument refers to."""
        return self.values[ref.name]

    def tiles(self, size_px: tuple[int, int]) -> dict[int, Tile]:
        """The tiles of an image of that size, by rank: what each owns."""
        return dict(zip(self.stage.ranks, self.stage.grid.cut(*size_px), strict=True))

    def outputs(self, size_px: tuple[int, int]) -> Mapping[int, Tile]:
        """What each rank computes of the present node's result, an image of that size: its tile, or more."""
        return self.wide.held.get(self._node) or self.tiles(size_px)

    def holds(self, ref: Ref) -> Mapping[int, Tile]:
        """What each rank has of a tiled value: its tile, or more."""
        return self._held.get(ref.name) or self.tiles(self.value(ref).size_px)

    def hold_like(self, out: Ref, ref: Ref) -> None:
        """Each rank has the same pixels of `out` as of `ref`."""
        self._held[out.name] = self.holds(ref)

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
        if axes and out in self.wide.held:
            self._held[out] = self.wide.held[out]
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
            AllReduce(target, value.name, target, value.spec, self.stage.ranks, value.differentiable)
        )
        self.values[target] = Value(target, value.spec, None, value.differentiable)
        return Ref(target)

    def window(self, ref: Ref, out_px: tuple[int, int], rows: SpanRule, cols: SpanRule, fill: float = 0.0) -> Window:
        """What this rank's part of an `out_px` image reads of a tiled value, borrowed where it lacks it."""
        self.reads.append(Read(self._node, ref.name, rows, cols, fill))
        wanted = {rank: window(tile, rows, cols) for rank, tile in self.outputs(out_px).items()}
        found = self._fetched(ref, wanted, fill)
        return Window(found.name, self.holds(found)[self.rank], wanted[self.rank], fill)

    def _fetched(self, ref: Ref, wanted: Mapping[int, Tile], fill: float) -> Ref:
        """A value that holds the pixels wanted: `ref` itself, or what comes of an exchange."""
        whole, held = Tile.whole(*self.value(ref).size_px), self.holds(ref)
        if all((tile & whole).lies_in(held[rank]) for rank, tile in wanted.items()):
            return ref
        if shared := self.wide.fetch(self._node, ref.name):
            wanted, fill = shared, 0.0
        key = (ref.name, tuple(wanted.values()), fill)
        if key not in self._windows:
            self._windows[key] = self._exchange(self.owned(ref), wanted, fill)
        return self._windows[key]

    def _exchange(self, ref: Ref, wanted: Mapping[int, Tile], fill: float) -> Ref:
        self.tag += 2
        value, target = self.value(ref), f"{ref.name}.window{self.tag}"
        owned = self.tiles(value.size_px)
        name = self.transfer(value, "halo", target, target, self.tag, owned, wanted, fill)
        if name == target:
            self._held[target] = wanted
        return Ref(name)

    def extent(self, name: str) -> tuple[Tile, Mapping[int, Tile]]:
        """A tiled value's whole image, and each rank's own tile of it."""
        size_px = self.values[name].size_px
        return Tile.whole(*size_px), self.tiles(size_px)

    def work(self, name: str) -> Work:
        """What a tiled value costs to compute, and to send."""
        value, flops = self.values[name], self._flops.get(name, 0)
        return Work(flops, value.spec.bytes / math.prod(value.size_px))

    def owned(self, ref: Ref) -> Ref:
        """The pixels of a tiled value that this rank owns; all of a value that is not tiled."""
        if not self.is_tiled(ref):
            return ref
        own = self.tiles(self.value(ref).size_px)[self.rank]
        return self.padded(Window(ref.name, self.holds(ref)[self.rank], own, 0.0))

    def beneath(self, ref: Ref) -> Ref:
        """The pixels of a tiled value that lie where the present node's result does; all of one that is not tiled."""
        if not self.is_tiled(ref):
            return ref
        return self.padded(self.window(ref, self.value(ref).size_px, Shift(0), Shift(0)))

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
        """The window as one tensor of just what is wanted, with what lies outside the image filled in."""
        if not any(window.margins):
            return Ref(window.name)
        value = self.values[window.name]
        name = f"{window.name}.padded{len(self._open)}_{len(self.instructions)}"
        return self.local(
            name, "tile.pad", Ref(window.name), window.margins, window.fill, value.axes,
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
