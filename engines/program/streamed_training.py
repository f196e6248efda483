"""Training tile by tile: one process trains on an image far larger than its memory.

The programs are those of a plan, one for each tile of each stage, and run unchanged, but one at a time, in the order in
which their messages arrive. What a tile holds while others compute is offloaded to a file. All tiles share one set of
weights, so gradients accumulate without communication, and one update follows after the last tile's backward pass.

Late layers have many weights and few pixels. An undivided last stage avoids reading these weights for every tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engines.comm.cgroup_limits import count_cores
from engines.comm.device import choose_device, choose_memory_format
from engines.comm.world import World
from engines.errors import LossError, PlanError
from engines.graph.label_counter import LabelCounter, find_causes, format_causes
from engines.graph.model_graph import to_user_name
from engines.images.dataset import LabelledImages, find_ignored_label
from engines.images.shard_reader import ShardReader
from engines.plan import OPTIONS, Plan
from engines.program.compile import compile_plan
from engines.program.instructions import Phase, SumGradients, Update
from engines.program.offloader import Offloader, OffloadStore
from engines.program.offloading_micro_batch import OffloadingMicroBatch
from engines.program.program import Program, Step
from engines.program.rank_scheduler import RankScheduler
from engines.program.worker import Inputs, Worker
from engines.spatial.layout import Layout
from engines.train.training import Recipe, copy_state_tensor, cut_inputs

__all__ = ["StreamedTraining", "check_streamable", "make_tile_loader"]


class StreamedTraining:
    """The training of a plan with the tiles of all stages in this process.

    `folder` is where offloaded values are stored (None: where temporary files are). Raises PlanError if the plan cannot
    be streamed, RankError if nothing can be stored.
    """

    def __init__(self, recipe: Recipe, folder: str | Path | None = None, threads: int | None = None) -> None:
        check_streamable(recipe.plan)
        recipe.additions.register()
        self.recipe, self.threads = recipe, threads or count_cores()
        leaders = [stage.ranks[0] for stage in Layout.of(recipe.plan).stages]
        self.programs = [
            _drop_collectives(each, each.rank in leaders) for each in compile_plan(recipe.graph, recipe.plan)
        ]
        self.device = choose_device(recipe.device, rank=0)
        specs, state = recipe.graph.specs, recipe.state
        self.weights = {name: copy_state_tensor(state[name], specs[name], self.device) for name in recipe.graph.weights}
        for name in recipe.graph.trainable & self.weights.keys():
            self.weights[name].requires_grad_()
        self.buffers = {name: copy_state_tensor(state[name], specs[name], self.device) for name in recipe.graph.buffers}
        self.store = OffloadStore(folder)
        self._relay = RankScheduler(len(self.programs))
        stays, reads_files = [*self.weights.values(), *self.buffers.values()], self.device.type == "cpu"
        owned = {**self.weights, **self.buffers}
        self._countings = [
            LabelCounter(recipe.graph, recipe.plan, program, world, owned, self.device)
            for program, world in zip(self.programs, self._relay.worlds, strict=True)
        ]
        self._shelves = [Offloader(self.store, stays, reads_files) for _ in self.programs]
        self.workers = [
            self._make_worker(program, world, shelf, program.rank == leaders[-1])
            for program, world, shelf in zip(self.programs, self._relay.worlds, self._shelves, strict=True)
        ]
        self._leaders = [self.workers[rank] for rank in leaders]

    def _make_worker(self, program: Program, world: World, shelf: Offloader, moves: bool) -> Worker:
        """Return the worker of one tile; `moves` gives it the optimiser.

        Only the worker where the gradient starts has the optimiser, since only there the loss scale is known.
        """
        recipe = self.recipe
        stage = Layout.of(recipe.plan).roles[program.rank][0].stage
        worker = Worker(
            program,
            world,
            self.weights,
            self.buffers,
            optimiser=recipe.make_optimiser(self.weights) if moves else None,
            device=self.device,
            seed=recipe.seed,
            rules=recipe.rules if moves else None,
            make_lane=partial(OffloadingMicroBatch, offloader=shelf),
            constants=self._countings[program.rank].values,
            count_labels=self._countings[program.rank].count,
        )
        self._relay.register(
            program.rank,
            worker.offload,
            lambda: (stage, worker.position),  # late stages first: they consume what early ones sent
        )
        return worker

    def step(self, feed: Callable[[int], Inputs]) -> Mapping[int, float]:
        """Run one training step; return the losses by micro-batch. `feed(tile)` returns a tile's parts of the inputs.

        Raises LossError if a loss is not finite; no weight has changed then. Raises RankError if the disk is full.
        """
        for weight in self.weights.values():
            weight.grad = None
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            self._relay.run([partial(self._run_pass, worker, feed) for worker in self.workers])
            losses = self._leaders[-1].losses
            for number, loss in losses.items():
                if not math.isfinite(loss):
                    raise LossError.of(loss, number, self.recipe.plan.micro_batches, self._explain_loss(number))
            # Only after the check of all losses: no weight may change if one is not finite.
            for worker in self._leaders:
                while not worker.done:
                    worker.step()
        finally:
            torch.set_num_threads(before)
            for worker, shelf in zip(self.workers, self._shelves, strict=True):
                worker.steps = self._leaders[-1].steps  # it determines the random numbers
                worker.restart({})
                shelf.clear()
        return losses

    def _explain_loss(self, micro_batch: int) -> str:
        """Return why a loss is not finite, from the state of all tiles."""
        pairs = zip(self.workers, self._countings, strict=True)
        graph, last = self.recipe.graph, self._leaders[-1]
        found = {worker.program.rank: find_causes(graph, worker, own, ()) for worker, own in pairs}
        rank = last.program.rank
        return format_causes(found) or format_causes(
            {rank: find_causes(graph, last, self._countings[rank], (), micro_batch)}
        )

    def _run_pass(self, worker: Worker, feed: Callable[[int], Inputs]) -> None:
        """Run forward and backward of all micro-batches of one tile."""
        # Copies, on the device: offloading moves their memory, and the caller's must stay. No name here refers to them,
        # so that each is freed after its last use.
        worker.restart(
            {
                number: {
                    name: part.to(self.device).clone(memory_format=choose_memory_format(part.dim()))
                    for name, part in own.items()
                }
                for number, own in feed(worker.program.rank).items()
            }
        )
        while not (worker.done or isinstance(worker.program.steps[worker.position].instruction, Update)):
            worker.step()
        worker.flush_sends()

    def cut(self, inputs: Mapping[str, Tensor]) -> Callable[[int], Inputs]:
        """Return a function from a tile to its parts of the whole inputs of a step, cut when called."""
        return lambda tile: cut_inputs(self.programs[tile], inputs)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's gradients, by the names of the plain model."""
        return {to_user_name(name): w.grad.clone() for name, w in self.weights.items() if w.grad is not None}

    def close(self) -> None:
        """Return the disk space."""
        self.store.close()


