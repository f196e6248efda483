"""Machines that are known by name: nodes, links and processors as described by their makers.

Assumptions for all: messages reach the nominal bandwidth of their links, and a message takes `SMALL_S` in addition. A
node's ranks are its devices, or processes that share its cores evenly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown
from mpi4dl_nb.engines.plan import HALF
from mpi4dl_nb.engines.predict.machine import Link, Machine, Speed
from mpi4dl_nb.engines.predict.tallies import BY_ARITHMETIC, CLASSES

# Processors and nodes as described by their makers, and the rule that makes a `Machine` of them.
#
# The rule is a roofline. Kernels that only move data run at the memory's bandwidth, divided by the passes over the
# counted bytes (`PASSES`). Convolutions are matrix products, (outputs, dot) x (dot, filters), whose time is that of
# the arithmetic plus that of moving the three matrices through memory, so thin ones are slow. A device is busy for at
# least as long as its host takes to launch the next kernel.


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
    **dict.fromkeys(("pool", "transcendental", "slope", "loss", "pointwise"), (1, 3 / 2)),
    **dict.fromkeys(("pad", "copy"), (1, 1)),
    "drawn": (32, 3 / 2),
}
"""How often a kernel reads or writes the bytes counted for it, forward and backward. The count is of arguments and
results once, in forward: a ReLU reads and writes (2), and backward reads a gradient and the result and writes a
gradient (3). A batch norm reads twice and writes (3 of 2), and backward reads both image and gradient twice and writes
(5 of 2). A random number by position is made in sixteen kernels that each read and write 64 bits (256 bytes of 8)."""


@dataclass(frozen=True)
class Processor:
    """One rank's processor: peak `flop_per_s` with numbers of `number_bytes`, and the fraction `busy` that it reaches.

    `start_s` is the time in which a host launches a kernel on it (0: the processor is its own host).

    >>> from mpi4dl_nb import Processor
    >>> Processor("V100", "NVIDIA V100 data sheet", 15.7e12, 900e9, memory_bytes=16 * 2**30).name
    'V100'
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

    >>> from mpi4dl_nb import Link, NodeSpec
    >>> NodeSpec("my node", "its data sheet", ranks=4, inside=Link(5e-6, 50e9), between=Link(5e-6, 12e9)).ranks
    4
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

    >>> from mpi4dl_nb import Link, NodeSpec, Processor, make_machine
    >>> card = Processor("V100", "NVIDIA V100 data sheet", 15.7e12, 900e9, memory_bytes=16 * 2**30)
    >>> node = NodeSpec("my node", "its data sheet", ranks=4, inside=Link(5e-6, 50e9), between=Link(5e-6, 12e9))
    >>> make_machine(node, card).node_ranks
    4
    """
    memory_per_s = MEMORY_SHARE * processor.memory_per_s
    return Machine(
        node.name,
        f"{node.source} {processor.source} Made by the rule of engines/predict/machines.py.",
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


GB = 10**9
GIB = 1 << 30
SMALL_S = 5e-6
"""The latency of a small message between GPUs or processes, assumed to be some microseconds. With 40 times as much, the
steps of `amoebanet/8192` (engines/predict/published.py) take a third longer, and its simulated number moves from 1.21
to 1.25."""

_SOURCES = {
    "V100": "NVIDIA V100 data sheet (2020): 15.7 TFLOP/s in single precision, 900 GB/s, 16 GB.",
    "V100 PCIe": "NVIDIA V100 data sheet (2020): 14 TFLOP/s in single precision, 900 GB/s, 16 GB.",
    "A100": "NVIDIA A100 data sheet: 156 TFLOP/s in TF32 (PyTorch's default for convolutions), dense, 2039 GB/s, "
    "80 GB.",
    "H100": "NVIDIA H100 data sheet: 989 TFLOP/s in TF32 with sparsity, half of that without, 3.35 TB/s, 80 GB.",
    "H200": "NVIDIA H200 data sheet: arithmetic of the H100, 4.8 TB/s, 141 GB.",
    "Xeon": "Frontera user guide, system architecture: 2 x 28 cores at 2.7 GHz nominal (with two AVX-512 units each "
    "64 FLOPs a cycle), 192 GB of DDR4 at 2933 MT/s, of which each socket has six channels; a rank has a quarter of "
    "all. Of the peak it reaches what Linpack does there: TOP500, June 2019, 23.5 of 38.7 PFLOP/s.",
    "Summit": "OLCF's Summit: 6 V100 a node, two NVLink bricks of 25 GB/s a direction between two GPUs of a socket "
    "(assumed of all pairs), as many to its processor, dual-rail EDR InfiniBand, 25 GB/s a node, in a non-blocking "
    "fat tree.",
    "Lassen": "LLNL's Lassen (IBM Power AC922): 4 V100 a node, three NVLink bricks of 25 GB/s a direction between two "
    "GPUs of a socket (assumed of all pairs), as many to its processor, dual-rail EDR InfiniBand, 25 GB/s a node.",
    "Pitzer": "OSC's Pitzer: 2 V100 a node on PCIe 3.0 x16, 15.75 GB/s a direction, EDR InfiniBand, 12.5 GB/s a node.",
    "DGX A100": "NVIDIA DGX A100 data sheet: 8 A100, NVLink of 600 GB/s in both directions together, eight HDR "
    "InfiniBand ports of 200 Gbit/s, PCIe 4.0 x16 to the host, 31.5 GB/s a direction.",
    "DGX H100": "NVIDIA DGX H100 data sheet: 8 H100, NVLink of 900 GB/s in both directions together, eight NDR "
    "InfiniBand ports of 400 Gbit/s, PCIe 5.0 x16 to the host, 63 GB/s a direction.",
    "Frontera": "TACC's Frontera: 4 processes on a node's 56 cores, whose messages go through its memory at half of "
    "what a process copies; HDR100 InfiniBand, 12.5 GB/s a node, 22 nodes sharing 18 links upwards.",
}
"""Where the numbers of each processor and of each node are from."""

V100 = Processor("V100 SXM2 16 GB", _SOURCES["V100"], flop_per_s=15.7e12, memory_per_s=900e9, memory_bytes=16 * GIB)
V100_PCIE = replace(V100, name="V100 PCIe 16 GB", source=_SOURCES["V100 PCIe"], flop_per_s=14e12)
A100 = Processor("A100 SXM 80 GB", _SOURCES["A100"], flop_per_s=156e12, memory_per_s=2039e9, memory_bytes=80 * GIB)
H100 = Processor("H100 SXM 80 GB", _SOURCES["H100"], flop_per_s=494.7e12, memory_per_s=3350e9, memory_bytes=80 * GIB)
H200 = replace(H100, name="H200 SXM 141 GB", source=_SOURCES["H200"], memory_per_s=4800e9, memory_bytes=141 * GB)
QUARTER_8280 = Processor(
    "14 cores of two Xeon Platinum 8280",
    _SOURCES["Xeon"],
    flop_per_s=14 * 2.7e9 * 64,
    memory_per_s=3 * 8 * 2.933e9,
    memory_bytes=48 * GB,
    busy=23.5 / 38.7,
    start_s=0.0,
)

SUMMIT = NodeSpec("Summit", _SOURCES["Summit"], 6, Link(SMALL_S, 50e9), between=Link(SMALL_S, 25e9), host_per_s=50e9)
LASSEN = NodeSpec("Lassen", _SOURCES["Lassen"], 4, Link(SMALL_S, 75e9), between=Link(SMALL_S, 25e9), host_per_s=75e9)
PITZER = NodeSpec(
    "Pitzer", _SOURCES["Pitzer"], 2, Link(SMALL_S, 15.75e9), between=Link(SMALL_S, 12.5e9), host_per_s=15.75e9
)
DGX_A100 = NodeSpec(
    "DGX A100", _SOURCES["DGX A100"], 8, Link(SMALL_S, 300e9), between=Link(SMALL_S, 200e9), host_per_s=31.5e9
)
DGX_H100 = NodeSpec(
    "DGX H100", _SOURCES["DGX H100"], 8, Link(SMALL_S, 450e9), between=Link(SMALL_S, 400e9), host_per_s=63e9
)
DGX_H200 = replace(DGX_H100, name="DGX H200", source=DGX_H100.source.replace("H100", "H200"))
FRONTERA = NodeSpec("Frontera", _SOURCES["Frontera"], 4, Link(SMALL_S, 15e9), between=Link(SMALL_S, 12.5e9 * 18 / 22))

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
HALF_NAME = ", half precision"
"""The end of the names of machines that compute in half precision."""
MACHINES = {node.name: make_machine(node, processor) for node, processor in _BUILT}
"""The machines by name, those of GPUs in half precision too; `source` says where each number is from.

