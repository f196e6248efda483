"""The supported outputs of a model, and which part of them is the prediction.

Stock models return a tensor, or a tuple, a list, a mapping or a dataclass of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engines.errors import TraceError

__all__ = ["collect_tensors", "get_prediction", "merge_outputs"]


def get_prediction(answer: Any) -> Any:
    """Return the part of a model's output that the loss receives: its `logits` if present, or else its only tensor.

    An output of several tensors without that name is returned unchanged, for a loss that accepts it.
    """
    named: Mapping[str, Any] = {}
    if isinstance(answer, Mapping):
        named = answer
    elif is_dataclass(answer):
        named = vars(answer)
    elif hasattr(answer, "_asdict"):  # a named tuple
        named = answer._asdict()
    if named.get("logits") is not None:
        return named["logits"]
    found = list(collect_tensors(answer).values())
    return found[0] if len(found) == 1 else answer


def collect_tensors(answer: Any) -> dict[str, Tensor]:
    """Return the tensors in a model's output by their place in it, in order. Raises TraceError for other types."""
    return dict(_iterate_places(answer, ()))


def _iterate_places(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield ".".join(place), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _iterate_places(item, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _iterate_places(item, (*place, str(index)))
    elif is_dataclass(value):
        for field in fields(value):
            yield from _iterate_places(getattr(value, field.name), (*place, field.name))
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TraceError(
            f"The model answers with a {type(value).__name__}, in which no tensor can be found. "
            "Let it return a tensor, or a tuple, list, dict or dataclass of tensors."
        )


def merge_outputs(answers: Sequence[Any]) -> Any:
    """Concatenate the outputs for several micro-batches: each tensor then has the images of all of them."""
    first = answers[0]
    if isinstance(first, Tensor):
        return torch.cat(list(answers))
    if isinstance(first, Mapping):
        found = {key: merge_outputs([answer[key] for answer in answers]) for key in first}
        return found if type(first) is dict else type(first)(**found)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return replace(first, **{name: merge_outputs([getattr(answer, name) for answer in answers]) for name in names})
    if isinstance(first, list | tuple):
        items = [merge_outputs(parts) for parts in zip(*answers, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
