"""The supported outputs of a model: what the loss is given of them, and which tensor is the prediction.

Stock models return a tensor, or a tuple, a list, a mapping, a dataclass or another object with tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.graph.watch_forward import restore_module_stack


def get_prediction(answer: Any) -> Any:
    """Return the prediction in a model's output: its `logits` if present, or else its only tensor.

    An output of several tensors without that name is returned unchanged.
    """
    is_named = isinstance(answer, tuple) and hasattr(answer, "_asdict")  # a named tuple
    parts = _get_parts(answer._asdict() if is_named else answer)
    if parts and parts.get("logits") is not None:
        return parts["logits"]
    tensors = list(collect_tensors(answer).values())
    return tensors[0] if len(tensors) == 1 else answer


def _get_parts(value: Any) -> Mapping[Any, Any] | None:
    """Return what a container holds, by key, name or position, or None if a value is none in which tensors may be."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return vars(value) if _has_logits(value) else None


def _has_logits(value: Any) -> bool:
    """Return whether a value is an object of no known kind that has logits among its attributes."""
    return hasattr(value, "__dict__") and isinstance(vars(value).get("logits"), Tensor)


def collect_tensors(answer: Any) -> dict[str, Tensor]:
    """Return the tensors in a model's output by their place in it, in order. Raises TraceError for other types."""
    return dict(_iterate_places(answer, ()))


def _iterate_places(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield ".".join(place), value
    elif (parts := _get_parts(value)) is not None:
        for key, item in parts.items():
            yield from _iterate_places(item, (*place, str(key)))
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TraceError(
            f"The model answers with a {type(value).__name__}, in which no tensor can be found. "
            "Let it return a tensor, or a tuple, list, dict or dataclass of tensors."
        )


def collect_from_prediction(answer: Any) -> dict[str, Tensor]:
    """Return the tensors in a model's output by their place in it, the prediction first."""
    prediction, tensors = get_prediction(answer), collect_tensors(answer)
    return dict(sorted(tensors.items(), key=lambda item: item[1] is not prediction))


def map_tensors(function: Callable[..., Tensor], *answers: Any) -> Any:
    """Return an output like these, whose tensors are `function` of those at the same place of each of them."""
    first = answers[0]
    if isinstance(first, Tensor):
        return function(*answers)
    if isinstance(first, Mapping):
        mapped = {key: map_tensors(function, *(answer[key] for answer in answers)) for key in first}
        return mapped if type(first) is dict else type(first)(**mapped)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        parts = {name: map_tensors(function, *(getattr(answer, name) for answer in answers)) for name in names}
        return replace(first, **parts)
    if isinstance(first, list | tuple):
        items = [map_tensors(function, *parts) for parts in zip(*answers, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if _has_logits(first):
        output = copy.copy(first)
        vars(output).update(map_tensors(function, *map(vars, answers)))
        return output
    return first


def merge_outputs(answers: Sequence[Any]) -> Any:
    """Concatenate the outputs for several micro-batches: each tensor then has the images of all of them."""
    return map_tensors(lambda *tensors: torch.cat(tensors), *answers)


# What a loss is given.


def call_loss(loss: Callable[..., Any], answer: Any, labels: Any) -> tuple[Any, Any]:
    """Return the loss of a model's output, and what the loss was given: the whole output, as in a loop of one's own.

    Only if the loss cannot take the whole, because it wants a tensor, it is given the prediction (`get_prediction`).
    Raises what the loss raises.
    """
    try:
        with restore_module_stack():
            return loss(answer, labels), answer
    except (AttributeError, TypeError, KeyError) as error:
        prediction = get_prediction(answer)
        if prediction is answer or not _wants_tensor(error):
            raise
        failure = error
    try:
        return loss(prediction, labels), prediction
    except (AttributeError, TypeError, KeyError):  # it takes neither: the first error is that of a loop of one's own
        raise failure from None


def _wants_tensor(error: Exception) -> bool:
    """Return whether a loss may have failed since it treats the whole output as one tensor.

    So do `output.shape` and `output[:, 0]`. A loss that asks a tensor for an attribute that it lacks, or a mapping for
    a name, has taken the whole, and is wrong.
    """
    if isinstance(error, KeyError):
        return not error.args or not isinstance(error.args[0], str)
    return not isinstance(getattr(error, "obj", None), Tensor)


def find_left_out(answer: Any, given: Any) -> tuple[str, ...]:
    """Return the places of the tensors in a model's output that are not in what the loss is given."""
    if given is answer:
        return ()
    places, known = [], {id(tensor) for tensor in collect_tensors(given).values()}
    with suppress(TraceError):  # the loss is not given it, so that anything may be in it
        places = [place for place, tensor in _iterate_places(answer, ()) if id(tensor) not in known]
    return tuple(places)


def warn_of_left_out(graph: ModelGraph, stacklevel: int) -> None:
    """Warn if the loss is given the logits of the model's output alone, since it cannot take the whole output."""
    if graph.left_out:
        several, verb = ("s", "count") if len(graph.left_out) > 1 else ("", "counts")
        warnings.warn(
            f"The loss takes a tensor, and not all that the model returns: it is given the logits. The other "
            f"tensor{several} ({format_names(list(graph.left_out))}) {verb} nothing in the training. "
            "For a loss of all of them, write a function of what the model returns and the labels, such as "
            "loss=lambda o, y: cross_entropy(o.logits, y) + ...",
            stacklevel=stacklevel + 1,
        )
