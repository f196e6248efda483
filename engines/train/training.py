"""One rank's share of a training: from a model and a plan to steps that update the weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from engines.comm.device import (
    choose_autocast_type,
    choose_device,
    choose_memory_format,
    choose_thread_count,
    get_used_bytes,
    place_inputs,
    use_threads,
)
from engines.comm.world import World
from engines.errors import LossError, PlanError, TraceError
from engines.formatting import FactTable, format_names
from engines.graph.labels import LabelCounter, NonFiniteCause, find_causes
from engines.graph.labels import format_causes as describe_causes
from engines.graph.model_graph import ModelGraph, TensorSpec, to_user_name
from engines.graph.trace import StateNames, collect_state_names, iterate_owners
from engines.graph.trace_cache import Loss, TraceCache
from engines.plan import Plan
from engines.program.compile import Compiler, compile_plan
from engines.program.effects import Phase
from engines.program.instructions import FiniteCheckAllReduce, SumGradients, Update
from engines.program.micro_batch import MicroBatchState
from engines.program.offloader import Offloader, OffloadingMicroBatch, OffloadStore
from engines.program.program import Program
from engines.program.segment import Segment
from engines.program.segment_compiler import SegmentCompiler, check_compiler
from engines.program.shared_state import SharedState
from engines.program.steps import describe_steps
from engines.program.timeline import identify_clock
from engines.program.update import SCALE, Scheduler, UpdateRules
from engines.program.worker import Inputs, Worker
from engines.spatial.operator_table import UserOps
from engines.spatial.rng import has_random_ops
from engines.train.optimiser_trial import check_groups, check_on_ranks, check_scheduler, find_frozen
from engines.train.optimisers import Optimiser, ParameterSpec, collect_parameter_specs, make_on_rank, make_optimiser
from engines.train.step_report import StepReport

__all__ = [
    "Loss",
    "Optimiser",
    "RankTraining",
    "Recipe",
    "collect_state",
    "copy_state_tensor",
    "count_step_images",
    "describe_precision_change",
    "freeze_weights",
    "prepare",
    "sgd",
]

sgd: Optimiser = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@dataclass(frozen=True, repr=False)
class Recipe(FactTable):
    """Everything that a rank needs in order to train, as plain data: a model defined in a notebook cell needs no file.

    `state` maps the graph's names to the weights and buffers that the rank needs. `additions` holds the operators and
    kernels that the user has registered. `loss_scale` is the initial loss scale of float16. `names` holds the names in
    the plain model's `state_dict()`, and in the loss's. `parameters` describes all parameters of the model and of the
    loss, from which `optimiser` makes the optimiser.
    """

    graph: ModelGraph
    plan: Plan
    optimiser: Optimiser
    state: Mapping[str, Tensor]
    device: str = "auto"
    seed: int = 0
    additions: UserOps = field(default_factory=UserOps)
    clip_norm: float | None = None
    scheduler: Scheduler | None = None
    loss_scale: float = SCALE
    names: Mapping[str, StateNames] = field(default_factory=dict)
    parameters: Sequence[ParameterSpec] = ()

    @property
    def facts(self) -> dict[str, object]:
        return {
            "plan": self.plan.summary,
            "images of a step": " × ".join(map(str, self.step_specs["images"].shape)),
            "operators": len(self.graph.nodes),
            "weights": len(self.graph.weights),
            "device": self.device,
        }

    def make_optimiser(self, weights: Mapping[str, Tensor]) -> torch.optim.Optimizer | None:
        """Return the optimiser of a rank's `weights` (by the graph's names).

        Returns None if none of these weights receives a gradient from the loss.
        """
        trained = {name: weight for name, weight in weights.items() if name in self.graph.trainable}
        return make_on_rank(self.optimiser, self.parameters, trained) if trained else None

    @property
    def step_specs(self) -> dict[str, TensorSpec]:
        """The inputs of a training step: the images and labels of all its micro-batches."""
        count = self.plan.micro_batches
        return {
            name: replace(spec, shape=(count * spec.shape[0], *spec.shape[1:])) if spec.shape else spec
            for name, spec in self.graph.inputs.items()
        }

    @property
    def has_whole_loss(self) -> bool:
        """Whether micro-batches add up to the whole batch's loss, where that is not the mean of their own losses."""
        return self.graph.whole is not None and self.graph.whole.differs

    @property
    def draws(self) -> int | None:
        """The random seed if the model draws random numbers, else None."""
        return self.seed if has_random_ops(self.graph) else None

    @property
    def rules(self) -> UpdateRules:
        """The rules of an update besides the optimiser step: gradient clipping, scheduler and loss scaling."""
        scaled = self.plan.precision == "float16"
        return UpdateRules(self.clip_norm, self.scheduler, self.loss_scale if scaled else None)

    def restrict_to_rank(self, program: Program) -> Recipe:
        """Return the part of the recipe that one rank needs. Tensors that no rank changes go to rank 0 only.

        Raises TraceError if a weight has no values.
        """
        # A meta tensor has a shape and no values, and would fail on the rank, far from its cause.
        if absent := [name for name in (*program.weights, *program.buffers) if self.state[name].is_meta]:
            raise TraceError(
                f"{to_user_name(absent[0])} of the model is on the meta device and has no values. Make the model on "
                "the CPU, or give it values first: model.to_empty(device='cpu'), then those of a state_dict."
            )
        names = {
            owner: names if program.rank == 0 else names.drop_unused_tensors() for owner, names in self.names.items()
        }
        return replace(self, state={n: self.state[n] for n in (*program.weights, *program.buffers)}, names=names)


