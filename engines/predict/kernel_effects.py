"""Finds the results of a kernel and the tensors that autograd saves, by running the kernel once on the meta device.

There is no hand-written table: the kernel runs on the meta device, and hooks record the tensors that it saves
(`torch.autograd.graph.saved_tensors_hooks`): a convolution saves its input, a ReLU its result, a sum nothing, a max
pool its indices. Each kernel and shape is run once.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import mpi4dl_nb.engines.program.rng  # noqa: F401  (gives the kernels of random numbers their names)
from mpi4dl_nb.engines.comm.device import choose_memory_format
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.graph.constant_propagation import list_tensors
from mpi4dl_nb.engines.graph.export_reader import FlopCount
from mpi4dl_nb.engines.graph.model_graph import Ref, TensorSpec
from mpi4dl_nb.engines.program.instructions import DEVICE, SEED
from mpi4dl_nb.engines.program.kernels import get_kernel

_TOO_LARGE = 1 << 28  # bytes of arguments, up to which a kernel without a meta implementation is run on the CPU


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The description of a tensor of one rank: shape and type, strides, and whether it needs a gradient."""

    spec: TensorSpec
    strides: tuple[int, ...]
    needs_gradient: bool

    @classmethod
    def of(cls, spec: TensorSpec, needs_gradient: bool, is_image: bool = True) -> LocalTensor:
        """Return the description of a newly allocated tensor in the memory format that the ranks use."""
        layout = choose_memory_format(len(spec.shape)) if is_image else torch.contiguous_format
        twin = torch.empty(spec.shape, device="meta", memory_format=layout)
        return cls(spec, twin.stride(), needs_gradient and spec.is_floating)

    @classmethod
    def describe(cls, tensor: Tensor) -> LocalTensor:
        """Return the description of a tensor."""
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return cls(spec, tuple(tensor.stride()), tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class KernelOutput:
    """A tensor that a kernel returns. `shares` is the index of the argument whose memory it is a view of, or None."""

    local: LocalTensor
    bytes: int
    shares: int | None


@dataclass(frozen=True, slots=True)
class KernelEffect:
    """The effect of one kernel call. Tensor arguments are numbered in order of appearance.

    `made` are the results (`several`: the kernel returns a tuple). `saves` are the indices of the arguments saved for
    backward, `saves_made` those of the saved results, and `saves_bytes` the bytes saved in addition. `passes` are the
    arguments whose gradient is the result's gradient itself, without memory of its own. `back_bytes` are temporary
    memory in backward, in addition to the gradients. `flops` counts the forward pass, by PyTorch's formulas.
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
    """Return the effect of a kernel on arguments with `LocalTensor` objects in place of tensors.

    Raises TraceError if the kernel has no meta implementation and its arguments are too large to run it on the CPU.
    """
    # Arguments may be lists, which cannot be hashed: their text is the key.
    key = f"{name}{arguments}{keywords}"
    if key in _KNOWN:
        return _KNOWN[key]
    try:
        effect = _run_kernel(name, arguments, keywords, "meta")
    except (NotImplementedError, RuntimeError, TypeError) as error:
        size = sum(local.spec.bytes for local in find_local_tensors((arguments, keywords)))
        if size > _TOO_LARGE:
            raise TraceError(
                f"{name} cannot be run without memory ({type(error).__name__}), and its arguments of "
                f"{format_bytes(size)} are too many to try it. Register a meta kernel for it "
                "(torch.library.register_fake)."
            ) from error
        effect = _run_kernel(name, arguments, keywords, "cpu")
    _KNOWN[key] = effect
    return effect


def _run_kernel(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any], device: str) -> KernelEffect:
    tensors: list[Tensor] = []

    def materialise(item: Any) -> Any:
        if isinstance(item, LocalTensor):
            dtype = getattr(torch, item.spec.dtype)
            tensor = torch.empty_strided(item.spec.shape, item.strides, dtype=dtype, device=device)
            if device != "meta":
                tensor.zero_()
            tensors.append(tensor.requires_grad_(item.needs_gradient))
            return tensor
        # Kernels of random numbers have placeholders among their arguments, which the ranks fill in.
        if isinstance(item, Ref):
            return {DEVICE: torch.device(device), SEED: 0}.get(item, item)
        return item

    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    # Ranks train, also if the caller has switched gradients off.
    with torch.inference_mode(False), torch.enable_grad():
        args, kwargs = tree_map(materialise, (list(arguments), dict(keywords)))
        with _MetaKernelMode(), FlopCount() as count, hooks:
            run = _attend_on_meta if device == "meta" and name == _ATTENTION else get_kernel(name)
            result = run(*args, **kwargs)
    several = isinstance(result, list | tuple)
    results = [item for item in (result if several else [result]) if isinstance(item, Tensor)]
    # A kernel's results and saved tensors are identified by their storage: a view has that of an argument, and what
    # autograd saves may be an argument, a result, or memory of its own.
    # Reversed, so that the first of several tensors with the same storage wins.
    places = {get_storage_id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
    result_places = {get_storage_id(tensor): index for index, tensor in reversed(list(enumerate(results)))}
    kept = {get_storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    outputs = []
    for tensor in results:
        shares, size = places.get(get_storage_id(tensor)), tensor.untyped_storage().nbytes()
        outputs.append(KernelOutput(LocalTensor.describe(tensor), size, shares))
    passes, back_bytes = _infer_backward(results, tensors)
    return KernelEffect(
        tuple(outputs),
        several,
        saves=frozenset(places[memory] for memory in kept if memory in places),
        saves_made=frozenset(result_places[memory] for memory in kept.keys() & result_places.keys() - places.keys()),
        saves_bytes=sum(size for memory, size in kept.items() if memory not in places and memory not in result_places),
        passes=passes,
        back_bytes=back_bytes,
        flops=count.total,
    )


def _infer_backward(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[frozenset[int], int]:
    """Return the arguments whose gradient has no memory of its own, and the temporary bytes of backward."""
    roots = [tensor for tensor in results if tensor.requires_grad]
    leaves = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    if not roots or not leaves:
        return frozenset(), 0
    # Meta tensors have storages with sizes, although without memory: what backward needs for a while can be counted. A
    # gradient with the storage of a root's is that gradient, passed on unchanged, as to both terms of a sum.
    root_grads = [torch.empty_like(root) for root in roots]
    try:
        with torch.inference_mode(False), LiveBytes() as live, _MetaKernelMode():
            inputs = [tensors[index] for index in leaves]
            grads: Sequence[Tensor | None] = torch.autograd.grad(roots, inputs, root_grads, allow_unused=True)
    except (NotImplementedError, RuntimeError):
        return frozenset(), 0  # each gradient then counts as memory of its own
    shared = {get_storage_id(grad) for grad in root_grads}
    pairs = list(zip(leaves, grads, strict=True))
    passes = frozenset(index for index, grad in pairs if grad is None or get_storage_id(grad) in shared)
    lasting = [grad for index, grad in pairs if grad is not None and index not in passes]
    kept = {get_storage_id(grad): grad.untyped_storage().nbytes() for grad in lasting}
    return passes, max(0, live.peak - sum(kept.values()))


class _MetaKernelMode(TorchDispatchMode):
    """Supplies operators for which PyTorch has no meta implementation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.batch_norm_update_stats.default and args[0].is_meta:
            kind = torch.promote_types(args[0].dtype, torch.float32)
            return tuple(args[0].new_empty(args[0].shape[1], dtype=kind) for _ in range(2))
        return func(*args, **(kwargs or {}))


_ATTENTION = "aten.scaled_dot_product_attention.default"


def _attend_on_meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """Attend by the kernel that the ranks run: on the meta device PyTorch takes the one with a matrix of all scores.

    The kernels of GPUs save the same: the result, and one number for each query.
    """

    # Which kernel it is depends on types, channels and strides, and not on the number of tokens.
    def shrink(x: Tensor) -> Tensor:
        few = x[tuple(slice(2) for _ in x.shape[:-1])]
        return torch.empty_strided(few.shape, few.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)

    small, mask = [shrink(x) for x in (query, key, value)], None
    if attn_mask is not None:
        pairs = small[0].shape[-2], small[1].shape[-2]
        mask = torch.empty(pairs, dtype=attn_mask.dtype, requires_grad=attn_mask.requires_grad)
    choice = torch.ops.aten._fused_sdp_choice.default(*small, mask, dropout_p, is_causal, **others)
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return get_kernel(_ATTENTION)(query, key, value, attn_mask, dropout_p, is_causal, **others)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result: Tensor = flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=others.get("scale"))[0]
    return result


