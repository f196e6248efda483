"""Exercises at the end of a tutorial: compare a reader's answer with what this machine computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def grade_answer(answer: Any, truth: Callable[[], Any], hint: str) -> str:
    """Return the reply to an answer. `truth` is computed only once there is one; a float is right within 5 %.

    >>> grade_answer(None, lambda: 5, "Count the ranks of both stages.")
    'Put your answer into the cell above, then run this one.'
    >>> grade_answer(4, lambda: 5, "Count the ranks of both stages.")
    'Not 4. Count the ranks of both stages.'
    >>> grade_answer(5, lambda: 5, "Count the ranks of both stages.")
    'Right: 5.'
    >>> grade_answer(0.49, lambda: 0.5, "How much of the time does a rank wait?")
    'Right within 5 %: 0.5.'
    """
    if answer is None:
        return "Put your answer into the cell above, then run this one."
    right = truth()
    if isinstance(answer, str) and not isinstance(right, str):
        return f"Give {answer} without quotes."
    if answer == right:
        return f"Right: {right}."
    if isinstance(right, float) and isinstance(answer, (int, float)) and math.isclose(answer, right, rel_tol=0.05):
        return f"Right within 5 %: {right:.4g}."
    return f"Not {answer}. {hint}"
