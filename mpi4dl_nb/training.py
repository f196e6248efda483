"""The notebook's handle on a training that runs on a cluster's ranks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from engines.bench.verify import STEPS, batches, comparable, rank_record, verdict
from engines.errors import ImageError, PlanError
from engines.layer.graph import TensorSpec
from engines.layer.trace import MODEL, first_names, plain_name
from engines.layout import check_fits
from engines.oracle import Record
from engines.plan import Plan
from engines.program.compile import compile_plan
from engines.program.program import Program
from engines.program.timeline import Timeline
from engines.program.update import Scheduler
from engines.program.worker import Inputs
from engines.training import Loss, Optimiser, RankTraining, Recipe, StepReport, cut_inputs, prepare, sgd

if TYPE_CHECKING:
    from engines.host import Host
    from mpi4dl_nb.cluster import Cluster

__all__ = ["History", "Training"]

Batch = tuple[Any, Any]


@dataclass(frozen=True)
class History:
    """What `fit` saw: the loss of each step, and images per second over all of them."""

    losses: tuple[float, ...]
    images_per_s: float


class Training:
    """A model, trained on a cluster by a plan.

    `image_shape` is (N, C, H, W) of a batch; a step takes `plan.batches` of them as one tensor.
    `loss(prediction, labels)` is cross-entropy unless given, `optimiser` a function of
    parameters, such as `partial(torch.optim.Adam, lr=1e-3)`. The model itself is only read: its weights are the
    first ones, and `state_dict()` gives the trained ones. `clip_norm` bounds the norm of all gradients together;
    `scheduler` makes of an optimiser what steps once after each update, such as
    `partial(torch.optim.lr_scheduler.StepLR, step_size=10)`.

    Raises PlanError, TraceError or ImageError before any rank is touched.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        cluster: Cluster,
        image_shape: Sequence[int],
        loss: Loss | None = None,
        optimiser: Optimiser = sgd,
        labels: TensorSpec | None = None,
        device: str = "auto",
        clip_norm: float | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        check_fits(plan, cluster.n)
        self.model, self.plan, self.cluster = model, plan, cluster
        self.loss = loss or nn.CrossEntropyLoss()
        self._prepare: Callable[[Plan], Recipe] = lambda plan: prepare(
            model, plan, image_shape, self.loss, optimiser, labels, device, clip_norm, scheduler
        )
        self.recipe = self._prepare(plan)
        self.programs = compile_plan(self.recipe.graph, plan)
        self._id = uuid.uuid4().hex
        self._reports: list[StepReport] = []
        cluster.call(_create, self._id, per_rank=[(self._recipe_of(program),) for program in self.programs])

    def _recipe_of(self, program: Program, recipe: Recipe | None = None) -> Recipe:
        recipe = recipe or self.recipe
        return replace(recipe, state={n: recipe.state[n] for n in (*program.weights, *program.buffers)})

    def step(self, images: Any, labels: Any) -> float:
        """One training step on a batch; the loss before it.

        `images` is (N, C, H, W), `labels` class numbers; each rank is sent its own pixels only.
        Raises ImageError for a wrong shape or label, LossError for a loss that is not finite, and
        RankError where a rank fails; no weight has changed then.
        """
        whole = self._checked(images, labels)
        parts = [(cut_inputs(program, whole),) for program in self.programs]
        self._reports = self.cluster.call(_step, self._id, per_rank=parts)
        losses = {number: loss for report in self._reports for number, loss in report.losses.items()}
        return sum(losses.values()) / len(losses)

    def fit(self, data: Iterable[Batch], epochs: int = 1, progress: bool = True) -> History:
        """Train on the batches of `data`, `epochs` times, with a bar that shows loss and images per second."""
        losses: list[float] = []
        images, start_s = 0, time.perf_counter()
        batches_seen = list(data) if isinstance(data, Iterator) else data
        total = epochs * len(batches_seen) if isinstance(batches_seen, Sized) else None
        with tqdm(total=total, unit="step", disable=not progress) as bar:
            for _ in range(epochs):
                for batch, labels in batches_seen:
                    losses.append(self.step(batch, labels))
                    images += len(batch)
                    rate = images / (time.perf_counter() - start_s)
                    bar.set_postfix_str(f"loss {losses[-1]:.4f}, {rate:.2f} images/s")
                    bar.update()
        return History(tuple(losses), images / (time.perf_counter() - start_s))

    def verify(
        self, data: Iterable[Batch] | None = None, seed: int = 0, precision: str = "float64"
    ) -> dict[str, object]:
        """Three optimiser steps from the model's own weights, ranks against one process in float64.

        On random batches, or those of `data`. In another `precision` than float64 ranks may be as far off as such a
        process, four times. This training itself is not touched.
        """
        start_s = time.perf_counter()
        recipe = comparable(self._prepare(replace(self.plan, precision=precision)))
        whole = (
            batches(recipe, seed) if data is None else [self._checked(*batch, recipe) for batch in islice(data, STEPS)]
        )
        if not whole:
            raise ImageError("verify was given no batch. Give it at least one, or leave data out.")
        work = [
            (self._recipe_of(program, recipe), [cut_inputs(program, batch) for batch in whole])
            for program in compile_plan(recipe.graph, recipe.plan)
        ]
        records = self.cluster.call(_record, per_rank=work)
        line = verdict(recipe, self.model, self.loss, whole, records)
        return {**line, "seconds": round(time.perf_counter() - start_s, 2)}

    def timeline(self) -> Timeline:
        """What each rank did when in the last step. Raises PlanError before the first one."""
        if not self._reports:
            raise PlanError("timeline() shows the last step, but none was run yet. Call step() or fit() first.")
        return Timeline.of(report.events for report in self._reports)

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights and buffers by the plain model's names, for `model.load_state_dict`."""
        found: dict[str, Tensor] = {}
        for tensors in self.cluster.call(_tensors, self._id):
            held = tensors["weights"] | tensors["buffers"]
            found |= {plain_name(name): t for name, t in held.items() if name.startswith(MODEL)}
        first = {plain_name(name): plain_name(held) for name, held in first_names(self.model).items()}
        return {name: found.get(first.get(name, name), own) for name, own in self.model.state_dict().items()}

    def close(self) -> None:
        """Free the ranks' memory."""
        self.cluster.call(_drop, self._id)

    def _checked(self, images: Any, labels: Any, recipe: Recipe | None = None) -> dict[str, Tensor]:
        graph, specs = (recipe or self.recipe).graph, (recipe or self.recipe).step_specs
        whole = {}
        for name, given in (("images", images), ("labels", labels)):
            spec, tensor = specs[name], torch.as_tensor(given)
            if tuple(tensor.shape) != spec.shape:
                several = f" ({self.plan.batches} batches make a step of this plan)" if self.plan.batches > 1 else ""
                raise ImageError(
                    f"{name} have shape {tuple(tensor.shape)} but the training was made for {spec.shape}{several}. "
                    "Change the batch, or make a Training with this image_shape."
                )
            if tensor.is_floating_point() and not spec.is_floating:
                raise ImageError(
                    f"{name} are {tensor.dtype}, but the training was made for {spec.dtype}. Give whole numbers, or "
                    "make a Training with labels=TensorSpec(shape, dtype)."
                )
            whole[name] = tensor.detach().to(getattr(torch, spec.dtype))
        ignored = getattr(self.loss, "ignore_index", -100)
        _check_classes(whole["labels"], graph.specs[graph.prediction], ignored)
        return whole

    def __repr__(self) -> str:
        spec = self.recipe.step_specs["images"]
        return f"Training({type(self.model).__name__}, images {spec.shape}, {self.plan.summary})"


