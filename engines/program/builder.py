"""Writes one rank's forward pass: the operator table says what each operator needs, this makes it instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from engines.errors import TraceError
from engines.layer.graph import WITHOUT_GRADIENT, Node, Ref, TensorSpec
from engines.program.instructions import AllReduce, Compute, Exchange, LocalOp, ModelInstruction, RunningStatistics
from engines.program.segment_io import resolve_segment_io
from engines.program.value_layout import ValueLayout, ValueLayouts
from engines.spatial.halo_fusion import WindowRead
from engines.spatial.moves import Move, compute_moves
from engines.spatial.tiles import Tile
from engines.spatial.windows import Shift, SpanRule, Window, compute_window

__all__ = ["POINT", "Builder", "HaloRead", "ValueLayout"]

MovesByRank = Mapping[int, tuple[Move, ...]]

POINT = Tile.whole(1, 1)
"""What a rank holds of a value that has no pixels."""


@dataclass(frozen=True, slots=True)
class HaloRead:
    """A node's one window that needs an exchange: how it is read, and what all ranks want, in their order."""

    read: WindowRead
    wanted: tuple[Tile, ...]
    fill: float

    @property
    def rules(self) -> tuple[SpanRule, SpanRule]:
        """Of rows and of columns."""
        return self.read.rows, self.read.cols


