"""The reference training: one process with the plain model and whole images, to which ranks are compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mpi4dl_nb.engines.comm.device import choose_device
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.graph.model_graph import to_user_name
from mpi4dl_nb.engines.graph.outputs import call_loss, map_tensors, merge_outputs
from mpi4dl_nb.engines.graph.owners import iterate_owners
from mpi4dl_nb.engines.program.rng import CounterRNGMode
from mpi4dl_nb.engines.program.update import SCALE, UpdateRules
from mpi4dl_nb.engines.train.optimisers import Optimiser, make_optimiser
from mpi4dl_nb.engines.train.recipe import Recipe, split_micro_batches


@dataclass(frozen=True)
class TrainingRecord:
    """The results of a training: losses by micro-batch and gradients of each step, and the final weights and buffers.

    `whole`: the loss is that of the whole batch, the same for each micro-batch; ranks hold the summands of a mean.
    Tensors have the plain model's names; those of a loss that is a module have the names that `to_user_name` gives.
    """

    losses: tuple[Mapping[int, float], ...]
    gradients: tuple[Mapping[str, Tensor], ...]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    whole: bool = False
    driven: Mapping[str, float] = field(default_factory=dict)
    """The weights with a gradient, and a learning rate, that was not 0 in every step, with the largest rate."""

    @property
    def mean_losses(self) -> tuple[float, ...]:
        """The loss of each step: the mean over its micro-batches."""
        return tuple(sum(losses.values()) / len(losses) for losses in self.losses)

    def restrict_to(self, other: TrainingRecord) -> TrainingRecord:
        """Return this record with only the losses, gradients, weights and buffers that `other` has too."""

        def select_common(mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> dict[Any, Any]:
            return {name: value for name, value in mine.items() if name in theirs}

        return TrainingRecord(
            tuple(map(select_common, self.losses, other.losses)),
            tuple(map(select_common, self.gradients, other.gradients)),
            select_common(self.weights, other.weights),
            select_common(self.buffers, other.buffers),
            self.whole,
        )


class ReferenceTraining:
    """The ordinary training of a copy of the plain model in one process. The model that is passed in is not changed.

    With a `seed` the model draws the random numbers that ranks draw with that seed. If `dtype` is a half precision,
    weights are float32 and the model runs under `torch.autocast`; the loss of float16 is scaled by
    `torch.amp.GradScaler`.
    `whole_loss`: the model computes one micro-batch after another, and the loss is computed from the outputs of all of
    them at once; all activations are kept until then. Otherwise a step's loss is the mean of the micro-batches' losses.
    `whole_model`: the model, too, gets all micro-batches at once, as a user's own loop would call it. Only norms with
    running statistics normalise each micro-batch by itself, unless they are an nn.SyncBatchNorm.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimiser: Optimiser,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        micro_batches: int = 1,
        rules: UpdateRules | None = None,
        device: torch.device | None = None,
        whole_loss: bool = False,
        whole_model: bool = False,
    ) -> None:
        self.device, self.whole_loss = device or torch.device("cpu"), whole_loss and micro_batches > 1
        self.whole_model = whole_model and micro_batches > 1
        self.seed, self.micro_batches, self.rules = seed, micro_batches, rules or UpdateRules()
        # Ranks seed micro-batch `number` of a step with `steps * micro_batches + number`, and count steps from 1.
        self.begun = micro_batches
        self.precision, self.dtype = dtype, torch.promote_types(dtype, torch.float32)
        self.model = copy.deepcopy(model).to(self.device, self.dtype)
        if self.whole_model:
            _normalise_by_micro_batch(self.model, micro_batches)
        self.loss = copy.deepcopy(loss).to(self.device, self.dtype) if isinstance(loss, nn.Module) else loss
        # The function may freeze weights, so that what is trained is known only after it was called.
        trains = any(weight.requires_grad for weight in self.weights.values())
        candidate = make_optimiser(optimiser, self.weights) if trains else None
        self.trained = [weight for weight in self.weights.values() if weight.requires_grad]
        self.optimiser = candidate if self.trained else None
        self.scheduler = self.rules.scheduler(self.optimiser) if self.rules.scheduler and self.optimiser else None
        first = self.rules.loss_scale or SCALE
        self.rates: list[list[float]] = []  # the learning rate of each group in each update
        self.pushed: set[str] = set()  # the weights with a gradient that was not 0 before some update
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=first, enabled=dtype is torch.float16)

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, recipe: Recipe, seed: int | None = None) -> ReferenceTraining:
        """Make the training that a recipe describes, on the device that its first rank would choose."""
        dtype, device = getattr(torch, recipe.plan.precision), choose_device(recipe.device, rank=0)
        count = recipe.plan.micro_batches
        return cls(model, loss, recipe.optimiser, dtype, seed, count, recipe.rules, device, recipe.has_whole_loss)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Run one training step, micro-batch after micro-batch.

        Returns the loss before the update: the mean over the micro-batches.
        """
        for weight in self.weights.values():
            weight.grad = None
        self.losses: list[float] = []
        outputs: list[Any] = []
        together = self.micro_batches if self.whole_model else 1  # micro-batches in one call of the model
        parts = (split_micro_batches(batch[name], self.micro_batches // together) for name in ("images", "labels"))
        for part in zip(*parts, strict=True):
            # Copies: a forward may write to its images, and the batch is used again.
            images, labels = (tensor.to(self.device, copy=True) for tensor in part)
            if labels.is_floating_point():  # as those of a trace: some losses refuse two types
                labels = labels.to(torch.promote_types(labels.dtype, self.dtype))
            random = nullcontext() if self.seed is None else CounterRNGMode(self.seed, self.begun, together)
            self.begun += together
            with random, self._make_autocast():
                answer = self.model(images.to(self.dtype))
                pairs = () if self.whole_loss else _split(together, answer, labels)
                values = [call_loss(self.loss, *pair)[0] for pair in pairs]
            if self.whole_loss:
                outputs.append(answer)
                continue
            self.losses += [float(value.item()) for value in values]
            if self.optimiser:
                self.scaler.scale(sum(values) / self.micro_batches).backward()
        # A loss of the whole batch is computed once, from all micro-batches' outputs; their graphs stay until then.
        if self.whole_loss:
            with self._make_autocast():
                value, _ = call_loss(self.loss, merge_outputs(outputs), batch["labels"].to(self.device, copy=True))
            self.losses = [float(value.item())] * self.micro_batches
            if self.optimiser:
                self.scaler.scale(value).backward()
        if self.optimiser:
            self._update(self.optimiser)
        return sum(self.losses) / self.micro_batches

    def _make_autocast(self) -> AbstractContextManager[object]:
        half = self.precision is not self.dtype
        return torch.autocast(self.device.type, self.precision) if half else nullcontext()

    def _update(self, optimiser: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimiser)
        # Clipping bounds the true gradients, so that the loss scale is divided out first.
        if self.rules.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trained, self.rules.clip_norm)
        self.rates.append([float(group.get("lr", 1.0)) for group in optimiser.param_groups])
        self.pushed |= {name for name, weight in self.weights.items() if weight.grad is not None and weight.grad.any()}
        before = self.scaler.get_scale()
        self.scaler.step(optimiser)
        self.scaler.update()
        # GradScaler lowers its scale when it skips a step with non-finite gradients: the scheduler must not step then.
        if self.scheduler and self.scaler.get_scale() >= before:
            self.scheduler.step()

    @property
    def driven(self) -> dict[str, float]:
        """The weights that an update should have moved, with the largest learning rate: no gradient, no rate was 0."""
        groups = self.optimiser.param_groups if self.optimiser else []
        rates = {
            id(weight): max((abs(rates[index]) for rates in self.rates), default=0.0)
            for index, group in enumerate(groups)
            for weight in group["params"]
        }
        known = {name: rates.get(id(weight), 1.0) for name, weight in self.weights.items() if name in self.pushed}
        return {name: rate for name, rate in known.items() if rate}

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters of the model and of its loss, by name."""
        owners = iterate_owners(self.model, self.loss)
        return {to_user_name(prefix + name): p for prefix, owner in owners for name, p in owner.named_parameters()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the model and of its loss, by name."""
        owners = iterate_owners(self.model, self.loss)
        return {to_user_name(prefix + name): b for prefix, owner in owners for name, b in owner.named_buffers()}

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's gradients, by name."""
        return {name: p.grad.clone() for name, p in self.weights.items() if p.grad is not None}


def _normalise_by_micro_batch(model: nn.Module, count: int) -> None:
    """Let each norm that has statistics of a batch take the `count` micro-batches of its input one after another."""

    def normalise(plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.cat([plain(part) for part in x.chunk(count)])

    for module in model.modules():
        if isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm):
            module.forward = partial(normalise, module.forward)


def _split(count: int, answer: Any, labels: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield the outputs and labels of each of `count` micro-batches, for a loss of each by itself."""
    for micro_batch in range(count):
        part = map_tensors(lambda tensor, n=micro_batch: tensor.chunk(count)[n], answer) if count > 1 else answer
        yield part, split_micro_batches(labels, count)[micro_batch]


def train_reference(alone: ReferenceTraining, batches: Iterable[Mapping[str, Tensor]]) -> TrainingRecord:
    """Train on these batches, and record the results."""
    losses, gradients = [], []
    for batch in batches:
        alone.step(batch)
        losses.append(dict(enumerate(alone.losses)))
        gradients.append(alone.gradients)
    weights = {name: weight.detach() for name, weight in alone.weights.items()}
    return TrainingRecord(tuple(losses), tuple(gradients), weights, alone.buffers, alone.whole_loss, alone.driven)


@dataclass(frozen=True)
class Comparison:
    """Relative errors against the reference, as norms over whole vectors.

    `worst_parameter` is the parameter with the largest relative error of its gradient.
    """

    loss_rel: float
    grad_rel: float
    worst_parameter: str
    worst_parameter_rel: float
    buffers_rel: float
    params_rel: float

    @property
    def worst(self) -> float:
        """The largest of the four errors."""
        return max(self.loss_rel, self.grad_rel, self.buffers_rel, self.params_rel)

    def is_within(self, times: float, usual: Comparison) -> bool:
        """Return whether every error is at most `times` times the usual one.

        The loss is a single number, which may be right by chance: it is compared to the worst of the usual errors.
        """
        names = ("grad_rel", "buffers_rel", "params_rel")
        far = any(getattr(self, name) > times * getattr(usual, name) for name in names)
        return not far and self.loss_rel <= times * usual.worst and math.isfinite(self.worst)


def compare(oracle: TrainingRecord, ranks: Sequence[TrainingRecord]) -> Comparison:
    """Compare each rank's record to the reference's.

    Every copy of a weight counts; a value that no rank has is an error.
    """
    losses = _pair_losses(oracle, ranks)
    sizes = [_compute_squares(theirs) for theirs in oracle.gradients]  # computed once for all ranks
    steps = [
        (_compute_squares(mine, theirs), size)
        for rank in ranks
        for mine, theirs, size in zip(rank.gradients, oracle.gradients, sizes, strict=True)
    ]

    def is_complete(kind: str) -> bool:
        steps = zip(*(getattr(record, kind) for record in (*ranks, oracle)), strict=True)
        return all(set().union(*mine) == set(theirs) for *mine, theirs in steps)

    def compare_final(kind: str) -> float:
        theirs = getattr(oracle, kind)
        sizes = _compute_squares(theirs)
        return max(_compare_squares(_compute_squares(getattr(rank, kind), theirs), sizes) for rank in ranks)

    noise = max((_find_noise(weight.dtype) for weight in oracle.weights.values()), default=_find_noise(torch.float64))
    worst_rel, worst = max((error for step in steps for error in _compare_by_name(*step, noise)), default=(0.0, ""))
    return Comparison(
        # A value that no rank has makes the result infinite: a comparison of what is there would call it right.
        loss_rel=max(_replace_nan(abs(mine - theirs) / max(abs(theirs), 1e-300)) for mine, theirs in losses)
        if is_complete("losses")
        else math.inf,
        grad_rel=max(_compare_squares(*step) for step in steps) if is_complete("gradients") else math.inf,
        worst_parameter=worst,
        worst_parameter_rel=worst_rel,
        buffers_rel=compare_final("buffers"),
        params_rel=compare_final("weights"),
    )


def _pair_losses(oracle: TrainingRecord, ranks: Sequence[TrainingRecord]) -> list[tuple[float, float]]:
    """Pair the ranks' losses with the reference's: by micro-batch, or by step if the loss is of the whole batch."""
    if not oracle.whole:
        return [
            (loss, theirs[micro_batch])
            for rank in ranks
            for mine, theirs in zip(rank.losses, oracle.losses, strict=True)
            for micro_batch, loss in mine.items()
        ]
    return list(zip(combine_losses(ranks).mean_losses, oracle.mean_losses, strict=True))


def combine_losses(ranks: Sequence[TrainingRecord]) -> TrainingRecord:
    """Return a record of nothing but the losses of whole batches, combined from their parts on the ranks."""
    steps = zip(*(rank.losses for rank in ranks), strict=True)
    merged = ({n: loss for losses in step for n, loss in losses.items()} for step in steps)
    return TrainingRecord(tuple(dict(sorted(losses.items())) for losses in merged), (), {}, {}, whole=True)


def _compute_squares(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """Return the squared norm of each tensor, or of its difference to that of the same name in `others`."""
    squares = {}
    for name, tensor in tensors.items():
        difference = tensor.double() if others is None else tensor.double() - others[name].double()
        squares[name] = difference.square().sum().item()
    return squares


def _compare_squares(differences: Mapping[str, float], sizes: Mapping[str, float]) -> float:
    """Return |mine - theirs| / |theirs| over all tensors in `differences`, as one vector; both are squared norms."""
    return _compute_relative(sum(differences.values()), sum(sizes[name] for name in differences))


def _find_noise(dtype: torch.dtype) -> float:
    """Return the share of all gradients' squared size below which that of a weight is only rounding."""
    return 1e-24 if dtype is torch.float64 else 1e-10


def _compare_by_name(
    differences: Mapping[str, float], sizes: Mapping[str, float], noise: float
) -> Iterator[tuple[float, str]]:
    """Yield the relative error of each tensor. A reference that is zero up to rounding counts as large as all."""
    whole = sum(sizes.values())
    for name, difference in differences.items():
        size = sizes[name]
        yield _compute_relative(difference, size if size > noise * whole else whole), name


def _compute_relative(difference: float, size: float) -> float:
    """Return the relative error from two squared norms."""
    return _replace_nan(math.sqrt(difference) / max(math.sqrt(size), 1e-300)) if difference else 0.0


def _replace_nan(error: float) -> float:
    """Return inf for an error that is not finite: `max` could drop a nan."""
    return error if math.isfinite(error) else math.inf


def to_plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a rank's tensors to the names that a TrainingRecord uses."""
    return {to_user_name(name): tensor for name, tensor in tensors.items()}
