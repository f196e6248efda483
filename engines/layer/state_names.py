"""The names of tensors in a module's own `state_dict()`, and their names on the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from engines.layer.graph import LOSS, MODEL
from engines.layer.trace import find_first_names

__all__ = ["OWNERS", "StateNames", "collect_state_names"]

OWNERS = {"model": MODEL, "loss": LOSS}
"""The owners of tensors, and the prefixes of their names on the ranks."""


@dataclass(frozen=True)
class StateNames:
    """The names of a module's `state_dict()`, in its order.

    `held` maps a state name to the name on the ranks; several map to one tensor if weights are tied. `kept` are the
    tensors that the graph does not use, by state name: no rank changes them. As in PyTorch, buffers registered with
    `persistent=False` are not part of the state.
    """

    names: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Tensor] = field(default_factory=dict)

    def drop_unused_tensors(self) -> StateNames:
        """Return a copy without `kept`, to be sent to ranks, which do not need those tensors."""
        return replace(self, kept={})


def collect_state_names(model: nn.Module, loss: object, used: Collection[str]) -> dict[str, StateNames]:
    """Return the names of the model and, if it is a module, of the loss; `used` are the names that graph nodes read."""
    first = find_first_names(model, loss)
    found = {}
    for owner, module in (("model", model), ("loss", loss)):
        if isinstance(module, nn.Module):
            named = [*module.named_parameters(), *module.named_buffers()]
            # By identity: a state_dict() lists a tied weight under each of its names, the ranks know only the first.
            ranks_say = {id(tensor): first[OWNERS[owner] + name] for name, tensor in named}
            state = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
            held = {name: said for name, t in state.items() if (said := ranks_say.get(id(t))) in used}
            kept = {name: t.detach() for name, t in state.items() if name not in held}
            found[owner] = StateNames(tuple(state), held, kept)
    return found
