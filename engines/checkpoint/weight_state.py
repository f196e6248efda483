"""The state of an optimiser by weight name, independent of which rank updates which weight.

`torch.optim` numbers the weights in the order in which it received them, and every rank has other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.checkpoint.json_values import check_like, decode_value, encode_value
from engines.errors import CheckpointError

__all__ = ["WeightState", "collect_weight_states", "get_class_name", "make_optimiser_state"]


@dataclass(frozen=True)
class WeightState:
    """The optimiser's state of one weight: `options` of its group (such as lr), `values` and keys of `tensors`.

    `options` and `values` are JSON data.
    """

    options: Mapping[str, Any]
    values: Mapping[str, Any]
    tensors: tuple[str, ...]


def get_class_name(made: object) -> str:
    """Return the class name of an optimiser or a scheduler."""
    return type(made).__name__


def collect_weight_states(
    optimiser: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, WeightState], dict[str, Tensor]]:
    """Return the state of each weight by name, and the tensors by `WEIGHT/KEY`. `names` maps ids of weights to names.

    Raises CheckpointError if the optimiser keeps state that belongs to no single weight, or that is no number or
    tensor.
    """
    kind = get_class_name(optimiser)
    if strange := [key for key in optimiser.state if id(key) not in names]:
        raise CheckpointError(f"{kind} keeps {strange[0]!r}, which is of no weight. A checkpoint has state by weight.")
    states: dict[str, WeightState] = {}
    tensors: dict[str, Tensor] = {}
    for group in optimiser.param_groups:
        options = {
            key: encode_value(value, kind) for key, value in group.items() if key not in ("params", "param_names")
        }
        for weight in group["params"]:
            name, kept = names[id(weight)], optimiser.state.get(weight, {})
            held = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
            values = {key: encode_value(value, kind) for key, value in kept.items() if key not in held}
            states[name] = WeightState(options, values, tuple(held))
            tensors |= {f"{name}/{key}": tensor for key, tensor in held.items()}
    return states, tensors


def make_optimiser_state(
    optimiser: torch.optim.Optimizer,
    names: Mapping[int, str],
    states: Mapping[str, WeightState],
    tensor: Callable[[str], Tensor],
) -> dict[str, Any]:
    """Return the argument of `optimiser.load_state_dict`, for the optimiser's weights that `states` contains.

    `tensor` reads a tensor by its name; a tensor on the meta device stays there. Raises CheckpointError if weights of
    one group had different options.
    """
    # The optimiser's own state_dict() has the numbers of its weights; saved options and state are put in their places:
    #
    #   saved, by name     {"conv.weight": state, "fc.bias": state, "fc.weight": state}
    #   this rank holds    group 0: fc.weight, fc.bias
    #   result             group 0: params [0, 1], saved options;  state {0: of fc.weight, 1: of fc.bias}
    made = optimiser.state_dict()
    for group, packed in zip(optimiser.param_groups, made["param_groups"], strict=True):
        said = [names[id(weight)] for weight in group["params"]]
        saved = [name for name in said if name in states]
        if other := next((name for name in saved if states[name].options != states[saved[0]].options), None):
            raise CheckpointError(
                f"{saved[0]} and {other} were in groups of the optimiser with other options, and are in one group now. "
                "Make the optimiser with the groups that it had."
            )
        options = decode_value(states[saved[0]].options) if saved else {}
        known = options.keys() & packed.keys()  # schedulers add others, which no step reads
        check_like({key: options[key] for key in known}, {key: packed[key] for key in known}, get_class_name(optimiser))
        packed.update(options)
        for index, name, weight in zip(packed["params"], said, group["params"], strict=True):
            if name in states and (kept := _read_weight_state(name, weight, states[name], tensor)):
                made["state"][index] = kept
    return made


def _read_weight_state(
    name: str, weight: Tensor, state: WeightState, tensor: Callable[[str], Tensor]
) -> dict[str, Any]:
    kept = {key: decode_value(value) for key, value in state.values.items()}
    for key in state.tensors:
        read = tensor(f"{name}/{key}")  # mapped from the file, which others may overwrite
        if read.is_meta:
            kept[key] = read
            continue
        like = weight if read.shape == weight.shape else read  # the weight's memory layout: others slow down steps
        kept[key] = torch.empty_like(like, dtype=read.dtype, device="cpu", requires_grad=False).copy_(read)
    return kept
