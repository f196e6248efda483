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
    "V100 SXM2 16 GB",
    "NVIDIA V100 data sheet (2020): 15.7 TFLOP/s in single precision, 900 GB/s, 16 GB.",
    flop_per_s=15.7e12,
    memory_per_s=900e9,
    memory_bytes=16 * GIB,
)
V100_PCIE = Processor(
    "V100 PCIe 16 GB",
    "NVIDIA V100 data sheet (2020): 14 TFLOP/s in single precision, 900 GB/s, 16 GB.",
    flop_per_s=14e12,
    memory_per_s=900e9,
    memory_bytes=16 * GIB,
)
A100 = Processor(
    "A100 SXM 80 GB",
    "NVIDIA A100 data sheet: 156 TFLOP/s in TF32 (PyTorch's default for convolutions), dense, 2039 GB/s, 80 GB.",
    flop_per_s=156e12,
    memory_per_s=2039e9,
    memory_bytes=80 * GIB,
)
H100 = Processor(
    "H100 SXM 80 GB",
    "NVIDIA H100 data sheet: 989 TFLOP/s in TF32 with sparsity, half of that without, 3.35 TB/s, 80 GB.",
    flop_per_s=494.7e12,
    memory_per_s=3350e9,
    memory_bytes=80 * GIB,
)
H200 = replace(
    H100,
    name="H200 SXM 141 GB",
    source="NVIDIA H200 data sheet: arithmetic of the H100, 4.8 TB/s, 141 GB.",
    memory_per_s=4800e9,
    memory_bytes=141 * GB,
)
QUARTER_8280 = Processor(
    "14 cores of two Xeon Platinum 8280",
    "Frontera user guide, system architecture: 2 x 28 cores at 2.7 GHz nominal (with two AVX-512 units each 64 FLOPs a "
    "cycle), 192 GB of DDR4 at 2933 MT/s, of which each socket has six channels; a rank has a quarter of all. Of "
    "the peak it reaches what Linpack does there: TOP500, June 2019, 23.5 of 38.7 PFLOP/s.",
    flop_per_s=14 * 2.7e9 * 64,
    memory_per_s=3 * 8 * 2.933e9,
    memory_bytes=48 * GB,
    busy=23.5 / 38.7,
    start_s=0.0,
)

SUMMIT = NodeSpec(
    "Summit",
    "OLCF's Summit: 6 V100 a node, two NVLink bricks of 25 GB/s a direction between two GPUs of a socket (assumed of "
    "all pairs), as many to its processor, dual-rail EDR InfiniBand, 25 GB/s a node, in a non-blocking fat tree.",
    ranks=6,
    inside=Link(SMALL_S, 50e9),
    between=Link(SMALL_S, 25e9),
    host_per_s=50e9,
)
LASSEN = NodeSpec(
    "Lassen",
    "LLNL's Lassen (IBM Power AC922): 4 V100 a node, three NVLink bricks of 25 GB/s a direction between two GPUs of a "
    "socket (assumed of all pairs), as many to its processor, dual-rail EDR InfiniBand, 25 GB/s a node.",
    ranks=4,
    inside=Link(SMALL_S, 75e9),
    between=Link(SMALL_S, 25e9),
    host_per_s=75e9,
)
PITZER = NodeSpec(
    "Pitzer",
    "OSC's Pitzer: 2 V100 a node on PCIe 3.0 x16, 15.75 GB/s a direction, EDR InfiniBand, 12.5 GB/s a node.",
    ranks=2,
    inside=Link(SMALL_S, 15.75e9),
    between=Link(SMALL_S, 12.5e9),
    host_per_s=15.75e9,
)
DGX_A100 = NodeSpec(
    "DGX A100",
    "NVIDIA DGX A100 data sheet: 8 A100, NVLink of 600 GB/s in both directions together, eight HDR InfiniBand ports of "
    "200 Gbit/s, PCIe 4.0 x16 to the host, 31.5 GB/s a direction.",
    ranks=8,
    inside=Link(SMALL_S, 300e9),
    between=Link(SMALL_S, 200e9),
    host_per_s=31.5e9,
)
DGX_H100 = NodeSpec(
    "DGX H100",
    "NVIDIA DGX H100 data sheet: 8 H100, NVLink of 900 GB/s in both directions together, eight NDR InfiniBand ports of "
    "400 Gbit/s, PCIe 5.0 x16 to the host, 63 GB/s a direction.",
    ranks=8,
    inside=Link(SMALL_S, 450e9),
    between=Link(SMALL_S, 400e9),
    host_per_s=63e9,
)
DGX_H200 = replace(DGX_H100, name="DGX H200", source=DGX_H100.source.replace("H100", "H200"))
FRONTERA = NodeSpec(
    "Frontera",
    "TACC's Frontera: 4 processes on a node's 56 cores, whose messages go through its memory at half of what a process "
    "copies; HDR100 InfiniBand, 12.5 GB/s a node, 22 nodes sharing 18 links upwards.",
    ranks=4,
    inside=Link(SMALL_S, 15e9),
    between=Link(SMALL_S, 12.5e9 * 18 / 22),
)

_HALF = {V100: 125e12, V100_PCIE: 112e12, A100: 312e12, H100: 989.4e12, H200: 989.4e12}
"""Peak FLOP/s of the tensor cores in half precision, dense, from the same data sheets."""

_BUILT = (
    (SUMMIT, V100),
    (LASSEN, V100),
    (PITZER, V100_PCIE),
    (DGX_A100, A100),
    (DGX_H100, H100),
    (DGX_H200, H200),
    (FRONTERA, QUARTER_8280),
)
MACHINES = {node.name: make_machine(node, processor) for node, processor in _BUILT}
"""The machines by name, those of GPUs in half precision too; `source` says where each number is from."""

# Half precision moves half of the bytes, and its products run on the tensor cores.
for _node, _processor in _BUILT:
    if _processor in _HALF:
        _half = replace(_processor, flop_per_s=_HALF[_processor], number_bytes=2)
        _name = f"{_node.name}, half precision"
        MACHINES[_name] = make_machine(replace(_node, name=_name), _half)


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
