"""Load trained weights into a plain model from a safetensors file with its own names, or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from engines.checkpoint.checkpoint_reader import Checkpoint, get_tensor_file
from engines.errors import CheckpointError

__all__ = ["load_weights"]


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a model's weights and buffers from a file, a checkpoint, or the newest intact one in a folder of them.

    Raises CheckpointError if they cannot be read or belong to another model; the model is then unchanged.
    """
    file = path
    if path.is_dir():
        checkpoint = Checkpoint.open(path, only=[get_tensor_file("model")])
        checkpoint.warn_of_passed_over(stacklevel=2)
        file = checkpoint.path / get_tensor_file("model")
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: no weights can be read from it ({error}). Give a safetensors file.") from error
    # All names and shapes are compared first: `load_state_dict` would copy what fits before it raises.
    ours, theirs = ({name: tuple(t.shape) for name, t in state.items()} for state in (model.state_dict(), found))
    wrong = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if wrong:
        told = ", ".join(
            f"{name} {theirs.get(name, 'missing')} instead of {ours.get(name, 'none')}" for name in wrong[:3]
        )
        raise CheckpointError(
            f"{file}: these are the weights of another model: of {len(ours)} tensors {len(wrong)} do not fit, such as "
            f"{told}. Give the model (--model-args, --num-classes) that it was saved from."
        )
    model.load_state_dict(found)
