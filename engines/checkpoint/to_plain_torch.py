"""Load a checkpoint into plain PyTorch in one process: the optimiser continues where the ranks stopped.

model.load_state_dict(safetensors.torch.load_file(checkpoint / "model.safetensors"))
optimiser.load_state_dict(optimiser_state(checkpoint, model, optimiser))
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.checkpoint.checkpoint_reader import STATE, Checkpoint
from engines.checkpoint.compatibility import check_optimiser_state, check_shapes
from engines.checkpoint.json_values import decode_value
from engines.checkpoint.weight_state import get_class_name, make_optimiser_state
from engines.errors import CheckpointError
from engines.layer.state_names import OWNERS
from engines.layer.trace import find_first_names

__all__ = ["optimiser_state", "scheduler_state"]


def optimiser_state(
    path: str | Path, model: nn.Module, optimiser: torch.optim.Optimizer, loss: nn.Module | None = None
) -> dict[str, Any]:
    """Return the argument of `optimiser.load_state_dict`; the optimiser may list its weights in any order.

    `optimiser` updates weights of `model` (and of `loss`). `path` is a checkpoint or a folder of checkpoints. Of a
    folder the newest intact one is read, with a warning for each newer one that is damaged. Raises CheckpointError.

    >>> import tempfile, torch
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Training, optimiser_state
    >>> model, folder = resnet20_v1(), tempfile.mkdtemp()
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     training = Training(model, Plan(split_size=2, spatial_size=0), cluster, (2, 3, 32, 32))
    ...     loss = training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     path = training.save(folder)
    >>> optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimiser.load_state_dict(optimiser_state(folder, model, optimiser))
    """
    checkpoint = Checkpoint.open(Path(path), lambda found: _check_owners(found, model, loss))
    checkpoint.warn_of_passed_over(stacklevel=2)
    _check_owners(checkpoint, model, loss)
    first = find_first_names(model, loss)  # of tied weights, the name under which the ranks know them
    names = {
        id(weight): first[prefix + name]
        for prefix, owner in zip(OWNERS.values(), (model, loss), strict=True)
        if owner is not None
        for name, weight in owner.named_parameters()
    }
    stored = (checkpoint.manifest["optimiser"] or {}).get("kind", "none")
    if stored != get_class_name(optimiser):
        raise CheckpointError(
            f"{checkpoint.path}: its optimiser is {stored}, and this one is {get_class_name(optimiser)}."
        )
    for group in optimiser.param_groups:
        for weight in group["params"]:
            if id(weight) not in names:
                raise CheckpointError(
                    f"The optimiser moves a tensor {tuple(weight.shape)} that is no weight of the model. Make it of "
                    "model.parameters(), and of those of the loss if that is trained."
                )
    check_optimiser_state(checkpoint, optimiser, names)
    with checkpoint.translate_errors():
        return make_optimiser_state(optimiser, names, checkpoint.weight_states, partial(checkpoint.read_tensor, STATE))


def scheduler_state(path: str | Path) -> dict[str, Any] | None:
    """Return the argument of `scheduler.load_state_dict`, or None if the training had no scheduler.

    `path`, warnings and errors are those of `optimiser_state`.

    >>> import tempfile
    >>> from functools import partial
    >>> import torch
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Training, scheduler_state
    >>> halve, folder = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), tempfile.mkdtemp()
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     plan = Plan(split_size=2, spatial_size=0)
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32), scheduler=halve)
    ...     loss = training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     path = training.save(folder)
    >>> scheduler_state(folder)["last_epoch"]
    1
    """
    checkpoint = Checkpoint.open(Path(path))  # all files are checked, so that this is the one `optimiser_state` reads
    checkpoint.warn_of_passed_over(stacklevel=2)
    with checkpoint.translate_errors():
        stored = checkpoint.manifest["scheduler"]
        return decode_value(stored["state"]) if stored else None


def _check_owners(checkpoint: Checkpoint, model: nn.Module, loss: nn.Module | None) -> None:
    for owner, module in (("model", model), ("loss", loss)):
        if module is not None:
            outlines = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}
            check_shapes(checkpoint, owner, outlines)