def _check_classes(labels: Tensor, prediction: TensorSpec, ignored: int) -> None:
    """Class numbers beyond the model's answers would fail in a rank."""
    if labels.is_floating_point() or len(prediction.shape) < 2:
        return
    classes = prediction.shape[1]
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != ignored)]
    if wrong.numel():
        raise ImageError(
            f"A label is {int(wrong.max())}, but the model answers for {classes} classes (0 to {classes - 1}). "
            "Change the labels, or the model's num_classes."
        )


def _create(host: Host, name: str, recipe: Recipe) -> None:
    host.trainings[name] = RankTraining(host.world, recipe)


def _held(host: Host, name: str) -> RankTraining:
    if name not in host.trainings:
        raise PlanError("The ranks hold this training no more: it was closed, or they were restarted. Make a new one.")
    return host.trainings[name]


def _step(host: Host, name: str, inputs: Inputs) -> StepReport:
    return _held(host, name).step(inputs)


def _record(host: Host, recipe: Recipe, parts: list[Inputs]) -> Record:
    return rank_record(RankTraining(host.world, recipe), parts)


def _tensors(host: Host, name: str) -> dict[str, dict[str, Tensor]]:
    return _held(host, name).tensors()


def _drop(host: Host, name: str) -> None:
    host.trainings.pop(name, None)
