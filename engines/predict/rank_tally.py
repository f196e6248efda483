"""Counts a rank's program: shapes, bytes and FLOPs of every kernel call, from the program alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch.utils._pytree import tree_map

from mpi4dl_nb.engines.graph.export_reader import resolve_flops
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Ref, TensorSpec
from mpi4dl_nb.engines.predict.kernel_effects import KernelEffect, LocalTensor, find_local_tensors, infer_effect
from mpi4dl_nb.engines.predict.memory_simulation import GradientTracker, MemoryTracker
from mpi4dl_nb.engines.predict.tallies import (
    BY_ARITHMETIC,
    Block,
    DirectionTally,
    OpTally,
    RankTally,
    SegmentTally,
    classify_kernel,
    get_product_shape,
)
from mpi4dl_nb.engines.program.effects import Instruction, LocalOp, Phase
from mpi4dl_nb.engines.program.instructions import DEVICE, SEED, Compute
from mpi4dl_nb.engines.program.kernels import SLOT_ARGUMENTS
from mpi4dl_nb.engines.program.program import DirectionProgram, Program
from mpi4dl_nb.engines.program.ring import ScoreRule
from mpi4dl_nb.engines.program.segment import find_in_place, find_last_reads, has_out_kernel

# Counts the memory and arithmetic of one segment of a rank, call by call, forward and backward.


Abstract = LocalTensor | tuple[LocalTensor, ...]


@dataclass(frozen=True, slots=True)
class _SegmentCall:
    """One kernel call in a segment: the names of its tensor arguments, in order, and of its results."""

    op: LocalOp
    effect: KernelEffect
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    locals: tuple[LocalTensor, ...]

    @property
    def leads_back(self) -> bool:
        """Whether backward passes through the call."""
        return any(output.local.needs_gradient for output in self.effect.made)

    @property
    def is_arithmetic(self) -> bool:
        """Whether the call is bound by arithmetic rather than by memory."""
        return classify_kernel(self.op.kernel, self.effect.flops) in BY_ARITHMETIC


@dataclass
class _SegmentCounter:
    """The counter of one segment: its calls in order, and the memory key of each result."""

    # Names and memory are separate, because several values may lie in one block, which is counted once:
    #
    #   y = relu(x)        y lies in "y": new memory
    #   v = view(y)        v lies in "y", too
    #   z = relu_(v)       z lies in "y": written over
    #   w = conv(z)        w lies in the window "halo3", if only that exchange reads it: written into its middle
    #
    # `keys` says where a value lies, `fresh` how large the blocks are that the segment allocates. Weights are held by
    # the rank at all times and never counted here.
    segment: Compute
    way: _DirectionCounter
    scope: dict[str, Abstract] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: dict[str, Block] = field(default_factory=dict)
    fresh: dict[Block, int] = field(default_factory=dict)

    @cached_property
    def over(self) -> frozenset[str]:
        """The values that overwrite the memory of their argument."""
        return find_in_place(self.segment)

    def build_tally(self) -> SegmentTally:
        """Return the tally of the segment and register its outputs as values of the rank; to be called once."""
        for name in self.segment.inputs:
            self._enter(name, self.way.values[name], self.way.lies_in[name])
        inside = MemoryTracker()
        calls: list[_SegmentCall] = []
        for op, of_no_use in zip(self.segment.ops, find_last_reads(self.segment), strict=True):
            calls += self._count_forward(op, inside)
            for name in of_no_use:
                for part in self.names[name]:
                    inside.release(self.keys[part])
        keeps = frozenset(key for call in calls if call.leads_back for key in self._get_saved_keys(call))
        for name in self.segment.outputs:  # from here on, values of the rank
            (part,) = self.names[name]
            local, key = self.scope[name], self.keys[part]
            self.way.bytes[key] = self.fresh.get(key, self.way.bytes.get(key, 0))
            self.way.add_value(name, local, key)  # type: ignore[arg-type]
        graph = [call for call in calls if call.leads_back]
        back, gradients = self._count_backward(graph)
        back_with_graph, _ = self._count_backward(graph, keeps_graph=True)
        trains = {name: size for name, size in gradients.sizes.items() if name in self.way.graph.weights}
        grads = {name: size for name, size in gradients.sizes.items() if name not in trains}
        matrices = [name for name in trains if len(self.way.graph.weights[name].shape) > 1]
        moves = list(gradients.moved)
        for name, size in grads.items():
            # Backward visits the readers of a value in reverse: the gradient from the last reader arrives first and
            # needs no addition, but a copy if it was passed on, because it is then the memory of another gradient.
            if self.way.way.reads[name][-1] != self.segment.name:
                moves.append(3 * size)
            elif name in gradients.passed:
                moves.append(2 * size)
        moves += [2 * trains[name] for name in matrices]  # copied to the weight's layout, or added
        kept = {key: size for key, size in self.fresh.items() if key in keeps}
        ops = tuple(_make_op_tally(call.op.kernel, call.effect, call.locals, call.op.arguments) for call in calls)
        return SegmentTally(
            ops, keeps, kept, inside.peak, back, grads, trains, bool(matrices), tuple(moves), back_with_graph
        )

    def _enter(self, name: str, local: LocalTensor, key: Block) -> None:
        self.scope[name], self.names[name], self.keys[name] = local, (name,), key

    def _count_forward(self, op: LocalOp, inside: MemoryTracker) -> Iterator[_SegmentCall]:
        # Not a kernel, but Python's choice of one of the results of a kernel: another name for the same memory.
        if op.kernel == "getitem":
            source, index = op.arguments
            part = self.names[source.name][index]
            self.scope[op.out], self.names[op.out] = self.scope[source.name][index], (part,)  # type: ignore[index]
            inside.hold(self.keys[part])
            return
        read: list[str] = []

        def resolve(item: Any) -> Any:
            if not isinstance(item, Ref) or item in (DEVICE, SEED):
                return item
            if item.name not in self.scope:
                self._enter(item.name, self.way.find_owned(item.name), Block(item.name, "weight"))  # type: ignore[arg-type]
            (part,) = self.names[item.name]
            read.append(part)
            local: LocalTensor = self.scope[item.name]  # type: ignore[assignment]
            return local if op.graded else replace(local, needs_gradient=False)

        arguments, keywords = tree_map(resolve, (list(_get_sizing_arguments(op)), dict(op.keywords)))
        effect = infer_effect(op.kernel, arguments, keywords)
        makes = tuple(f"{op.out}[{i}]" for i in range(len(effect.made))) if effect.several else (op.out,)
        call = _SegmentCall(op, effect, tuple(read), makes, find_local_tensors((arguments, keywords)))
        self._add_results(call)
        # A result is held until its last reader, and once more if backward needs it; that reference is never released
        # here, since the block outlives the forward pass of the segment.
        for name in makes:
            inside.hold(self.keys[name], {"made": self.fresh.get(self.keys[name], 0)})
        if call.leads_back:
            for key in self._get_saved_keys(call):
                inside.hold(key, {"made": self.fresh.get(key, 0)})
        yield call

    def _add_results(self, call: _SegmentCall) -> None:
        """Register the results of a call, their memory keys, and the sizes of newly allocated memory."""
        tensors = tuple(output.local for output in call.effect.made)
        self.scope[call.op.out] = tensors if call.effect.several else tensors[0]
        self.names[call.op.out] = call.makes
        for name, output in zip(call.makes, call.effect.made, strict=True):
            self.keys[name] = Block(name) if output.shares is None else self.keys[call.reads[output.shares]]
            if output.shares is None:
                self.fresh[Block(name)] = output.bytes
        rooms = self.way.way.rooms
        if has_out_kernel(self.segment, call.op, rooms):
            # The kernel writes its result into the middle of the window, so the block that is allocated is the whole
            # window.
            ((window, spec),) = rooms[call.op.out].get_effects(Phase.FORWARD).specs.items()
            key = Block(window, "window")
            self.fresh.pop(Block(call.op.out), None)
            self.keys[call.op.out] = key
            self.fresh[key] = spec.bytes
        # In-place: the result lives in the memory of the call's first argument, and nothing new is allocated.
        elif call.op.out in self.over:
            self.fresh.pop(Block(call.op.out), None)
            self.keys[call.op.out] = self.keys[call.reads[0]]
        if call.effect.saves_bytes and call.leads_back:
            self.fresh[Block(call.op.out, "saved")] = call.effect.saves_bytes

    def _get_saved_keys(self, call: _SegmentCall) -> list[Block]:
        """Return the memory that autograd saves for a call, without weights, which are held anyway."""
        keys = {self.keys[call.reads[index]] for index in call.effect.saves}
        keys |= {self.keys[call.makes[index]] for index in call.effect.saves_made}
        keys |= {Block(call.op.out, "saved")} if call.effect.saves_bytes else set()
        return sorted(key for key in keys if key.role != "weight")

    def _count_backward(self, calls: Sequence[_SegmentCall], keeps_graph: bool = False) -> tuple[int, GradientTracker]:
        """Return the peak bytes of backward beyond the memory at its start, and the gradients that remain."""
        ledger = MemoryTracker()
        for key in (key for call in calls for key in self._get_saved_keys(call)):
            ledger.hold(key, {"kept": self.fresh.get(key, 0)})
        # At the start of backward the saved tensors are held; only memory beyond these counts.
        start = ledger.peak = ledger.total
        grads = GradientTracker(ledger, {part for name in self.segment.outputs for part in self.names[name]})
        # Autograd visits the calls in reverse, and each receives the finished gradients of its results. A call whose
        # results nobody reads on the way to the outputs receives none, and is not visited.
        for call in reversed(calls):
            if any(name in grads.arrived for name in call.makes):
                whole = call.effect.made[0].local.spec.bytes
                for index, (name, local) in enumerate(zip(call.reads, call.locals, strict=True)):
                    if local.needs_gradient:
                        passes = index in call.effect.passes
                        grads.add(name, local.spec.bytes, call.makes if passes else ())
                        grads.parts.update({name} if passes and local.spec.bytes < whole else ())
                # A convolution or product needs a contiguous gradient: a part of a larger gradient is copied first.
                copied = whole if call.is_arithmetic and call.makes[0] in grads.parts else 0
                ledger.add_transient(back=call.effect.back_bytes + copied)
                # Autograd frees as it goes: the gradients of the results, and what this call has saved, unless the
                # gradients of weights follow later.
                grads.release(call.makes)
                for key in self._get_saved_keys(call) if not keeps_graph else ():
                    ledger.release(key)
        grads.hold_passed()
        return ledger.peak - start, grads


def build_op_tally(kernel: str, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> OpTally:
    """Return the tally of a single call, with `LocalTensor` objects in place of the tensor arguments."""
    tensors = find_local_tensors((arguments, keywords))
    return _make_op_tally(kernel, infer_effect(kernel, arguments, keywords or {}), tensors, arguments)


def _make_op_tally(
    kernel: str, effect: KernelEffect, locals_: Sequence[LocalTensor], arguments: Sequence[Any]
) -> OpTally:
    shapes = [local.spec.shape for local in locals_]
    specs = [output.local.spec for output in effect.made]
    # A view costs neither arithmetic nor traffic, only the call itself.
    views = not specs or effect.made[0].shares is not None
    kind = classify_kernel(kernel, effect.flops)
    if kind == "attention" and len(shapes[0]) != 4:
        kind = "scores"  # PyTorch's kernel takes (N, heads, T, C) alone
    if kind == "scores" and any(isinstance(argument, ScoreRule) and argument.dropout for argument in arguments):
        kind = "dropped"
    matrices = kind in BY_ARITHMETIC
    # What counts are gradients that cost work: one that is passed on costs none, and that of a bias next to none beside
    # a convolution's.
    gradients = sum(
        local.needs_gradient and index not in effect.passes and (len(local.spec.shape) > 1 or not matrices)
        for index, local in enumerate(locals_)
    )
    return OpTally(
        kernel,
        kind,
        0 if views else resolve_flops(kernel, effect.flops, specs[0].shape),
        0 if views else sum(spec.bytes for spec in (*(local.spec for local in locals_), *specs)),
        get_product_shape(kernel, shapes),
        gradients if any(output.local.needs_gradient for output in effect.made) else 0,
    )


def build_tally(program: Program, graph: ModelGraph) -> RankTally:
    """Return the tally of a training step of the program's rank.

    Raises TraceError if the effect of a kernel cannot be inferred.
    """
    ways = program.direction_programs.items()
    return RankTally(
        {direction: _DirectionCounter(way, graph).build_tally() for direction, way in ways},
        {name: graph.weights[name].bytes for name in program.weights},
        {name: graph.buffers[name].bytes for name in program.buffers},
        graph.trainable & set(program.weights),
    )


def build_tallies(programs: Iterable[Program], graph: ModelGraph) -> Iterator[RankTally]:
    """Yield the tally of each program's rank, in order. Ranks that compute the same share one, which is counted once.

    Raises TraceError as `build_tally` does.
    """
    # Of 64 tiles, those inside the image have windows of one size, and differ in the ranks with which they exchange.
    counted: list[tuple[object, RankTally]] = []
    for program in programs:
        directions = {direction: _describe_direction(way) for direction, way in program.direction_programs.items()}
        description = program.weights, program.buffers, directions
        tally = next((known for other, known in counted if other == description), None)
        if tally is None:
            tally = build_tally(program, graph)
            counted.append((description, tally))
        yield tally


def _describe_direction(program: DirectionProgram) -> object:
    """Return all that the tally of a direction depends on, to compare it with another rank's."""
    # The ranks of the messages are left out: they differ between tiles, and no size depends on them.
    parts = [(name, part.axes, part.tile.shape) for name, part in program.input_shards.items()]
    items = []
    for item, effects in program.forward_effects:
        ops = [(op.out, op.kernel, op.graded, _get_sizing_arguments(op), op.keywords) for op in item.local_ops]
        moved = effects.messages and (effects.messages.own, effects.messages.makes_room)
        values = effects.reads, effects.makes, effects.specs
        items.append((item.name, item.kind, item.differentiable, values, moved, ops))
    return parts, items