@dataclass
class Builder(ValueLayouts):
    """Collects the instructions of tile `tile` of one stage, in graph order.

    Tags count up from `tag`, which is even; every rank of the stage counts the same exchanges, so equal tags meet.
    """

    instructions: list[ModelInstruction] = field(default_factory=list)
    statistics: list[RunningStatistics] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    sync_batchnorm: bool = True
    overlaps: bool = False
    reads: list[WindowRead] = field(default_factory=list)
    strips: dict[tuple[Any, ...], tuple[tuple[str, Tile], ...]] = field(default_factory=dict)
    _open: list[LocalOp] = field(default_factory=list)
    _windows: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _module: str = ""
    _graded: bool = True
    _from: Ref | None = None
    _before: tuple[int, list[LocalOp], list[int]] = field(default=(0, [], []))

    @property
    def local_stats_ranks(self) -> tuple[int, ...]:
        """The ranks of the stage, where each has batch norm's statistics of its own tile."""
        return () if self.sync_batchnorm or len(self.stage.ranks) == 1 else self.stage.ranks

    def begin_node(self, node: Node) -> None:
        """What follows belongs to this node."""
        self._module, self._node, self._graded = node.module, node.name, node.graded
        self._flops[node.name] = node.flops
        self._before = self.tag, list(self._open), [len(made) for made in self._growing_state]

    def undo_node(self) -> None:
        """Take back what was begun for the present node."""
        self.tag, self._open, counts = self._before[0], list(self._before[1]), self._before[2]
        for made, count in zip(self._growing_state, counts, strict=True):
            if isinstance(made, dict):
                for key in list(made)[count:]:
                    del made[key]
            else:
                del made[count:]

    @property
    def _growing_state(self) -> tuple[list[Any] | dict[Any, Any], ...]:
        """What only grows while nodes are lowered."""
        return self.instructions, self.reads, self.statistics, self.values, self._windows

    @property
    def single_halo_read(self) -> HaloRead | None:
        """What the present node has read by a window and an exchange; None where that is not all it needs of others."""
        instructions, reads, statistics, _, windows = (
            list(made)[count:] for made, count in zip(self._growing_state, self._before[2], strict=True)
        )
        sums = statistics or any(isinstance(item, AllReduce) for item in instructions)
        if sums or (len(reads), len(windows), self.tag - self._before[0]) != (1, 1, 2):
            return None
        return HaloRead(reads[0], *windows[0][1:])

    @contextmanager
    def restrict_node(self, source: Ref, out: str | None = None, outputs: Tile | None = None) -> Iterator[None]:
        """While it lasts the present node reads `source`, which has all it needs; it makes `outputs` only, as `out`."""
        node, wide = self._node, self.extended
        self._from = source
        if out is not None and outputs is not None:
            self._node, self.extended = out, replace(wide, held={**wide.held, out: {self.rank: outputs}})
        try:
            yield
        finally:
            self._node, self.extended, self._from = node, wide, None

    def add_local_op(
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
        differentiable = may_carry and any(self._needs_gradient(name) for name in op.reads)
        self.values[out] = ValueLayout(out, like, axes, differentiable)
        self.hold_extended(out)
        return Ref(out)

    def _needs_gradient(self, name: str) -> bool:
        return name in self.graph.trainable or (name in self.values and self.values[name].differentiable)

    def all_reduce(self, ref: Ref) -> Ref:
        """The sum of a value over the ranks of the stage."""
        if len(self.stage.ranks) == 1:
            return ref
        value = self.get_value(ref)
        self.flush()
        target = f"{value.name}.total"
        self.instructions.append(
            AllReduce(target, value.name, target, value.spec, self.stage.ranks, value.differentiable)
        )
        self.values[target] = ValueLayout(target, value.spec, None, value.differentiable)
        return Ref(target)

    def read_window(
        self, ref: Ref, out_px: tuple[int, int], rows: SpanRule, cols: SpanRule, fill: float = 0.0
    ) -> Window:
        """What this rank's part of an `out_px` image reads of a tiled value, borrowed where it lacks it."""
        self.reads.append(WindowRead(self._node, ref.name, rows, cols, fill))
        key = ("window", self._node, ref.name)
        wanted = self.memo.get_or_compute(key, (self.get_output_tiles(out_px), rows, cols), _compute_windows)
        found = self._fetch_window(ref, wanted, fill)
        return Window(found.name, self.get_held_tiles(found)[self.rank], wanted[self.rank], fill)

    def _fetch_window(self, ref: Ref, wanted: Mapping[int, Tile], fill: float) -> Ref:
        """A value that holds the pixels wanted: `ref` itself, or what comes of an exchange."""
        if self._from is not None:
            return self._from
        given = self.get_value(ref).size_px, self.get_held_tiles(ref), wanted
        if not self.memo.get_or_compute(("lacks", self._node, ref.name), given, _needs_exchange):
            return ref
        if shared := self.extended.get_fetched(self._node, ref.name):
            wanted, fill = shared, 0.0
        key = (ref.name, tuple(wanted.values()), fill)
        if key not in self._windows:
            self._windows[key] = self.exchange(self.crop_to_own(ref), wanted, fill)
        return self._windows[key]

    def exchange(self, ref: Ref, wanted: Mapping[int, Tile], fill: float) -> Ref:
        """A value that holds the pixels `wanted`, by an exchange with all ranks of the stage: `ref` where it does."""
        if self.in_turn and self.extended.groups:
            raise TraceError(f"{self._node} reads all pixels of {ref.name} at once, which no tile has by itself.")
        self.tag += 2
        value, target = self.get_value(ref), f"{ref.name}.window{self.tag}"
        owned = self.get_tiles(value.size_px)
        name = self.transfer(value, "halo", target, target, self.tag, owned, wanted, fill)
        if name == target:
            self._held[target] = wanted
        return Ref(name)

    def all_gather(self, ref: Ref) -> Ref:
        """All of a tiled value, on every rank of the stage: its window is the whole image.

        Backward, what each rank found of the gradient goes home and is added there. It takes the memory of the
        undivided value on each rank, and what is computed of it is computed on each: for results of few pixels.
        """
        target = f"{ref.name}.whole"
        if self.is_tiled(ref) and target not in self.values:
            value = self.get_value(ref)
            everything = dict.fromkeys(self.stage.ranks, Tile.whole(*value.size_px))
            window = self.exchange(self.crop_to_own(ref), everything, 0.0)
            self.add_local_op(target, "aten.alias.default", window, like=value.spec)
        return Ref(target) if self.is_tiled(ref) else ref

    def crop_to_own(self, ref: Ref) -> Ref:
        """The pixels of a tiled value that this rank owns; all of a value that is not tiled."""
        if not self.is_tiled(ref):
            return ref
        own = self.get_tiles(self.get_value(ref).size_px)[self.rank]
        return self.pad_window(Window(ref.name, self.get_held_tiles(ref)[self.rank], own, 0.0))

    def align_to_output(self, ref: Ref) -> Ref:
        """The pixels of a tiled value that lie where the present node's result does; all of one that is not tiled."""
        if not self.is_tiled(ref):
            return ref
        return self.pad_window(self.read_window(ref, self.get_value(ref).size_px, Shift(0), Shift(0)))

    def transfer(
        self, value: ValueLayout, purpose: str, name: str, target: str, tag: int,
        owned: Mapping[int, Tile], wanted: Mapping[int, Tile], fill: float = 0.0,
    ) -> str:  # fmt: skip
        """Fill each rank's `wanted` tile; the name under which this rank has its own, if it had to borrow for it."""
        whole = Tile.whole(*value.size_px) if value.axes else POINT
        sent, received = self.memo.get_or_compute(
            ("transfer", purpose, tag), (owned, wanted, whole), _compute_transfers
        )
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
            self.values[target] = ValueLayout(target, value.spec, value.axes, value.differentiable)
        return target if receives else value.name

    def pad_window(self, window: Window) -> Ref:
        """The window as one tensor of just what is wanted, with what lies outside the image filled in."""
        if not any(window.margins):
            return Ref(window.name)
        value = self.values[window.name]
        name = f"{window.name}.padded{len(self._open)}_{len(self.instructions)}"
        return self.add_local_op(
            name, "tile.pad", Ref(window.name), window.margins, window.fill, value.axes,
            like=value.spec, axes=value.axes,
        )  # fmt: skip

    def flush(self, interior: bool = False) -> None:
        """End the open segment: a communication follows."""
        if self._open:
            name = f"segment{len(self.instructions)}{'.interior' * interior}"
            self.instructions.append(Compute(name, tuple(self._open), (), (), False, interior))
            self._open = []

    def finish(self, kept: Iterable[str]) -> list[ModelInstruction]:
        """All instructions, each segment with its inputs and outputs; `kept` values stay to the end."""
        self.flush()
        return resolve_segment_io(self.instructions, self.values, kept)


def _compute_windows(outputs: Mapping[int, Tile], rows: SpanRule, cols: SpanRule) -> dict[int, Tile]:
    return {rank: compute_window(tile, rows, cols) for rank, tile in outputs.items()}


def _needs_exchange(size_px: tuple[int, int], held: Mapping[int, Tile], wanted: Mapping[int, Tile]) -> bool:
    """Whether a rank lacks some of what it wants of an image."""
    whole = Tile.whole(*size_px)
    return not all((tile & whole).is_inside(held[rank]) for rank, tile in wanted.items())


def _compute_transfers(
    owned: Mapping[int, Tile], wanted: Mapping[int, Tile], whole: Tile
) -> tuple[MovesByRank, MovesByRank]:
    """What each rank sends to others, and what each receives."""
    sends: dict[int, list[Move]] = defaultdict(list)
    receives: dict[int, list[Move]] = defaultdict(list)
    for move in compute_moves(owned, {rank: tile & whole for rank, tile in wanted.items()}):
        if move.source != move.target:
            sends[move.source].append(move)
            receives[move.target].append(move)
    return tuple({rank: tuple(found) for rank, found in side.items()} for side in (sends, receives))
