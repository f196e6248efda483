"""Builds one rank's forward pass: from what the operator table says of each operator, it emits instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mpi4dl_nb.engines.compiler.class_tokens import drop_lead, take_lead
from mpi4dl_nb.engines.compiler.segments import Segments
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Move, Tile, compute_moves
from mpi4dl_nb.engines.geometry.windows import Shift, SpanRule, Window, WindowRead, compute_window
from mpi4dl_nb.engines.graph.model_graph import Ref
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange import Exchange

MovesByRank = Mapping[int, tuple[Move, ...]]


@dataclass(frozen=True, slots=True)
class HaloRead:
    """A node's only window that needs an exchange: how it is read, and the tile that each rank needs, in rank order."""

    read: WindowRead
    wanted: tuple[Tile, ...]
    fill: float


@dataclass
class Builder(Segments):
    """Collects the instructions for tile `tile` of one stage, with the exchanges of the pixels that they read."""

    sync_batchnorm: bool = True
    attention_keys: str = "auto"
    overlaps: bool = False
    reads: list[WindowRead] = field(default_factory=list)
    strips: dict[tuple[Any, ...], tuple[tuple[str, Tile], ...]] = field(default_factory=dict)
    # The exchanges made so far, by what they fetch: (value, tiles of all ranks, fill) -> the result.
    _windows: dict[tuple[Any, ...], Ref] = field(default_factory=dict)
    _from: Ref | None = None  # what the current node reads instead of its own window (interior and strips)

    @property
    def local_stats_ranks(self) -> tuple[int, ...]:
        """The ranks of the stage if each keeps batch norm's statistics of its own tile, else ()."""
        return () if self.sync_batchnorm or len(self.stage.ranks) == 1 else self.stage.ranks

    @property
    def _growing_state(self) -> tuple[list[Any] | dict[Any, Any], ...]:
        return *super()._growing_state, self.reads, self._windows

    @property
    def single_halo_read(self) -> HaloRead | None:
        """The current node's window if one exchange for one window is all that it needs of other ranks, else None."""
        instructions, statistics, _, reads, windows = (
            list(collection)[count:] for collection, count in zip(self._growing_state, self._before[2], strict=True)
        )
        sums = statistics or any(item.get_effects(Phase.FORWARD).reductions for item in instructions)
        # One window, fetched by one exchange (each exchange adds 2 to the tag), and no all-reduce: only then can the
        # node be split into an interior and strips.
        if sums or (len(reads), len(windows), self.tag - self._before[0]) != (1, 1, 2):
            return None
        return HaloRead(reads[0], *windows[0][1:])

    @contextmanager
    def restrict_node(self, source: Ref, out: str | None = None, outputs: Tile | None = None) -> Iterator[None]:
        """While active, the current node reads `source`, which holds all it needs, and computes `outputs`, as `out`."""
        node, wide = self._node, self.extended
        self._from = source
        if out is not None and outputs is not None:
            self._node, self.extended = out, replace(wide, held={**wide.held, out: {self.rank: outputs}})
        try:
            yield
        finally:
            self._node, self.extended, self._from = node, wide, None

    def read_window(self, ref: Ref, out_px: tuple[int, ...], *rules: SpanRule, fill: float = 0.0) -> Window:
        """Return the window of a tiled value that this rank's part of an `out_px` image reads, exchanged if needed.

        There is a rule for each sharded axis.
        """
        self.reads.append(WindowRead(self._node, ref.name, rules, fill))
        wanted = self.memo.get_or_compute(
            ("window", self._node, ref.name),
            (self.get_output_tiles(out_px), rules),
            lambda outputs, rules: {rank: compute_window(tile, rules) for rank, tile in outputs.items()},
        )
        inputs = self.get_value(ref).size_px, self.get_held_tiles(ref), wanted
        source = ref
        if self._from is not None:
            source = self._from
        elif self.memo.get_or_compute(("lacks", self._node, ref.name), inputs, _needs_exchange):
            # Fused halos: all nodes of the group that read this value share one wider window.
            shared = self.extended.get_fetched(self._node, ref.name)
            tiles, beyond = (shared, 0.0) if shared else (wanted, fill)
            # Two reads of the same window share one exchange. The key holds the tiles of all ranks, not only of this
            # one, so that every rank decides alike and the tags stay in step.
            fetched = (ref.name, tuple(tiles.values()), beyond)
            if fetched not in self._windows:
                self._windows[fetched] = self.exchange(self.crop_to_own(ref), tiles, beyond)
            source = self._windows[fetched]
        return Window(source.name, self.get_held_tiles(source)[self.rank], wanted[self.rank], fill)

    def exchange(self, ref: Ref, wanted: Mapping[int, Tile], fill: float) -> Ref:
        """Return a value that holds the pixels `wanted`, by an exchange within the stage if one is needed.

        If rows and columns of the value are merged with others, the result has them as dimensions (`split_axes`).

        Raises TraceError if tiles are computed one after another (`tile_by_tile`), because they cannot exchange pixels.
        """
        if self.tile_by_tile and self.extended.groups:
            raise TraceError(f"{self._node} reads all pixels of {ref.name} at once, which no tile has by itself.")
        self.reserve_tags()
        ref = self.split_axes(ref)
        value, target = self.get_value(ref), f"{ref.name}.window{self.tag}"
        owned = self.get_tiles(value.size_px)
        name = self.transfer(value, "halo", target, target, self.tag, owned, wanted, fill)
        if name == target:
            self._held[target] = wanted
        return Ref(name)

    def all_gather(self, ref: Ref) -> Ref:
        """Return the whole of a tiled value on every rank of the stage: an exchange whose window is the whole image.

        In the backward pass each rank's gradient is sent to the owners of the pixels and added there. Each rank needs
        the memory of the undivided value, and repeats all computation that follows from it; use it for values of few
        pixels.
        """
        target = f"{ref.name}.whole"
        if self.is_tiled(ref) and target not in self.values:
            value = self.get_value(ref)
            if value.lead:
                parts = take_lead(self, ref), self.all_gather(drop_lead(self, ref))
                return self.add_local_op(target, "aten.cat.default", parts, value.places[0].dim, like=value.spec)
            everything = dict.fromkeys(self.stage.ranks, Tile.whole(*value.size_px))
            window = self.exchange(self.crop_to_own(ref), everything, 0.0)
            kernel, shape = ("alias", ()) if value.is_split else ("reshape", (value.spec.shape,))
            self.add_local_op(target, f"aten.{kernel}.default", window, *shape, like=value.spec)
        return Ref(target) if self.is_tiled(ref) else ref

    def crop_to_own(self, ref: Ref) -> Ref:
        """Return the pixels of a tiled value that this rank owns; a value that is not tiled is returned whole."""
        if not self.is_tiled(ref):
            return ref
        value = self.get_value(ref)
        tile = self.get_tiles(value.size_px)[self.rank]
        return self.cut_window(Window(ref.name, self.get_held_tiles(ref)[self.rank], tile, 0.0), value)

    def align_to_output(self, ref: Ref) -> Ref:
        """Return the pixels of a tiled value at the positions of the node's result; other values are returned whole."""
        if not self.is_tiled(ref):
            return ref
        value = self.get_value(ref)
        return self.cut_window(self.read_window(ref, value.size_px, *(Shift(0) for _ in value.places)), value)

    def split_axes(self, ref: Ref) -> Ref:
        """Return a value in a shape in which each sharded axis is a dimension of its own: the same pixels, in memory.

        Windows, exchanges and gathers need such a shape.
        """
        value = self.get_value(ref)
        split = value.split()
        if split is not value and split.name not in self.values:
            tile = self.get_held_tiles(ref)[self.rank]
            shape = split.compute_shape(tile)
            self.add_local_op(split.name, "aten.reshape.default", ref, shape, like=split.spec, axes=split.places)
            self.hold_like(Ref(split.name), ref)
        return Ref(split.name)

    def cut_window(self, window: Window, value: ValueLayout) -> Ref:
        """Return a window of a value, or of its split form, as a tensor in the value's own shape."""
        part = self.pad_window(window)
        if self.get_value(part).spec.shape == value.spec.shape:
            return part
        name, shape = f"{part.name}.merged", value.compute_shape(window.wanted)
        if name not in self.values:
            self.add_local_op(name, "aten.reshape.default", part, shape, like=value.spec, axes=value.places)
        return Ref(name)

    def merge_axes(self, split: Ref, value: ValueLayout) -> None:
        """Add a value from its split form, of which this rank has its own tile."""
        tile = self.get_tiles(value.size_px)[self.rank] if value.places else Tile()
        shape = value.compute_shape(tile)
        self.add_local_op(value.name, "aten.reshape.default", split, shape, like=value.spec, axes=value.places)
        self.hold_own(value.name)

    def transfer(
        self,
        value: ValueLayout,
        purpose: str,
        name: str,
        target: str,
        tag: int,
        owned: Mapping[int, Tile],
        wanted: Mapping[int, Tile],
        fill: float = 0.0,
    ) -> str:
        """Add the exchange that fills each rank's `wanted` tile, and return the name of what this rank then holds.

        The name is `target` if the rank receives anything, else the name of `value`.
        """
        # Computed once for all ranks of the stage: every rank must derive the same moves, in the same order, so that
        # sends and receives match.
        whole = Tile.whole(*value.size_px)
        sent, received = self.memo.get_or_compute(
            ("transfer", purpose, tag), (owned, wanted, whole), _compute_transfers
        )
        sends, receives = sent.get(self.rank, ()), received.get(self.rank, ())
        if not (sends or receives):
            return value.name
        self.flush()
        spec, tile, window = value.spec, owned.get(self.rank), wanted[self.rank] if receives else None
        pixels = value.axes, spec.shape, spec.dtype, tile, window, fill
        self.instructions.append(
            Exchange(name, purpose, value.name, target, *pixels, sends, receives, tag, value.differentiable)
        )
        if receives:
            self.values[target] = ValueLayout(target, value.spec, value.places, value.differentiable)
        return target if receives else value.name

    def pad_window(self, window: Window) -> Ref:
        """Return the window as one tensor of exactly the pixels wanted, with the fill outside the image."""
        if not any(map(any, window.margins)):
            return Ref(window.name)
        source = self.split_axes(Ref(window.name))
        value = self.values[source.name]
        name = f"{source.name}.padded{len(self._open)}_{len(self.instructions)}"
        pad = source, window.margins, window.fill, value.axes
        return self.add_local_op(name, "tile.pad", *pad, like=value.spec, axes=value.axes)


def _needs_exchange(size_px: tuple[int, ...], held: Mapping[int, Tile], wanted: Mapping[int, Tile]) -> bool:
    """Return whether any rank lacks some of the pixels it wants inside the image."""
    whole = Tile.whole(*size_px)
    return not all((tile & whole).is_inside(held[rank]) for rank, tile in wanted.items())


def _compute_transfers(
    owned: Mapping[int, Tile], wanted: Mapping[int, Tile], whole: Tile
) -> tuple[MovesByRank, MovesByRank]:
    """Return what each rank sends to others, and what each receives."""
    sends: dict[int, list[Move]] = defaultdict(list)
    receives: dict[int, list[Move]] = defaultdict(list)
    for move in compute_moves(owned, {rank: tile & whole for rank, tile in wanted.items()}):
        if move.source != move.target:
            sends[move.source].append(move)
            receives[move.target].append(move)
    sent, received = ({rank: tuple(moves) for rank, moves in side.items()} for side in (sends, receives))
    return sent, received
