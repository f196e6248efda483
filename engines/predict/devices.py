"""Processors and nodes as their makers describe them, and the one rule that makes a `Machine` of them.

The rule is a roofline. Kernels that only move pixels run at the memory's bandwidth, times how often they go over what
is counted (`PASSES`). Convolutions are the matrix products that they are: (outputs, dot) x (dot, filters), whose time
is that of the arithmetic and of the three matrices through the memory, one after the other; so thin ones are slow. A
device works for at least as long as its host takes to start the next kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.predict.kernel_classes import BY_ARITHMETIC, CLASSES
from engines.predict.machine import Link, Machine, Speed

__all__ = ["BUSY", "LAUNCH_S", "MEMORY_SHARE", "PASSES", "NodeSpec", "Processor", "make_machine"]

MEMORY_SHARE = 0.83
"""Of the memory's nominal bandwidth, what a kernel gets: 750 of 900 GB/s on a V100 (Jia et al., Dissecting the NVIDIA
Volta GPU Architecture via Microbenchmarking, arXiv:1804.06826, global memory). Assumed of all processors."""

BUSY = 1.08
"""Of a GPU's peak, what the arithmetic of a convolution gets. It is counted by its definition, and faster algorithms do
with less, so that more than all can be reached. Fixed by one number: ResNet-50 trains at 334 images/s on one V100 with
batches of 64 (Jain, Distributed Deep Neural Network Training using MVAPICH2, OSU booth at SC '22, "Run PyTorch on a
single GPU"). Assumed of all GPUs. What it was not made of: 337 images/s with batches of 112 to 128, where NVIDIA's
container reaches 367, and 1205 to 1220 on an A100 with TF32, where it reaches 938 (NVIDIA DeepLearningExamples,
ResNet50 v1.5 for PyTorch, training performance): newer devices are priced too fast by three tenths."""

LAUNCH_S = 59e-6
"""Between two kernels that a host starts: 10.37 ms for one image through ResNet-50, whose 176 kernels are too short to
matter on a V100 (NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch, inference on one V100 16 GB, FP32, batch 1).
Assumed of all GPUs, and of backward."""

PASSES = {
    "moments": (1, 2), "norm": (1, 5 / 2), "whole_norm": (3 / 2, 5 / 2), "pool": (1, 3 / 2),
    "transcendental": (1, 3 / 2), "loss": (1, 3 / 2), "pointwise": (1, 3 / 2), "pad": (1, 1),
    "copy": (1, 1),
}  # fmt: skip
"""How often a kernel reads or writes what is counted of it, forward and back. The count is of arguments and results
once, forward: a ReLU reads and writes (2), and backward reads a gradient and the result and writes a gradient (3). A
batch norm reads twice and writes (3 of 2), and backward reads both image and gradient twice and writes (5 of 2)."""


@dataclass(frozen=True)
class Processor:
    """One rank's: `flop_per_s` and `number_bytes` of what convolutions compute with, `busy` the share that they reach.

    `start_s` is how long a host takes to start a kernel on it (0: it is its own host).
    """

    name: str
    source: str
    flop_per_s: float
    memory_per_s: float
    memory_bytes: int
    number_bytes: int = 4
    busy: float = BUSY
    start_s: float = LAUNCH_S


@dataclass(frozen=True)
class NodeSpec:
    """Ranks that share a host: the link between two of them, and the one that they share to all other nodes.

    `host_per_s` is the way between each device and the host, in bytes a second one way (None: the ranks are the host).
    """

    name: str
    source: str
    ranks: int
    inside: Link
    between: Link
    host_per_s: float | None = None


def make_machine(node: NodeSpec, processor: Processor) -> Machine:
    """The machine made of such nodes; sums go within nodes and then between them, as NCCL and MVAPICH2 do them.

    What an optimiser starts is taken to be hidden behind the device's work, and running statistics to be kept by the
    norms' own kernels.
    """
    memory_per_s = MEMORY_SHARE * processor.memory_per_s
    return Machine(
        node.name, f"{node.source} {processor.source} Made by the rule of engines/predict/devices.py.",
        {kind: (_make_speed(kind, processor, memory_per_s),) for kind in CLASSES},
        least_s=processor.start_s, instruction_s=processor.start_s,
        copy_per_s=memory_per_s / 2, host_per_s=node.host_per_s,
        latency_s=node.inside.latency_s, bytes_per_s=node.inside.bytes_per_s,
        memory_bytes=processor.memory_bytes, node_ranks=node.ranks, between=node.between,
        sums="two_level",
    )  # fmt: skip


def _make_speed(kind: str, processor: Processor, memory_per_s: float) -> Speed:
    """An upper bound, and for arithmetic the sizes at which memory alone makes it half as fast.

    2 x dot x filters x outputs FLOPs move number_bytes x (outputs x dot + outputs x filters + dot x filters) bytes.
    """
    if kind not in BY_ARITHMETIC:
        forward, back = PASSES[kind]
        return Speed((), memory_per_s / forward, memory_per_s / back)
    peak = processor.busy * processor.flop_per_s
    half = processor.number_bytes * peak / (2 * memory_per_s)
    return Speed((), peak, peak, half=(half, half, half))
