"""The oracle: one process, the plain model, the whole image. Whatever ranks compute is held against it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engines.layer.answers import prediction_of
from engines.layer.trace import MODEL
from engines.spatial.draws import SameDraws
from engines.training import Loss, Optimiser

__all__ = ["Comparison", "OneProcess", "Record", "compare", "one_process"]


@dataclass(frozen=True)
class Record:
    """What a training did: each step's losses by micro-batch and its gradients, weights and buffers at the end.

    Tensors go by the plain model's names.
    """

    losses: tuple[Mapping[int, float], ...]
    gradients: tuple[Mapping[str, Tensor], ...]
    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class OneProcess:
    """A copy of the plain model, trained as anyone would in one process. The model given is not changed.

    With a `seed` it draws the random numbers that ranks draw with that seed.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, optimiser: Optimiser, dtype: torch.dtype = torch.float32,
        seed: int | None = None, micro_batches: int = 1,
    ) -> None:  # fmt: skip
        self.seed, self.micro_batches = seed, micro_batches
        self.begun = micro_batches  # ranks count steps from 1
        self.model, self.dtype = copy.deepcopy(model).to(dtype), dtype
        self.loss = copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = optimiser(trained) if trained else None

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """One training step, its micro-batches one after another; the mean of their losses before it."""
        self.model.zero_grad()
        self.losses = []
        parts = {name: tensor.chunk(self.micro_batches) for name, tensor in batch.items()}
        for images, labels in zip(parts["images"], parts["labels"], strict=True):
            self._add(images, labels)
        if self.optimiser:
            self.optimiser.step()
        return sum(self.losses) / self.micro_batches

    def _add(self, images: Tensor, labels: Tensor) -> None:
        """Add one micro-batch's share of the step's gradient."""
        with nullcontext() if self.seed is None else SameDraws(self.seed, self.begun):
            answer = self.model(images.to(self.dtype))
            value = self.loss(prediction_of(answer), labels)
        self.begun += 1
        self.losses.append(float(value.item()))
        if self.optimiser:
            (value / self.micro_batches).backward()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's, by name."""
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def one_process(
    model: nn.Module, loss: Loss, optimiser: Optimiser, batches: Iterable[Mapping[str, Tensor]], dtype: torch.dtype,
    seed: int | None = None, micro_batches: int = 1,
) -> Record:  # fmt: skip
    """What one process does with these batches, each of that many micro-batches."""
    alone = OneProcess(model, loss, optimiser, dtype, seed, micro_batches)
    losses, gradients = [], []
    for batch in batches:
        alone.step(batch)
        losses.append(dict(enumerate(alone.losses)))
        gradients.append(alone.gradients)
    weights = {name: p.detach() for name, p in alone.model.named_parameters()}
    return Record(tuple(losses), tuple(gradients), weights, dict(alone.model.named_buffers()))


@dataclass(frozen=True)
class Comparison:
    """Relative errors against the oracle: norms over whole vectors. `worst_parameter` has the largest of its own."""

    loss_rel: float
    grad_rel: float
    worst_parameter: str
    worst_parameter_rel: float
    buffers_rel: float
    params_rel: float

    @property
    def worst(self) -> float:
        """The largest of all."""
        return max(self.loss_rel, self.grad_rel, self.buffers_rel, self.params_rel)


def compare(oracle: Record, ranks: Sequence[Record]) -> Comparison:
    """Hold each rank's record against the oracle's; every copy of a weight counts, and what no rank has is wrong."""
    losses = [
        (loss, theirs[number])
        for rank in ranks
        for mine, theirs in zip(rank.losses, oracle.losses, strict=True)
        for number, loss in mine.items()
    ]
    steps = [(rank.gradients[step], oracle.gradients[step]) for rank in ranks for step in range(len(oracle.gradients))]
    complete = all(
        set().union(*(rank.gradients[step] for rank in ranks)) == set(theirs)
        for step, theirs in enumerate(oracle.gradients)
    )
    told = all(
        set().union(*(rank.losses[step] for rank in ranks)) == set(theirs) for step, theirs in enumerate(oracle.losses)
    )
    each = ((_one(mine[name], theirs[name], theirs), name) for mine, theirs in steps for name in mine)
    worst_rel, worst = max(each, default=(0.0, ""))
    return Comparison(
        loss_rel=max(_told(abs(mine - theirs) / max(abs(theirs), 1e-300)) for mine, theirs in losses)
        if told
        else math.inf,
        grad_rel=max(_distance(mine, theirs) for mine, theirs in steps) if complete else math.inf,
        worst_parameter=worst,
        worst_parameter_rel=worst_rel,
        buffers_rel=max(_distance(rank.buffers, oracle.buffers) for rank in ranks),
        params_rel=max(_distance(rank.weights, oracle.weights) for rank in ranks),
    )


def _distance(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|mine - theirs| / |theirs| over all tensors that `mine` has, as one vector."""
    if not mine:
        return 0.0
    difference = _norm(mine[name].double() - theirs[name].double() for name in mine)
    return _told(difference / max(_norm(theirs[name].double() for name in mine), 1e-300)) if difference else 0.0


def _one(mine: Tensor, theirs: Tensor, all_theirs: Mapping[str, Tensor]) -> float:
    """The same for one gradient; where it is zero but for rounding, against the size of all gradients."""
    scale, noise = _norm([theirs.double()]), 1e-12 * _norm(t.double() for t in all_theirs.values())
    difference = _norm([mine.double() - theirs.double()])
    return _told(difference / (scale if scale > noise else max(noise * 1e12, 1e-300)))


def _told(error: float) -> float:
    """What is not a number is infinitely wrong: `max` would drop it."""
    return error if math.isfinite(error) else math.inf


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(sum((tensor.square().sum().item() for tensor in tensors), 0.0) ** 0.5)


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rank's tensors of the model itself, by the plain model's names."""
    return {name.removeprefix(MODEL): t for name, t in tensors.items() if name.startswith(MODEL)}
