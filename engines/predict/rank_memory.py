"""Predicts the bytes of one rank before anything runs: simulates its program; tensors live until their last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.stages import find_layers
from mpi4dl_nb.engines.compiler.steps import StepLabel, label_steps
from mpi4dl_nb.engines.formatting import FactTable, format_bytes
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.memory_simulation import MemoryTracker, simulate_memory
from mpi4dl_nb.engines.predict.rank_tally import build_tallies, build_tally
from mpi4dl_nb.engines.predict.tallies import Block, RankTally
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.instructions import SumGradients
from mpi4dl_nb.engines.program.program import Program

KINDS = ("weights", "gradients", "optimiser", "inputs", "activations", "halos", "passing", "messages")
"""`activations` are saved for backward, `halos` are their received parts. `passing` is the temporary memory of a
program step, and gradients in backward. `messages` is the memory of message and all-reduce buffers."""


@dataclass(frozen=True, repr=False)
class RankMemory(FactTable):
    """The tensors of one rank at the peak of a training step that is not the first: `at_peak` are bytes by kind.

    `peak_step` is the index of the peak in `program.steps`, and `after` are the bytes held after each step. Buffers
    count as weights.
    """

    rank: int
    at_peak: Mapping[str, int]
    peak_step: int
    after: tuple[int, ...]

    @property
    def caption(self) -> str:
        return f"Memory of rank {self.rank}"

    @property
    def facts(self) -> dict[str, object]:
        held = {kind: format_bytes(size) for kind, size in self.at_peak.items() if size}
        return {"peak": format_bytes(self.peak_bytes), **held}

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of all kinds together."""
        return sum(self.at_peak.values())


def predict_rank_memory(
    program: Program, graph: ModelGraph, plan: Plan, optimiser_states: int = 1, tally: RankTally | None = None
) -> RankMemory:
    """Return the memory that the rank of `program` needs for a training step; `tally` is that of the program, if known.

    `optimiser_states` is how many numbers the optimiser keeps for each weight: momentum 1, Adam 2. Raises TraceError if
    the effect of a kernel cannot be inferred.
    """
    ledger, after = simulate_memory(program, tally or build_tally(program, graph), plan, optimiser_states)
    at_peak = {kind: ledger.at_peak.get(kind, 0) for kind in KINDS}
    return RankMemory(program.rank, at_peak, ledger.peak_step, tuple(after))


# The memory peak of a rank's training step: the instruction at the peak, and the memory of each layer at that time.


Kinds = Mapping[str, int]
"""Bytes by kind, as in `mpi4dl_nb.engines.predict.rank_memory.KINDS`."""


@dataclass(frozen=True)
class PeakMemory:
    """The memory peak of a rank, in step `step` of its program (from 0), which is at `place`.

    `layers` are bytes by kind of each layer of the user's model, in the model's order. `rest` belongs to no layer:
    images, labels, and message buffers. Together they are the peak.
    """

    rank: int
    step: int
    steps: int
    place: StepLabel
    layers: Mapping[str, Kinds]
    rest: Kinds

    @property
    def bytes(self) -> int:
        """The bytes at the peak."""
        return sum(self.rest.values()) + sum(sum(kinds.values()) for kinds in self.layers.values())

    @property
    def words(self) -> str:
        """`instruction 266 of 533, backward compute · micro-batch 0 · blocks.28`."""
        return f"instruction {self.step + 1} of {self.steps}, {self.place.text}"

    def get_largest_layers(self, count: int) -> list[tuple[str, Kinds]]:
        """Return the `count` layers that hold most, the largest first."""
        return sorted(self.layers.items(), key=lambda item: -sum(item[1].values()))[:count]


