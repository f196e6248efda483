"""A cache of traces: a model's graph for one micro-batch of a plan, shared by all plans that need the same graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mpi4dl_nb.engines.comm.device import choose_autocast_type
from mpi4dl_nb.engines.compiler.joined_attention import join_attention
from mpi4dl_nb.engines.compiler.model_mixing import find_mixing
from mpi4dl_nb.engines.compiler.operand_types import check_operand_types, trace_in_fitting_type
from mpi4dl_nb.engines.compiler.whole_loss import with_whole_loss
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.geometry.tiles import find_compact_grid
from mpi4dl_nb.engines.graph.export_reader import make_tensor_spec
from mpi4dl_nb.engines.graph.model_graph import (
    BatchLoss,
    ModelGraph,
    TensorSpec,
    check_buffer_reads,
    check_synced_norms,
)
from mpi4dl_nb.engines.graph.model_inputs import (
    check_forward,
    check_image_shape,
    check_layer_names,
    describe_value,
    format_packing,
)
from mpi4dl_nb.engines.graph.model_state import ModelState
from mpi4dl_nb.engines.graph.outside_state import Place, restore_outside_state
from mpi4dl_nb.engines.graph.trace import infer_output_spec, trace
from mpi4dl_nb.engines.graph.traceability import check_loss_repeats, check_modules, check_side_effects, make_traceable
from mpi4dl_nb.engines.plan import Plan

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TraceCache:
    """The traces of one model under many plans.

    `image_shape` is (N, C, H, W) of a batch, `labels` are as for `prepare`.
    Plans whose micro-batches have the same shape and precision share a trace, but for those that ask for rings of
    attention; a trace takes seconds. If a step has
    several micro-batches, the graph's loss is changed so that the mean over them is the loss of the whole batch.
    The model is traced in its current state, and again after a change; with `state`, in the modes that it recorded.
    Raises ImageError for an invalid `image_shape` or `labels`, and TraceError for modules that cannot be traced.
    """

    model: nn.Module
    image_shape: Sequence[int]
    loss: Loss
    labels: TensorSpec | Tensor | None = None
    device: str = "auto"
    state: ModelState | None = None
    # Three levels, from what costs seconds to what costs nothing:
    #
    #     _traces   by image and label specs and precision           one run of the model
    #     (each also by the state of the model, and by PyTorch's default type)
    #     _graphs   by micro-batch and precision                     a trace
    #     _wholes   the same, by the number of micro-batches too     the graph with the whole batch's loss
    _graphs: dict[Hashable, ModelGraph] = field(default_factory=dict, repr=False, compare=False)
    _wholes: dict[Hashable, ModelGraph] = field(default_factory=dict, repr=False, compare=False)
    _traces: dict[Hashable, ModelGraph] = field(default_factory=dict, repr=False, compare=False)
    _mixing: dict[Hashable, tuple[str, bool]] = field(default_factory=dict, repr=False, compare=False)
    _checked: set[Hashable] = field(default_factory=set, repr=False, compare=False)  # types, for side effects
    kept_outside: list[Place] = field(default_factory=list, repr=False, compare=False)
    """The places outside of the model in which its code keeps tensors, and what else it changes there."""

    def __post_init__(self) -> None:
        check_modules(self.model, self.loss)
        object.__setattr__(self, "image_shape", check_image_shape(self.image_shape))
        check_layer_names(self.model)
        check_forward(self.model)
        labels = self.label_spec
        if isinstance(labels, TensorSpec) and isinstance(dtype := getattr(torch, labels.dtype, None), torch.dtype):
            labels = TensorSpec(tuple(labels.shape), str(dtype).removeprefix("torch."))  # "float" becomes float32
        elif labels is not None:
            raise ImageError(
                f"labels is {describe_value(labels)}, but must be an example tensor of the labels of one batch, "
                "such as torch.zeros(4, 1, 32, 32), or its TensorSpec(shape, dtype), with a type such as 'float32'."
                f"{format_packing(labels)}"
            )
        object.__setattr__(self, "labels", labels)

    @property
    def label_spec(self) -> TensorSpec | None:
        """The spec of the labels of a batch, if they are given."""
        return make_tensor_spec(self.labels) if isinstance(self.labels, Tensor) else self.labels

    def with_batch(self, images: int) -> TraceCache:
        """Return a cache for the same model with batches of `images` images; both share their traces."""
        labels = self.label_spec
        if labels and labels.shape:
            count = labels.shape[0] * images // self.image_shape[0]
            labels = replace(labels, shape=(count, *labels.shape[1:]))
        return replace(self, image_shape=(images, *self.image_shape[1:]), labels=labels)

    def with_shape(self, image_shape: Sequence[int]) -> TraceCache:
        """Return a cache for the same model with a batch of another size; both share their traces.

        Labels that are given keep their place: their first axis follows the number of images, and those of them that
        have the height and the width of the images as their last axes follow these.
        Raises ImageError for an invalid `image_shape`.
        """
        cache, labels = replace(self, image_shape=image_shape, labels=None), self.label_spec
        if labels and labels.shape:
            shape = (labels.shape[0] * cache.image_shape[0] // self.image_shape[0], *labels.shape[1:])
            before, after = tuple(self.image_shape[2:]), cache.image_shape[2:]
            if len(shape) > len(before) and shape[-len(before) :] == before:
                shape = (*shape[: -len(before)], *after)
            labels = replace(labels, shape=shape)
        return replace(cache, labels=labels)

    def has_graph(self, plan: Plan) -> bool:
        """Return whether `get_graph` needs no new trace.

        Raises PlanError if the batch cannot be cut as the plan says.
        """
        return self._make_key(plan) in self._graphs

    def get_graph(self, plan: Plan) -> ModelGraph:
        """Return the graph that `plan` is compiled from.

        Raises PlanError, or TraceError if the model cannot be traced.
        """
        return trace_in_fitting_type(plan.precision, lambda: self._get_graph(plan))

    def _get_graph(self, plan: Plan) -> ModelGraph:
        with self.get_state().apply_modes(self.model, self.loss):
            key = self._make_key(plan)
            if key not in self._graphs:
                with self._restore_outside():
                    self._graphs[key] = self._trace(plan, *self._get_specs(plan))
            check_buffer_reads(self._graphs[key], plan.micro_batches)
            check_synced_norms(self._graphs[key], plan)
            if plan.micro_batches == 1:
                return self._graphs[key]
            # The number of micro-batches matters only to losses that are sums, which are multiplied by it. Any other
            # loss serves every number (None).
            for known in ((key, None), (key, plan.micro_batches)):
                if known in self._wholes:
                    return self._wholes[known]

            rewritten = with_whole_loss(self._graphs[key], lambda: self._trace_times(plan, 2), plan.micro_batches)
            mixes, apart = self._find_mixing(plan)
            rewritten = replace(rewritten, whole=replace(rewritten.whole or BatchLoss(), mixes=mixes, apart=apart))
            scaled = rewritten.whole is not None and rewritten.whole.scaled
            self._wholes[key, plan.micro_batches if scaled else None] = rewritten
            return rewritten

    @contextmanager
    def _restore_outside(self) -> Iterator[None]:
        """Within the context, several runs of the model share one look at what its code can reach."""
        with restore_outside_state(self.model, self.loss) as state:
            try:
                yield
            finally:
                self.kept_outside.extend(state.restored)

    def _trace_times(self, plan: Plan, times: int) -> ModelGraph:
        """Trace a micro-batch of some times as many images."""
        more = (replace(spec, shape=(times * spec.shape[0], *spec.shape[1:])) for spec in self._get_specs(plan))
        with self._restore_outside():
            return self._trace(plan, *more)

    def _find_mixing(self, plan: Plan) -> tuple[str, bool]:
        """Return where the model computes with several images at once, and whether it can be compared only apart."""
        state = self.get_state()
        if state not in self._mixing:
            modules = self.model.named_modules(remove_duplicate=False)
            norms = {name for name, module in modules if isinstance(module, _NormBase)}
            images = self._get_image_spec(plan).shape[0]
            self._mixing[state] = find_mixing(partial(self._trace_times, plan), images, norms)
        return self._mixing[state]

    def _make_key(self, plan: Plan) -> Hashable:
        return self.get_state(), self._get_image_spec(plan), *_list_traced_options(plan)

    def get_state(self) -> ModelState:
        """Return the state in which the model is traced."""
        return self.state or ModelState.of(self.model, self.loss)

    @property
    def _traceable(self) -> nn.Module:
        """The model in the form that is traced."""
        return make_traceable(self.model)

    def _get_image_spec(self, plan: Plan) -> TensorSpec:
        check_grid(plan.fit(self.image_shape[2:]), self.image_shape[2:])
        return get_micro_batch_spec("images", TensorSpec(tuple(self.image_shape), plan.held_in), plan)

    def _get_specs(self, plan: Plan) -> tuple[TensorSpec, TensorSpec]:
        """Return the specs of a micro-batch's images and labels."""
        images = self._get_image_spec(plan)
        checked = self.get_state(), images.dtype
        if checked not in self._checked:
            # A trace would lose side effects of forward.
            check_side_effects(self._traceable, images)
            self._checked.add(checked)
        if labels := self.label_spec:
            # Some losses refuse labels of a lower precision than the model's.
            kinds = (getattr(torch, name) for name in (labels.dtype, plan.held_in))
            dtype = str(torch.promote_types(*kinds)).removeprefix("torch.")
            labels = replace(labels, dtype=dtype) if labels.is_floating else labels
            return images, get_micro_batch_spec("labels", labels, plan)
        # Class numbers: one for each row of the model's output, or for each pixel.
        shape = infer_output_spec(self._traceable, images).shape
        return images, TensorSpec((*shape[:1], *shape[2:]), "int64")

    def _trace(self, plan: Plan, images: TensorSpec, answers: TensorSpec) -> ModelGraph:
        """Trace the model for these specs."""
        key = self.get_state(), images, answers, *_list_traced_options(plan)
        if key not in self._traces:
            kind = choose_autocast_type(self.device)
            graph = trace(self.model, self.loss, images, answers, plan.precision, kind)
            graph = join_attention(graph, plan.attention_keys)
            check_batched(graph)
            # After the trace: a cache that the loss keeps outside would hold tensors of the check otherwise.
            if not self._traces:
                only = graph.specs[graph.prediction] if graph.loss_input == "Tensor" else None
                check_loss_repeats(self._traceable, self.loss, images, answers, only)
            self._traces[key] = graph
        check_operand_types(self._traces[key])
        return self._traces[key]


