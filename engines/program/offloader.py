"""Offloading of tensors to a file, fetching them before they are read, and micro-batches that offload their values."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.program.effects import Instruction, Phase
from mpi4dl_nb.engines.program.instructions import Compute
from mpi4dl_nb.engines.program.micro_batch import MicroBatchState
from mpi4dl_nb.engines.program.program import LEAST_BYTES

# A file that holds the contents of offloaded tensors.

_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class _FileRegion:
    """A region of the file, from `start` in a chunk that is mapped as a whole from `offset` of the file."""

    chunk: mmap.mmap
    offset: int
    start: int


class OffloadStore:
    """Contents of storages in an unnamed file, which disappears with the process however that ends.

    The contents can be read and modified in place, through the operating system's page cache of the file; the system
    evicts these pages when memory is short. `folder` is where the file is (None: where temporary files are, on a disk).
    Regions that no tensor uses any more are reused.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or find_disk_folder())
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open as long as the store)
        except OSError as error:
            raise RankError(f"Nothing can be stored in {self.folder}: {error}. Choose another folder.") from error
        weakref.finalize(self, self._file.close).atexit = False
        #   file    | chunk 0, mapped                     | chunk 1, mapped                     |
        #   used    | 3 MB | 8 MB | (free) | 8 MB | 8 MB  | 3 MB | 3 MB | rest ...
        #
        # `_free` holds the regions to use again, by the size they were made for: the tiles of a plan have few different
        # sizes, and each step stores the same ones.
        self._free: dict[int, list[_FileRegion]] = defaultdict(list)
        self._rest: _FileRegion | None = None  # the free end of the last chunk
        self._used: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self._mapped_bytes = self.end_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a host storage with the same content, backed by the file. Raises RankError if the disk is full."""
        copy = self.allocate(storage.nbytes())
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.empty(0, dtype=torch.uint8).set_(copy).copy_(content)  # multi-threaded
        return copy

    def allocate(self, size: int) -> torch.UntypedStorage:
        """Return a host storage of `size` bytes, backed by the file. Raises RankError if the disk is full."""
        block = self._free[size].pop() if self._free[size] else self._reserve_region(size)
        there = np.frombuffer(block.chunk, np.uint8, size, block.start)
        # The region is free again once the last tensor on it is gone: torch keeps the array `there` alive until then.
        weakref.finalize(there, self._free[size].append, block).atexit = False
        storage = torch.frombuffer(there, dtype=torch.uint8).untyped_storage()
        self._used[storage.data_ptr()] = there
        return storage

    def has_storage(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the storage is backed by the file."""
        return storage.data_ptr() in self._used

    def _reserve_region(self, size: int) -> _FileRegion:
        """Return a region reserved on the disk: writing to a mapped page without disk space would end the process."""
        needed = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if self._rest is None or self._rest.start + needed > len(self._rest.chunk):
                # Extend the file by a chunk and map it. This takes address space only; disk space is reserved below,
                # region by region.
                mapped = max(needed, _CHUNK_BYTES)
                os.ftruncate(self._file.fileno(), self._mapped_bytes + mapped)
                chunk = mmap.mmap(self._file.fileno(), mapped, offset=self._mapped_bytes)
                self._rest = _FileRegion(chunk, self._mapped_bytes, 0)
                self._mapped_bytes += mapped
            region = self._rest
            _reserve(self._file.fileno(), region.offset + region.start, needed)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise RankError(f"{self.folder} cannot be written: {error}. Choose another folder.") from error
            raise RankError(
                f"{self.folder} is full: {format_bytes(size)} more are to be stored beside "
                f"{format_bytes(self.end_bytes)}. Make room, choose another folder (TMPDIR), or use a smaller image."
            ) from error
        self._rest = replace(region, start=region.start + needed)
        self.end_bytes += needed
        return region


