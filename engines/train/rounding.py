"""Decide whether ranks differ from one process by rounding or by a fault.

The reference is one process whose weights and images change by an ulp, a unit in the last place. If the model itself
computes in a lower precision, each of its results there changes by an ulp of that precision as well.

    oracle      one process as it is
    nears       the same with random changes by an ulp: how far rounding may spread
    noise       gradient elements that are zero in theory, and only rounding in fact
    mirrored    one process whose noise has the opposite sign: optimisers that divide by a gradient's size
                (Adam) move such a weight a full step in a random direction
    followed    one process whose optimiser gets the ranks' gradients, so that its weights stay where theirs are: for
                optimisers whose update an ulp decides (orthogonalisation of a gradient without full rank)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, TrainingRecord, combine_losses

DOUBLE = torch.finfo(torch.float64).eps
"""Machine epsilon of float64."""

TIMES = 64
"""Ranks add in another order than one process: their error may be this multiple of the effect of an ulp's change."""

EXACT = 1e-10  # relative to a tensor's own size: an error within it needs no other explanation
_MOST = 1e-6  # of a tensor's size: an effect of an ulp's change that is larger excuses nothing
_FAINT = 1e-9  # of the largest gradient of a step
_RUNS = 4  # runs of one process with changes by an ulp, if the first one does not explain all
Begin = Callable[[ReferenceTraining], None]
Key = tuple[str, int, str]
"""Kind (loss, gradient, change of the weight, buffer), step (0: after all of them), and name of a quantity."""

_MOVED = "change of the weight"


