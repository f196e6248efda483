"""Tallies of the memory and arithmetic of a rank's program, counted before anything runs: plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Role = Literal["value", "window", "input", "weight", "saved", "gradient", "given", "new", "own"]


class Block(NamedTuple):
    """A block of memory: of the `value` itself, or in another role of that value.

    An exchange makes its "window", autograd keeps more for it than tensors ("saved"), and while the backward pass of a
    segment is counted, its gradient is "given" by the caller, "new", or a copy of its "own".
    """

    value: str
    role: Role = "value"
    is_recomputed: bool = False


@dataclass(frozen=True, slots=True)
class OpTally:
    """One kernel call of a rank in forward: its FLOPs, and the bytes that it reads and writes.

    `kind` is its class. `shape` holds what its speed depends on in addition to
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

    Several values may share a block of memory. `keeps` are the blocks that autograd saves from
    forward to backward, and `fresh` the bytes of those that the segment allocates. `inside` is the peak of forward
    beyond the memory held before it, `back_inside` the peak of backward likewise, and `back_inside_with_graph` that of
    a backward pass that frees nothing of the graph. `grads` are the bytes of gradients by value, `trains` by weight,
    and `moves` the bytes that each addition or copy of a gradient reads and writes. `late`: the gradients of the
    weights may be computed separately.
    """

    ops: tuple[OpTally, ...]
    keeps: frozenset[Block]
    fresh: Mapping[Block, int]
    inside: int
    back_inside: int
    grads: Mapping[str, int]
    trains: Mapping[str, int]
    late: bool
    moves: tuple[int, ...] = ()
    back_inside_with_graph: int = 0


@dataclass(frozen=True)
class DirectionTally:
    """One direction of a rank: the block in which each value lies, the values that need a gradient, and the segments.

    `bytes` are those of each block, `halo_bytes` the received parts of them, and `inputs` the bytes of the rank's
    inputs. `roomy` are the windows whose own pixels are computed in place, so that they are not copied.
    """

    lies_in: Mapping[str, Block]
    bytes: Mapping[Block, int]
    halo_bytes: Mapping[Block, int]
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


# Classes of kernels with similar behaviour: the speed of one kernel of a class predicts the speed of the others.


_BEGINNINGS = {
    "convolution": "conv",
    "volume": "conv3d",
    "transposed": "conv_transpose",
    "product": "linear matmul mm addmm bmm",
    "attention": "scaled_dot_product_attention",
    "scores": "attention",
    "dropped": "dropped_attention",
    "moments": "moments",
    "norm": "batch_norm normalise_groups",
    "whole_norm": "whole_batch_norm instance_norm group_norm layer_norm",
    "pool": "max_pool avg_pool adaptive upsample",
    "transcendental": "softmax log_softmax exp log sigmoid tanh gelu silu mish elu softplus",
    "slope": "prelu",
    "drawn": "dropout draw rrelu",
    "loss": "cross_entropy binary_cross_entropy nll",
    "pointwise": "logical",
    "pad": "pad constant_pad",
    "copy": "cat pixel_ clone _to_copy stack expand",
}
"""The beginnings of the names of the kernels of each class."""

CLASSES = tuple(_BEGINNINGS)
"""Convolutions (plain, of a `volume`, and transposed), matrix products and attention are bound by arithmetic, the
others by memory, or by a processor's exponentials. Convolutions of volumes take two to six times as long as others with
as much arithmetic. `scores` are attention without PyTorch's kernel, at half of its speed, and `dropped` the same with
dropout. Random numbers by position (`drawn`) take a processor twenty operations each. A `norm` receives its `moments`,
a `whole_norm` computes them. A `slope` has a weight whose gradient is summed over all pixels: on a CPU, its backward
takes twenty times as long as that of a ReLU. A `pad` may also crop, and a `loss` of labels is several kernels."""

ATTENTION = ("attention", "scores", "dropped")
CONVOLUTIONS = ("convolution", "volume", "transposed")
BY_ARITHMETIC = (*CONVOLUTIONS, "product", *ATTENTION)

# The longest first, so that `conv_transpose` is not taken for a `conv`, or `expand` for an `exp`.
_CLASS_OF = [(start, kind) for kind, starts in _BEGINNINGS.items() for start in starts.split()]
_CLASS_OF.sort(key=lambda pair: -len(pair[0]))


def classify_kernel(kernel: str, flops: int = 0) -> str:
    """Return the class of a kernel by its name; an unknown one is a product if it has `flops`, else pointwise.

    >>> (
    ...     classify_kernel("aten.conv2d.default"),
    ...     classify_kernel("aten.gelu_.default"),
    ...     classify_kernel("aten.hardtanh.default"),
    ... )
    ('convolution', 'transcendental', 'pointwise')
    >>> classify_kernel("aten.mv.default", flops=1 << 20)
    'product'
    """
    name = kernel.split(".")[1] if "." in kernel else kernel
    unknown = "product" if flops else "pointwise"
    return next((kind for start, kind in _CLASS_OF if name.startswith(start)), unknown)


_BLOCK = 2048
"""Attention is computed in blocks: of more queries or keys, it is as fast as of so many."""


def get_product_shape(kernel: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the lengths on which the speed of an arithmetic kernel depends, or () for other kernels, and for products.

    Of a convolution, these are the length of its dot products, its filters and its images; of a transposed one, those
    of the convolution that it transposes. Of attention, channels, queries and keys, these two up to a limit.

    >>> get_product_shape("aten.conv2d.default", [(1, 16, 32, 32), (64, 16, 3, 3)])
    (144, 64, 1)
    >>> get_product_shape("tile.attention", [(1, 2, 100, 16), (1, 2, 3000, 16), (1, 2, 3000, 16)])
    (16, 100, 2048)
    """
    kind = classify_kernel(kernel)
    if kind in ATTENTION:
        return shapes[1][-1], min(_BLOCK, shapes[0][-2]), min(_BLOCK, shapes[1][-2])
    if kind not in CONVOLUTIONS or len(shapes) < 2:
        return ()
    return math.prod(shapes[1][1:]), shapes[1][0], shapes[0][0]
