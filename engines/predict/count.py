"""Counts what a rank's program does: shapes, bytes and FLOPs of every kernel call, from the program alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.layer.graph import ModelGraph, TensorSpec
from engines.predict.effects import Local
from engines.predict.segments import Held, SegmentCount, window_key
from engines.predict.tallies import RankTally, WayTally
from engines.program.instructions import AllReduce, Compute, Exchange
from engines.program.program import Feed, Program

__all__ = ["tally"]


def tally(program: Program, graph: ModelGraph) -> RankTally:
    """What the rank of this program does in a training step.

    Raises TraceError where a kernel cannot be asked what it makes.
    """
    ways = {direction: _WayCount(way, graph).tally() for direction, way in program.ways.items()}
    return RankTally(
        ways,
        {name: graph.weights[name].bytes for name in program.weights},
        {name: graph.buffers[name].bytes for name in program.buffers},
        graph.trainable & set(program.weights),
    )


@dataclass
class _WayCount(Held):
    """One direction of a rank; `halo_bytes` are borrowed."""

    halo_bytes: dict[str, int] = field(default_factory=dict)

    def tally(self) -> WayTally:
        segments = {}
        inputs = {name: self._fed(name, feed) for name, feed in self.way.feeds.items()}
        for item in self.way.forward:
            match item:
                case Compute():
                    segments[item.name] = SegmentCount(item, self).tally()
                case Exchange() if item.window is not None:
                    self._arrives(item)
                case AllReduce():
                    self.keep(item.target, self.values[item.source], item.differentiable, item.target)
        gradients = frozenset(name for name, local in self.values.items() if local.needs_gradient)
        return WayTally(
            self.lies_in, self.bytes, self.halo_bytes, gradients, segments, inputs,
            frozenset(e.target for source, e in self.rooms.items() if self.lies_in.get(source) == window_key(e)),
        )  # fmt: skip

    def _fed(self, name: str, feed: Feed) -> int:
        spec, shape = self.graph.inputs[name], list(self.graph.inputs[name].shape)
        if feed.tile is not None and feed.tile.images is not None:
            shape[0] = len(feed.tile.images)
        if feed.tile is not None and feed.axes is not None:
            for axis, size in zip(feed.axes, feed.tile.shape, strict=True):
                shape[axis] = size
        part = TensorSpec(tuple(shape), spec.dtype)
        self.keep(name, Local.of(part, False), False, f"input:{name}")
        self.bytes[f"input:{name}"] = 0  # it is counted as what the rank is fed with
        return part.bytes

    def _arrives(self, exchange: Exchange) -> None:
        window, key = exchange.window, window_key(exchange)
        spec = TensorSpec(exchange.shape_of(window), exchange.dtype)
        self.bytes[key] = spec.bytes
        if exchange.kind == "halo":
            own = exchange.own & window if exchange.own else None
            kept = TensorSpec(exchange.shape_of(own), exchange.dtype).bytes if own else 0
            self.halo_bytes[key] = spec.bytes - kept
        self.keep(exchange.target, Local.of(spec, exchange.differentiable), exchange.differentiable, key)
