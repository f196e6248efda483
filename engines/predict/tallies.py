"""Tallies of the memory and arithmetic of a rank's program, counted before anything runs: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DirectionTally", "OpTally", "RankTally", "SegmentTally"]


@dataclass(frozen=True, slots=True)
class OpTally:
    """One kernel call of a rank in forward: its FLOPs, and the bytes that it reads and writes.

    `kind` is its class (`engines/predict/kernel_classes.py`). `shape` holds what its speed depends on in addition to
    its size: for a convolution the length of its dot products, its filters, and the images. `gradients` is the number
    of its arguments that receive a gradient, weights included.
    """

    kernel: str
    kind: str
    flops: int
    bytes: int
    shape: tuple[int, ...] = ()
    gradients: int = 0


@dataclass(frozen=True)
class SegmentTally:
    """The tally of one segment of a rank.

    Memory is identified by key, since several values may share a block. `keeps` are the keys that autograd saves from
    forward to backward, and `fresh` the bytes of those and of the outputs that the segment allocates. `inside` is the
    peak of forward beyond the memory held before it, and `back_inside` the peak of backward likewise. `grads` are the
    bytes of gradients by value, `trains` by weight, and `moves` the bytes that each addition or copy of a gradient
    reads and writes. `late`: the gradients of the weights may be computed separately.
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
    """One direction of a rank: the memory key of each value, the values that need a gradient, and the segments by name.

    `bytes` is by key, `halo_bytes` the received part of it, and `inputs` the bytes of the rank's inputs. `roomy` are
    the windows whose own pixels are computed in place, so that they are not copied.
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
    """The complete tally of one rank: its directions, and the bytes of the weights and buffers that it owns."""

    ways: Mapping[int, DirectionTally]
    weights: Mapping[str, int]
    buffers: Mapping[str, int]
    trained: frozenset[str] = field(default_factory=frozenset)
