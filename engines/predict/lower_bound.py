"""Lower bounds on the time and memory of a plan, computed from the model's layers before any plan is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from engines.errors import PlanError, TraceError
from engines.graph.model_graph import ModelGraph
from engines.graph.stages import Layer, cut_stages, find_layers
from engines.plan import Plan
from engines.predict.cost import CostModel
from engines.predict.layer_tally import QUARTER, WHOLE, LayerTally, build_layer_tallies
from engines.predict.links import AllReduceCost
from engines.predict.tallies import SegmentTally
from engines.program.instructions import Phase
from engines.spatial.layout import Layout, compute_threads

__all__ = ["BoundCalculator", "PlanBound"]

_SURE = 0.97
"""Safety factor on the time: the corner tile, which stands for all tiles, borrows up to this much at the image's edges.
"""


@dataclass(frozen=True)
class PlanBound:
    """Lower bounds of a plan: `seconds` of a step, and `peak_bytes` of its fullest rank. A step has `images` images."""

    plan: Plan
    seconds: float
    peak_bytes: int
    images: int

    @property
    def images_per_s(self) -> float:
        """The upper bound on images per second."""
        return self.images / self.seconds if self.seconds else math.inf


class BoundCalculator:
    """Computes the bounds of many plans of one model on one machine, and caches what the plans share."""

    def __init__(self, graph_of: Callable[[Plan], ModelGraph], prices: CostModel, optimiser_states: int) -> None:
        if prices.machine.least_s:  # no lower bound for a segment of several layers
            prices = CostModel(replace(prices.machine, least_s=0.0))
        self.graph_of, self.prices, self.states = graph_of, prices, optimiser_states
        self._models: dict[int, _ModelCost] = {}

    def compute_bound(self, plan: Plan) -> PlanBound:
        """Return the bound of a plan.

        Raises PlanError or TraceError if the plan's model cannot be traced, or cannot be cut into its stages.
        """
        graph = self.graph_of(plan)
        if id(graph) not in self._models:
            self._models[id(graph)] = _ModelCost(graph, self.prices)
        return _PlanCost(self._models[id(graph)], plan, self.states).compute_bound()


@dataclass
class _ModelCost:
    """A traced micro-batch: tallies of its layers, and their times on parts of the image."""

    graph: ModelGraph
    prices: CostModel
    _seconds: dict[tuple[object, ...], float] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], tuple[range, ...]] = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return find_layers(self.graph)

    @cached_property
    def whole(self) -> tuple[LayerTally, ...]:
        return build_layer_tallies(self.graph, self.layers, WHOLE)

    @cached_property
    def quarter(self) -> tuple[LayerTally, ...]:
        """The tallies for a quarter of the image; empty ones if the image is too small for four tiles."""
        # A tiled layer has other kernels than a whole one, and halos and all-reduces in addition. They are counted
        # once, in four tiles, and scaled to other grids: to compile each grid would cost as much as to simulate it.
        try:
            return build_layer_tallies(self.graph, self.layers, QUARTER)
        except (PlanError, TraceError):
            return (LayerTally(0.25),) * len(self.layers)

    @cached_property
    def owned(self) -> list[tuple[int, int]]:
        """The bytes of each layer's weights and buffers, and of trained ones; shared ones count where first read."""
        specs, seen, found = {**self.graph.weights, **self.graph.buffers}, set[str](), []
        for layer in self.layers:
            nodes = self.graph.nodes[layer.nodes.start : layer.nodes.stop]
            new = {name for node in nodes for name in node.reads if name in specs} - seen
            seen |= new
            sizes = [sum(specs[name].bytes for name in names) for names in (new, new & self.graph.trainable)]
            found.append((sizes[0], sizes[1]))
        return found

    def get_stage_layers(self, plan: Plan) -> tuple[range, ...]:
        """Return the layers of each stage."""
        key = plan.balance, plan.split_size, plan.local_dp, *(grid.tiles for grid in plan.grids)
        if key not in self._cuts:
            starts = [layer.nodes.start for layer in self.layers]
            ends = [*(starts.index(span.start) for span in cut_stages(self.layers, plan)), len(starts)]
            self._cuts[key] = tuple(range(*pair) for pair in pairwise(ends))
        return self._cuts[key]

    def get_layer_seconds(
        self, outline: LayerTally, part: float, images: bool, phase: Phase, threads: int, again: bool
    ) -> float:
        """Return the seconds of one phase of a layer on the fraction `part` of the image (`images`: of the batch)."""
        key = id(outline), part, images, phase, threads, again
        if key not in self._seconds:
            ops = outline.scale_ops(part, images)
            segment = SegmentTally(ops, frozenset(), {}, 0, 0, {}, {}, outline.late)
            # Every instruction costs at least what the cheapest does; WEIGHTS has none of its own.
            walked = {Phase.FORWARD: outline.instructions, Phase.WEIGHTS: 0}.get(phase, outline.goes_back)
            machine = self.prices.machine
            each_s = min(machine.instruction_s, machine.sum_s or math.inf)
            self._seconds[key] = self.prices.get_segment_work(segment, threads, phase, again).seconds + walked * each_s
        return self._seconds[key]