def _reserve(file: int, start: int, size: int) -> None:
    """Reserve `size` bytes on the disk. Raises OSError if that fails."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)
    else:  # macOS
        os.pwrite(file, bytes(size), start)


def find_disk_folder() -> Path:
    """Return a folder for large temporary files: on some systems the usual one is itself in memory."""
    usual, other = Path(tempfile.gettempdir()).resolve(), Path("/var/tmp")
    try:
        import psutil  # not installed on every machine with ranks
    except ImportError:
        return usual
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[folder] for folder in (usual, *usual.parents) if folder in mounts), "")
    return other if kind in ("tmpfs", "ramfs") and os.access(other, os.W_OK) else usual


# Offloads tensors while other work computes: the tensors stay, and their memory becomes that of a file.
#
# A tensor keeps its shape, its strides and its place in autograd's graph, so no other code is affected. Small tensors
# stay in memory.


class Offloader:
    """Offloads the tensors of one tile or rank, except those of `stays`.

    The CPU computes directly on memory that a file backs, so that a tensor may be moved at any time. For a device that
    cannot (`reads_files=False`), a tensor is copied back when an instruction uses it.
    """

    def __init__(self, store: OffloadStore, stays: Iterable[Tensor] = (), reads_files: bool = True) -> None:
        self.store, self.reads_files = store, reads_files
        # A storage is identified by its C++ object: two tensors that are views of one storage move together.
        #
        #   in use (`_used`) --next call (`_later`)--> in the file --fetch--> in use
        #
        # On the CPU, "in the file" means that the tensor's memory is the file's; on a GPU, that the tensor has no
        # memory and `_away` knows its copy in the file.
        self._stay = {tensor.untyped_storage()._cdata for tensor in stays}
        self._used: set[int] = set()
        self._later: list[Tensor] = []
        self._away = WeakTensorKeyDictionary()

    def allocate(self, shape: Sequence[int] | int, **options: Any) -> Tensor:
        """Return a new tensor, as `torch.empty` does; a large one is in the file from the start, if that can be.

        Messages arrive in it while other work computes: had it to be moved then, they would not find it.
        """
        if not self.reads_files:
            return torch.empty(shape, **options)
        outline = torch.empty(shape, **{**options, "device": "meta", "pin_memory": False})
        size = outline.numel() * outline.element_size()
        if size < LEAST_BYTES:
            return torch.empty(shape, **options)
        storage = self.store.allocate(size)
        return torch.empty(0, dtype=outline.dtype).set_(storage, 0, outline.size(), outline.stride())

    def fetch(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors available until the current instruction ends."""
        if self.reads_files:
            return
        back: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            stored = self._away.pop(tensor, None)
            if stored is not None:
                # Tensors that were views of the same memory must share it again.
                storage = stored.untyped_storage()
                key = storage.data_ptr()
                if key not in back:
                    content = torch.empty(0, dtype=torch.uint8).set_(storage)
                    back[key] = content.to(tensor.device, copy=True).untyped_storage()
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = whole.set_(back[key], stored.storage_offset(), stored.size(), stored.stride())
            self._used.add(tensor.untyped_storage()._cdata)

    def end_instruction(self) -> None:
        """Mark the end of the current instruction."""
        self._used.clear()

    def offload(self, touched: Iterable[Tensor]) -> None:
        """Offload these tensors; those in use are offloaded by the next call.

        Tensors that share memory must come in one call, or they no longer share it afterwards.
        """
        stored: dict[int, torch.UntypedStorage] = {}
        tensors, self._later = [*self._later, *touched], []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            stays = storage.nbytes() < LEAST_BYTES or key in self._stay
            if stays or tensor in self._away or self.store.has_storage(storage):
                continue
            # Kernels may hold addresses of memory in use; such a tensor is moved by the next call.
            if key in self._used:
                self._later.append(tensor)
                continue
            if key not in stored:
                stored[key] = self.store.put(storage)
            there = torch.empty(0, dtype=tensor.dtype)
            there.set_(stored[key], tensor.storage_offset(), tensor.size(), tensor.stride())
            # `data` is replaced, not the tensor: autograd's nodes, and all names, still refer to the same object.
            if self.reads_files:
                tensor.data = there
            else:
                self._away[tensor] = there
                strides = tensor.stride()
                tensor.data = tensor.new_empty(()).expand(tensor.size())  # free the old memory before allocating anew
                tensor.data = _make_storageless(tensor, strides)


