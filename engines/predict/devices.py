"""Processors and nodes as described by their makers, and the rule that makes a `Machine` of them.

The rule is a roofline. Kernels that only move data run at the memory's bandwidth, divided by the number of passes over
the counted bytes (`PASSES`). Convolutions are matrix products, (outputs, dot) x (dot, filters), whose time is that of
the arithmetic plus that of moving the three matrices through memory, so thin ones are slow. A device is busy for at
least as long as its host takes to launch the next kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.predict.kernel_classes import BY_ARITHMETIC, CLASSES
from engines.predict.machine import Link, Machine, Speed

__all__ = ["BUSY", "LAUNCH_S", "MEMORY_SHARE", "PASSES", "NodeSpec", "Processor", "make_machine"]

MEMORY_SHARE = 0.83
"""The fraction of the nominal memory bandwidth that a kernel reaches: 750 of 900 GB/s on a V100 (Jia et al., Dissecting
the NVIDIA Volta GPU Architecture via Microbenchmarking, arXiv:1804.06826, global memory). Assumed of all processors."""

BUSY = 1.08
"""The fraction of a GPU's peak that the arithmetic of a convolution reaches. FLOPs are counted by definition, and
faster algorithms need fewer, so the fraction can exceed 1. It is fitted to one number: ResNet-50 trains at 334 images/s
on one V100 with batches of 64 (Jain, Distributed Deep Neural Network Training using MVAPICH2, OSU booth at SC '22, "Run
PyTorch on a single GPU"). Assumed of all GPUs. Numbers not used for the fit: 337 images/s with batches of 112 to 128,
where NVIDIA's container reaches 367, and 1205 to 1220 on an A100 with TF32, where it reaches 938 (NVIDIA
DeepLearningExamples, ResNet50 v1.5 for PyTorch, training performance): newer devices are predicted too fast by three
tenths."""

LAUNCH_S = 59e-6
"""The time between two kernel launches by a host: 10.37 ms for one image through ResNet-50, whose 176 kernels are too
short to matter on a V100 (NVIDIA DeepLearningExamples, ResNet50 v1.5 for PyTorch, inference on one V100 16 GB, FP32,
batch 1). Assumed of all GPUs, and of backward."""

PASSES = {
    "moments": (1, 2),
    "norm": (1, 5 / 2),
    "whole_norm": (3 / 2, 5 / 2),
    **dict.fromkeys(("pool", "transcendental", "loss", "pointwise"), (1, 3 / 2)),
    **dict.fromkeys(("pad", "copy"), (1, 1)),
}
"""How often a kernel reads or writes the bytes counted for it, forward and backward. The count is of arguments and
results once, in forward: a ReLU reads and writes (2), and backward reads a gradient and the result and writes a
gradient (3). A batch norm reads twice and writes (3 of 2), and backward reads both image and gradient twice and writes
(5 of 2)."""


@dataclass(frozen=True)
class Processor:
    """One rank's processor: peak `flop_per_s` with numbers of `number_bytes`, and the fraction `busy` that it reaches.

    `start_s` is the time in which a host launches a kernel on it (0: the processor is its own host).
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
    """Ranks that share a host: the link `inside` between two of them, and the link that they share to all other nodes.

    `host_per_s` is the bandwidth between each device and the host in bytes per second and direction (None: ranks run on
    the host).
    """

    name: str
    source: str
    ranks: int
    inside: Link
    between: Link
    host_per_s: float | None = None


def make_machine(node: NodeSpec, processor: Processor) -> Machine:
    """Return the machine made of such nodes; all-reduces have two levels, as those of NCCL and MVAPICH2.

    The launches of the optimiser are assumed to be hidden by the device's work, and running statistics to be updated by
    the kernels of the norms.
    """
    memory_per_s = MEMORY_SHARE * processor.memory_per_s
    return Machine(
        node.name,
        f"{node.source} {processor.source} Made by the rule of engines/predict/devices.py.",
        {kind: (_make_speed(kind, processor, memory_per_s),) for kind in CLASSES},
        least_s=processor.start_s,
        instruction_s=processor.start_s,
        copy_per_s=memory_per_s / 2,
        host_per_s=node.host_per_s,
        latency_s=node.inside.latency_s,
        bytes_per_s=node.inside.bytes_per_s,
        memory_bytes=processor.memory_bytes,
        node_ranks=node.ranks,
        between=node.between,
        sums="two_level",
    )


def _make_speed(kind: str, processor: Processor, memory_per_s: float) -> Speed:
    """Return an upper bound on the speed and, for arithmetic kernels, the sizes at which memory alone halves it.

    2 x dot x filters x outputs FLOPs move number_bytes x (outputs x dot + outputs x filters + dot x filters) bytes.
    """
    # Time is the sum of both parts, arithmetic and memory. `Speed.compute_rate` therefore divides the peak by
    # 1 + half / dot + half / filters + half / outputs: each of the three matrices is read or written once, and matters
    # the more, the shorter the axis is along which its numbers are used again.
    if kind not in BY_ARITHMETIC:
        forward, back = PASSES[kind]
        return Speed((), memory_per_s / forward, memory_per_s / back)
    peak = processor.busy * processor.flop_per_s
    half = processor.number_bytes * peak / (2 * memory_per_s)
    return Speed((), peak, peak, half=(half, half, half))
