"""Collects the instructions of one rank's forward pass: communications, and segments of kernels between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from mpi4dl_nb.engines.compiler.value_layout import ValueLayout, ValueLayouts
from mpi4dl_nb.engines.geometry.places import Place, to_places
from mpi4dl_nb.engines.graph.model_graph import WITHOUT_GRADIENT, Node, Ref, TensorSpec
from mpi4dl_nb.engines.program.effects import LocalOp
from mpi4dl_nb.engines.program.instructions import AllReduce, Compute, ModelInstruction, RunningStatistics
from mpi4dl_nb.engines.program.ring import RingAttention


@dataclass
class Segments(ValueLayouts):
    """The instructions for tile `tile` of one stage, in graph order.

    Tags are even and count up from `tag`. Every rank of the stage emits the same sequence of exchanges and therefore
    assigns the same tag to each.
    """

    instructions: list[ModelInstruction] = field(default_factory=list)
    statistics: list[RunningStatistics] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    # Kernels collect in `_open` until a communication closes them into a segment:
    #
    #   nodes         conv, relu          conv                     pool over the image     linear
    #   instructions  [segment0]  (exchange)  [segment2: conv, sum]  (all-reduce)  [segment4: divide, linear]
    _open: list[LocalOp] = field(default_factory=list)
    _module: str = ""
    _graded: bool = True
    _before: tuple[int, list[LocalOp], list[int]] = field(default=(0, [], []))

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
        return self.instructions, self.statistics, self.values

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