def _get_sizing_arguments(op: LocalOp) -> tuple[Any, ...]:
    """Return the arguments of an op, with 0 in place of one on which no size depends."""
    index = SLOT_ARGUMENTS.get(op.kernel)
    return op.arguments if index is None else (*op.arguments[:index], 0, *op.arguments[index + 1 :])


@dataclass
class _DirectionCounter:
    """One direction of a rank, walked forward: the description of each value, the key of its memory, and its bytes.

    `halo_bytes` are the received parts of windows.
    """

    way: DirectionProgram
    graph: ModelGraph
    values: dict[str, LocalTensor] = field(default_factory=dict)
    lies_in: dict[str, Block] = field(default_factory=dict)
    bytes: dict[Block, int] = field(default_factory=dict)
    halo_bytes: dict[Block, int] = field(default_factory=dict)

    def find_owned(self, name: str) -> LocalTensor | None:
        """Return the description of a weight, buffer or total, or None if the name is none of these."""
        totals = {total.name: total.spec for total in self.graph.totals}
        spec = self.graph.weights.get(name) or self.graph.buffers.get(name) or totals.get(name)
        return None if spec is None else LocalTensor.of(spec, name in self.graph.trainable)

    def add_value(self, name: str, local: LocalTensor, key: Block) -> None:
        """Register a value that the rank holds from here on, in the memory block `key`."""
        self.values[name] = local
        self.lies_in[name] = key
        self.bytes.setdefault(key, local.spec.bytes)

    def _count_own_work(self, item: Instruction) -> SegmentTally:
        """Return the tally of the kernels that a communication runs; its values and memory are in its effects."""

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return self.values[argument.name]
            return LocalTensor.of(argument, item.differentiable) if isinstance(argument, TensorSpec) else argument

        ops = [build_op_tally(op.kernel, [resolve(argument) for argument in op.arguments]) for op in item.local_ops]
        return SegmentTally(tuple(ops), frozenset(), {}, 0, 0, {}, {}, late=False)

    def build_tally(self) -> DirectionTally:
        segments = {}
        inputs = {}
        for name, feed in self.way.input_shards.items():
            # The model was traced with whole images. A rank receives its tile of them, or, in a stage whose ranks share
            # the batch, some of the images.
            spec, shape = self.graph.inputs[name], list(self.graph.inputs[name].shape)
            for axis, size in zip(feed.axes, feed.tile.shape, strict=True):
                shape[axis] = size
            part = TensorSpec(tuple(shape), spec.dtype)
            self.add_value(name, LocalTensor.of(part, False), Block(name, "input"))
            self.bytes[Block(name, "input")] = 0  # counted in `inputs` instead
            inputs[name] = part.bytes
        for item, effects in self.way.forward_effects:
            if isinstance(item, Compute):
                segments[item.name] = _SegmentCounter(item, self).build_tally()
                continue
            if item.local_ops:
                segments[item.name] = self._count_own_work(item)
            for name, spec in effects.specs.items():
                key = Block(name, "window" if effects.messages else "value")
                self.bytes[key] = spec.bytes
                # A window is the rank's own tile and the halo around it. Only the halo is memory due to spatial
                # parallelism; of a strip, also its copies of own pixels.
                if effects.messages and item.kind == "halo":
                    self.halo_bytes[key] = spec.bytes - (effects.messages.own if len(effects.specs) == 1 else 0)
                self.add_value(name, LocalTensor.of(spec, item.differentiable, item.is_image), key)
        gradients = frozenset(name for name, local in self.values.items() if local.needs_gradient)
        roomy = frozenset(
            window
            for name, item in self.way.rooms.items()
            for window in item.get_effects(Phase.FORWARD).makes
            if self.lies_in.get(name) == Block(window, "window")
        )
        return DirectionTally(self.lies_in, self.bytes, self.halo_bytes, gradients, segments, inputs, roomy)
