"""What ranks need in order to train, as plain data that is checked before any rank starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.checks import is_number
from mpi4dl_nb.engines.comm.device import choose_autocast_type
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.operator_table import UserOps
from mpi4dl_nb.engines.compiler.trace_cache import Loss, TraceCache
from mpi4dl_nb.engines.compiler.whole_loss import warn_of_mean
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import FactTable, format_names
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec, to_user_name
from mpi4dl_nb.engines.graph.model_state import ModelState
from mpi4dl_nb.engines.graph.outputs import warn_of_left_out
from mpi4dl_nb.engines.graph.owners import iterate_owners
from mpi4dl_nb.engines.graph.trace import StateNames, collect_state_names
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.program.rng import has_random_ops
from mpi4dl_nb.engines.program.segment_compiler import check_compiler
from mpi4dl_nb.engines.program.update import SCALE, Scheduler, UpdateRules
from mpi4dl_nb.engines.train.optimiser_trial import (
    check_flags,
    check_groups,
    check_on_ranks,
    check_scheduler,
    count_optimiser_states,
    find_frozen,
)
from mpi4dl_nb.engines.train.optimisers import (
    Optimiser,
    ParameterSpec,
    collect_parameter_specs,
    make_on_rank,
    make_optimiser,
)

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
    def compares_whole(self) -> bool:
        """Whether one process that takes all micro-batches of a step in one call of the model computes the same."""
        whole = self.graph.whole
        return whole is not None and (bool(self.graph.synced) or not (whole.unknown or whole.mixes or whole.apart))

    @property
    def draws(self) -> int | None:
        """The random seed if the model draws random numbers, else None."""
        return self.seed if has_random_ops(self.graph) else None

    @property
    def rules(self) -> UpdateRules:
        """The rules of an update besides the optimiser step: gradient clipping, scheduler and loss scaling."""
        scaled = self.plan.precision == "float16"
        return UpdateRules(self.clip_norm, self.scheduler, self.loss_scale if scaled else None)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The programs of all ranks, compiled once.

        They stay in this process: a rank compiles its own. Raises PlanError or TraceError if the plan does not fit.
        """
        return compile_plan(self.graph, self.plan)

    def check_programs(self) -> None:
        """Raise PlanError or TraceError if the plan does not fit the model."""
        _ = self.programs

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "programs"}

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
        names = {owner: names if program.rank == 0 else replace(names, kept={}) for owner, names in self.names.items()}
        return replace(self, state={n: self.state[n] for n in (*program.weights, *program.buffers)}, names=names)


