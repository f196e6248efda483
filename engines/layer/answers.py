"""What a model may answer with, and which of it is the prediction.

Stock models answer with a tensor, or with a tuple, a list, a mapping or a dataclass of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engines.errors import TraceError

__all__ = ["joined_answers", "prediction_of", "tensors_of"]


def prediction_of(answer: Any) -> Any:
    """What the loss is given of a model's answer: its `logits` if it names any, or else its only tensor.

    An answer of several tensors without such a name is given as it is, to a loss that takes it so.
    """
    named = answer if isinstance(answer, Mapping) else vars(answer) if is_dataclass(answer) else _fields(answer)
    if named.get("logits") is not None:
        return named["logits"]
    found = list(tensors_of(answer).values())
    return found[0] if len(found) == 1 else answer


def _fields(answer: Any) -> Mapping[str, Any]:
    """Of a named tuple."""
    return answer._asdict() if hasattr(answer, "_asdict") else {}


def tensors_of(answer: Any) -> dict[str, Tensor]:
    """The tensors in a model's answer by their place in it, in its order. Raises TraceError where it hides any."""
    return dict(_walk(answer, ()))


def _walk(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield ".".join(place), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(item, (*place, str(index)))
    elif is_dataclass(value):
        for field in fields(value):
            yield from _walk(getattr(value, field.name), (*place, field.name))
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TraceError(
            f"The model answers with a {type(value).__name__}, in which no tensor can be found. "
            "Let it return a tensor, or a tuple, list, dict or dataclass of tensors."
        )


def joined_answers(answers: Sequence[Any]) -> Any:
    """One answer out of those to several micro-batches: each of its tensors has the images of all of them."""
    first = answers[0]
    if isinstance(first, Tensor):
        return torch.cat(list(answers))
    if isinstance(first, Mapping):
        found = {key: joined_answers([answer[key] for answer in answers]) for key in first}
        return found if type(first) is dict else type(first)(**found)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return replace(first, **{name: joined_answers([getattr(answer, name) for answer in answers]) for name in names})
    if isinstance(first, list | tuple):
        items = [joined_answers(parts) for parts in zip(*answers, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
