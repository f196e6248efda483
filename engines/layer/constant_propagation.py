"""What a model asks of tensors while it is traced: numbers that follow from shapes are answered, others are refused.

`torch.arange(2, x.dim()).tolist()` has one answer whatever the images are. So tensors that are made of no image and
no weight are computed on the side, and who asks for their numbers gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from engines.errors import TraceError
from engines.layer.source_location import find_current_line

__all__ = ["ConstantPropagationMode", "disable_tracing"]

LIMIT = 1 << 16
"""Numbers of a tensor that is computed on the side."""

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]

_ASKS = {
    getattr(Tensor, name): name.strip("_")
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
                 "numpy", "__array__", "is_nonzero", "equal", "allclose")
} | {torch.equal: "equal", torch.allclose: "allclose", torch.is_nonzero: "is_nonzero"}  # fmt: skip
"""Functions that answer with numbers of a tensor rather than with a tensor."""

_HOOKS = {getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")}

_MAKES = {
    getattr(torch, name)
    for name in ("tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor", "arange", "range", "linspace",
                 "logspace", "zeros", "ones", "full", "eye", "tril_indices", "triu_indices")
}  # fmt: skip
"""Functions that make a tensor of numbers that are given."""

_BY_SHAPE = {
    *(getattr(torch, name) for name in ("zeros_like", "ones_like", "full_like")),
    *(getattr(Tensor, name) for name in ("new_zeros", "new_ones", "new_full", "new_tensor", "numel")),
}
"""Functions that look at a tensor's shape and type only."""

_DRAWS = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "uniform", "exponential", "cauchy",
          "geometric", "rrelu", "empty")  # fmt: skip


@dataclass(frozen=True)
class _ConstantValue:
    """The numbers of a tensor, and the buffers that they follow from."""

    numbers: Tensor
    buffers: frozenset[str] = frozenset()


