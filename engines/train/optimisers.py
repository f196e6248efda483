"""The optimiser that a user's function makes. A rank passes all parameters of the model to it, and keeps its own.

So names, positions and shapes mean the same on a rank as in one process. A parameter that another rank holds is
replaced by a placeholder of the same shape and type, without memory of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.graph.model_graph import to_user_name
from mpi4dl_nb.engines.graph.owners import iterate_owners
from mpi4dl_nb.engines.program.update import list_weights

Optimiser = Callable[[Any], torch.optim.Optimizer]
"""Makes the optimiser of parameters, or of (name, parameter) pairs if its first argument is called NAMED."""

NAMED = "named_parameters"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the plain model or its loss: its name there, its name on ranks (`key`), its shape and type."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def make_placeholder(self, device: torch.device | str = "cpu") -> nn.Parameter:
        """Make a parameter of this shape, all of whose elements share one zero in memory."""
        zero = torch.zeros((), dtype=self.dtype, device=device)
        return nn.Parameter(zero.expand(self.shape), requires_grad=self.requires_grad)


def collect_parameter_specs(
    model: nn.Module, loss: object, held_in: torch.dtype, used: Collection[str] = ()
) -> tuple[ParameterSpec, ...]:
    """Collect all parameters, frozen ones too, in the order of `named_parameters()`: the model's, then the loss's.

    Floating-point parameters have type `held_in`. `used` holds the ranks' names of the parameters that the traced graph
    reads. Raises PlanError if the loss reads a parameter of the model, and TraceError for a complex parameter that
    requires gradients.
    """
    specs: dict[int, ParameterSpec] = {}
    for prefix, owner in iterate_owners(model, loss):
        for name, weight in owner.named_parameters():
            # Weights tied between model and loss: on ranks the loss has its own copy, which would be trained apart.
            if id(weight) in specs:
                if prefix + name not in used:
                    continue
                raise PlanError(
                    f"The loss holds the model's parameter {specs[id(weight)].name} (as {name}), and ranks would train "
                    "two copies of it. Compute what the loss needs of it in the model's forward, as one of its outputs."
                )
            if weight.is_complex() and weight.requires_grad:
                raise TraceError(
                    f"The parameter {to_user_name(prefix + name)} is {weight.dtype}, and ranks train real ones only. "
                    "Hold its real and imaginary parts in one real parameter with a last axis of 2, such as "
                    "nn.Parameter(torch.view_as_real(w)), and call torch.view_as_complex on it in forward."
                )
            dtype = held_in if weight.is_floating_point() else weight.dtype
            key = prefix + name
            specs[id(weight)] = ParameterSpec(to_user_name(key), key, tuple(weight.shape), dtype, weight.requires_grad)
    return tuple(specs.values())


def make_optimiser(function: Optimiser, named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Make the optimiser with a user's function, from all parameters of a model, `named` in the model's order.

    The function freezes a parameter with `requires_grad_(False)`. Raises PlanError if the function fails, if the
    optimiser has a parameter that was not passed in, or if a parameter that requires gradients is in none of its
    groups.
    """
    frozen = [name for name, weight in named.items() if not weight.requires_grad]
    optimiser = _call_function(function, named)
    if not isinstance(optimiser, torch.optim.Optimizer):
        raise PlanError(
            f"optimiser makes a {type(optimiser).__name__}, not a torch.optim.Optimizer. Give a function of parameters "
            "that returns one, such as partial(torch.optim.SGD, lr=0.1)."
        )
    # A scheduler writes to a tensor learning rate, which would otherwise be that of the user's function itself.
    for options in (optimiser.defaults, *optimiser.param_groups):
        options.update({key: value.clone() for key, value in options.items() if isinstance(value, Tensor)})
    known = {id(weight) for weight in named.values()}
    moved = list_weights(optimiser)
    if foreign := [weight for weight in moved if id(weight) not in known]:
        raise PlanError(
            f"The optimiser has {len(foreign)} parameters that its function was not given, the first of shape "
            f"{tuple(foreign[0].shape)}: they are not the weights that ranks train. Use the function's argument, as in "
            "lambda params: torch.optim.SGD(params, lr=0.1), and not model.parameters()."
        )
    held = {id(weight) for weight in moved}
    if missing := [name for name, weight in named.items() if weight.requires_grad and id(weight) not in held]:
        raise PlanError(
            f"The optimiser has no group for {len(missing)} of the {len(named)} parameters that its function was "
            f"given: {format_names(missing)}. To freeze them call requires_grad_(False) on them, in the model or in "
            "the function; otherwise put them into a group."
        )
    if woken := [name for name in frozen if named[name].requires_grad]:
        raise PlanError(
            f"The optimiser's function sets requires_grad on {format_names(woken)}, which the model has frozen. Call "
            "requires_grad_(True) on the model before it is given."
        )
    return optimiser


def make_on_rank(
    function: Optimiser, specs: Sequence[ParameterSpec], weights: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """Make the optimiser of a rank that holds `weights` (by the ranks' names), with all groups of the whole model's.

    Groups without a weight of this rank are empty. Raises PlanError as `make_optimiser` does, and if the function
    freezes one of `weights`.
    """
    # The function sees the whole model on every rank. Placeholders of other ranks' parameters share one zero each:
    #
    #     model      a  b  c  d
    #     rank 0     a  b  .  .        groups as the function makes them, then only a and b are kept
    #     rank 1     .  .  c  d
    device = next((weight.device for weight in weights.values()), torch.device("cpu"))
    named = {spec.name: weights[spec.key] if spec.key in weights else spec.make_placeholder(device) for spec in specs}
    optimiser = make_optimiser(function, named)
    if lost := [name for name, weight in weights.items() if not weight.requires_grad]:
        raise PlanError(
            f"The optimiser's function has frozen {format_names(lost)} on a rank, but not before. Let it make the same "
            "optimiser whenever it is called."
        )
    # Only this rank's own weights stay in the optimiser; its groups stay, in their order.
    kept = {id(weight) for weight in weights.values()}
    for group in optimiser.param_groups:
        mine = [id(weight) in kept for weight in group["params"]]
        for key in group.keys() & {"params", "param_names"}:
            group[key][:] = list(compress(group[key], mine))
    states: dict[Any, Any] = optimiser.state  # an optimiser of the user's may keep some by other keys
    for weight in [key for key in states if isinstance(key, Tensor) and id(key) not in kept]:
        del states[weight]
    return optimiser


def _call_function(function: Optimiser, named: Mapping[str, Tensor]) -> Any:
    if not callable(function):
        raise PlanError(
            f"optimiser is a {type(function).__name__}, not a function. Ranks make it of their own weights: give a "
            "function of parameters, such as partial(torch.optim.SGD, lr=0.1)."
        )
    try:
        pairs = next(iter(inspect.signature(function).parameters), None) == NAMED
    except (TypeError, ValueError):  # some callables written in C have no signature
        pairs = False
    try:
        return function(list(named.items()) if pairs else list(named.values()))
    except PlanError:
        raise
    except Exception as error:
        advice = ""
        if not pairs and "unpack" in str(error):  # the function takes parameters for pairs
            advice = f". It is given (name, parameter) pairs if its first argument is called {NAMED}."
        raise PlanError(f"The optimiser cannot be made: {type(error).__name__}: {error}{advice}") from error
