"""What a rank's program does with memory and arithmetic, counted before anything runs: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DirectionTally", "OpTally", "RankTally", "SegmentTally"]


@dataclass(frozen=True, slots=True)
class OpTally:
    """One kernel call of a rank, going forward: arithmetic, and bytes read and written.

    `kind` is its class (`engines/predict/kernel_classes.py`); `shape` what its speed depends on beside its size: of a
    convolution the length of its dot products, its filters, and the images. `gradients` is to how many of its arguments
    a gradient goes back; a weight's counts.
    """

    kernel: str
    kind: str
    flops: int
    bytes: int
    shape: tuple[int, ...] = ()
    gradients: int = 0


@dataclass(frozen=True)
class SegmentTally:
    """A segment of one rank.

    Memory goes by key, since several values may lie in the same. `keeps` is what autograd holds from forward to
    backward, `fresh` the bytes of what the segment makes of that and of its outputs, and `inside` the most bytes beyond
    what was there before that are in use while it runs forward; `back_inside` likewise in backward, beyond what that
    finds. It adds to gradients: `grads` are their bytes by value, `trains` by weight; `moves` are the bytes that each
    addition or copy of a gradient reads and writes. `late`: the weights' may be computed apart.
    """

    ops: tuple[OpTally, ...]
    keeps: frozenset[str]
    fresh: Mapping[str, int]
    inside: int
    back_inside: int
    grads: Mapping[str, int]
    trains: Mapping[str, int]
    late: bool
    moves: tuple[int, ...] = ()


@dataclass(frozen=True)
class DirectionTally:
    """One direction of a rank: for each value where it lies and whether it has a gradient; its segments by name.

    `bytes` is by key, `halo_bytes` the part of it that was borrowed, `inputs` the bytes of what the rank is fed with.
    `roomy` are the windows in whose middle their source is made, so that it is not copied.
    """

    lies_in: Mapping[str, str]
    bytes: Mapping[str, int]
    halo_bytes: Mapping[str, int]
    needs_gradient: frozenset[str]
    segments: Mapping[str, SegmentTally]
    inputs: Mapping[str, int]
    roomy: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RankTally:
    """All that is counted of one rank: its directions, and the bytes of what it owns."""

    ways: Mapping[int, DirectionTally]
    weights: Mapping[str, int]
    buffers: Mapping[str, int]
    trained: frozenset[str] = field(default_factory=frozenset)
