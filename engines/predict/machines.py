"""Machines that are known by name: nodes, links and processors as described by their makers.

Assumptions for all: messages reach the nominal bandwidth of their links, and a message takes `SMALL_S` in addition. A
node's ranks are its devices, or processes that share its cores evenly.
"""

from __future__ import annotations

from dataclasses import replace

from engines.errors import PlanError
from engines.predict.devices import NodeSpec, Processor, make_machine
from engines.predict.machine import Link, Machine

__all__ = ["MACHINES", "get_machine"]

GB = 10**9
GIB = 1 << 30
SMALL_S = 5e-6
"""The latency of a small message between GPUs or processes, assumed to be some microseconds. With 40 times as much, the
steps of `amoebanet/8192` (engines/predict/published.py) take a third longer, and its ratio moves from 1.21 to 1.25."""

V100 = Processor(
    "V100 SXM2 16 GB", "NVIDIA V100 data sheet (2020): 15.7 TFLOP/s in single precision, 900 GB/s, 16 GB.",
    15.7e12, 900e9, 16 * GIB,
)  # fmt: skip
V100_PCIE = Processor(
    "V100 PCIe 16 GB", "NVIDIA V100 data sheet (2020): 14 TFLOP/s in single precision, 900 GB/s, 16 GB.",
    14e12, 900e9, 16 * GIB,
)  # fmt: skip
A100 = Processor(
    "A100 SXM 80 GB",
    "NVIDIA A100 data sheet: 156 TFLOP/s in TF32 (PyTorch's default for convolutions), dense, 2039 GB/s, 80 GB.",
    156e12, 2039e9, 80 * GIB,
)  # fmt: skip
H100 = Processor(
    "H100 SXM 80 GB",
    "NVIDIA H100 data sheet: 989 TFLOP/s in TF32 with sparsity, half of that without, 3.35 TB/s, 80 GB.",
    494.7e12, 3350e9, 80 * GIB,
)  # fmt: skip
H200 = replace(
    H100, name="H200 SXM 141 GB", source="NVIDIA H200 data sheet: arithmetic of the H100, 4.8 TB/s, 141 GB.",
    memory_per_s=4800e9, memory_bytes=141 * GB,
)  # fmt: skip
QUARTER_8280 = Processor(
    "14 cores of two Xeon Platinum 8280",
    "Frontera user guide, system architecture: 2 x 28 cores at 2.7 GHz nominal (with two AVX-512 units each 64 FLOPs a "
    "cycle), 192 GB of DDR4 at 2933 MT/s, of which each socket has six channels; a rank has a quarter of all. Of "
    "the peak it reaches what Linpack does there: TOP500, June 2019, 23.5 of 38.7 PFLOP/s.",
    14 * 2.7e9 * 64, 3 * 8 * 2.933e9, 48 * GB, busy=23.5 / 38.7, start_s=0.0,
)  # fmt: skip

SUMMIT = NodeSpec(
    "Summit",
    "OLCF's Summit: 6 V100 a node, two NVLink bricks of 25 GB/s a direction between two GPUs of a socket (assumed of "
    "all pairs), as many to its processor, dual-rail EDR InfiniBand, 25 GB/s a node, in a non-blocking fat tree.",
    6, Link(SMALL_S, 50e9), Link(SMALL_S, 25e9), 50e9,
)  # fmt: skip
LASSEN = NodeSpec(
    "Lassen",
    "LLNL's Lassen (IBM Power AC922): 4 V100 a node, three NVLink bricks of 25 GB/s a direction between two GPUs of a "
    "socket (assumed of all pairs), as many to its processor, dual-rail EDR InfiniBand, 25 GB/s a node.",
    4, Link(SMALL_S, 75e9), Link(SMALL_S, 25e9), 75e9,
)  # fmt: skip
PITZER = NodeSpec(
    "Pitzer", "OSC's Pitzer: 2 V100 a node on PCIe 3.0 x16, 15.75 GB/s a direction, EDR InfiniBand, 12.5 GB/s a node.",
    2, Link(SMALL_S, 15.75e9), Link(SMALL_S, 12.5e9), 15.75e9,
)  # fmt: skip
DGX_A100 = NodeSpec(
    "DGX A100",
    "NVIDIA DGX A100 data sheet: 8 A100, NVLink of 600 GB/s in both directions together, eight HDR InfiniBand ports of "
    "200 Gbit/s, PCIe 4.0 x16 to the host, 31.5 GB/s a direction.",
    8, Link(SMALL_S, 300e9), Link(SMALL_S, 200e9), 31.5e9,
)  # fmt: skip
DGX_H100 = NodeSpec(
    "DGX H100",
    "NVIDIA DGX H100 data sheet: 8 H100, NVLink of 900 GB/s in both directions together, eight NDR InfiniBand ports of "
    "400 Gbit/s, PCIe 5.0 x16 to the host, 63 GB/s a direction.",
    8, Link(SMALL_S, 450e9), Link(SMALL_S, 400e9), 63e9,
)  # fmt: skip
DGX_H200 = replace(DGX_H100, name="DGX H200", source=DGX_H100.source.replace("H100", "H200"))
FRONTERA = NodeSpec(
    "Frontera",
    "TACC's Frontera: 4 processes on a node's 56 cores, whose messages go through its memory at half of what a process "
    "copies; HDR100 InfiniBand, 12.5 GB/s a node, 22 nodes sharing 18 links upwards.",
    4, Link(SMALL_S, 15e9), Link(SMALL_S, 12.5e9 * 18 / 22),
)  # fmt: skip

_HALF = {V100: 125e12, V100_PCIE: 112e12, A100: 312e12, H100: 989.4e12, H200: 989.4e12}
"""Peak FLOP/s of the tensor cores in half precision, dense, from the same data sheets."""

_BUILT = (
    (SUMMIT, V100), (LASSEN, V100), (PITZER, V100_PCIE), (DGX_A100, A100), (DGX_H100, H100), (DGX_H200, H200),
    (FRONTERA, QUARTER_8280),
)  # fmt: skip


def get_machine(name: str) -> Machine:
    """Return a machine by name. Raises PlanError, listing all names, if there is no such machine.

    >>> get_machine("Summit").node_ranks
    6
    """
    if name not in MACHINES:
        raise PlanError(
            f"There is no machine {name!r}. Known are {', '.join(MACHINES)}; calibrate() measures this one."
        )
    return MACHINES[name]


def _build_machines() -> dict[str, Machine]:
    """Return each machine in single precision, and the GPU machines in half precision too."""
    found = {node.name: make_machine(node, processor) for node, processor in _BUILT}
    for node, processor in _BUILT:
        if processor in _HALF:
            half = replace(processor, flop_per_s=_HALF[processor], number_bytes=2)
            name = f"{node.name}, half precision"
            found[name] = make_machine(replace(node, name=name), half)
    return found


MACHINES = _build_machines()
"""The machines by name; `source` says where each number is from."""