def prepare(
    model: nn.Module,
    plan: Plan,
    image_shape: Sequence[int],
    loss: Loss | None = None,
    optimiser: Optimiser = sgd,
    labels: TensorSpec | Tensor | None = None,
    device: str = "auto",
    clip_norm: float | None = None,
    scheduler: Scheduler | None = None,
    graph: ModelGraph | None = None,
) -> Recipe:
    """Trace the model, and check everything that can be checked before a rank is used.

    `image_shape` is (N, C, H, W). `loss` defaults to cross-entropy. `labels` defaults to class numbers: (N,) for a
    classifier, (N, H, W) if the model predicts each pixel. `labels` is an example tensor of the labels of a batch,
    whose values do not matter, or its TensorSpec.
    The model's random numbers follow from `torch.manual_seed`.
    `optimiser` makes an optimiser of all parameters of the model and of its loss, in the order of `named_parameters()`.
    It receives a list of them, or a list of (name, parameter) pairs if its first argument is called `named_parameters`.
    It must freeze each parameter that it leaves out, with `requires_grad_(False)`.
    `clip_norm` bounds the norm of all gradients of the model together, as `torch.nn.utils.clip_grad_norm_` does.
    `scheduler` is a function of the optimiser, such as `partial(torch.optim.lr_scheduler.StepLR, step_size=10)`; the
    scheduler steps once after each update. `graph` is that of an earlier `TraceCache` for this plan.
    Raises TraceError, PlanError or ImageError.
    """
    loss = loss or nn.CrossEntropyLoss()
    graph = graph or TraceCache(model, image_shape, loss, labels, device).get_graph(plan)
    if clip_norm is not None and not (isinstance(clip_norm, Real) and clip_norm > 0):
        raise PlanError(f"clip_norm={clip_norm!r} must be a positive number, or None for gradients of any norm.")
    used = {name for node in graph.nodes for name in node.reads}
    parameters = collect_parameter_specs(model, loss, getattr(torch, plan.held_in), used)
    graph = freeze_weights(graph, find_frozen(optimiser, parameters))
    if parameters:
        owned = {
            prefix + name: weight
            for prefix, owner in iterate_owners(model, loss)
            for name, weight in owner.named_parameters(remove_duplicate=False)
        }
        check_groups(optimiser, parameters, owned)
    programs, state = compile_plan(graph, plan), collect_state(model, loss, graph)
    if plan.compile_segments:
        check_compiler(choose_autocast_type(device))
    if scheduler:
        check_scheduler(
            scheduler, make_optimiser(optimiser, {spec.name: spec.make_placeholder() for spec in parameters})
        )
    # An optimiser for GPUs only (fused kernels) cannot step here: its trial is skipped unless ranks use the CPU.
    on_cpu = device in ("auto", "cpu") and choose_autocast_type(device) == "cpu"
    check_on_ranks(optimiser, parameters, state, [graph.trainable & set(p.weights) for p in programs], on_cpu)
    names = collect_state_names(model, loss, used)
    seed, additions = torch.initial_seed(), UserOps.snapshot()
    return Recipe(
        graph, plan, optimiser, state, device, seed, additions, clip_norm, scheduler, names=names, parameters=parameters
    )


def freeze_weights(graph: ModelGraph, frozen: frozenset[str]) -> ModelGraph:
    """Return the graph, and the graph of a share of its images, with the weights in `frozen` not trainable."""
    if not frozen & graph.trainable:
        return graph
    share = graph.share and freeze_weights(graph.share, frozen)
    return replace(graph, trainable=graph.trainable - frozen, share=share)


