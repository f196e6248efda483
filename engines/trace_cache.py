"""A model's graph as a plan needs it: traced for one micro-batch, and kept for the next plan that needs the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from engines.comm.device import choose_autocast_type
from engines.errors import ImageError, PlanError
from engines.layer.buffer_updates import check_buffer_reads
from engines.layer.export_reader import make_tensor_spec
from engines.layer.graph import ModelGraph, TensorSpec
from engines.layer.trace import infer_output_spec, trace
from engines.layer.traceability import check_modules, check_side_effects, make_traceable
from engines.loss.whole_loss import with_whole_loss
from engines.plan import Plan

__all__ = ["Loss", "TraceCache", "get_micro_batch_spec", "get_shard_spec"]

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class TraceCache:
    """One model under many plans: `image_shape` is (N, C, H, W) of a batch, `labels` are as for `prepare`.

    Plans with micro-batches of one shape and precision share a trace, whatever they do with it; a trace takes seconds.
    Where a step has several micro-batches the graph's loss is changed so that their mean is that of the whole batch.
    Raises ImageError for an `image_shape` or `labels` that are none, and TraceError for modules that cannot be traced.
    """

    model: nn.Module
    image_shape: Sequence[int]
    loss: Loss
    labels: TensorSpec | Tensor | None = None
    device: str = "auto"
    _graphs: dict[Hashable, ModelGraph] = field(default_factory=dict, repr=False, compare=False)
    _wholes: dict[Hashable, ModelGraph] = field(default_factory=dict, repr=False, compare=False)
    _traces: dict[Hashable, ModelGraph] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_modules(self.model, self.loss)
        if len(self.image_shape) != 4 or any(size < 1 for size in self.image_shape):
            raise ImageError(f"image_shape={tuple(self.image_shape)} must be (N, C, H, W), four positive numbers.")
        object.__setattr__(self, "labels", _resolve_labels(self.labels))

    def with_batch(self, images: int) -> TraceCache:
        """The same model on batches of so many images; what is traced is kept together."""
        labels = self.labels
        if labels and labels.shape:
            count = labels.shape[0] * images // self.image_shape[0]
            labels = replace(labels, shape=(count, *labels.shape[1:]))
        return replace(self, image_shape=(images, *self.image_shape[1:]), labels=labels)

    def has_graph(self, plan: Plan) -> bool:
        """Whether `graph` answers at once. Raises PlanError where the batch cannot be cut as the plan says."""
        return self._make_key(plan) in self._graphs

    def get_graph(self, plan: Plan) -> ModelGraph:
        """What `plan` is compiled from, with the share of a rank where ranks share micro-batches.

        Raises PlanError, or TraceError where the model cannot be traced.
        """
        key = self._make_key(plan)
        if key not in self._graphs:
            self._graphs[key] = self._trace_plan(plan)
        check_buffer_reads(self._graphs[key], plan.micro_batches)
        return self._graphs[key] if plan.micro_batches == 1 else self._get_whole_loss_graph(key, plan)

    def _get_whole_loss_graph(self, key: Hashable, plan: Plan) -> ModelGraph:
        """The graph for several micro-batches; how many they are matters only to sums, which are multiplied by that."""
        for known in ((key, None), (key, plan.micro_batches)):
            if known in self._wholes:
                return self._wholes[known]
        found = with_whole_loss(self._graphs[key], lambda: self._trace_doubled(plan), plan.micro_batches)
        scaled = found.whole is not None and found.whole.scaled
        self._wholes[key, plan.micro_batches if scaled else None] = found
        return found

    def _make_key(self, plan: Plan) -> Hashable:
        images = self._get_image_spec(plan)
        return images, plan.precision, get_shard_spec(images, plan) if plan.local_dp > 1 else None

    @cached_property
    def _traceable(self) -> nn.Module:
        """The model as it is traced. Raises TraceError where it changes while it runs, which a trace would not do."""
        found = make_traceable(self.model)
        check_side_effects(found, TensorSpec(tuple(self.image_shape), "float32"))
        return found

    def _get_image_spec(self, plan: Plan) -> TensorSpec:
        return get_micro_batch_spec("images", TensorSpec(tuple(self.image_shape), plan.held_in), plan)

    def _trace_plan(self, plan: Plan) -> ModelGraph:
        images, answers = self._get_specs(plan)
        whole = self._trace(plan, images, answers)
        if plan.local_dp == 1:
            return whole
        return replace(whole, share=self._trace(plan, get_shard_spec(images, plan), get_shard_spec(answers, plan)))

    def _get_specs(self, plan: Plan) -> tuple[TensorSpec, TensorSpec]:
        """Of the images and of the labels of a micro-batch."""
        images = self._get_image_spec(plan)
        return images, get_micro_batch_spec("labels", self.labels, plan) if self.labels else _make_label_spec(
            self._traceable, images
        )

    def _trace_doubled(self, plan: Plan) -> ModelGraph:
        """The trace of a micro-batch of twice as many images."""
        twice = (replace(spec, shape=(2 * spec.shape[0], *spec.shape[1:])) for spec in self._get_specs(plan))
        return self._trace(plan, *twice)

    def _trace(self, plan: Plan, images: TensorSpec, answers: TensorSpec) -> ModelGraph:
        """A share of a micro-batch is traced as a micro-batch of that size is."""
        key = images, answers, plan.precision
        if key not in self._traces:
            made = trace(self._traceable, self.loss, images, answers, plan.precision, choose_autocast_type(self.device))
            self._traces[key] = made
        return self._traces[key]


def get_micro_batch_spec(name: str, batch: TensorSpec, plan: Plan) -> TensorSpec:
    """One of the `parts` of a batch. Raises PlanError where it cannot be cut into so many."""
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
    return replace(batch, shape=(count // plan.parts, *batch.shape[1:])) if batch.shape else batch


def get_shard_spec(micro_batch: TensorSpec, plan: Plan) -> TensorSpec:
    """What one of `local_dp` ranks has of a micro-batch. Raises PlanError where they cannot share it evenly."""
    count = micro_batch.shape[0]
    if count % plan.local_dp:
        raise PlanError(
            f"local_dp={plan.local_dp} ranks cannot share the {count} images of a micro-batch evenly. "
            f"Use a batch size that is a multiple of {plan.parts * plan.local_dp} (parts x local_dp)."
        )
    return replace(micro_batch, shape=(count // plan.local_dp, *micro_batch.shape[1:]))


def _resolve_labels(labels: object) -> TensorSpec | None:
    """The shape and type of an example tensor, or those that are given. Raises ImageError for anything else."""
    if labels is None:
        return None
    if isinstance(labels, Tensor):
        return make_tensor_spec(labels)
    if isinstance(labels, TensorSpec) and isinstance(dtype := getattr(torch, labels.dtype, None), torch.dtype):
        return TensorSpec(tuple(labels.shape), str(dtype).removeprefix("torch."))  # "float" is called float32 elsewhere
    raise ImageError(
        f"labels={labels!r} must be an example tensor of the labels of one batch, such as "
        "torch.zeros(4, 1, 32, 32), or its TensorSpec(shape, dtype), with a type such as 'float32'."
    )


def _make_label_spec(model: nn.Module, images: TensorSpec) -> TensorSpec:
    """Class numbers for whatever the model answers: one for each row of its output, or for each pixel."""
    shape = infer_output_spec(model, images).shape
    return TensorSpec((*shape[:1], *shape[2:]), "int64")
