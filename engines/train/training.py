"""One rank's share of a training: steps that update the weights."""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.device import (
    choose_device,
    choose_memory_format,
    count_cores,
    count_local_ranks,
    get_used_bytes,
    place_inputs,
    use_threads,
)
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.labels import LabelCounter, NonFiniteCause, find_causes
from mpi4dl_nb.engines.compiler.labels import format_causes as describe_causes
from mpi4dl_nb.engines.compiler.steps import describe_steps
from mpi4dl_nb.engines.errors import LossError, PlanError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import compute_threads
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.instructions import FiniteCheckAllReduce, SumGradients, Update
from mpi4dl_nb.engines.program.micro_batch import MicroBatchState
from mpi4dl_nb.engines.program.offloader import Offloader, OffloadingMicroBatch, OffloadStore
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.program.segment import Segment
from mpi4dl_nb.engines.program.segment_compiler import SegmentCompiler
from mpi4dl_nb.engines.program.shared_state import SharedState
from mpi4dl_nb.engines.program.timeline import identify_clock
from mpi4dl_nb.engines.program.update import UpdateRules
from mpi4dl_nb.engines.program.worker import Inputs, Worker
from mpi4dl_nb.engines.train.recipe import Recipe, count_step_images, split_micro_batches
from mpi4dl_nb.engines.train.step_report import StepReport


@dataclass(frozen=True)
class _StepSetup:
    """The graph, worker and label counter for steps of one batch size."""

    graph: ModelGraph
    worker: Worker
    counting: LabelCounter


def choose_thread_count(plan: Plan, rank: int) -> int:
    """Return a rank's share of the cores of this host."""
    return compute_threads(plan, rank, count_cores(), count_local_ranks(plan.ranks))


