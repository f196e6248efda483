"""Compare a training on ranks with one process: three steps, all gradients, and a report of what differs."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.world import World, run_on_all, run_on_first
from mpi4dl_nb.engines.compiler.labels import find_class_count
from mpi4dl_nb.engines.compiler.operand_types import TYPE_ERROR
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError, VerifyError
from mpi4dl_nb.engines.formatting import FactTable, format_names
from mpi4dl_nb.engines.graph.default_type import use_default_type
from mpi4dl_nb.engines.graph.exported_nodes import find_user_line
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, TrainingRecord, compare, to_plain_names, train_reference
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.rounding import (
    DOUBLE,
    EXACT,
    Begin,
    Key,
    RoundingCheck,
    TensorDifference,
    find_lowest_precision,
)
from mpi4dl_nb.engines.train.training import RankTraining

# Texts of `verify`: which tensors differ, by how much, and whether that is rounding or a fault.


def _describe_fault(far: Sequence[TensorDifference]) -> str:
    """Describe the tensor that differs most: by how much, and how much rounding explains."""
    first = far[0]
    others = f" So are {len(far) - 1} other tensors." if len(far) > 1 else ""
    size = "its size"
    if first.is_zero:
        what, step, _ = first.key
        size = f"the size of every {what}{' of the step' if step else ''} together (it is exactly 0 in one process)"
    usual = f"and by {first.usual:.1e} in one process whose weights and images change by an ulp"
    if first.follows:  # where an ulp would excuse anything
        usual = "compared with one process that updates its weights with the ranks' gradients"
    return (
        f"This is a fault, not rounding: {_describe_key(first.key)} is off by {first.rel:.1e} of {size}, "
        f"{usual}.{others}"
    )


def _describe_rounding(rounding: RoundingCheck, where: str) -> list[str]:
    """Explain why ranks are right although some tensors differ by more than EXACT; empty if none does."""
    if rounding.is_followed:
        far, agree = max(rounding.undetermined.values()), rounding.compute_followed_error()
        # Others go elsewhere, too, because they follow from these.
        names = format_names(sorted(name for name, move in rounding.undetermined.items() if move > 0.1 * far))
        sentence = (
            f"The optimiser's update of {names} is not determined by the gradient to more than {far:.1e} of its size: "
            "so far does it differ in one process whose weights and images change by an ulp. Ranks are therefore "
            "compared with one process that updates its weights with the ranks' gradients: the weights agree, and "
            f"gradients agree to {agree:.0e} in every step."
        )
        return [sentence]
    inexact = rounding.find_inexact()
    noise = sorted({key[2] for key in inexact if rounding.is_noise(key)})
    others = [key for key in inexact if not rounding.is_noise(key)]
    sentences = []
    if inexact and rounding.eps > DOUBLE:
        sentences.append(f"The model computes in {where}, where rounding is {rounding.eps:.0e}.")
    if noise:
        sentences.append(
            f"The gradients of {format_names(noise)} are zero in theory and rounding in fact, which an optimiser that "
            "divides by a gradient's size makes larger."
        )
    if others:
        more = f", and {len(others) - 1} other tensors," if len(others) > 1 else ""
        sentences.append(
            f"Rounding explains that {_describe_key(others[0])}{more} differ from one process by more than {EXACT:.0e} "
            "of their size: it differs so from itself once its weights and images, and gradients that are zero in "
            "theory, change by rounding."
        )
    return sentences


def _describe_parts(recipe: Recipe) -> list[str]:
    """Say so if one process, too, takes micro-batches for what is not the same for the whole batch; else empty."""
    whole = recipe.graph.whole
    if whole is None or recipe.compares_whole or not (whole.mixes or whole.unknown):
        return []
    what = f"the model ({whole.mixes})" if whole.mixes else f"the loss ({whole.unknown})"
    sentence = (
        f"One process, too, takes the {recipe.plan.micro_batches} micro-batches one after another: {what} gives other "
        "numbers for the whole batch, as a warning said when the training was made."
    )
    return [sentence]


def _describe_key(key: Key) -> str:
    what, step, name = key
    return f"the {what} {name}" + (f" in step {step}" if step else " after all steps")


# The result of `verify`: numbers by name, and one sentence.


_UNMOVED = "The optimiser does not move"


class VerifyResult(FactTable, dict[str, Any]):
    """The numbers of a comparison with one process, by name, as data of JSON; shown as one sentence.

    `str` is that sentence with the reason and the numbers beneath; a notebook shows them as a table.

    >>> errors = {"loss_rel": 0.0, "buffers_rel": 0.0, "params_rel": 3e-15}
    >>> worst = {"worst_parameter": "layer1.conv2.weight", "worst_parameter_rel": 2e-13}
    >>> VerifyResult(ok=True, ranks=5, dtype="float64", **errors, **worst)
    Same as one process: worst relative difference 2e-13, in the gradient of layer1.conv2.weight
    """

    __slots__ = ()

    @property
    def sentence(self) -> str:
        """Whether the ranks compute the same as one process, and where they differ most."""
        errors = {
            f"the gradient of {self['worst_parameter']}": self["worst_parameter_rel"],
            "the losses": self["loss_rel"],
            "the weights after all steps": self["params_rel"],
            "the buffers after all steps": self["buffers_rel"],
        }
        where = max(errors, key=lambda name: errors[name])
        if self["ok"]:
            same = "Same as one process"
        elif self.get("why", "").startswith(_UNMOVED):
            same = "Same as one process, which does not learn everything either"
        else:
            same = "NOT the same as one process"
        if self["dtype"] != "float64":
            same += f", as far as {self['dtype']} is precise" if self["ok"] else f" in {self['dtype']}"
        if math.isinf(errors[where]):
            return f"{same}: {where} cannot be compared"
        if not errors[where]:
            return f"{same}: every bit"
        return f"{same}: worst relative difference {errors[where]:.0e}, in {where}"

    @property
    def caption(self) -> str:
        return self.sentence

    @property
    def facts(self) -> dict[str, object]:
        def format_value(value: object) -> object:
            if isinstance(value, Mapping):
                return ", ".join(f"{name} {format_value(fact)}" for name, fact in value.items())
            return f"{value:.1e}" if type(value) is float else value

        return {name: value if name == "seconds" else format_value(value) for name, value in self.items()}

    def __repr__(self) -> str:
        return self.sentence

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.sentence, self.get("why", ""), dict.__repr__(self))))


# Texts of `verify` where one process itself fails: what, where in the user's code, and what to do.


_OURS = ("/torch/", str(Path(__file__).parents[1]))


def _run_reference(run: Callable[[], TrainingRecord], dtype: torch.dtype) -> TrainingRecord:
    """Return the record of one process. Raises VerifyError, with the cause and the user's line, if it fails."""
    try:
        return run()
    except Mpi4dlError:
        raise
    except Exception as error:
        line = find_user_line("".join(traceback.format_tb(error.__traceback__)), _OURS)
        first, remedy = str(error).strip().partition("\n")[0], ""
        if "modified by an inplace operation" in first:
            first = first.partition(": [")[0]
            if not line:
                # The error arises in backward, which has no frame of the user's. In its anomaly mode autograd warns of
                # the forward call.
                with (
                    torch.autograd.set_detect_anomaly(True, check_nan=False),
                    warnings.catch_warnings(record=True) as caught,
                ):
                    warnings.simplefilter("always")
                    with suppress(Exception):
                        run()
                line = next(filter(None, (find_user_line(str(warning.message), _OURS) for warning in caught)), "")
            remedy = (
                " An operation in place, such as y.relu_() or y += 1, overwrites a value that a gradient needs. Ranks "
                "run it out of place and train the model, but plain PyTorch cannot. Write y = y.relu()."
            )
        elif TYPE_ERROR.search(first):
            remedy = (
                f" verify() converts the model to {str(dtype).removeprefix('torch.')}, which a cast to a fixed type, "
                "such as x.float(), does not follow. Cast to the type of the next layer instead, as in "
                "x.to(self.conv.weight.dtype)."
            )
        where = f" ({line})" if line else ""
        raise VerifyError(
            "The ranks cannot be compared with one process, because the plain model itself fails there: "
            f"{type(error).__name__}: {first.rstrip('.')}{where}.{remedy}"
        ) from error