@dataclass(frozen=True)
class Task:
    """What is trained, without a plan: a model with its loss and its batches, as traced, and how weights are updated.

    The arguments of `of` are those of `prepare`.
    """

    traces: TraceCache
    optimiser: Optimiser = sgd
    clip_norm: float | None = None
    scheduler: Scheduler | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        image_shape: Sequence[int],
        loss: Loss | None = None,
        optimiser: Optimiser = sgd,
        labels: TensorSpec | Tensor | None = None,
        device: str = "auto",
        clip_norm: float | None = None,
        scheduler: Scheduler | None = None,
        state: ModelState | None = None,
    ) -> Task:
        """Return the task; with `state`, the model is traced in the modes that it recorded.

        Raises ImageError or TraceError for what can be traced under no plan.
        """
        traces = TraceCache(model, image_shape, loss or nn.CrossEntropyLoss(), labels, device, state)
        return cls(traces, optimiser, clip_norm, scheduler)

    def with_shape(self, image_shape: Sequence[int]) -> Task:
        """Return the same task with batches of another shape. Raises ImageError for an invalid one."""
        return replace(self, traces=self.traces.with_shape(image_shape))

    def count_optimiser_states(self) -> int:
        """Return how many numbers the optimiser keeps for each weight, by a trial step."""
        return count_optimiser_states(self.optimiser, self.traces.model, self.traces.loss)

    def prepare(self, plan: Plan, graph: ModelGraph | None = None) -> Recipe:
        """Return the recipe of a training under a plan; `graph` is that of an earlier `TraceCache` for this plan."""
        model, loss, device, optimiser = self.traces.model, self.traces.loss, self.traces.device, self.optimiser
        plan = plan.fit(self.traces.image_shape[2:])
        graph = graph or self.traces.get_graph(plan)
        clip_norm = self.clip_norm
        if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
            raise PlanError(f"clip_norm={clip_norm!r} must be a positive number, or None for gradients of any norm.")
        used = {name for node in graph.nodes for name in node.reads}
        parameters = collect_parameter_specs(model, loss, getattr(torch, plan.held_in), used)
        graph = freeze_weights(graph, find_frozen(optimiser, parameters))
        check_parameters(model, loss, optimiser, parameters)
        recipe = Recipe(
            graph,
            plan,
            optimiser,
            collect_state(model, loss, graph),
            device,
            torch.initial_seed(),
            UserOps.snapshot(),
            clip_norm,
            self.scheduler,
            names=collect_state_names(model, loss, used),
            parameters=parameters,
        )
        held = [graph.trainable & set(program.weights) for program in recipe.programs]
        if plan.compile_segments:
            check_compiler(choose_autocast_type(device))
        if self.scheduler and parameters:
            placeholders = {spec.name: spec.make_placeholder() for spec in parameters}
            check_scheduler(self.scheduler, make_optimiser(optimiser, placeholders))
        # An optimiser for GPUs only (fused kernels) cannot step here: its trial is skipped unless ranks use the CPU.
        on_cpu = device in ("auto", "cpu") and choose_autocast_type(device) == "cpu"
        check_on_ranks(optimiser, parameters, recipe.state, held, on_cpu)
        return recipe


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
    task = Task.of(model, image_shape, loss, optimiser, labels, device, clip_norm, scheduler)
    return task.prepare(plan, graph)


def check_parameters(model: nn.Module, loss: Loss, optimiser: Optimiser, parameters: Sequence[ParameterSpec]) -> None:
    """Raise PlanError for parameters of the model and the loss that an optimiser cannot train."""
    owned = {
        prefix + name: weight
        for prefix, owner in iterate_owners(model, loss)
        for name, weight in owner.named_parameters(remove_duplicate=False)
    }
    check_flags(parameters, owned)
    if parameters:
        check_groups(optimiser, parameters, owned)


def freeze_weights(graph: ModelGraph, frozen: frozenset[str]) -> ModelGraph:
    """Return the graph with the weights in `frozen` not trainable."""
    return replace(graph, trainable=graph.trainable - frozen) if frozen & graph.trainable else graph


def warn_of_differences(model: nn.Module, loss: Loss, recipe: Recipe, stacklevel: int) -> None:
    """Warn of what a training with this recipe may compute otherwise than the plain loop on the whole batch."""
    warn_of_mean(recipe.graph, recipe.plan, stacklevel + 1)
    warn_of_left_out(recipe.graph, stacklevel + 1)
    if changed := _describe_precision_change(model, loss, recipe.plan):
        warnings.warn(changed, stacklevel=stacklevel + 1)


def _describe_precision_change(model: nn.Module, loss: Loss, plan: Plan) -> str:
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
    state = dict(graph.constants)
    for prefix, owner in iterate_owners(model, loss):
        state |= {prefix + name: tensor.detach() for name, tensor in owner.named_parameters()}
        state |= {prefix + name: tensor for name, tensor in owner.named_buffers()}
    return {name: state[name] for name in (*graph.weights, *graph.buffers)}


def count_step_images(recipe: Recipe) -> int:
    """Return the number of images in one step, over all ranks."""
    return recipe.step_specs["images"].shape[0]


def split_micro_batches(whole: Tensor, count: int) -> Sequence[Tensor]:
    """Return a step's images or labels by micro-batch, views.

    Labels may be a single number, without an axis to be cut; a plan with one micro-batch takes them as they are.
    """
    return whole.chunk(count) if count > 1 else (whole,)