def _make_storageless(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor without memory, of the same shape and those strides, by which autograd lays out gradients."""
    hollow = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
    hollow.untyped_storage().resize_(0)
    return hollow


# Micro-batches whose values are offloaded while they are idle.


@dataclass
class OffloadingMicroBatch(MicroBatchState):
    """A micro-batch that offloads what a forward instruction makes as soon as it ends, and fetches what one reads.

    It records what autograd saves for each segment. Message buffers do not belong to a micro-batch, so nothing is moved
    while it is being sent.
    """

    offloader: Offloader = field(kw_only=True)
    _saved: dict[str, list[Tensor]] = field(default_factory=dict)
    _touched: dict[str, Instruction] = field(default_factory=dict)
    _going_back: Instruction | None = None

    def __post_init__(self) -> None:
        # The caller's pixels, in tensors of their own memory, so that moving one moves nothing else.
        self.inputs = {
            name: part.detach() if part.untyped_storage().nbytes() == part.nbytes else part.clone()
            for name, part in self.inputs.items()
            if part is not None
        }
        super().__post_init__()
        self._begun = list(self.inputs)
        self.inputs = dict.fromkeys(self.inputs)  # names only, so that inputs can be freed

    def run_instruction(self, instruction: Instruction, phase: Phase) -> int:
        """Run one instruction with all that it reads in memory, and offload what it made; return the bytes sent."""
        if phase is Phase.FORWARD:
            names = instruction.get_effects(phase).reads
            self.offloader.fetch(self.values[name] for name in names if name in self.values)
        else:
            # What autograd saved for a segment is read twice if the weights' gradients follow later (WEIGHTS).
            take = self._saved.get if phase is Phase.INPUTS else self._saved.pop
            self.offloader.fetch(take(instruction.name, ()))
            self.offloader.fetch(self._get_gradients(_get_value_names(instruction)))
            self._going_back = instruction
        try:
            with self._record_saved(instruction) if phase is Phase.FORWARD else nullcontext():
                sent = super().run_instruction(instruction, phase)
        finally:
            self._going_back = None
            self.offloader.end_instruction()
            self._touched[instruction.name] = instruction
        if phase is Phase.FORWARD:
            self.offload()
            return sent
        recomputed = instruction.name in self._late and not self.runtime.keeps_graphs
        if phase is Phase.INPUTS and recomputed and isinstance(instruction, Compute):
            # What the recomputed graph reads in WEIGHTS: other instructions may offload and release these inputs first.
            self._saved[instruction.name] = self._get_inputs(instruction)
        # Going backward, only what was fetched for this instruction and will be read by another one is worth a copy:
        # the rest is freed soon.
        names = instruction.get_effects(phase).makes
        lasting = self.direction_program.kept_to_end
        leaves = [self.leaves[name] for name in names if name in self.leaves and name not in lasting]
        self.offloader.offload([*self._saved.get(instruction.name, ()), *leaves])
        return sent

    def offload(self) -> None:
        """Offload what instructions have made or added to since the last call, as far as it is alive and not in use.

        Of the values that outlive the step only the prediction is large; the others are not offloaded, since other code
        reads them too.
        """
        running = () if self._going_back is None else _get_value_names(self._going_back)
        self.offloader.fetch(self._get_gradients(running))  # one may have been created since
        lasting = self.direction_program.kept_to_end - {self.direction_program.prediction}
        # By storage, not by tensor: views of a value that stays must stay, too.
        kept = {self.leaves[name].untyped_storage()._cdata for name in lasting & self.leaves.keys()}
        names = [*running, *self._begun, *chain(*map(_get_value_names, self._touched.values()))]
        saved = [tensor for name in self._touched for tensor in self._saved.get(name, ())]
        # Gradients that an exchange has taken, and still has while it waits for those of other ranks.
        waiting = [grad for started in self._under_way.values() for grad in started.grads if grad is not None]
        self._begun, self._touched = [], {}
        named = [tensors[name] for name in names for tensors in (self.values, self.leaves) if name in tensors]
        touched = (*saved, *waiting, *named, *self._get_gradients(names))
        self.offloader.offload(tensor for tensor in touched if tensor.untyped_storage()._cdata not in kept)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor, moved back to the device it is computed on."""
        self.offloader.fetch([tensor])
        return tensor

    @contextmanager
    def _record_saved(self, instruction: Instruction) -> Iterator[None]:
        """Within the context, in which a segment runs forward, record what autograd saves for its backward pass."""
        if not (instruction.is_local and instruction.differentiable and self.runtime.keeps_graphs):
            yield
            return
        saved: list[Tensor] = []

        # The hooks see every tensor that autograd saves, including intermediate results without a name. Autograd keeps
        # an alias in the tensor's place. If it kept an output itself, the output's graph would refer to the output: a
        # cycle that only a backward pass frees.
        #
        #   output --grad_fn--> node --saved--> output         output --grad_fn--> node --saved--> alias
        def record(tensor: Tensor) -> Tensor:
            saved.append(tensor.data)
            return saved[-1]

        with saved_tensors_hooks(record, lambda tensor: tensor):
            yield
        # Autograd's nodes keep `record`, hence this list, to the end of the segment's backward pass. It must not hold
        # what each node frees as soon as it has run.
        self._saved[instruction.name] = [*saved]
        saved.clear()

    def _recompute(self, segment: Compute) -> tuple[Tensor, ...]:
        self.offloader.fetch(self._get_inputs(segment))
        return super()._recompute(segment)

    def _get_gradients(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Return the gradients of values, as far as there are any."""
        leaves = (self.leaves.get(name) for name in names)
        return (leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)


def _get_value_names(instruction: Instruction) -> tuple[str, ...]:
    """Return the names of the values that an instruction reads and makes."""
    effects = instruction.get_effects(Phase.FORWARD)
    return (*effects.reads, *effects.makes)