@dataclass
class ConstantPropagationMode(TorchFunctionMode):
    """Watches the functions that a model calls while it is traced.

    `held` are the tensors with numbers behind its buffers, by name. `decided` says of each buffer whose numbers were
    asked for where that was; `unanswered` where numbers were asked for that are not known.
    """

    held: Mapping[str, Tensor] = field(default_factory=dict)
    decided: dict[str, str] = field(default_factory=dict)
    unanswered: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._known: Any = WeakIdKeyDictionary()
        self._inference = torch.is_inference_mode_enabled()

    def add_buffers(self, twins: Mapping[str, Tensor]) -> None:
        """The module's own buffers, by name, as they are while it is traced."""
        for name, twin in twins.items():
            real = self.held.get(name)
            if real is not None and not real.is_meta and real.numel() <= LIMIT:
                with disable_tracing():
                    numbers = real.detach().to("cpu", twin.dtype, copy=True)
                self._known[twin] = _ConstantValue(numbers, frozenset({name}))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions."""
        kwargs = kwargs or {}
        if func == _DATA:
            return args[0].detach()  # which torch.export cannot follow otherwise
        self._refuse(func)
        if func in _ASKS:
            return self._evaluate_request(func, args, kwargs)
        made = func(*args, **kwargs)
        if isinstance(made, Tensor | tuple | list) or _is_mutating(func, kwargs):
            self._propagate(func, args, kwargs, made)
        return made

    def _refuse(self, func: Any) -> None:
        if func in _HOOKS:
            raise TraceError(
                f"{find_current_line()} calls Tensor.{func.__name__}: what it does to gradients would be lost on the "
                "ranks. Compute the same in forward, or take it out."
            )
        if torch.is_inference_mode_enabled() and not self._inference:
            raise TraceError(
                f"{find_current_line()} stands under torch.inference_mode(), whose tensors no gradient may be computed "
                "with. Use torch.no_grad()."
            )

    # ---- numbers that are asked for

    def _evaluate_request(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = [self._find_constant(each) for each in _iterate_tensors((args, kwargs))]
        if all(known):
            for name in frozenset().union(*(each.buffers for each in known)):  # type: ignore[union-attr]
                self.decided.setdefault(name, find_current_line())
            return self._evaluate(func, args, kwargs)
        asked = next(each for each in _iterate_tensors((args, kwargs)) if not self._find_constant(each))
        kind = str(asked.dtype).removeprefix("torch.")
        self.unanswered = (
            f"{find_current_line()} asks for the numbers ({_ASKS[func]}) of a {kind} tensor {tuple(asked.shape)}"
        )
        try:
            return func(*args, **kwargs)
        except Exception as error:
            raise self.make_error() from error

    def make_error(self) -> TraceError:
        """The error for numbers that are not known."""
        return TraceError(
            f"{self.unanswered}, which follow from images, labels or trained weights: while a model is traced nothing "
            "is known of these but their shapes. Its forward and its loss may take no decision from the values of a "
            "tensor; choose with torch.where, or compute with the tensor itself."
        )

    # ---- numbers that are known

    def _find_constant(self, tensor: Tensor) -> _ConstantValue | None:
        found = self._known.get(tensor)
        if found is None and not isinstance(tensor, FakeTensor) and not _is_opaque(tensor):
            with disable_tracing():
                found = self._known[tensor] = _ConstantValue(tensor.detach().clone())
        return found  # type: ignore[no-any-return]

    def _propagate(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Compute on the side what was made of what is known; forget what was written with what is not."""
        given = list(_iterate_tensors((args, kwargs)))
        by_shape = func in _BY_SHAPE
        if (by_shape or all(self._find_constant(each) for each in given)) and self._can_propagate(func, given, made):
            try:
                numbers = self._evaluate(func, args, kwargs)
            except Exception:  # what cannot be computed so is not known
                self._forget(given)
            else:
                self._store_constants(made, numbers, frozenset() if by_shape else self._collect_buffers(given))
        elif _is_mutating(func, kwargs):
            self._forget([*given[:1], *_iterate_tensors(kwargs.get("out"))])

    @staticmethod
    def _can_propagate(func: Any, given: list[Tensor], made: Any) -> bool:
        small = all(each.numel() <= LIMIT for each in _iterate_tensors(made))
        draws = any(word in _get_name(func) for word in _DRAWS)
        return small and (bool(given) or func in _MAKES) and not draws

    def _collect_buffers(self, given: list[Tensor]) -> frozenset[str]:
        return frozenset().union(*(known.buffers for each in given if (known := self._find_constant(each))))

    def _store_constants(self, made: Any, numbers: Any, buffers: frozenset[str]) -> None:
        for tensor, real in zip(_iterate_tensors(made), _iterate_tensors(numbers), strict=False):
            if tensor.shape == real.shape and tensor.dtype == real.dtype:
                self._known[tensor] = _ConstantValue(real, buffers)

    def _forget(self, written: list[Tensor]) -> None:
        """What lies in the memory of a tensor that was written is not known any more."""
        for tensor in written:
            found = self._known.get(tensor)
            if found is None:
                continue
            memory = found.numbers.untyped_storage().data_ptr()
            for each in list(self._known):
                if self._known[each].numbers.untyped_storage().data_ptr() == memory:
                    del self._known[each]

    def _evaluate(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The function of the known numbers; of a tensor whose shape alone counts, of zeros."""
        with disable_tracing():
            given, named = _map_tensors((args, {**kwargs}), self._get_numbers)
            if "device" in named:
                named["device"] = "cpu"
            return func(*given, **named)

    def _get_numbers(self, tensor: Tensor) -> Tensor:
        known = self._find_constant(tensor)
        return known.numbers if known else torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@contextmanager
def disable_tracing() -> Iterator[None]:
    """While it lasts torch computes with numbers, and nothing is traced."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def _is_opaque(tensor: Tensor) -> bool:
    """Whether a tensor with memory is none whose numbers may be taken as they are."""
    return type(tensor) is not Tensor or tensor.is_meta or tensor.numel() > LIMIT or tensor.requires_grad


def _get_name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _is_mutating(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument, or one that is called `out`."""
    name = _get_name(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") or kwargs.get("out") is not None


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _iterate_tensors(each)
    elif isinstance(value, dict):
        yield from _iterate_tensors(list(value.values()))


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_map_tensors(item, change) for item in value]
        return type(value)(items) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    return value