def describe_precision_change(model: nn.Module, loss: object, plan: Plan) -> str:
    """Describe how the plan's precision changes weights and buffers that are not in PyTorch's default float32.

    Returns an empty string if it changes none of them.
    """
    owners = iterate_owners(model, loss)
    named = [pair for _, owner in owners for pair in (*owner.named_parameters(), *owner.named_buffers())]
    kept = (torch.float32, getattr(torch, plan.held_in))
    other = {name: t.dtype for name, t in named if t.is_floating_point() and t.dtype not in kept}
    if not other:
        return ""
    types = " and ".join(sorted({str(dtype).removeprefix("torch.") for dtype in other.values()}))
    return (
        f"{len(other)} of the model's {len(named)} tensors are {types} ({format_names(list(other))}), but ranks hold "
        f"them in {plan.held_in}: Plan(precision={plan.precision!r}). The precision is the plan's choice: for float64 "
        "say Plan(precision='float64'); a half one computes as torch.autocast does, with weights in float32."
    )


def collect_state(model: nn.Module, loss: Loss | None, graph: ModelGraph) -> dict[str, Tensor]:
    found = dict(graph.constants)
    for prefix, owner in iterate_owners(model, loss):
        found |= {prefix + name: tensor.detach() for name, tensor in owner.named_parameters()}
        found |= {prefix + name: tensor for name, tensor in owner.named_buffers()}
    return {name: found[name] for name in (*graph.weights, *graph.buffers)}


@dataclass(frozen=True)
class _StepSetup:
    """The graph, worker and label counter for steps of one batch size."""

    graph: ModelGraph
    worker: Worker
    counting: LabelCounter


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
            # Activations go to a file of this rank; what the rank holds in any case stays.
            stays = [*self.weights.values(), *self.buffers.values()]
            self.offloader = Offloader(OffloadStore(), stays, reads_files=self.device.type == "cpu")
            self._make_micro_batch = partial(OffloadingMicroBatch, offloader=self.offloader)
        self._make_segment = SegmentCompiler() if recipe.plan.compile_segments else Segment
        # One setup for each number of images in a step; weights, buffers and optimiser are the same in all of them.
        found = self._make_setup(recipe, program, self.make_optimiser(), recipe.rules)
        self.images = count_step_images(recipe)
        self.sizes = {self.images: found}
        self.worker, self.counting = found.worker, found.counting
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
        )
        worker.step_labels = describe_steps(recipe.graph, recipe.plan, program)
        return _StepSetup(recipe.graph, worker, counting)

    def make_optimiser(self) -> torch.optim.Optimizer | None:
        """Make the optimiser of the weights that this rank updates, None if there are none.

        These are all of its weights. Of weights that ranks share, each is updated by the first rank that has it.
        """
        counted = {name for each in self.program.select_instructions(FiniteCheckAllReduce) for name in each.counted}
        return self.recipe.make_optimiser(
            {name: weight for name, weight in self.weights.items() if not self.shared or name in counted}
        )

    def add_size(self, recipe: Recipe) -> None:
        """Prepare for steps of fewer images, with a recipe from `engines.train.train_loop.make_smaller_recipe`.

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
        found = self._get_setup(images)
        if found.worker is not self.worker:
            self.worker.restart({})  # frees the micro-batches of the other size
            found.worker.resume_from(self.worker)
            self.graph, self.program = found.graph, found.worker.program
            self.worker, self.counting = found.worker, found.counting

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
        made = getattr(step.instruction, "outputs", ()) if step.phase is Phase.FORWARD else ()
        # Checked right after the instruction that computes the loss, so before any update: no weight has changed yet.
        if self.graph.loss in made and not math.isfinite(loss := self.worker.losses[step.micro_batch]):
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
        """Go to the start of a step of `images` images (None: a full step), and discard the gradients. Collective."""
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


def count_step_images(recipe: Recipe) -> int:
    """Return the number of images in one step, over all ranks."""
    return recipe.step_specs["images"].shape[0]


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
    # Labels may be a single number, without an axis to be cut; a plan with one micro-batch takes them as they are.
    parts = program.micro_batches
    chunks = {name: whole.chunk(parts) if parts > 1 else (whole,) for name, whole in inputs.items()}
    return {
        number: {name: feed.cut(chunks[name][number]).contiguous() for name, feed in feeds.items()}
        for number, feeds in program.feeds.items()
    }
