"""Writes one rank's forward pass: the operator table says what each operator needs, this makes it instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engines.errors import TraceError
from engines.layer.graph import WITHOUT_GRADIENT, Node, Ref, TensorSpec
from engines.program.bounds import bounded
from engines.program.holdings import Holdings, Value
from engines.program.instructions import AllReduce, Compute, Exchange, Linear, LocalOp, RunningStatistics
from engines.spatial.fusion import Read
from engines.spatial.moves import Move, moves
from engines.spatial.tiles import Tile
from engines.spatial.windows import Shift, SpanRule, Window, window

__all__ = ["POINT", "Borrowed", "Builder", "Value"]

Moves = Mapping[int, tuple[Move, ...]]

POINT = Tile.whole(1, 1)
"""What a rank holds of a value that has no pixels."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A node's one window that needs an exchange: how it is read, and what all ranks want, in their order."""

    read: Read
    wanted: tuple[Tile, ...]
    fill: float

    @property
    def rules(self) -> tuple[SpanRule, SpanRule]:
        """Of rows and of columns."""
        return self.read.rows, self.read.cols


@dataclass
class Builder(Holdings):
    """Collects the instructions of tile `tile` of one stage, in graph order.

    Tags count up from `tag`, which is even; every rank of the stage counts the same exchanges, so equal tags meet.
    """

    instructions: list[Linear] = field(default_factory=list)
    statistics: list[RunningStatistics] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    sync_batchnorm: bool = True
    overlaps: bool = False
    reads: list[Read] = field(default_factory=list)
    strips: dict[tuple[Any, ...], tuple[tuple[str, Tile], ...]] = field(default_factory=dict)
    _open: list[LocalOp] = field(default_factory=list)
    _windows: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _module: str = ""
    _graded: bool = True
    _from: Ref | None = None
    _before: tuple[int, list[LocalOp], list[int]] = field(default=(0, [], []))

    @property
    def apart(self) -> tuple[int, ...]:
        """The ranks of the stage, where each has batch norm's statistics of its own tile."""
        return () if self.sync_batchnorm or len(self.stage.ranks) == 1 else self.stage.ranks

    def at(self, node: Node) -> None:
        """What follows belongs to this node."""
        self._module, self._node, self._graded = node.module, node.name, node.graded
        self._flops[node.name] = node.flops
        self._before = self.tag, list(self._open), [len(made) for made in self._made]

    def forget(self) -> None:
        """Take back what was begun for the present node."""
        self.tag, self._open, counts = self._before[0], list(self._before[1]), self._before[2]
        for made, count in zip(self._made, counts, strict=True):
            if isinstance(made, dict):
                for key in list(made)[count:]:
                    del made[key]
            else:
                del made[count:]

    @property
    def _made(self) -> tuple[list[Any] | dict[Any, Any], ...]:
        """What only grows while nodes are lowered."""
        return self.instructions, self.reads, self.statistics, self.values, self._windows

    @property
    def borrowed(self) -> Borrowed | None:
        """What the present node has read by a window and an exchange; None where that is not all it needs of others."""
        instructions, reads, statistics, _, windows = (
            list(made)[count:] for made, count in zip(self._made, self._before[2], strict=True)
        )
        sums = statistics or any(isinstance(item, AllReduce) for item in instructions)
        if sums or (len(reads), len(windows), self.tag - self._before[0]) != (1, 1, 2):
            return None
        return Borrowed(reads[0], *windows[0][1:])

    @contextmanager
    def piece(self, source: Ref, out: str | None = None, outputs: Tile | None = None) -> Iterator[None]:
        """While it lasts the present node reads `source`, which has all it needs; it makes `outputs` only, as `out`."""
        node, wide = self._node, self.wide
        self._from = source
        if out is not None and outputs is not None:
            self._node, self.wide = out, replace(wide, held={**wide.held, out: {self.rank: outputs}})
        try:
            yield
        finally:
            self._node, self.wide, self._from = node, wide, None

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
        op = LocalOp(out, kernel, arguments, keywords, self._module, self._graded)
        self._open.append(op)
        may_carry = self._graded and like.is_floating and kernel not in WITHOUT_GRADIENT
        differentiable = may_carry and any(self._carries(name) for name in op.reads)
        self.values[out] = Value(out, like, axes, differentiable)
        self.hold_wide(out)
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
        key = ("window", self._node, ref.name)
        wanted = self.common.once(key, (self.outputs(out_px), rows, cols), _windows)
        found = self._fetched(ref, wanted, fill)
        return Window(found.name, self.holds(found)[self.rank], wanted[self.rank], fill)

    def _fetched(self, ref: Ref, wanted: Mapping[int, Tile], fill: float) -> Ref:
        """A value that holds the pixels wanted: `ref` itself, or what comes of an exchange."""
        if self._from is not None:
            return self._from
        given = self.value(ref).size_px, self.holds(ref), wanted
        if not self.common.once(("lacks", self._node, ref.name), given, _lacks):
            return ref
        if shared := self.wide.fetch(self._node, ref.name):
            wanted, fill = shared, 0.0
        key = (ref.name, tuple(wanted.values()), fill)
        if key not in self._windows:
            self._windows[key] = self.exchange(self.owned(ref), wanted, fill)
        return self._windows[key]

    def exchange(self, ref: Ref, wanted: Mapping[int, Tile], fill: float) -> Ref:
        """A value that holds the pixels `wanted`, by an exchange with all ranks of the stage: `ref` where it does."""
        if self.in_turn and self.wide.groups:
            raise TraceError(f"{self._node} reads all pixels of {ref.name} at once, which no tile has by itself.")
        self.tag += 2
        value, target = self.value(ref), f"{ref.name}.window{self.tag}"
        owned = self.tiles(value.size_px)
        name = self.transfer(value, "halo", target, target, self.tag, owned, wanted, fill)
        if name == target:
            self._held[target] = wanted
        return Ref(name)

    def gathered(self, ref: Ref) -> Ref:
        """All of a tiled value, on every rank of the stage: its window is the whole image.

        Backward, what each rank found of the gradient goes home and is added there. It takes the memory of the
        undivided value on each rank, and what is computed of it is computed on each: for results of few pixels.
        """
        target = f"{ref.name}.whole"
        if self.is_tiled(ref) and target not in self.values:
            value = self.value(ref)
            everything = dict.fromkeys(self.stage.ranks, Tile.whole(*value.size_px))
            window = self.exchange(self.owned(ref), everything, 0.0)
            self.local(target, "aten.alias.default", window, like=value.spec)
        return Ref(target) if self.is_tiled(ref) else ref

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
        sent, received = self.common.once(("transfer", purpose, tag), (owned, wanted, whole), _travelling)
        sends, receives = sent.get(self.rank, ()), received.get(self.rank, ())
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

    def flush(self, interior: bool = False) -> None:
        """End the open segment: a communication follows."""
        if self._open:
            name = f"segment{len(self.instructions)}{'.interior' * interior}"
            self.instructions.append(Compute(name, tuple(self._open), (), (), False, interior))
            self._open = []

    def finished(self, kept: Iterable[str]) -> list[Linear]:
        """All instructions, each segment with its inputs and outputs; `kept` values stay to the end."""
        self.flush()
        return bounded(self.instructions, self.values, kept)


def _windows(outputs: Mapping[int, Tile], rows: SpanRule, cols: SpanRule) -> dict[int, Tile]:
    return {rank: window(tile, rows, cols) for rank, tile in outputs.items()}


def _lacks(size_px: tuple[int, int], held: Mapping[int, Tile], wanted: Mapping[int, Tile]) -> bool:
    """Whether a rank lacks some of what it wants of an image."""
    whole = Tile.whole(*size_px)
    return not all((tile & whole).lies_in(held[rank]) for rank, tile in wanted.items())


def _travelling(owned: Mapping[int, Tile], wanted: Mapping[int, Tile], whole: Tile) -> tuple[Moves, Moves]:
    """What each rank sends to others, and what each receives."""
    sends: dict[int, list[Move]] = defaultdict(list)
    receives: dict[int, list[Move]] = defaultdict(list)
    for move in moves(owned, {rank: tile & whole for rank, tile in wanted.items()}):
        if move.source != move.target:
            sends[move.source].append(move)
            receives[move.target].append(move)
    return tuple({rank: tuple(found) for rank, found in side.items()} for side in (sends, receives))
