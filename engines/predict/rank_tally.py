"""Counts a rank's program: shapes, bytes and FLOPs of every kernel call, from the program alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.layer.graph import ModelGraph, TensorSpec
from engines.predict.kernel_effects import LocalTensor
from engines.predict.segment_tally import DirectionValues, SegmentCounter, get_window_key
from engines.predict.tallies import DirectionTally, RankTally
from engines.program.instructions import AllReduce, Compute, Exchange
from engines.program.program import Program, ShardSpec

__all__ = ["build_tally"]


def build_tally(program: Program, graph: ModelGraph) -> RankTally:
    """Return the tally of a training step of the program's rank.

    Raises TraceError if the effect of a kernel cannot be inferred.
    """
    ways = {
        direction: _DirectionCounter(way, graph).build_tally() for direction, way in program.direction_programs.items()
    }
    return RankTally(
        ways,
        {name: graph.weights[name].bytes for name in program.weights},
        {name: graph.buffers[name].bytes for name in program.buffers},
        graph.trainable & set(program.weights),
    )


@dataclass
class _DirectionCounter(DirectionValues):
    """The counter of one direction of a rank; `halo_bytes` are the received parts of windows."""

    halo_bytes: dict[str, int] = field(default_factory=dict)

    def build_tally(self) -> DirectionTally:
        segments = {}
        inputs = {name: self._add_input(name, feed) for name, feed in self.way.input_shards.items()}
        for item in self.way.forward:
            match item:
                case Compute():
                    segments[item.name] = SegmentCounter(item, self).build_tally()
                case Exchange() if item.window is not None:
                    self._add_window(item)
                case AllReduce():
                    self.add_value(item.target, self.values[item.source], item.differentiable, item.target)
        gradients = frozenset(name for name, local in self.values.items() if local.needs_gradient)
        roomy = frozenset(e.target for name, e in self.rooms.items() if self.lies_in.get(name) == get_window_key(e))
        return DirectionTally(self.lies_in, self.bytes, self.halo_bytes, gradients, segments, inputs, roomy)

    def _add_input(self, name: str, feed: ShardSpec) -> int:
        # The model was traced with whole images. A rank receives its tile of them, or, in a stage whose ranks share the
        # batch, some of the images.
        spec, shape = self.graph.inputs[name], list(self.graph.inputs[name].shape)
        if feed.tile is not None and feed.tile.images is not None:
            shape[0] = len(feed.tile.images)
        if feed.tile is not None and feed.axes is not None:
            for axis, size in zip(feed.axes, feed.tile.shape, strict=True):
                shape[axis] = size
        part = TensorSpec(tuple(shape), spec.dtype)
        self.add_value(name, LocalTensor.of(part, False), False, f"input:{name}")
        self.bytes[f"input:{name}"] = 0  # counted in `inputs` instead
        return part.bytes

    def _add_window(self, exchange: Exchange) -> None:
        window, key = exchange.window, get_window_key(exchange)
        spec = TensorSpec(exchange.compute_shape(window), exchange.dtype)
        self.bytes[key] = spec.bytes
        # A window is the rank's own tile and the halo around it. Only the halo is memory due to spatial parallelism.
        if exchange.kind == "halo":
            own = exchange.own & window if exchange.own else None
            kept = TensorSpec(exchange.compute_shape(own), exchange.dtype).bytes if own else 0
            self.halo_bytes[key] = spec.bytes - kept
        self.add_value(exchange.target, LocalTensor.of(spec, exchange.differentiable), exchange.differentiable, key)