def check_streamable(plan: Plan) -> None:
    """Raise PlanError if a plan's tiles cannot be computed in turn."""
    wrong = {name: value for name, value in plan.chosen.items() if not OPTIONS[name].in_turn}
    if wrong:
        found = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise PlanError(
            f"{found}: where one process computes the ranks in turn, they are those of one replica, and pass once. "
            f"Leave {' and '.join(wrong)} out."
        )


def _drop_collectives(program: Program, leads: bool) -> Program:
    """Return the program without collectives at the update, and with an update only if the rank leads its stage."""
    steps: Sequence[Step] = [step for step in program.steps if not isinstance(step.instruction, SumGradients)]
    kept = (
        step for step in steps if step.phase is not Phase.UPDATE or (leads and isinstance(step.instruction, Update))
    )
    return replace(program, steps=tuple(kept))


# Loads an image tile by tile, when each tile's turn comes: at most one tile is in memory.


@dataclass(frozen=True)
class _TileInputs:
    """Selects one tile's part of a step's inputs."""

    program: Program

    def cut(self, inputs: Mapping[str, Tensor]) -> Inputs:
        """Return the tile's parts by micro-batch and name."""
        return cut_inputs(self.program, inputs)


def make_tile_loader(
    training: StreamedTraining, images: LabelledImages
) -> Callable[[Sequence[int], Sequence[int] | None], Callable[[int], Inputs]]:
    """Return a function that gives `step` its `feed`, from the numbers of a step's images and their augmentation draws.

    Pixels are read when `feed` is called; ImageError is raised then if they cannot be read.
    """
    specs, ignored = training.recipe.step_specs, find_ignored_label(training.recipe.graph)
    parts = [ShardReader(_TileInputs(program), images, specs, ignored) for program in training.programs]

    def load_step(numbers: Sequence[int], draws: Sequence[int] | None = None) -> Callable[[int], Inputs]:
        return lambda tile: parts[tile].read(numbers, draws)

    return load_step
