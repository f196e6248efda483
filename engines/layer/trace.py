"""Trace any `nn.Module`, with a loss or without, at full image size and without memory, into a `ModelGraph`.

The model is exported by `torch.export` on the meta device, never run, and never changed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engines.errors import TraceError
from engines.layer.answers import prediction_of, tensors_of
from engines.layer.casts import with_casts
from engines.layer.graph import LOSS, MODEL, ModelGraph, TensorSpec, plain_name
from engines.layer.reader import Reader, spec_of
from engines.plan import HALF

__all__ = ["LOSS", "MODEL", "answer", "first_names", "plain_name", "trace", "trace_alone"]

_ONE_AT_A_TIME = threading.Lock()  # torch.export keeps global state; ranks may be threads


class _DataAsDetached(TorchFunctionMode):
    """`x.data`, which torch.export cannot follow, is read as `x.detach()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions."""
        return args[0].detach() if func == _DATA else func(*args, **(kwargs or {}))


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        with _DataAsDetached():
            prediction = prediction_of(self.model(images))
        found = tensors_of(prediction)
        try:
            loss = self.loss(prediction, labels)
        except (TypeError, AttributeError) as error:
            if isinstance(prediction, Tensor):
                raise
            raise TraceError(_untaken(prediction, list(found), error)) from error
        return loss, *found.values()


class _Alone(nn.Module):
    """The model in evaluation mode: no dropout, batch norm by its running statistics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        with _DataAsDetached():
            return tuple(tensors_of(prediction_of(self.model(images))).values())


def trace(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    images: TensorSpec,
    labels: TensorSpec,
    precision: str = "",
    device: str = "cpu",
) -> ModelGraph:
    """The graph of `loss(model(images), labels)`, a scalar.

    `images` is (N, C, H, W) of one micro-batch at whole-image size; the model is traced in its precision and
    in the mode (train or eval) that it is in. If `precision` is a half one, the graph has the casts that
    `torch.autocast` does on that type of `device`. Raises TraceError where `torch.export` cannot follow the model.
    """
    dtype = getattr(torch, images.dtype)
    judge = _on_meta(loss).to(dtype) if isinstance(loss, nn.Module) else loss
    whole = _WithLoss(_on_meta(model).to(dtype), judge)
    return _exported(model, whole, (images, labels), precision, device, (model, loss))


def trace_alone(model: nn.Module, images: TensorSpec, precision: str = "", device: str = "cpu") -> ModelGraph:
    """The graph of `model.eval()(images)`, for prediction: it has no loss, and nothing in it is trained.

    The rest is as in `trace`; the model itself stays in the mode that it is in.
    """
    whole = _Alone(_on_meta(model).to(getattr(torch, images.dtype)))
    return _exported(model, whole, (images,), precision, device, (model,))


def _exported(
    model: nn.Module, whole: nn.Module, specs: Sequence[TensorSpec], precision: str, device: str, owners: Sequence[Any]
) -> ModelGraph:
    inputs = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs]
    with _following(model, specs[0]):
        exported = torch.export.export(whole, tuple(inputs), strict=False).module()
        if precision in HALF:
            with torch.device(device):
                with_casts(exported, getattr(torch, precision), device)
        graph = Reader(exported, first_names(*owners), has_loss=isinstance(whole, _WithLoss)).graph()
    return replace(graph, chains=frozenset(_chains(model)))


def first_names(*owners: object) -> dict[str, str]:
    """Every name of the weights and buffers of a model, and of its loss if given -> the first one of that tensor."""
    names: dict[str, str] = {}
    for prefix, owner in zip((MODEL, LOSS), owners, strict=False):
        if isinstance(owner, nn.Module):
            first: dict[int, str] = {}
            for named in (owner.named_parameters, owner.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    names[prefix + name] = first.setdefault(id(tensor), prefix + name)
    return names


def answer(model: nn.Module, images: TensorSpec) -> TensorSpec:
    """The (first) tensor that the model answers with to images of that shape, found without running it on real ones."""
    dtype = getattr(torch, images.dtype)
    twin = _on_meta(model).to(dtype)
    held = dict(twin.named_buffers())
    with _following(model, images), torch.no_grad():
        found = tensors_of(prediction_of(twin(torch.empty(images.shape, dtype=dtype))))
    for name, buffer in twin.named_buffers():
        if buffer is not held.get(name):
            raise TraceError(f"The model replaces its buffer {name} while it runs. Keep such values outside.")
    if not found:
        raise TraceError("The model answers with no tensor: there is nothing to train.")
    return spec_of(next(iter(found.values())))


@contextmanager
def _following(model: nn.Module, images: TensorSpec) -> Iterator[None]:
    try:
        with _ONE_AT_A_TIME, torch.device("meta"):
            yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_untraceable(model, images, error)) from error


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy with the same names and no memory: tensors are replaced before they would be copied."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): _meta_like(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo).to("meta")


def _meta_like(tensor: Tensor) -> Tensor:
    twin = torch.empty_like(tensor, device="meta")
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def _chains(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        sequential = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if sequential or isinstance(module, nn.ModuleList):
            yield name


def _untraceable(model: nn.Module, images: TensorSpec, error: Exception) -> str:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"{type(model).__name__} cannot be traced with images of shape {images.shape}: "
        f"{type(error).__name__}: {reason}. Check that it runs on images of this shape, the loss too, "
        "and that its forward takes no decision from the values of a tensor; tensors that either keeps must be "
        "parameters or buffers."
    )


def _untaken(prediction: Any, places: list[str], error: Exception) -> str:
    return (
        f"The model answers with a {type(prediction).__name__} of {len(places)} tensors ({', '.join(places)}), none of "
        f"them called logits, and the loss does not take it ({type(error).__name__}: {error}). Give a loss that does: "
        "a function of this answer and the labels."
    )