def _collect_quantities(record: TrainingRecord, start: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Return all quantities of a record in float64; for weights, their change since the `start`."""
    moved = {name: weight.detach().double() - start[name].double() for name, weight in record.weights.items()}
    quantities = _collect_losses(record)
    for step, gradients in enumerate(record.gradients, start=1):
        quantities |= {("gradient", step, name): gradient for name, gradient in gradients.items()}
    for what, tensors in ((_MOVED, moved), ("buffer", record.buffers)):
        quantities |= {(what, 0, name): tensor for name, tensor in tensors.items()}
    return {key: tensor.detach().double() for key, tensor in quantities.items()}


def _collect_losses(record: TrainingRecord) -> dict[Key, Tensor]:
    """Return the losses by micro-batch, or their mean if the loss is that of the whole batch."""
    if record.whole:
        quantities = {("loss", step, "of the batch"): loss for step, loss in enumerate(record.mean_losses, start=1)}
    else:
        quantities = {
            ("loss", step, f"of micro-batch {micro_batch}"): loss
            for step, losses in enumerate(record.losses, start=1)
            for micro_batch, loss in losses.items()
        }
    return {key: torch.tensor(loss, dtype=torch.float64) for key, loss in quantities.items()}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose error `rel` is too large; `usual` is the effect of an ulp's change. Both are relative.

    They are relative to the tensor's own size, or, if that `is_zero`, to that of all tensors of its kind in its step.
    `follows`: the difference is to the process that follows the ranks, and an ulp's change says nothing of it.
    """

    key: Key
    rel: float
    usual: float
    is_zero: bool = False
    follows: bool = False


@dataclass(frozen=True)
class RoundingCheck:
    """The results of one process (`record`), and its results after changes that should be irrelevant.

    `run(begin, meanwhile, change)` trains one process again: `begin` is called with the process before its first step,
    within `meanwhile`, on batches transformed by `change`. `eps` is the machine epsilon of its least precise operator,
    `start` are its weights before the first step. `ranks` are the records that are compared with it.
    """

    record: TrainingRecord
    run: Callable[[Begin, AbstractContextManager[object], Callable[[Any], Any]], TrainingRecord]
    eps: float
    start: Mapping[str, Tensor]
    ranks: Sequence[TrainingRecord] = ()

    nears: list[Mapping[Key, Tensor]] = field(default_factory=list)
    """Quantities after weights and images have changed by an ulp, at random each time."""

    @cached_property
    def oracle(self) -> Mapping[Key, Tensor]:
        """Quantities of the unchanged process."""
        return _collect_quantities(self.record, self.start)

    def ensure_nears(self, times: int) -> None:
        """Run until there are `times` `nears`."""
        for seed in range(3 * len(self.nears), 3 * times, 3):
            # Three seeds for each run: the noise of low-precision results, the weights, the images.
            meanwhile = _UlpNoiseMode(seed) if self.eps > DOUBLE else nullcontext()
            begin, change = partial(_nudge_weights, seed=seed + 1), partial(_nudge_images, seed=seed + 2)
            self.nears.append(_collect_quantities(self.run(begin, meanwhile, change), self.start))

    @cached_property
    def mirrored(self) -> Mapping[Key, Tensor]:
        """Quantities after negating each gradient that is only rounding, so that its weight moves the other way."""
        if not self.noise:
            return self.oracle

        def reverse_noise(process: ReferenceTraining, step: int) -> None:
            for name, mask in self.noise.items():
                gradient = process.weights[name].grad
                if gradient is not None:
                    gradient[mask] *= -1
                    # An exact 0 has no opposite: it becomes the ranks' value in its place.
                    gradient += self._strays["gradient", step, name].to(gradient)

        return _collect_quantities(self._run_with_hook(reverse_noise), self.start)

    def _run_with_hook(self, hook: Callable[[ReferenceTraining, int], None]) -> TrainingRecord:
        """Train one process again, and call `hook(process, step)` when the gradients of a step are complete."""

        def begin(process: ReferenceTraining) -> None:
            steps = count(1)
            if process.optimiser is not None:
                process.optimiser.register_step_pre_hook(lambda *_: hook(process, next(steps)))

        return self.run(begin, nullcontext(), lambda batch: batch)

    @cached_property
    def noise(self) -> dict[str, Tensor]:
        """Masks by weight of the elements whose gradient, in some step, is zero in theory and rounding in fact."""
        self.ensure_nears(1)
        gradients = {key: tensor for key, tensor in self.oracle.items() if key[0] == "gradient" and tensor.numel()}
        masks: dict[str, Tensor] = {}
        for (what, step, name), gradient in gradients.items():
            other = self.nears[0][what, step, name]
            # Two bounds: small compared with the effect of an ulp's change, and small compared with the step's
            # largest gradient. That effect may be none: the sum of four softmax gradients is the same multiple of an
            # ulp for many weights. A gradient that is exactly 0 in both runs is a real zero, not noise.
            usual = torch.maximum((gradient - other).square().mean().sqrt(), self._largest[step] * DOUBLE)
            bound = torch.minimum(1e3 * usual, self._largest[step] * max(_FAINT, self._slack))
            mask = (gradient.abs() <= bound) & ((gradient != 0) | (other != 0))
            mask |= self._strays[what, step, name] != 0
            masks[name] = masks[name] | mask if name in masks else mask
        return {name: mask for name, mask in masks.items() if mask.any()}

    @cached_property
    def _largest(self) -> dict[int, Tensor]:
        """By step: the largest element of all gradients."""
        largest: dict[int, Tensor] = {}
        for (what, step, _), gradient in self.oracle.items():
            if what == "gradient" and gradient.numel():
                largest[step] = torch.maximum(largest.get(step, gradient.new_zeros(())), gradient.abs().max())
        return largest

    @cached_property
    def _records(self) -> list[dict[Key, Tensor]]:
        """Each rank's quantities. A whole batch's loss, combined from its parts on ranks, is one more record."""
        if not self.record.whole:
            return [_collect_quantities(rank, self.start) for rank in self.ranks]
        alone = [_collect_quantities(replace(rank, losses=()), self.start) for rank in self.ranks]
        return [*alone, _collect_losses(combine_losses(self.ranks))]

    @cached_property
    def _strays(self) -> dict[Key, Tensor]:
        """By gradient: a rank's value where one process has exactly 0, if within the rounding of the whole step."""
        self.ensure_nears(1)
        strays: dict[Key, Tensor] = {}
        for key, gradient in self.oracle.items():
            if key[0] == "gradient":
                # A gradient that is zero in theory may be exactly 0 in one process (two terms cancel bit by bit), and
                # not on ranks, which add the terms in another order. There the rank's value stands for the noise.
                zero, strays[key] = (gradient == 0) & (self.nears[0][key] == 0), torch.zeros_like(gradient)
                for mine in (record[key] for record in self._records if key in record):
                    strays[key] = torch.where(
                        zero & (mine.abs() <= self._compute_floor(key)) & (mine != 0), mine, strays[key]
                    )
        return strays

    def find_differences(self) -> list[TensorDifference]:
        """Return the tensors whose error exceeds rounding, the furthest beyond the usual first.

        One process runs again only if necessary.
        """
        records = self._records
        differences = self._find_beyond(records, self._is_exact)
        # An error within EXACT of the tensor's own size needs no explanation, and mostly there is no other.
        # From cheap to expensive: without a run, one perturbed run, the mirrored run, then `_RUNS` perturbed runs.
        for times in (1, _RUNS):
            if differences:
                self.ensure_nears(times)
                differences = self._find_beyond(records, lambda key, off: self._is_usual(key, off, self.nears, 0.0))
            if differences and self.noise:
                differences = self._find_beyond(records, self._is_like_mirrored)
        if differences and self.undetermined:
            differences = self._find_beyond(records, self._is_followed, self.followed)
        return sorted(differences.values(), key=lambda difference: -difference.rel / max(difference.usual, 1e-16))

    @cached_property
    def undetermined(self) -> dict[str, float]:
        """By weight: how far an ulp's change moves the update, relative to it, if that is too far to judge ranks by.

        Only of weights whose first gradient, which no update precedes, is not zero in theory and agrees with itself.
        """
        self.ensure_nears(_RUNS)
        undetermined = {}
        for (what, step, name), moved in self.oracle.items():
            first = ("gradient", 1, name)
            if what == _MOVED and first in self.oracle:
                size, gradient = _compute_norm(moved), _compute_norm(self.oracle[first])
                far = max(_compute_norm(near[what, step, name] - moved) for near in self.nears)
                off = max(_compute_norm(near[first] - self.oracle[first]) for near in self.nears)
                if far > _MOST * size > 0 and off <= EXACT * gradient and gradient > self._compute_floor(first):
                    undetermined[name] = far / size
        return undetermined

    @cached_property
    def followed(self) -> Mapping[Key, Tensor]:
        """Quantities of one process whose optimiser gets, in each step, the ranks' gradients in place of its own.

        Its own gradients, from the weights that the ranks have in that step, are those of the result.
        """
        # A weight that an ulp moves elsewhere, and all that follows from it, is compared step by step:
        #
        #     one process     gradient 1 -- compare, take the ranks' -- optimiser --> weights --> gradient 2 -- ...
        #     ranks           gradient 1 ------------------------------ optimiser --> weights --> gradient 2 -- ...
        #
        # The optimiser computes the same from the same gradient, so that weights are equal again before each step.
        gradients: list[dict[str, Tensor]] = []

        def take_gradients(process: ReferenceTraining, step: int) -> None:
            gradients.append(process.gradients)
            for rank in reversed(self.ranks):
                for name, gradient in rank.gradients[step - 1].items():
                    process.weights[name].grad.copy_(gradient)  # type: ignore[union-attr]

        record = self._run_with_hook(take_gradients)
        return _collect_quantities(replace(record, gradients=tuple(gradients)), self.start)

    def _is_followed(self, key: Key, off: Tensor) -> bool:
        least = EXACT * _compute_norm(self.followed[key])
        least = max(least, self._compute_floor(key)) if key[0] == "gradient" else least
        return _compute_norm(off) <= max(least, self._estimate_storage_error(key, lambda tensor: tensor))

    @property
    def is_followed(self) -> bool:
        """Whether ranks were compared with the process that follows them."""
        return "followed" in self.__dict__

    def compute_followed_error(self) -> float:
        """Return the largest error of a gradient against the process that follows the ranks, relative to its step."""
        off = (
            _compute_norm(mine - self.followed[key]) / (self._sizes[key[:2]] or 1.0)
            for record in self._records
            for key, mine in record.items()
            if key[0] == "gradient"
        )
        return max(off, default=0.0)

    def find_inexact(self) -> list[Key]:
        """Return the keys whose error only rounding explains."""
        return list(self._find_beyond(self._records, self._is_exact))

    def find_unmoved(self) -> list[str]:
        """Return the weights of one process that stay unchanged, although an update should have moved them."""
        weights, driven = self.record.weights, self.record.driven
        still = [name for name in weights if name in driven and torch.equal(weights[name], self.start[name])]
        return [name for name in still if self._has_real_gradient(name)]  # last, because it takes a run

    def _has_real_gradient(self, name: str) -> bool:
        """Return whether any element of a weight has, in any step, a gradient that is neither 0 nor only rounding.

        Nor does one count that is both a billionth of the step's largest and too small to change the weight's digits.
        """
        gradients = {
            step: tensor for (what, step, weight), tensor in self.oracle.items() if (what, weight) == ("gradient", name)
        }
        noise = self.noise.get(name, torch.zeros((), dtype=torch.bool))
        # Where a gradient vanishes, a step may be less than half of the last digit of its weight: none learns there.
        last = torch.finfo(self.record.weights[name].dtype).eps / 2 * self.record.weights[name].detach().abs().double()

        def is_real(step: int, gradient: Tensor) -> bool:
            faint = gradient.abs() <= _FAINT * self._largest[step]
            lost = faint & (self.record.driven[name] * gradient.abs() <= last)
            return bool(((gradient != 0) & ~noise & ~lost).any())

        # An optimiser may have removed the gradient, which was not 0, before it was recorded.
        return not gradients or any(is_real(*pair) for pair in gradients.items())

    def is_noise(self, key: Key) -> bool:
        """Return whether `key` is a gradient that is zero in theory in all elements, or the change of its weight."""
        return key[2] in self.noise and key[0] in ("gradient", _MOVED) and bool(self.noise[key[2]].all())

    def _find_beyond(
        self,
        records: Sequence[Mapping[Key, Tensor]],
        is_right: Callable[[Key, Tensor], bool],
        reference: Mapping[Key, Tensor] | None = None,
    ) -> dict[Key, TensorDifference]:
        wanted, differences = reference or self.oracle, dict[Key, TensorDifference]()
        for record in records:
            for key, mine in record.items():
                if key not in differences and not is_right(key, mine - wanted[key]):
                    norm = _compute_norm(wanted[key])
                    # A tensor that is exactly zero has no size: all tensors of its kind in that step lend theirs.
                    size = norm or self._sizes[key[:2]] or 1.0
                    usual = max((_compute_norm(near[key] - self.oracle[key]) for near in self.nears), default=0.0)
                    differences[key] = TensorDifference(
                        key, _compute_norm(mine - wanted[key]) / size, usual / size, norm == 0, reference is not None
                    )
        return differences

    def _is_exact(self, key: Key, off: Tensor) -> bool:
        return _compute_norm(off) <= max(
            EXACT * _compute_norm(self.oracle[key]), self._estimate_storage_error(key, lambda tensor: tensor)
        )

    def _is_like_mirrored(self, key: Key, off: Tensor) -> bool:
        may = TIMES * _compute_norm(self._select_real(key, self.mirrored[key] - self.oracle[key]))
        if key[0] in ("loss", "gradient"):
            # Reversed noise may move a norm's statistics far, but a loss that depends on it is chaotic: such a
            # reference must not excuse a fault.
            may = min(may, max(_MOST, self._slack) * _compute_norm(self.oracle[key]))
        return self._is_usual(key, off, [*self.nears, self.mirrored], may)

    def _is_usual(self, key: Key, off: Tensor, others: Sequence[Mapping[Key, Tensor]], may: float) -> bool:
        """Return whether the error `off` is within rounding; real elements may be off by `may` in any case.

        Real elements are those whose gradient is not zero in theory. The other elements of a weight may move as far as
        they do in one process and in its `others`.
        """
        usual = [near[key] - self.oracle[key] for near in self.nears]
        # Elements are of two kinds, and bounds differ:
        #
        #     real    |off| <= 64 x the effect of an ulp's change, and a millionth of the tensor at most
        #     noise   |off| <= 64 x the size that noise has in any run: its sign is a matter of chance, and an optimiser
        #             such as Adam moves the weight by a full step in either direction
        norm, spread = (
            _compute_norm(self._select_real(key, self.oracle[key])),
            max(_compute_norm(self._select_real(key, effect)) for effect in usual),
        )
        # A chaotic reference must not excuse a fault, so that no more than a millionth of the tensor's size is allowed.
        # A tensor that is itself rounding (a running mean that is zero in theory) has no size to compare with.
        least = self._compute_floor(key)
        ulps = min(TIMES * spread, least if norm <= least else max(_MOST, self._slack) * norm)
        stored = self._estimate_storage_error(key, lambda tensor: self._select_real(key, tensor))
        if not _compute_norm(self._select_real(key, off)) <= max(EXACT * norm, ulps, may, stored):
            return False
        # The noise of a gradient is as large as the effect of an ulp's change on it, that of a weight as its move.
        if (mask := self._get_noise_mask(key)) is None:
            return True
        if key[0] == "gradient":
            return _compute_norm(off[mask]) <= max(
                self._compute_floor(key), *(TIMES * _compute_norm(effect[mask]) for effect in usual)
            )
        return _compute_norm(off[mask]) <= TIMES * max(
            _compute_norm(record[key][mask]) for record in (self.oracle, *others)
        )

    def _estimate_storage_error(self, key: Key, part: Callable[[Tensor], Tensor]) -> float:
        """Return the error from rounding a stored value in each step, which may exceed an ulp's effect."""
        # A small change of a large weight or buffer is rounded to its own precision in each step, on both sides; losses
        # and gradients are made anew in each step.
        held = {_MOVED: self.record.weights, "buffer": self.record.buffers}.get(key[0], {})
        if key[2] in held:
            stored, steps = held[key[2]].detach(), len(self.record.losses)
        elif self.eps == DOUBLE:
            return 0.0
        else:
            computed_in = next((weight.dtype for weight in self.record.weights.values()), torch.float64)
            stored, steps = self.oracle[key].to(computed_in), 1
        eps = torch.finfo(stored.dtype).eps if stored.is_floating_point() else 0.0
        return 2 * eps * steps * _compute_norm(part(stored.double()))

    def _get_noise_mask(self, key: Key) -> Tensor | None:
        return self.noise.get(key[2]) if key[0] in ("gradient", _MOVED) else None

    def _select_real(self, key: Key, tensor: Tensor) -> Tensor:
        mask = self._get_noise_mask(key)
        return tensor if mask is None else tensor[~mask]

    @property
    def _slack(self) -> float:
        """Allowed effect of chaos in a model that computes in a lower precision, relative to a tensor's size."""
        return min(0.3, 1e4 * self.eps) if self.eps > DOUBLE else 0.0

    @cached_property
    def _sizes(self) -> dict[tuple[str, int], float]:
        """By kind and step: the norm of all losses, gradients, changes or buffers together."""
        squares: dict[tuple[str, int], float] = {}
        for key, tensor in self.oracle.items():
            squares[key[:2]] = squares.get(key[:2], 0.0) + _compute_norm(tensor) ** 2
        return {kind: square**0.5 for kind, square in squares.items()}

    def _compute_floor(self, key: Key) -> float:
        """Return the rounding of all tensors of a kind in a step: the allowed error of one that is zero in theory."""
        return 500 * self.eps * self._sizes[key[:2]]


def _compute_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


# Perturb weights, images and low-precision results by an ulp, a unit in the last place.


def find_lowest_precision(graph: ModelGraph) -> tuple[float, str]:
    """Return the machine epsilon of a graph's least precise operator, and the operator's place in the user's model."""
    precisions = [
        (torch.finfo(getattr(torch, node.spec.dtype)).eps, f"{node.spec.dtype} ({node.where})")
        for node in graph.nodes
        if node.spec is not None and node.spec.dtype in ("float64", "float32", "float16", "bfloat16")
    ]
    return max(precisions, key=lambda precision: precision[0], default=(DOUBLE, ""))


def _nudge_images(batch: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the batch with every element of its images changed by an ulp. Labels, which may have bounds, stay."""
    random = torch.Generator().manual_seed(seed)
    return {name: _nudge(t, random) if name == "images" and t.is_floating_point() else t for name, t in batch.items()}


def _nudge_weights(process: ReferenceTraining, seed: int) -> None:
    """Change every element of the weights of a process by an ulp."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in process.weights.values():
            if weight.is_floating_point():
                weight.copy_(_nudge(weight, random))


def _nudge(tensor: Tensor, random: torch.Generator) -> Tensor:
    up = torch.randint(2, tensor.shape, generator=random).bool()
    # Each element moves to its next neighbour above or below.
    far = torch.full_like(tensor, torch.inf)
    return torch.nextafter(tensor, torch.where(up, far, -far))


class _UlpNoiseMode(TorchDispatchMode):
    """Changes every result computed in a lower precision than float64 by an ulp, forward and backward."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and perturb its results, except views and in-place results, which were perturbed before."""
        out = func(*args, **(kwargs or {}))
        # Noise on a view or an in-place result would be added to the same memory a second time.
        fresh = not any(result.alias_info for result in func._schema.returns)
        return tree_map_only(Tensor, self._add_noise, out) if fresh else out

    def _add_noise(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or torch.finfo(tensor.dtype).eps <= DOUBLE:
            return tensor
        # Times 1 + eps or 1 - eps: `nextafter` does not exist for half precisions on all devices.
        sign = 2 * torch.randint(2, tensor.shape, generator=self.random, dtype=torch.int8) - 1
        return tensor * (1 + sign.to(tensor.dtype) * torch.finfo(tensor.dtype).eps)
