"""What a local kernel makes, and what autograd keeps of it for backward: found by running it once, without memory.

PyTorch itself is the table: a kernel runs on the meta device, and what it saves is listened to
(`torch.autograd.graph.saved_tensors_hooks`). So what an operator keeps (a convolution its input, a ReLU its result, a
sum nothing, a max pool its places) is never a second, hand-written truth. Each kernel and shape is asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import engines.spatial.rng  # noqa: F401  (gives the kernels of random numbers their names)
from engines.bench.live_bytes import LiveBytes
from engines.comm.device import choose_memory_format
from engines.errors import TraceError
from engines.layer.flops import FlopCount
from engines.layer.graph import Ref, TensorSpec
from engines.program.instructions import DEVICE, SEED
from engines.spatial.kernels import get_kernel

__all__ = ["KernelEffect", "KernelOutput", "LocalTensor", "find_local_tensors", "infer_effect"]

_TOO_LARGE = 1 << 28  # bytes of what a kernel reads that can only run for real


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of one rank: its shape and type, how it lies in memory, and whether backward comes to it."""

    spec: TensorSpec
    strides: tuple[int, ...]
    needs_gradient: bool

    @classmethod
    def of(cls, spec: TensorSpec, needs_gradient: bool) -> LocalTensor:
        """A tensor of its own, as ranks hold them."""
        layout = choose_memory_format(len(spec.shape))
        twin = torch.empty(spec.shape, device="meta", memory_format=layout)
        return cls(spec, twin.stride(), needs_gradient and spec.is_floating)

    def detach(self) -> LocalTensor:
        """The leaf that is made of it between two segments."""
        return replace(self, needs_gradient=self.needs_gradient and self.spec.is_floating)


@dataclass(frozen=True, slots=True)
class KernelOutput:
    """A tensor that a kernel makes. `shares` is the place of the argument whose memory it is a view of, if any."""

    local: LocalTensor
    bytes: int
    shares: int | None


@dataclass(frozen=True, slots=True)
class KernelEffect:
    """What one call does. Arguments that are tensors are numbered in the order in which they stand.

    `made` are the results (`several`: a tuple of them), `saves` the numbers of the arguments kept for backward,
    `saves_made` those of the results, and `saves_bytes` what is kept beside them. `passes` are the arguments whose
    gradient is that of the result itself, rather than memory of its own. `back_bytes` are in use for a while in
    backward, beside the gradients that it gives. `flops` are those that PyTorch has a formula for, going forward.
    """

    made: tuple[KernelOutput, ...]
    several: bool
    saves: frozenset[int]
    saves_made: frozenset[int]
    saves_bytes: int
    passes: frozenset[int]
    back_bytes: int = 0
    flops: int = 0


_KNOWN: dict[str, KernelEffect] = {}


def infer_effect(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> KernelEffect:
    """The effect of a kernel on arguments in which `Local`s stand for tensors.

    Raises TraceError where a kernel runs neither without memory nor on tensors of this size.
    """
    key = f"{name}{arguments}{keywords}"
    if key not in _KNOWN:
        _KNOWN[key] = _infer_uncached(name, arguments, keywords)
    return _KNOWN[key]


def _infer_uncached(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> KernelEffect:
    try:
        return _run_kernel(name, arguments, keywords, "meta")
    except (NotImplementedError, RuntimeError, TypeError) as error:
        size = sum(local.spec.bytes for local in find_local_tensors((arguments, keywords)))
        if size > _TOO_LARGE:
            raise TraceError(
                f"{name} cannot be run without memory ({type(error).__name__}), and its arguments of {size} bytes are "
                "too many to try it. Register a meta kernel for it (torch.library.register_fake)."
            ) from error
        return _run_kernel(name, arguments, keywords, "cpu")


def _run_kernel(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], device: str) -> KernelEffect:
    tensors: list[Tensor] = []

    def materialise(item: Any) -> Any:
        if isinstance(item, LocalTensor):
            tensors.append(_make_tensor(item, device))
            return tensors[-1]
        if item in (DEVICE, SEED) if isinstance(item, Ref) else False:
            return torch.device(device) if item == DEVICE else 0
        return item

    args, kwargs = _map_nested(list(arguments), materialise), _map_nested(dict(keywords), materialise)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x)
    with _MetaKernelMode(), FlopCount() as count, hooks:
        result = get_kernel(name)(*args, **kwargs)
    several = isinstance(result, list | tuple)
    results = [item for item in (result if several else [result]) if isinstance(item, Tensor)]
    places = {_get_storage_id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    own = {_get_storage_id(tensor): index for index, tensor in reversed(list(enumerate(results)))}
    kept = {_get_storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    made = tuple(
        KernelOutput(_make_local_tensor(tensor), tensor.untyped_storage().nbytes(), places.get(_get_storage_id(tensor)))
        for tensor in results
    )
    passes, back_bytes = _infer_backward(results, tensors)
    return KernelEffect(
        made, several,
        saves=frozenset(places[memory] for memory in kept if memory in places),
        saves_made=frozenset(own[memory] for memory in kept if memory in own and memory not in places),
        saves_bytes=sum(size for memory, size in kept.items() if memory not in places and memory not in own),
        passes=passes, back_bytes=back_bytes, flops=count.total,
    )  # fmt: skip


def _infer_backward(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[frozenset[int], int]:
    """The arguments whose gradient takes no memory of its own, and what backward takes for a while beside those."""
    roots = [tensor for tensor in results if tensor.requires_grad]
    leaves = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    if not roots or not leaves:
        return frozenset(), 0
    given = [torch.empty_like(root) for root in roots]
    try:
        with LiveBytes() as live, _MetaKernelMode():
            found = torch.autograd.grad(roots, [tensors[index] for index in leaves], given, allow_unused=True)
    except (NotImplementedError, RuntimeError):
        return frozenset(), 0  # then each is counted as memory of its own
    shared = {_get_storage_id(grad) for grad in given}
    pairs = list(zip(leaves, found, strict=True))
    passes = frozenset(index for index, grad in pairs if grad is None or _get_storage_id(grad) in shared)
    kept = {_get_storage_id(grad): grad.untyped_storage().nbytes() for index, grad in pairs if index not in passes}
    return passes, max(0, live.peak - sum(kept.values()))


class _MetaKernelMode(TorchDispatchMode):
    """Operators of which PyTorch knows no meta kernel, though it could."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.batch_norm_update_stats.default and args[0].is_meta:
            kind = torch.promote_types(args[0].dtype, torch.float32)
            return tuple(args[0].new_empty(args[0].shape[1], dtype=kind) for _ in range(2))
        return func(*args, **(kwargs or {}))


def _map_nested(value: Any, put: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return [_map_nested(item, put) for item in value]
    if isinstance(value, dict):
        return {key: _map_nested(item, put) for key, item in value.items()}
    return put(value)


def find_local_tensors(value: Any) -> Iterator[LocalTensor]:
    """Those in nested arguments, in order."""
    if isinstance(value, LocalTensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_local_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_local_tensors(item)


def _make_tensor(local: LocalTensor, device: str) -> Tensor:
    shape, dtype = local.spec.shape, getattr(torch, local.spec.dtype)
    made = torch.empty_strided(shape, local.strides, dtype=dtype, device=device)
    if device != "meta":
        made.zero_()
    return made.requires_grad_(local.needs_gradient)


def _make_local_tensor(tensor: Tensor) -> LocalTensor:
    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return LocalTensor(spec, tuple(tensor.stride()), tensor.requires_grad)


def _get_storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