def _list_traced_options(plan: Plan) -> tuple[Hashable, ...]:
    """Return what else than the model and its inputs a traced graph depends on."""
    return plan.precision, plan.attention_keys == "ring", torch.get_default_dtype()


def check_grid(plan: Plan, size_px: Sequence[int]) -> None:
    """Raise PlanError if a plan cuts images along fewer or more axes than they have."""
    if not plan.spatial_size or len(plan.grids[0]) == len(size_px):
        return
    kind = {1: "signals (N, C, L)", 2: "images (N, C, H, W)", 3: "volumes (N, C, D, H, W)"}[len(size_px)]
    fitting = find_compact_grid(size_px, plan.grids[0].tiles)
    single = " One image (C, H, W) is a batch (1, C, H, W)." if len(size_px) == 1 else ""
    raise PlanError(
        f"slice_method={plan.slice_method!r} cuts along {len(plan.grids[0])} axes, but {kind} have {len(size_px)}. "
        f"Use slice_method='{fitting}': of all grids of as many tiles, it has the smallest halos here.{single}"
    )


def check_batched(graph: ModelGraph) -> None:
    """Raise ImageError if what is given as signals (N, C, L) is one image (C, H, W) to the model.

    PyTorch's convolutions take an image without its batch. Its channels would then be divided as images are.
    """
    shape = graph.inputs["images"].shape
    for node in graph.nodes if len(shape) == 3 else ():
        reads = (graph.specs[name] for name in node.reads if name in graph.specs)
        if node.short_operator.startswith(("conv2d", "conv_transpose2d")) and any(len(s.shape) == 3 for s in reads):
            raise ImageError(
                f"image_shape={shape} is that of signals (N, C, L), but {node.short_operator} in {node.where} takes it "
                f"for one image (C, H, W). Give a batch of one: {(1, *shape)}."
            )


def get_micro_batch_spec(name: str, batch: TensorSpec, plan: Plan) -> TensorSpec:
    """Return the spec of one of the `parts` of a batch.

    Raises PlanError if the batch cannot be divided into them, or these evenly by the ranks that share one.
    """
    if not batch.shape and plan.micro_batches * plan.local_dp > 1:
        raise PlanError(
            f"{name} of shape () cannot be cut into the {plan.micro_batches} micro-batches of a step, or shared by "
            f"local_dp={plan.local_dp} ranks. Give them a first axis, with an entry for each image."
        )
    count = batch.shape[0] if batch.shape else 1
    if count % plan.parts:
        raise PlanError(
            f"A batch of {count} {name} cannot be cut into parts={plan.parts} micro-batches of one size. "
            f"Use a batch size that is a multiple of {plan.parts}, or other parts."
        )
    count //= plan.parts
    if batch.shape and count % plan.local_dp:
        raise PlanError(
            f"local_dp={plan.local_dp} ranks cannot share the {count} images of a micro-batch evenly. "
            f"Use a batch size that is a multiple of {plan.parts * plan.local_dp} (parts x local_dp)."
        )
    return replace(batch, shape=(count, *batch.shape[1:])) if batch.shape else batch