@dataclass(frozen=True)
class PlanMemory:
    """The bytes of each rank in a training step. All replicas are alike, so `ranks` are those of the first replica."""

    plan: Plan
    graph: ModelGraph
    programs: tuple[Program, ...]
    ranks: tuple[RankMemory, ...]
    optimiser_states: int

    @property
    def fullest(self) -> int:
        """The rank that holds most."""
        return max(self.ranks, key=lambda memory: memory.peak_bytes).rank

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of the fullest rank."""
        return self.ranks[self.fullest].peak_bytes

    def find_peak(self, rank: int) -> PeakMemory:
        program, memory = self.programs[rank], self.ranks[rank]
        counted, where = build_tally(program, self.graph), label_steps(self.graph, program)
        # The peak is known already. The same simulation again, with a tracker that looks at the blocks at that moment.
        ledger = _PeakTracker(memory.peak_bytes)
        simulate_memory(program, counted, self.plan, self.optimiser_states, ledger)
        label = where[memory.peak_step]
        owners = _LayerAssignment(self.graph, program, counted, self.optimiser_states, where)
        layers: dict[str, Counter[str]] = {name: Counter() for name in owners.names}
        rest: Counter[str] = Counter()
        blocks = [part for key, kinds in ledger.blocks.items() for part in owners.split_block(key, kinds)]
        for layer, kinds in [*blocks, (label.layer or None, ledger.passing)]:
            (rest if layer is None else layers.setdefault(layer, Counter())).update(kinds)
        filled = {layer: dict(+kinds) for layer, kinds in layers.items() if +kinds}
        return PeakMemory(program.rank, memory.peak_step, len(program.steps), label, filled, dict(+rest))


def predict_plan_memory(graph: ModelGraph, plan: Plan, optimiser_states: int = 1) -> PlanMemory:
    """Return the memory of the ranks of a plan; `optimiser_states` as in `predict_rank_memory`.

    Raises PlanError or TraceError if the plan does not fit the model.
    """
    programs, _, ranks = compile_replica(graph, plan, optimiser_states)
    return PlanMemory(plan, graph, programs, ranks, optimiser_states)


def compile_replica(
    graph: ModelGraph, plan: Plan, optimiser_states: int
) -> tuple[tuple[Program, ...], tuple[RankTally, ...], tuple[RankMemory, ...]]:
    """Return the programs, tallies and memory of the ranks of one replica; `optimiser_states` as above."""
    compiler = Compiler(graph, plan)
    programs = tuple(compiler.compile_rank(rank) for rank in range(plan.replica_ranks))
    tallies = tuple(build_tallies(programs, graph))
    pairs = zip(programs, tallies, strict=True)
    memory = (predict_rank_memory(program, graph, plan, optimiser_states, tally) for program, tally in pairs)
    return programs, tallies, tuple(memory)


class _PeakTracker(MemoryTracker):
    """A memory tracker that records the held `blocks` and the `passing` bytes when the known peak is reached."""

    def __init__(self, peak_bytes: int) -> None:
        super().__init__()
        self._wanted = peak_bytes
        self.blocks: dict[Hashable, Kinds] = {}
        self.passing: Kinds = {}

    def add_transient(self, **kinds: int) -> None:
        super().add_transient(**kinds)
        # The first moment at the peak. The simulation may reach it again later, with other blocks.
        if not self.blocks and self.peak == self._wanted:
            self.blocks, self.passing = self.held, kinds


@dataclass
class _LayerAssignment:
    """Maps each block of a rank's memory to its layer, or to None if it belongs to no layer."""

    graph: ModelGraph
    program: Program
    counted: RankTally
    states: int
    where: Sequence[StepLabel]
    names: dict[str, None] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes: dict[str, str] = {}
        for layer in find_layers(self.graph):
            self.names[layer.name] = None
            for node in self.graph.nodes[layer.nodes.start : layer.nodes.stop]:
                nodes[node.name] = layer.name
                for name in node.reads:
                    self.weights.setdefault(name, layer.name)
        # Each result of an instruction belongs to the layer of its node, or else to the layer of the instruction.
        for label in self.where:
            item, owner = label.step.instruction, label.layer
            for name in item.get_effects(Phase.FORWARD).specs if item.per_micro_batch else ():
                self.values.setdefault(name, owner)
            for op in item.local_ops:
                owner = nodes.get(op.out) or nodes.get(op.out.partition(".")[0]) or owner
                self.values[op.out] = owner

    def split_block(self, key: Hashable, kinds: Kinds) -> Iterator[tuple[str | None, Kinds]]:
        """Yield the parts of a block by layer."""
        match key:
            case "owned":
                for name, size in {**self.counted.weights, **self.counted.buffers}.items():
                    states = self.states * size if name in self.counted.trained else 0
                    yield self.weights.get(name), {"weights": size, "optimiser": states}
            case "sums":
                for bucket in {item.name: item for item in self.program.select_instructions(SumGradients)}.values():
                    sizes = {name: self.counted.weights[name] for name in bucket.weights}
                    yield from ((self.weights.get(name), {"gradients": size}) for name, size in sizes.items())
                    yield None, {"gradients": bucket.bytes - sum(sizes.values())}
            case ("gradient", str(name)):
                yield self.weights.get(name), kinds
            case (int(), Block(name)):
                # A gradient, or what autograd saves, belongs to the layer of its value; "x[1]" is a result of "x".
                yield self.values.get(name) or self.values.get(name.partition("[")[0]), kinds
            case _:
                yield None, kinds
