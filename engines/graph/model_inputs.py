"""What ranks give to a model and its loss: one tensor of images, volumes or signals, and one of labels.

The errors for anything else contain the code that makes it so.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from inspect import Parameter
from operator import index

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.errors import ImageError, TraceError

_MOST = 12  # keys of a dict that a message lists
_LABELS = {"y", "gt", "label", "labels", "target", "targets", "mask", "masks", "truth", "ground_truth"}
"""Names under which models take labels; any other argument of forward counts as images."""


def check_image_shape(image_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a batch: of images (N, C, H, W), volumes (N, C, D, H, W) or signals (N, C, L).

    Raises ImageError for another one.

    >>> check_image_shape([2, 3, 64, 96])
    (2, 3, 64, 96)
    """
    try:
        shape = tuple(map(index, image_shape))
    except TypeError:  # no sequence, or one of other numbers
        shape = ()
    if len(shape) not in (3, 4, 5) or min(shape) < 1:
        raise ImageError(
            f"image_shape={image_shape!r} must be (N, C, H, W), four positive whole numbers, such as (4, 3, 256, 256); "
            "volumes are (N, C, D, H, W), and signals (N, C, L)."
        )
    return shape


def check_forward(model: nn.Module) -> None:
    """Raise TraceError if forward needs something else than one batch of images: labels, or several images."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a function of C has no signature
        return
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        return
    required = [parameter for parameter in parameters if parameter.default is Parameter.empty]
    needed = [parameter.name for parameter in required if parameter.kind is not Parameter.VAR_KEYWORD]
    if len(needed) == 1 or (not needed and parameters):
        return
    listed = ", ".join(needed) or "no argument"
    takes = f"The forward of {type(model).__name__} takes {listed}, but ranks call model(images)"
    if not needed:
        raise TraceError(f"{takes}. Let it take the images.")
    images = [argument for argument in needed if argument.lower() not in _LABELS] or needed[:1]
    if len(images) < len(needed):
        labels = next(argument for argument in needed if argument not in images)
        raise TraceError(
            f"{takes} and then loss(prediction, labels). Give {labels} to the loss alone, Training(..., loss=...), and "
            f"as the model Around(model), which predicts without {labels}:\n"
            + _format_wrap(", ".join(f"{name}={'images' if name in images else 'None'}" for name in needed))
        )
    raise TraceError(
        f"{takes}, one tensor. If all of them are images, stack them along their channels, "
        f"torch.cat([{', '.join(needed)}], 1), and give Around(model), which parts them again:\n"
        + _format_wrap(f"*images.chunk({len(needed)}, dim=1)")
    )


def check_layer_names(model: nn.Module) -> None:
    """Raise TraceError for a layer whose name is no text: half of a surrogate pair cannot be sent, stored or drawn."""
    for name, _ in model.named_modules():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise TraceError(f"The name of the layer {name!a} is no text ({error.reason}). Rename the layer.") from None


def _format_wrap(arguments: str) -> str:
    """Return the source of a module that calls another one with other arguments."""
    return (
        "class Around(torch.nn.Module):\n"
        "    def __init__(self, model): super().__init__(); self.model = model\n"
        f"    def forward(self, images): return self.model({arguments})"
    )


# Images and labels that are no single tensor.


def describe_value(value: object) -> str:
    """Describe images or labels by kind, keys and shapes, without their numbers.

    >>> describe_value({"kinds": [1, 2]})
    "a dict of 'kinds' a list"
    """
    kind = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        entries = [
            f"{key!r} {describe_value(item) if isinstance(item, Tensor) else f'a {type(item).__name__}'}"
            for key, item in value.items()
        ]
        if not entries:
            return f"{kind} without entries"
        return f"{kind} of {', '.join(entries[:_MOST])}{', ...' * (len(entries) > _MOST)}"
    if isinstance(value, list | tuple):
        return f"{kind} of {len(value)} {'tensors' if all(isinstance(item, Tensor) for item in value) else 'values'}"
    return "None" if value is None else kind


def format_packing(labels: object) -> str:
    """Return how a dict of label tensors becomes one tensor, which the loss takes apart; empty for others."""
    if not isinstance(labels, Mapping) or len(labels) < 2:
        return ""
    parts = list(labels.items())
    if not all(isinstance(part, Tensor) and part.dim() and len(part) == len(parts[0][1]) for _, part in parts):
        return ""
    # Beside numbers of float32, whole ones beyond 2 ** 24 would lose their last digits; beyond 2 ** 53, of any floats.
    common = functools.reduce(torch.promote_types, (part.dtype for _, part in parts))
    whole_parts = [part.long() for _, part in parts if not part.is_floating_point() and part.numel()]
    largest = max((int(part.abs().max()) for part in whole_parts), default=0) if common.is_floating_point else 0
    if largest > _count_whole_numbers(torch.float64):
        return ""
    needs_double = common.is_floating_point and largest > _count_whole_numbers(common)
    start, unpacked = 0, []
    for key, part in parts:
        width = math.prod(part.shape[1:])
        whole = f".to({part.dtype})" if needs_double or not part.is_floating_point() else ""
        unpacked.append(f"{key!r}: y[:, {start}:{start + width}].reshape({(-1, *part.shape[1:])}){whole}")
        start += width
    return (
        f" Pack them into one tensor, torch.cat([part.reshape(len(part), -1){'.double()' * needs_double} for part "
        "in labels.values()], 1), which "
        f"the loss takes apart: loss=lambda prediction, y: your_loss(prediction, {{{', '.join(unpacked)}}})."
    )


def _count_whole_numbers(dtype: torch.dtype) -> float:
    """Return up to which number a floating-point type has all whole numbers."""
    return 2 / torch.finfo(dtype).eps