# Train a plan on the ranks and the plain model in one process, and measure how much they differ.


STEPS = 3

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
"""Relative errors against one process in float64, over all tensors together.

A single ReLU on the other side of zero may use up that of float32.
"""

TIMES = 4
"""Beyond TOLERANCE, the error of the ranks may be this multiple of the error of one process in the same precision."""


def make_batches(recipe: Recipe, seed: int, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Return whole random batches, identical on every rank for the same seed."""
    random, classes = torch.Generator().manual_seed(seed), find_class_count(recipe.graph)

    def sample(name: str, spec: TensorSpec) -> Tensor:
        dtype = getattr(torch, spec.dtype)
        if spec.is_floating:  # drawn in float64, so that every precision gets the same images, rounded
            draw = torch.randn if name == "images" else torch.rand  # labels that are shares or counts are not negative
            return draw(spec.shape, generator=random, dtype=torch.float64).to(dtype)
        highest = 2 if dtype is torch.bool else classes
        return torch.randint(highest, spec.shape, generator=random, dtype=dtype)

    return [{name: sample(name, spec) for name, spec in recipe.step_specs.items()} for _ in range(steps)]


def record_rank_run(training: RankTraining, parts: Iterable[Inputs]) -> TrainingRecord:
    """Train on this rank's parts of some batches and record the results."""
    losses, gradients = [], []
    for part in parts:
        report = training.step(part)
        losses.append(report.losses)
        gradients.append(to_plain_names(training.copy_tensors()["gradients"]))
    final = training.copy_tensors()
    return TrainingRecord(
        tuple(losses), tuple(gradients), to_plain_names(final["weights"]), to_plain_names(final["buffers"])
    )


def with_small_loss_scale(recipe: Recipe) -> Recipe:
    """Return the recipe with a loss scale so small that float16 skips no step."""
    return replace(recipe, loss_scale=2.0**8)


def verify(world: World, recipe: Recipe, model: nn.Module, loss: Loss, seed: int) -> VerifyResult:
    """Compare three optimiser steps on random images between ranks and one process; the same result on every rank."""
    start_s, recipe = time.perf_counter(), with_small_loss_scale(recipe)
    whole = make_batches(recipe, seed)
    training = run_on_all(world, lambda: RankTraining(world, recipe), PlanError)
    records = world.gather(record_rank_run(training, map(training.cut, whole)))
    answer = run_on_first(world, lambda: compare_records(recipe, model, loss, whole, records or ()))
    answer["seconds"] = round(time.perf_counter() - start_s, 2)
    return answer


def check_reference(recipe: Recipe, model: nn.Module, loss: Loss, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise VerifyError if the plain model cannot be trained on `batches` in one process."""
    _train_plain_model(recipe, model, loss, torch.float64, lambda process: None, batches)


def _train_plain_model(
    recipe: Recipe, model: nn.Module, loss: Loss, dtype: torch.dtype, begin: Begin, batches: Any
) -> TrainingRecord:
    count, whole_model = recipe.plan.micro_batches, recipe.compares_whole
    unknown = recipe.graph.whole is not None and recipe.graph.whole.unknown  # each micro-batch has a loss of its own
    whole_loss = recipe.has_whole_loss or (whole_model and not unknown)

    def run() -> TrainingRecord:
        alone = ReferenceTraining(
            *(model, loss, recipe.optimiser, dtype, recipe.draws, count, recipe.rules),
            whole_model=whole_model,
            whole_loss=whole_loss,
        )
        begin(alone)
        return train_reference(alone, batches)

    # Constants without a type of their own, as torch.tensor([1.0, 3.0]) in a loss, follow the type that is computed in.
    # Ranks in float64 have them in the trace: there both sides have the same.
    traced = recipe.plan.precision == "float64"
    default = getattr(torch, recipe.graph.default_type) if traced else torch.promote_types(dtype, torch.float32)
    with use_default_type(default):
        return _run_reference(run, dtype)


def _run_in_best_type(
    precision: str, run: Callable[[torch.dtype], TrainingRecord]
) -> tuple[TrainingRecord, torch.dtype]:
    """Return the record of one process, and its type: float64, or float32 if ranks are in another and it fails there.

    Raises the VerifyError of float64 if both fail.
    """
    try:
        return run(torch.float64), torch.float64
    except VerifyError as error:
        if precision != "float64":
            with suppress(VerifyError):
                return run(torch.float32), torch.float32
        raise error from error.__cause__


def compare_records(
    recipe: Recipe,
    model: nn.Module,
    loss: Loss,
    whole: Sequence[Mapping[str, Tensor]],
    records: Sequence[TrainingRecord],
) -> VerifyResult:
    """Compare the ranks' records of the batches `whole` with one process in float64; return a line of JSON data.

    `ok` in float64: every loss, gradient, weight and buffer is, by itself, within TOLERANCE of its own size, or as near
    as rounding allows (`RoundingCheck`); if an ulp decides an optimiser's update, that is judged by the ranks' own
    gradients. `ok` in other precisions: every error is within TOLERANCE over all tensors, or
    within TIMES that of `one_process` in the same precision. `ok` is never true if a weight stays unchanged although
    its gradient is not zero and its learning rate not 0. `why` explains any deviation.
    A model that one process can compute in float32 only is compared with that; ranks in float32 are then as near as the
    rounding of float32 allows. Raises VerifyError.
    """

    def run_plain_model(
        dtype: torch.dtype, begin: Begin = lambda process: None, batches: Any = whole
    ) -> TrainingRecord:
        return _train_plain_model(recipe, model, loss, dtype, begin, batches)

    def run_perturbed(
        begin: Begin, meanwhile: AbstractContextManager[object], change: Callable[[Any], Any]
    ) -> TrainingRecord:
        with meanwhile:
            return run_plain_model(best, begin, [change(batch) for batch in whole])

    start: dict[str, Tensor] = {}

    def copy_weights(process: ReferenceTraining) -> None:
        start.update({name: weight.detach().clone() for name, weight in process.weights.items()})

    precision = recipe.plan.precision
    oracle, best = _run_in_best_type(precision, lambda dtype: run_plain_model(dtype, copy_weights))
    comparison = compare(oracle, records)
    # In float64 the model itself may still compute in float32 somewhere (a cast in its forward): then rounding is that.
    alike = precision == str(best).removeprefix("torch.")
    eps, where = find_lowest_precision(recipe.graph) if alike else (DOUBLE, "")
    rounding = RoundingCheck(oracle, run_perturbed, eps, start, records)
    line = {"ok": comparison.worst <= TOLERANCE.get(precision, 0.0), "ranks": len(records), **asdict(comparison)}
    line["dtype"], why = precision, []
    if alike:
        complete = math.isfinite(comparison.loss_rel) and math.isfinite(comparison.grad_rel)
        far = rounding.find_differences() if complete else []
        line["ok"] = complete and not far
        if far:
            why = [_describe_fault(far)]
        elif complete:
            why = _describe_rounding(rounding, where)
        else:
            why = ["Some losses or gradients are on ranks only, in one process only, or not finite."]
    else:
        # A lower precision has no bound that fits all models: one process in that precision is the yardstick.
        same = run_plain_model(getattr(torch, precision))
        usual = compare(oracle, [same.restrict_to(record) for record in records])
        line |= {"ok": line["ok"] or comparison.is_within(TIMES, usual), "one_process": asdict(usual)}
    if still := rounding.find_unmoved():
        why.insert(
            0 if line["ok"] else len(why),
            f"{_UNMOVED} {format_names(still)}, on ranks and in one process, although the gradient is "
            "not zero and the learning rate not 0: nothing is learned there. Look at the function that makes the "
            "optimiser.",
        )
        line["ok"] = False
    if best is torch.float32:
        why.append("One process, which cannot compute the model in float64, computes in float32 as well.")
    why += _describe_parts(recipe)
    return VerifyResult(line, why=" ".join(why)) if why else VerifyResult(line)
