"""Texts of `verify`: which tensors differ, by how much, and whether that is rounding or a fault."""

from __future__ import annotations

from collections.abc import Sequence

from engines.bench.rounding import EXACT, Key, RoundingCheck, TensorDifference
from engines.bench.ulps import DOUBLE
from engines.optimisers import format_names

__all__ = ["describe_fault", "describe_rounding", "describe_unmoved"]


def describe_fault(far: Sequence[TensorDifference]) -> list[str]:
    """Describe the tensor that differs most: by how much, and how much rounding explains."""
    first = far[0]
    others = f" So are {len(far) - 1} other tensors." if len(far) > 1 else ""
    size = "its size"
    if first.is_zero:
        what, step, _ = first.key
        size = f"the size of every {what}{' of the step' if step else ''} together (it is exactly 0 in one process)"
    return [
        (
            f"This is a fault, not rounding: {_describe_key(first.key)} is off by {first.rel:.1e} of {size}, and by "
            f"{first.usual:.1e} in one process whose weights and images change by an ulp.{others}"
        )
    ]


def describe_rounding(rounding: RoundingCheck, where: str) -> list[str]:
    """Explain why ranks are right although some tensors differ by more than EXACT; empty if none does."""
    inexact = rounding.find_inexact()
    noise = sorted({key[2] for key in inexact if rounding.is_noise(key)})
    others = [key for key in inexact if not rounding.is_noise(key)]
    said = []
    if inexact and rounding.eps > DOUBLE:
        said.append(f"The model computes in {where}, where rounding is {rounding.eps:.0e}.")
    if noise:
        said.append(
            f"The gradients of {format_names(noise)} are zero in theory and rounding in fact, which an optimiser that "
            "divides by a gradient's size makes larger."
        )
    if others:
        more = f", and {len(others) - 1} other tensors," if len(others) > 1 else ""
        said.append(
            f"Rounding explains that {_describe_key(others[0])}{more} differ from one process by more than {EXACT:.0e} "
            "of their size: it differs so from itself once its weights and images, and gradients that are zero in "
            "theory, change by rounding."
        )
    return said


def describe_unmoved(names: Sequence[str]) -> str:
    """Describe the weights that the optimiser leaves unchanged."""
    return (
        f"The optimiser does not move {format_names(names)}, on ranks and in one process, although the gradient is not "
        "zero and the learning rate not 0: nothing is learned there. Look at the function that makes the optimiser."
    )


def _describe_key(key: Key) -> str:
    what, step, name = key
    return f"the {what} {name}" + (f" in step {step}" if step else " after all steps")
