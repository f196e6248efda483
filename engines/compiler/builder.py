"""Builds one rank's forward pass: from what the operator table says of each operator, it emits instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from mpi4dl_nb.engines.compiler.value_layout import ValueLayout, ValueLayouts
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.places import Place, drop_lead, to_places
from mpi4dl_nb.engines.geometry.tiles import Move, Tile, compute_moves
from mpi4dl_nb.engines.geometry.windows import Shift, SpanRule, Window, WindowRead, compute_window
from mpi4dl_nb.engines.graph.model_graph import WITHOUT_GRADIENT, Node, Ref, TensorSpec
from mpi4dl_nb.engines.program.effects import LocalOp, Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.instructions import AllReduce, Compute, ModelInstruction, RunningStatistics
from mpi4dl_nb.engines.program.ring import RingAttention

MovesByRank = Mapping[int, tuple[Move, ...]]


@dataclass(frozen=True, slots=True)
class HaloRead:
    """A node's only window that needs an exchange: how it is read, and the tile that each rank needs, in rank order."""

    read: WindowRead
    wanted: tuple[Tile, ...]
    fill: float


@dataclass
class Builder(ValueLayouts):
    """Collects the instructions for tile `tile` of one stage, in graph order.

    Tags are even and count up from `tag`. Every rank of the stage emits the same sequence of exchanges and therefore
    assigns the same tag to each.
    """

    instructions: list[ModelInstruction] = field(default_factory=list)
    statistics: list[RunningStatistics] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    sync_batchnorm: bool = True
    overlaps: bool = False
    reads: list[WindowRead] = field(default_factory=list)
    strips: dict[tuple[Any, ...], tuple[tuple[str, Tile], ...]] = field(default_factory=dict)
    # Kernels collect in `_open` until a communication closes them into a segment:
    #
    #   nodes         conv, relu          conv                     pool over the image     linear
    #   instructions  [segment0]  (exchange)  [segment2: conv, sum]  (all-reduce)  [segment4: divide, linear]
    _open: list[LocalOp] = field(default_factory=list)
    # The exchanges made so far, by what they fetch: (value, tiles of all ranks, fill) -> the result.
    _windows: dict[tuple[Any, ...], Ref] = field(default_factory=dict)
    _module: str = ""
    _graded: bool = True
    _from: Ref | None = None  # what the current node reads instead of its own window (interior and strips)
    _before: tuple[int, list[LocalOp], list[int]] = field(default=(0, [], []))

    @property
    def local_stats_ranks(self) -> tuple[int, ...]:
        """The ranks of the stage if each keeps batch norm's statistics of its own tile, else ()."""
        return () if self.sync_batchnorm or len(self.stage.ranks) == 1 else self.stage.ranks

    def begin_node(self, node: Node) -> None:
        """Attribute all instructions emitted from here on to this node."""
        self._module, self._node, self._graded = node.module, node.name, node.graded
        self._flops[node.name] = node.flops
        self._before = self.tag, list(self._open), [len(collection) for collection in self._growing_state]

    def end_nodes(self) -> None:
        """End the last node: what is emitted from here on carries gradients, even if that node is under `no_grad`."""
        self._graded = True

    def undo_node(self) -> None:
        """Roll back everything emitted since `begin_node`."""
        self.tag, self._open, counts = self._before[0], list(self._before[1]), self._before[2]
        for collection, count in zip(self._growing_state, counts, strict=True):
            if isinstance(collection, dict):
                for key in list(collection)[count:]:
                    del collection[key]
            else:
                del collection[count:]

    @property
    def _growing_state(self) -> tuple[list[Any] | dict[Any, Any], ...]:
        """The collections that only grow while nodes are lowered; `undo_node` truncates them."""
        return self.instructions, self.reads, self.statistics, self.values, self._windows

    @property
    def single_halo_read(self) -> HaloRead | None:
        """The current node's window if one exchange for one window is all that it needs of other ranks, else None."""
        instructions, reads, statistics, _, windows = (
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

    def add_local_op(
        self,
        out: str,
        kernel: str,
        *arguments: Any,
        like: TensorSpec,
        axes: Iterable[int | Place] = (),
        **keywords: Any,
    ) -> Ref:
        """Add a kernel that runs on this rank's part of its arguments; `like` is the spec of the whole result.

        `axes` are those along which the result is sharded: dimensions, or places in them.
        """
        op = LocalOp(out, kernel, arguments, keywords, self._module, self._graded)
        self._open.append(op)
        may_carry = self._graded and like.is_floating and kernel not in WITHOUT_GRADIENT
        differentiable = may_carry and any(
            name in self.graph.trainable or (name in self.values and self.values[name].differentiable)
            for name in op.reads
        )
        self.values[out] = ValueLayout(out, like, to_places(axes), differentiable)
        self.hold_extended(out)
        return Ref(out)

    def all_reduce(self, ref: Ref, group: tuple[int, ...] = ()) -> Ref:
        """Return the sum of a value over the ranks of the stage, or over the `group`."""
        group = group or self.stage.ranks
        if len(group) == 1:
            return ref
        value = self.get_value(ref)
        self.flush()
        target = f"{value.name}.total"
        self.instructions.append(
            AllReduce(target, value.name, target, value.spec, tuple(sorted(group)), value.differentiable)
        )
        self.values[target] = ValueLayout(target, value.spec, (), value.differentiable)
        return Ref(target)

    def reserve_tags(self, count: int = 2) -> int:
        """Return the first of so many tags for the messages of an instruction, an even number like `count`."""
        # On every rank, even one that sends and receives nothing here.
        self.tag += count
        return self.tag + 2 - count

    def add_ring(self, ring: RingAttention, value: ValueLayout) -> Ref:
        """Add attention to the keys of several ranks; `value` is its result."""
        self.flush()
        self.instructions.append(ring)
        self.values[value.name] = value
        return Ref(value.name)

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
                parts = self.take_lead(ref), self.all_gather(self.drop_lead(ref))
                return self.add_local_op(target, "aten.cat.default", parts, value.places[0].dim, like=value.spec)
            everything = dict.fromkeys(self.stage.ranks, Tile.whole(*value.size_px))
            window = self.exchange(self.crop_to_own(ref), everything, 0.0)
            kernel, shape = ("alias", ()) if value.is_split else ("reshape", (value.spec.shape,))
            self.add_local_op(target, f"aten.{kernel}.default", window, *shape, like=value.spec)
        return Ref(target) if self.is_tiled(ref) else ref

    # Positions beside the pixels (class tokens, registers): the first rank has them, in front of its own pixels.

    def take_lead(self, ref: Ref) -> Ref:
        """Return the positions of a value that lie beside its pixels, on every rank."""
        value, target = self.get_value(ref), f"{ref.name}.lead"
        if target not in self.values:
            dim = value.places[0].dim
            # The others add zeros to the first rank's.
            has_lead = self.rank == self.stage.ranks[0]
            like = value.spec.resize(dim, value.lead)
            self.add_local_op(target, "tile.lead", ref, dim, value.lead, has_lead, like=like)
        total = f"{target}.total"
        return Ref(total) if total in self.values else self.all_reduce(Ref(target))

    def drop_lead(self, ref: Ref) -> Ref:
        """Return the pixels of a value alone."""
        value, target = self.get_value(ref), f"{ref.name}.pixels"
        if target not in self.values:
            shape, places = drop_lead(value.spec.shape, value.places)
            start = value.lead if self.rank == self.stage.ranks[0] else 0
            how = value.places[0].dim, start, None
            self.add_local_op(
                target, "aten.slice.Tensor", ref, *how, like=replace(value.spec, shape=shape), axes=places
            )
            self._held.pop(target, None)
        return Ref(target)

    def add_lead(self, name: str, lead: Ref, pixels: Ref, like: TensorSpec) -> Ref:
        """Add the value `name`: positions that every rank has, before the pixels of a value with one merged axis."""
        places = self.get_value(pixels).places
        dim, count = places[0].dim, self.get_value(lead).spec.shape[places[0].dim]
        own = self.crop_to_own(pixels)
        joined = (lead, own) if self.rank == self.stage.ranks[0] else (own,)
        axes = [place._replace(lead=count) for place in places]
        return self.add_local_op(name, "aten.cat.default", joined, dim, like=like, axes=axes)

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
        self._held.pop(value.name, None)  # what arrives is the tile itself, also where fused halos hold more later

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

    def flush(self, interior: bool = False) -> None:
        """Close the open segment, before a communication."""
        if self._open:
            name = f"segment{len(self.instructions)}{'.interior' * interior}"
            self.instructions.append(Compute(name, tuple(self._open), (), (), False, interior))
            self._open = []

    def finish(self, kept: Iterable[str]) -> list[ModelInstruction]:
        """Return all instructions, each segment with its inputs, and as outputs what later ones read or is `kept`."""
        self.flush()
        wanted, done = set(kept), []
        # Liveness, from the end backward: `wanted` are the values read by the instructions after this one.
        #
        #   wanted {a} <- [s0: a -> b, c]  {b, c} <- (exchange b -> w)  {c, w} <- [s1: c, w -> y]  {y} = kept
        #
        # A value that only its own segment reads is in no set, so it is no output and dies inside the segment.
        for instruction in reversed(self.instructions):
            if isinstance(instruction, Compute):
                written = {op.out for op in instruction.ops}
                read = dict.fromkeys(name for op in instruction.ops for name in op.reads)
                # Names that are not in `values` are weights and buffers, which the rank owns.
                inputs = tuple(name for name in read if name in self.values and name not in written)
                outputs = tuple(op.out for op in instruction.ops if op.out in wanted)
                differentiable = any(self.values[name].differentiable for name in outputs)
                instruction = replace(instruction, inputs=inputs, outputs=outputs, differentiable=differentiable)
                wanted.update(inputs)
            else:
                wanted.update(instruction.sources)
            done.append(instruction)
        return done[::-1]


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
