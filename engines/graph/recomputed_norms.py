"""How often a step updates the statistics of norms: what is computed once more in backward updates them once more.

`torch.utils.checkpoint` runs a part of forward again in backward. A batch norm in that part then takes the same batch
into its running statistics twice, and counts it twice. A trace of forward has it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, find_updated_buffers, to_user_name


class _UpdateCount(TorchDispatchMode):
    """Counts, within it, the operators that update each of some buffers."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(buffer): name for name, buffer in buffers.items()}
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one ATen operator. Called by torch."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        is_norm = "norm" in func._schema.name and (named.get("training") or named.get("use_input_stats"))
        counts_up = func is torch.ops.aten.add_.Tensor
        # A norm writes to its statistics without saying so in its schema.
        written = ("running_mean", "running_var") if is_norm else ("self",) if counts_up else ()
        self.counts.update(self.names[id(named[name])] for name in written if id(named.get(name)) in self.names)
        return func(*args, **(kwargs or {}))


def find_recomputed_buffers(
    graph: ModelGraph, buffers: Mapping[str, Tensor], forward: Callable[[], Tensor]
) -> dict[str, int]:
    """Return how often a step updates each buffer for one update in forward, as far as that is more than once.

    `forward` computes the loss with copies without memory, and `buffers` are those of the copies by graph name.
    Raises TraceError if it cannot be counted, or if a buffer's updates in forward are not all repeated alike.
    """
    updated = {name for node in graph.nodes for name in find_updated_buffers(graph, node)} & buffers.keys()
    if not updated:
        return {}
    try:
        with torch.enable_grad(), _UpdateCount({name: buffers[name] for name in updated}) as count:
            loss = forward()
            first = Counter(count.counts)
            loss.backward()
    except Exception as error:
        raise TraceError(
            "The model computes a part of forward once more in backward (torch.utils.checkpoint), and has norms that "
            f"count what they see ({to_user_name(min(updated))}). How often they do could not be found out: "
            f"{type(error).__name__}: {error}. Leave it out: Plan(checkpoint_activations=True) recomputes."
        ) from error
    for name in sorted(updated):
        if first[name] and count.counts[name] % first[name]:
            raise TraceError(
                f"One step updates the buffer {to_user_name(name)} {first[name]} times in forward, and "
                f"{count.counts[name] - first[name]} times where the model computes once more in backward "
                "(torch.utils.checkpoint): not each of the updates is repeated. Recompute all calls of that norm, or "
                "none."
            )
    return {name: times for name in updated if first[name] and (times := count.counts[name] // first[name]) > 1}