@dataclass(frozen=True, slots=True)
class _StageCost:
    """The cost of a stage for one micro-batch.

    Seconds of a micro-batch forward and backward; `behind_s` is the part of backward until the previous stage has its
    gradients; `core_s` are the seconds of a rank's cores. Bytes of the saved activations, of the weights and buffers,
    of the trained weights, and of the moments for the running statistics.
    """

    forward_s: float
    back_s: float
    behind_s: float
    core_s: float
    kept_bytes: int
    owned_bytes: int
    trained_bytes: int
    moments_bytes: int


class _PlanCost:
    """The stages and ranks of one plan."""

    def __init__(self, model: _ModelCost, plan: Plan, states: int) -> None:
        self.model, self.plan, self.states = model, plan, states
        self.prices, self.machine, self.layout = model.prices, model.prices.machine, Layout.of(plan)
        self.stages = [self._make_stage(number, span) for number, span in enumerate(model.get_stage_layers(plan))]

    def compute_bound(self) -> PlanBound:
        held = {tuple(role.stage for role in roles) for roles in self.layout.roles[: self.plan.replica_ranks]}
        own_s, update_s = (max(map(find, held)) for find in (self._compute_rank_seconds, self._compute_update_seconds))
        own_s = max(own_s, self._compute_core_seconds())
        agreed_s = (
            self.prices.get_all_reduce_cost(tuple(range(self.plan.ranks)), 16).seconds if self.plan.ranks > 1 else 0.0
        )
        images = self.plan.micro_batches * self.model.graph.inputs["images"].shape[0]
        return PlanBound(
            self.plan, _SURE * (own_s + agreed_s + update_s), max(map(self._compute_rank_bytes, held)), images
        )

    def _make_stage(self, number: int, span: range) -> _StageCost:
        plan, ranks = self.plan, self.layout.stages[number]
        tiled = ranks.grid.tiles > 1
        outlines = self.model.quarter if tiled or ranks.shares > 1 else self.model.whole
        mine, part = [outlines[layer] for layer in span], 1 / len(ranks.ranks)
        threads = compute_threads(plan, ranks.ranks[0], self.machine.cores or 1, self.machine.node_ranks)
        again = plan.checkpoint_activations
        back = (Phase.INPUTS, Phase.WEIGHTS) if plan.rule.splits else (Phase.BACKWARD,)
        forward_s, behind_s, *later_s = (
            sum(self.model.get_layer_seconds(each, part, ranks.shares > 1, phase, threads, again) for each in mine)
            for phase in (Phase.FORWARD, *back)
        )
        back_s = behind_s + sum(later_s)
        waits_s = self._compute_communication_seconds(mine, ranks.ranks, tiled)
        away = again or plan.offload_activations
        kept_bytes = 0.0 if away else sum(each.kept_bytes * part / each.part for each in mine)
        owned = [self.model.owned[layer] for layer in span]
        return _StageCost(
            forward_s + waits_s,
            back_s + waits_s,
            behind_s + waits_s,
            threads * (forward_s + back_s),
            int(kept_bytes),
            sum(all_of for all_of, _ in owned),
            sum(trained for _, trained in owned),
            sum(each.moments_bytes for each in mine) * plan.sync_batchnorm,
        )

    def _compute_communication_seconds(self, mine: list[LayerTally], ranks: tuple[int, ...], tiled: bool) -> float:
        """Return the seconds per phase of the all-reduces and exchanges within a stage, at which all its ranks wait."""
        if len(ranks) == 1:
            return 0.0
        sums = [size for each in mine for size in each.sums] if self.plan.sync_batchnorm else []
        # With fused halos the number of exchanges differs, so none is counted: the result must remain a lower bound.
        exchanges = sum(each.exchanges for each in mine) if tiled and not self.plan.halo_d2 else 0
        return exchanges * self.machine.latency_s + sum(
            self.prices.get_all_reduce_cost(ranks, size).seconds for size in sums
        )

    def _compute_rank_seconds(self, held: tuple[int, ...]) -> float:
        """Return the seconds of a rank's own work, plus the fill before it and the drain after it.

        The fill is the forward pass up to the rank's first stage, and the drain is the backward pass to the first
        stage. The drain does not wait for the gradients of weights if these are computed separately.
        """
        # The second of three stages, with two micro-batches:
        #
        #   stage 0   F0 F1 .  .  .  .  .  B0 B1
        #   stage 1   .  F0 F1 .  .  B0 B1 .  .
        #   stage 2   .  .  F0 F1 B0 B1 .  .  .
        #            |fill|   own work    |drain|
        #
        # A rank with several stages waits as long as for the one that is reached first.
        stages, times = [self.stages[stage] for stage in held], self._times
        forward_s, back_s = sum(times * each.forward_s for each in stages), sum(times * each.back_s for each in stages)
        before_s = min(sum(other.forward_s for other in self.stages[:stage]) for stage in held)
        behind_s = min(sum(other.behind_s for other in self.stages[:stage]) for stage in held)
        behind_s += sum(times * each.behind_s for each in stages)
        gradients_s = sum(self._get_gradient_cost(stage).carried_s for stage in held)
        # The gradients' all-reduce may overlap with all other work of the rank, so only the larger of the two counts:
        #   own forward, then the larger of own backward and backward through the own and all earlier stages
        own_s = max(gradients_s, forward_s + max(back_s, behind_s))
        return before_s + own_s + sum(map(self._get_statistics_seconds, held))

    @property
    def _times(self) -> float:
        """The number of micro-batches that each stage processes in a step, in each direction."""
        return self.plan.replica_batches * self.plan.parts / self.layout.directions

    def _compute_core_seconds(self) -> float:
        """Return the seconds of all work on shared cores, under ideal use of all cores."""
        if not self.machine.cores:
            return 0.0
        nodes = -(-self.plan.ranks // self.machine.node_ranks) if self.machine.node_ranks else 1
        roles = (role for roles in self.layout.roles[: self.plan.replica_ranks] for role in roles)
        core_s = self._times * sum(self.stages[role.stage].core_s for role in roles)
        return self.plan.data_parallel * core_s / (nodes * self.machine.cores)

    def _get_gradient_cost(self, stage: int) -> AllReduceCost:
        group, size = self.layout.find_ranks([stage]), self.stages[stage].trained_bytes
        return (
            self.prices.get_all_reduce_cost(group, size)
            if len(group) > 1 and size
            else AllReduceCost(0.0, 0.0, crosses=False)
        )

    def _get_statistics_seconds(self, stage: int) -> float:
        """Return the seconds in which the replicas of the model exchange their running statistics."""
        size, group = self.stages[stage].moments_bytes, self.layout.find_ranks([stage])
        if not size or len(self.layout.pipes) == 1:
            return 0.0
        return self.prices.get_all_reduce_cost(group, self.plan.micro_batches * size).seconds

    def _compute_update_seconds(self, held: tuple[int, ...]) -> float:
        # As in `build_step_actions`: weight, gradient and momentum, of which two are written back.
        fetched_s = sum(self._get_gradient_cost(stage).fetched_s for stage in held)
        return fetched_s + 5 * sum(self.stages[stage].trained_bytes for stage in held) / self.machine.copy_per_s

    def _compute_rank_bytes(self, held: tuple[int, ...]) -> int:
        """Return the bytes of weights, optimiser state, and activations of the micro-batches in flight at the peak."""
        mine = [self.stages[stage] for stage in held]
        owned = sum(stage.owned_bytes + self.states * stage.trained_bytes for stage in mine)
        return owned + max(self._count_in_flight(stage) * self.stages[stage].kept_bytes for stage in held)

    def _count_in_flight(self, stage: int) -> int:
        # A schedule that drains has all micro-batches in forward before the first backward. In 1F1B a stage has as many
        # as there are stages from it to the last. Interleaved schedules differ: at least one.
        if self.plan.rule.drains:
            return self.plan.parts
        return 1 if self.plan.rule.interleaved else min(self.plan.parts, self.plan.split_size - stage)