class RankTraining:
    """The weights, optimiser and worker of one rank."""

    def __init__(self, world: World, recipe: Recipe, overlap: bool = True) -> None:
        recipe.additions.register()
        program = Compiler(recipe.graph, recipe.plan, overlap=overlap).compile_rank(world.rank)
        self.world, self.overlap = world, overlap
        # The weights' initial values are not kept beside the weights.
        self.recipe, self.program, self.graph = replace(recipe, state={}), program, recipe.graph
        self.device = choose_device(recipe.device, world.rank)
        self.threads = choose_thread_count(recipe.plan, world.rank)
        self.shared = SharedState.of(world, recipe.device)
        trained = self.graph.trainable
        # Each rank updates its own batch statistics, as it may count other images or pixels.
        changing = {name for update in program.select_instructions(Update) for name in update.buffers}

        def make_tensor(name: str) -> Tensor:
            make = partial(copy_state_tensor, recipe.state[name], self.graph.specs[name], self.device)
            return self.shared.get_tensor(name, make) if self.shared and name not in changing else make()

        self.weights = {
            name: nn.Parameter(make_tensor(name), requires_grad=name in trained) for name in program.weights
        }
        self.buffers = {name: make_tensor(name) for name in program.buffers}
        self.kept = {
            names.prefix + name: tensor.clone()
            for names in recipe.names.values()
            if world.rank == 0
            for name, tensor in names.kept.items()
        }
        self._make_micro_batch: Callable[..., MicroBatchState] = MicroBatchState
        self.offloader: Offloader | None = None
        if recipe.plan.offload_activations:
            # Activations go to a file; what the rank holds in any case stays.
            stays = [*self.weights.values(), *self.buffers.values()]
            store = self.shared.get_store() if self.shared else OffloadStore()
            self.offloader = Offloader(store, stays, reads_files=self.device.type == "cpu")
            self._make_micro_batch = partial(OffloadingMicroBatch, offloader=self.offloader)
        self._make_segment = SegmentCompiler() if recipe.plan.compile_segments else Segment
        # One setup for each number of images in a step; weights, buffers and optimiser are the same in all of them.
        setup = self._make_setup(recipe, program, self.make_optimiser(), recipe.rules)
        self.images = count_step_images(recipe)
        self.sizes = {self.images: setup}
        self.worker, self.counting = setup.worker, setup.counting
        self.identity = uuid.uuid4().hex  # which checkpoints are this training's
        self.recent: deque[float] = deque(maxlen=5)  # past losses, to find out whether they grew

    def _make_setup(
        self, recipe: Recipe, program: Program, optimiser: torch.optim.Optimizer | None, rules: UpdateRules
    ) -> _StepSetup:
        owned = {**self.weights, **self.buffers}
        counting = LabelCounter(recipe.graph, recipe.plan, program, self.world, owned, self.device)
        worker = Worker(
            program,
            self.world,
            self.weights,
            self.buffers,
            optimiser,
            self.device,
            self.recipe.seed,
            rules,
            keeps_graphs=not recipe.plan.checkpoint_activations,
            make_micro_batch=self._make_micro_batch,
            make_segment=self._make_segment,
            constants=counting.values,
            count_labels=counting.count,
            shared=self.shared,
            allocate=self.offloader.allocate if self.offloader else torch.empty,
        )
        worker.step_labels = describe_steps(recipe.graph, recipe.plan, program)
        return _StepSetup(recipe.graph, worker, counting)

    def make_optimiser(self) -> torch.optim.Optimizer | None:
        """Make the optimiser of the weights that this rank updates, None if there are none.

        These are all of its weights. Of weights that ranks share, each is updated by the first rank that has it.
        """
        counted = {name for check in self.program.select_instructions(FiniteCheckAllReduce) for name in check.counted}
        return self.recipe.make_optimiser(
            {name: weight for name, weight in self.weights.items() if not self.shared or name in counted}
        )

    def add_size(self, recipe: Recipe) -> None:
        """Prepare for steps of fewer images, with a recipe from `train_loop.make_smaller_recipe`.

        All step sizes share the weights, optimiser and buffers. Raises PlanError if the rank would hold different
        weights.
        """
        images = count_step_images(recipe)
        if images in self.sizes:
            return
        program = Compiler(recipe.graph, recipe.plan, overlap=self.overlap).compile_rank(self.world.rank)
        if _get_held(program) != _get_held(self.sizes[self.images].worker.program):
            raise PlanError(
                f"With {images} images in a step in place of {self.images}, rank {self.world.rank} would hold other "
                "weights, for the model then has other layers. Leave the last images of an epoch out: drop_last=True."
            )
        # No optimiser: `use_size` hands over that of the full steps, with its state (`Worker.resume_from`).
        self.sizes[images] = self._make_setup(recipe, program, None, UpdateRules())

    def use_size(self, images: int) -> None:
        """Switch to the program for steps of `images` images. Raises PlanError if the rank is not prepared for them."""
        setup = self._get_setup(images)
        if setup.worker is not self.worker:
            self.worker.restart({})  # frees the micro-batches of the other size
            setup.worker.resume_from(self.worker)
            self.graph, self.program = setup.graph, setup.worker.program
            self.worker, self.counting = setup.worker, setup.counting

    def _get_setup(self, images: int) -> _StepSetup:
        if images not in self.sizes:
            known = ", ".join(map(str, self.sizes))
            raise PlanError(f"A step of {images} images was not prepared; steps of {known} images were.")
        return self.sizes[images]

    def step(self, inputs: Inputs, images: int | None = None) -> StepReport:
        """Run one training step on this rank's parts of the inputs.

        `images` is the number of images on all ranks (None: a full step). Raises LossError if the loss is not finite;
        no weight has changed then.
        """
        self.start(inputs, images)
        while not self.worker.done:
            self.advance()
        return self.report

    def advance(self) -> None:
        """Run one instruction of the step that was started. Raises LossError if the loss is not finite."""
        self.worker.step()
        step = self.program.steps[self.worker.position - 1]
        outputs = getattr(step.instruction, "outputs", ()) if step.phase is Phase.FORWARD else ()
        # Checked right after the instruction that computes the loss, so before any update: no weight has changed yet.
        if self.graph.loss in outputs and not math.isfinite(loss := self.worker.losses[step.micro_batch]):
            cause = describe_causes({self.program.rank: self.find_causes(step.micro_batch)})
            raise LossError.of(loss, step.micro_batch, self.program.micro_batches, cause)

    @property
    def report(self) -> StepReport:
        """The report on the current step, up to the last instruction that has run."""
        events = tuple(self.worker.events)
        return StepReport(self.worker.losses, events, get_used_bytes(self.device), identify_clock())

    def abort_step(self) -> None:
        """Discard a step that has failed, if there is one.

        `updates` shows whether it had reached the update of the weights.
        """
        if not self.worker.done:
            self.worker.restart({})

    @property
    def updates(self) -> int:
        """The number of updates of the weights so far."""
        return self.worker.steps - 1

    def start(self, inputs: Inputs, images: int | None = None) -> None:
        """Go to the start of a step of `images` images (None: a full step), and discard the gradients. Collective.

        Raises PlanError, before anything changes, if the scheduler has come to its end.
        """
        self.worker.optimiser_step.check_schedule()
        # Before `use_size`, which may replace the worker that still holds the last step's loss.
        if self.worker.done and (loss := self.worker.loss) is not None:
            self.recent.append(loss)
        self.use_size(images or self.images)
        use_threads(self.threads)
        # Connected anew after a failure: the old connections do not survive the world's recovery.
        self.worker.connect()
        for weight in self.weights.values():
            weight.grad = None
        self.worker.restart(place_inputs(inputs, self.device))

    def offload(self) -> None:
        """Free memory while other ranks of this thread compute, if the plan says so: what a step has made so far."""
        self.worker.offload()
        if self.offloader and self.offloader.reads_files:  # else the backward pass could not add to these gradients
            grads = (weight.grad for weight in self.weights.values())
            self.offloader.offload(grad for grad in grads if grad is not None)

    def find_causes(self, micro_batch: int | None = None) -> list[NonFiniteCause]:
        """Return the causes of a non-finite loss that this rank finds, in one micro-batch or (None) in all its own."""
        return find_causes(self.graph, self.worker, self.counting, tuple(self.recent), micro_batch)

    def cut(self, inputs: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
        """Return this rank's parts of a step's whole inputs, for any number of images that the rank is prepared for."""
        return cut_inputs(self._get_setup(len(inputs["images"])).worker.program, inputs)

    @property
    def held(self) -> dict[str, Tensor]:
        """All tensors of the model and its loss that this rank holds, by the graph's names: not copies."""
        return {**self.kept, **self.weights, **self.buffers}

    @property
    def own_buffers(self) -> dict[str, Tensor]:
        """The buffers, without the constants that the model creates in its forward pass."""
        return {name: buffer for name, buffer in self.buffers.items() if name not in self.graph.constants}

    def copy_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Copy the rank's weights, gradients and buffers to the host, and on rank 0 tensors that the graph ignores."""
        grads = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        groups: dict[str, Any] = {"weights": self.weights, "gradients": grads}
        groups |= {"buffers": self.own_buffers, "kept": self.kept}
        return {
            group: {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            for group, tensors in groups.items()
        }


def _get_held(program: Program) -> tuple[object, ...]:
    """Return what a rank's programs must have in common, whatever the number of images in a step."""
    return program.weights, program.buffers, tuple(program.select_instructions(SumGradients))


def copy_state_tensor(tensor: Tensor, spec: TensorSpec, device: torch.device) -> Tensor:
    """Copy a weight or buffer to a rank's device, in the graph's type and the ranks' memory format."""
    dtype, layout = getattr(torch, spec.dtype), choose_memory_format(tensor.dim())
    return tensor.detach().to(device=device, dtype=dtype, copy=True, memory_format=layout)


def cut_inputs(program: Program, inputs: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return the parts of a step's whole inputs that a rank's program reads, by micro-batch."""
    # whole (N, C, H, W)  --chunk-->  micro-batch  --images-->  share  --rows, cols-->  tile
    #
    # Not a view: pickling would send the whole batch, and a kernel would read with the strides of the whole image.
    chunks = {name: split_micro_batches(whole, program.micro_batches) for name, whole in inputs.items()}
    return {
        micro_batch: {name: feed.cut(chunks[name][micro_batch]).contiguous() for name, feed in feeds.items()}
        for micro_batch, feeds in program.feeds.items()
    }