def find_local_tensors(arguments: Any) -> tuple[LocalTensor, ...]:
    """Return the tensor descriptions in nested arguments, in order."""
    return tuple(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, LocalTensor))


# The bytes of live tensors while operators run. The kernel's figures for a process (`engines/bench/measure.py`) include
# the allocator's gaps and all libraries, and do not exist for ranks that are threads.


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes (`now`, `peak`) of tensors that operators of this thread create within the context.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     x = torch.ones(256)
    ...     del x
    ...     y = torch.ones(8)
    >>> live.now, live.peak
    (32, 1024)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def reset_peak(self) -> None:
        """Start a new peak from the current bytes."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        # Arguments made before the context are unknown, and must not count when an in-place operator returns them.
        argument_ids = set(map(get_storage_id, list_tensors((args, kwargs))))
        for item in list_tensors(outputs):
            storage, storage_id = item.untyped_storage(), get_storage_id(item)
            size = storage.nbytes()
            # A view shares its storage with a tensor that was given, or that is known: its bytes count once.
            if size and storage_id not in argument_ids and storage_id not in self._known:
                self._known.add(storage_id)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._release, storage_id, size)
        return outputs

    def _release(self, place: int, size: int) -> None:
        # The address may be used again by a later storage: it must be unknown by then.
        self._known.discard(place)
        self.now -= size


def get_storage_id(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share."""
    return int(tensor.untyped_storage()._cdata)