A plan in bfloat16 or float16 is predicted on the one in half precision, whichever of the two is named.
"""

# Half precision moves half of the bytes, and its products run on the tensor cores.
for _node, _processor in _BUILT:
    if _processor in _HALF:
        _half = replace(_processor, flop_per_s=_HALF[_processor], number_bytes=2)
        _name = f"{_node.name}{HALF_NAME}"
        MACHINES[_name] = make_machine(replace(_node, name=_name), _half)


def adapt_to_precision(machine: Machine, precision: str) -> Machine:
    """Return the machine that is known by name as it computes in a precision; itself if its speed in that is not known.

    >>> adapt_to_precision(MACHINES["Summit"], "bfloat16").name, adapt_to_precision(MACHINES["Summit"], "float32").name
    ('Summit, half precision', 'Summit')
    """
    if MACHINES.get(machine.name) != machine:  # measured, or described by someone else
        return machine
    name = machine.name.removesuffix(HALF_NAME)
    return MACHINES.get(f"{name}{HALF_NAME}" if precision in HALF else name, machine)


def find_other_precision(machine: Machine, precision: str) -> str:
    """Return the precision in which a machine computes if it is another one than a plan's, else an empty text.

    >>> find_other_precision(MACHINES["Frontera"], "bfloat16"), find_other_precision(MACHINES["Frontera"], "float32")
    ('float32', '')
    """
    is_half = machine.name.endswith(HALF_NAME)
    if precision in HALF if is_half else precision == "float32":
        return ""
    return HALF_NAME.strip(", ") if is_half else "float32"


def resolve_machine(asked: Machine | str) -> Machine:
    """Return the machine, or the known one of that name. Raises PlanError, listing all names, if there is none.

    >>> resolve_machine("Summit").node_ranks
    6
    """
    if isinstance(asked, str) and asked in MACHINES:
        return MACHINES[asked]
    if isinstance(asked, Machine):
        return asked
    text = describe_unknown(f"There is no machine {asked!r}", asked, MACHINES)
    raise PlanError(f"{text} calibrate() measures this one.")
