"""Constant propagation while a model is traced: numbers that follow from shapes are available, all others are refused.

`torch.arange(2, x.dim()).tolist()` has the same result for all images. Tensors that depend on no image and no weight
are therefore also computed with real numbers, and reads of their numbers return these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.exported_nodes import find_current_line
from mpi4dl_nb.engines.graph.outside_tensors import OwnedMemory, is_real

LIMIT = 1 << 16
"""Maximum number of elements of a tensor that is computed with real numbers."""

_ASKING = (
    "item tolist numpy is_nonzero equal allclose "
    "__bool__ __int__ __float__ __index__ __complex__ __contains__ __array__"
)
_ASKS = {getattr(Tensor, name): name.strip("_") for name in _ASKING.split()}
_ASKS |= {torch.equal: "equal", torch.allclose: "allclose", torch.is_nonzero: "is_nonzero"}
"""Functions that return numbers of a tensor rather than a tensor."""

_HOOKS = {getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")}

_FLAGS = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
"""Functions that freeze a tensor or let it be trained."""

_MAKING = (
    "tensor as_tensor asarray from_numpy scalar_tensor arange range linspace logspace zeros ones full eye "
    "tril_indices triu_indices"
)
_MAKES = {getattr(torch, name) for name in _MAKING.split()}
"""Functions that create a tensor from given numbers."""

_BY_SHAPE = {
    *(getattr(torch, name) for name in ("zeros_like", "ones_like", "full_like")),
    *(getattr(Tensor, name) for name in ("new_zeros", "new_ones", "new_full", "new_tensor", "numel")),
}
"""Functions that read only the shape and type of their first tensor."""

_DRAWS = {"rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "uniform", "exponential", "cauchy"}
_DRAWS |= {"geometric", "rrelu", "empty"}
"""Parts of the names of functions whose results differ from call to call."""


@dataclass(frozen=True)
class _ConstantValue:
    """The known numbers of a tensor, and the buffers that they depend on."""

    numbers: Tensor
    buffers: frozenset[str] = frozenset()


@dataclass
class ConstantPropagationMode(TorchFunctionMode):
    """Intercepts the torch functions that a model calls while it is traced.

    `held` are the real tensors of its buffers, by name, and `memory` that of all its tensors. `decided` maps each
    buffer whose numbers were read to the source line of the first read; `unanswered` describes the last read of numbers
    that are not known. `stored` are the attributes in which forward has stored tensors. `recomputes` is set if
    backward computes a part of forward once more (torch.utils.checkpoint).
    """

    held: Mapping[str, Tensor] = field(default_factory=dict)
    memory: OwnedMemory = field(default_factory=OwnedMemory)
    decided: dict[str, str] = field(default_factory=dict)
    unanswered: str = ""
    stored: list[str] = field(default_factory=list)
    recomputes: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self._known: Any = WeakIdKeyDictionary()
        # A training may itself be created under `torch.inference_mode()`; only a model that enters it is refused.
        self._inference = torch.is_inference_mode_enabled()

    def add_buffers(self, twins: Mapping[str, Tensor]) -> None:
        """Record the numbers of the module's buffers; `twins` are the buffers by name, as they are during the trace."""
        for name, twin in twins.items():
            real = self.held.get(name)
            if real is not None and not real.is_meta and real.numel() <= LIMIT:
                with disable_tracing():
                    # In the type of the trace, and a copy: a write within forward must not reach the user's buffer.
                    numbers = real.detach().to("cpu", twin.dtype, copy=True)
                self._known[twin] = _ConstantValue(numbers, frozenset({name}))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept one torch function. Called by torch."""
        kwargs = kwargs or {}
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()  # torch.export cannot trace `.data`
        if func in _HOOKS:
            raise TraceError(
                f"{find_current_line()} calls Tensor.{func.__name__}: what it does to gradients would be lost on the "
                "ranks. Compute the same in forward, or take it out."
            )
        if func in _FLAGS:
            _check_flag(args[0], *args[1:], **kwargs)
        if torch.is_inference_mode_enabled() and not self._inference:
            raise TraceError(
                f"{find_current_line()} stands under torch.inference_mode(), whose tensors no gradient may be computed "
                "with. Use torch.no_grad()."
            )
        if func in _ASKS:
            return self._answer(func, args, kwargs)
        for tensor in list_tensors((args, kwargs)):
            if is_real(tensor):
                self.memory.note_read(tensor)
        output = func(*args, **kwargs)
        if isinstance(output, Tensor | tuple | list) or _is_mutating(func, kwargs):
            self._propagate(func, args, kwargs, output)
        return output

    # ---- reads of numbers

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = [self._find_constant(tensor) for tensor in list_tensors((args, kwargs))]
        if all(known):
            for name in frozenset().union(*(constant.buffers for constant in known)):  # type: ignore[union-attr]
                self.decided.setdefault(name, find_current_line())
            return self._evaluate(func, args, kwargs)
        # Some trace modes answer with a symbol, and only its use fails, on some other line (see `_translate_errors`):
        # what was read is noted before.
        unknown = next(tensor for tensor in list_tensors((args, kwargs)) if not self._find_constant(tensor))
        kind = str(unknown.dtype).removeprefix("torch.")
        self.unanswered = (
            f"{find_current_line()} asks for the numbers ({_ASKS[func]}) of a {kind} tensor {tuple(unknown.shape)}"
        )
        # A real tensor would answer, with a number that training changes.
        if is_real(unknown) and (unknown.requires_grad or self.memory.find_name(unknown)):
            raise self.make_error()
        try:
            return func(*args, **kwargs)
        except Exception as error:
            raise self.make_error() from error

    def make_error(self) -> TraceError:
        """Return the error for a read of numbers that are not known."""
        return TraceError(
            f"{self.unanswered}, which follow from images, labels or trained weights: while a model is traced nothing "
            "is known of these but their shapes. Its forward and its loss may take no decision from the values of a "
            "tensor; choose with torch.where, or compute with the tensor itself."
        )

    # ---- known numbers

    def _find_constant(self, tensor: Tensor) -> _ConstantValue | None:
        constant = self._known.get(tensor)
        # A real tensor that forward finds in a module, say, is a constant if no optimiser changes it.
        is_plain = type(tensor) is Tensor and not tensor.is_meta and not tensor.requires_grad
        if constant is None and is_plain and tensor.numel() <= LIMIT:
            with disable_tracing():
                if self.memory.find_name(tensor):
                    return None
                constant = self._known[tensor] = _ConstantValue(tensor.detach().clone())
        return constant

    def _propagate(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the result's numbers if all inputs are known; forget tensors written with unknown numbers."""
        inputs = list_tensors((args, kwargs))
        # `zeros_like(image)` is known although the image is not; `image.new_tensor(y)` is known if `y` is.
        read = [self._find_constant(argument) for argument in inputs[func in _BY_SHAPE :]]
        inputs_known = all(read)
        small = all(output.numel() <= LIMIT for output in list_tensors(result))
        draws = any(word in _get_name(func) for word in _DRAWS)
        if inputs_known and small and (inputs or func in _MAKES) and not draws:
            try:
                numbers = self._evaluate(func, args, kwargs)
            except Exception:  # numbers that cannot be computed are not known
                self._forget(inputs)
                return
            buffers = frozenset().union(*(known.buffers for known in read if known))
            for tensor, real in zip(list_tensors(result), list_tensors(numbers), strict=False):
                if tensor.shape == real.shape and tensor.dtype == real.dtype:
                    self._known[tensor] = _ConstantValue(real, buffers)
        elif _is_mutating(func, kwargs):
            # `t[0] = x` or `t.add_(x)` with an unknown x: t and all views of it are unknown from here on.
            self._forget([*inputs[:1], *list_tensors(kwargs.get("out"))])

    def _forget(self, written: list[Tensor]) -> None:
        """Forget the numbers of all tensors that share storage with a written tensor."""
        for tensor in written:
            constant = self._known.get(tensor)
            if constant is None:
                continue
            # The known numbers were made by the same functions as the traced tensors: their views share memory, too.
            memory = constant.numbers.untyped_storage().data_ptr()
            for traced in list(self._known):
                if self._known[traced].numbers.untyped_storage().data_ptr() == memory:
                    del self._known[traced]

    def _evaluate(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the function of the known numbers."""

        def get_numbers(tensor: Tensor) -> Tensor:
            if known := self._find_constant(tensor):
                return known.numbers
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)  # only its shape matters (`_BY_SHAPE`)

        with disable_tracing():
            arguments, keywords = tree_map_only(Tensor, get_numbers, (args, {**kwargs}))
            if "device" in keywords:
                keywords["device"] = "cpu"
            return func(*arguments, **keywords)


def _check_flag(tensor: Tensor, requires_grad: bool = True) -> None:
    """Raise TraceError if forward freezes or unfreezes a parameter: a trace has one flag for all of its reads."""
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad != requires_grad:
        raise TraceError(
            f"{find_current_line()} sets requires_grad of a parameter to {requires_grad} while the model runs, which "
            "ranks would not do: they train what the model has not frozen before. Freeze it before; for a part of "
            "forward, use torch.no_grad(), detach(), or torch.func.functional_call(module, {name: p.detach() for name, "
            "p in module.named_parameters()}, (x,)), through which gradients flow to x only."
        )


@contextmanager
def disable_tracing() -> Iterator[None]:
    """Within the context, torch computes with real numbers, and nothing is traced."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def _get_name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _is_mutating(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function changes its first argument or its `out` argument."""
    name = _get_name(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") or kwargs.get("out") is not None


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested values, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
