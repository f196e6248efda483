"""The files of a checkpoint, the manifest `checkpoint.json` and safetensors files, and their writer."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpi4dl_nb.engines.errors import CheckpointError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.images.regular_file import read_bounded
from mpi4dl_nb.engines.program.update import GOOD_STEPS
from mpi4dl_nb.engines.train.checkpoint_folder import (
    MANIFEST,
    create_draft,
    describe_remedy,
    flush_to_disk,
    get_free_bytes,
    get_named_step,
    list_checkpoints,
    lock_folder,
    make_damaged_error,
    make_read_error,
    make_space_error,
    prune,
    publish_draft,
)

T = TypeVar("T")

# `checkpoint.json`, the manifest of a checkpoint: protected by a checksum, and validated as untrusted input.

FORMAT = 1
TRAINING = "training"
"""The key of the id of the training that saved the checkpoint; earlier versions wrote none."""
MOST_STEPS = 1 << 53
"""More steps than any training makes, and still exact as a float."""

_SEAL = "crc32"
_BYTES = 1 << 24  # enough for 60,000 weights; parsed JSON takes up to 25 times as much memory
_LARGEST_SCALE = 2.0**127  # the scale must fit float32, because the loss is multiplied by it


def serialise_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the manifest as text, with its checksum. Raises CheckpointError if it exceeds the size that is read."""
    text = json.dumps({**manifest, _SEAL: _compute_checksum(manifest)}, indent=1, allow_nan=False)
    if len(text) > _BYTES:
        raise CheckpointError(
            f"{MANIFEST} would have {len(text):,} characters, but {_BYTES:,} are read at most. Train fewer weights, or "
            "ones with fewer values beside their tensors."
        )
    return text


def _compute_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True, allow_nan=False).encode())


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path`.

    Raises DamagedError, UnreadableError, or CheckpointError for another format.
    """
    if (path / MANIFEST).is_symlink():
        raise make_damaged_error(path, f"{MANIFEST} is no regular file of its own, but a link")
    try:
        # The checksum covers the parsed values in a canonical form, not the text: other indentation is no damage.
        read = json.loads(read_bounded(path / MANIFEST, _BYTES))
        whole = isinstance(read, dict) and read.pop(_SEAL, None) == _compute_checksum(read)
    except (OSError, MemoryError) as error:
        raise make_read_error(path, MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        raise make_damaged_error(path, f"{MANIFEST} is no JSON ({error})") from error
    if not isinstance(read, dict) or not isinstance(read.get("format"), int):
        raise make_damaged_error(path, f"{MANIFEST} is not that of a checkpoint of this package")
    # Before the checksum is checked: a file of another format must be reported as such, not as damaged.
    if read["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: this checkpoint has format {str(read['format'])[:20]} (written by version "
            f"{str(read.get('package'))[:20]}), but this version reads format {FORMAT}. Use the version that wrote it, "
            "or load its weights alone: safetensors.torch.load_file."
        )
    if not whole:
        raise make_damaged_error(path, f"the contents of {MANIFEST} are not those that were written")
    if wrong := [name for name, is_right in _FIELDS.items() if name not in read or not is_right(read[name])]:
        raise make_damaged_error(
            path, f"{MANIFEST} does not say what {wrong[0]!r} is, but {str(read.get(wrong[0]))[:40]}"
        )
    if contradiction := _find_contradiction(path, read):
        raise make_damaged_error(path, contradiction)
    return read


def _find_contradiction(path: Path, manifest: Mapping[str, Any]) -> str:
    """Return what in a manifest contradicts the checkpoint's name or itself; empty if nothing does."""
    if not isinstance(manifest.get(TRAINING, ""), str):
        return f"{MANIFEST} does not say which training it is of"
    if (named := get_named_step(path)) not in (None, manifest["step"]):
        return f"its name says {named} steps, but {MANIFEST} {manifest['step']}"
    if manifest["loss_scale"] is not None and manifest["good_steps"] >= GOOD_STEPS:
        return f"it counts {manifest['good_steps']} good steps, but the loss scale grows after {GOOD_STEPS}"
    return ""


def read_identity(path: Path) -> str | None:
    """Return the id of the training that saved a checkpoint: "" if it has none; None if its manifest is not whole."""
    try:
        return str(read_manifest(path).get(TRAINING, ""))
    except CheckpointError:
        return None


def _make_integer_check(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _make_type_check(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "step": _make_integer_check(0, MOST_STEPS),
    "seed": _make_integer_check(-(1 << 63), (1 << 64) - 1),
    "precision": _make_type_check(str),
    "plan": _make_type_check(dict),
    "model": _make_type_check(dict),
    "files": _make_type_check(dict),
    "optimiser": _make_type_check(dict, type(None)),
    "scheduler": _make_type_check(dict, type(None)),
    "loss_scale": lambda value: value is None or (isinstance(value, float) and 0 < value <= _LARGEST_SCALE),
    "good_steps": _make_integer_check(0, MOST_STEPS),
}


# Write a safetensors file tensor by tensor, so that the writer holds at most one of them in memory.
#
# The library itself writes from a dict that holds all tensors. Layout:
# https://github.com/huggingface/safetensors#format:
# 8 bytes with the header's length, the header as JSON, and the tensors' bytes one after another.


HEADER_BYTES = 1 << 24
"""Largest header that is read: enough for about 150,000 tensors."""

_CODES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "bool": "BOOL",
}


def get_tensor_spec(tensor: Tensor, where: str) -> TensorSpec:
    """Return a tensor's shape and dtype. Raises CheckpointError if the format cannot represent the tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _CODES or tensor.layout is not torch.strided:
        raise CheckpointError(f"{where} is a {dtype} tensor ({tensor.layout}), which safetensors files do not hold.")
    return TensorSpec(tuple(tensor.shape), dtype)


def parse_dtype(code: str) -> torch.dtype:
    """Return the dtype for a code of the format. Raises ValueError for a code that is never written here.

    >>> parse_dtype("F32")
    torch.float32
    """
    dtype = next((name for name, known in _CODES.items() if known == code), None)
    if dtype is None:
        raise ValueError(f"{code!r} is no type of tensor that a checkpoint holds")
    return getattr(torch, dtype)


def _count_bytes(spec: TensorSpec) -> int:
    return spec.numel * getattr(torch, spec.dtype).itemsize


def _make_header(specs: Mapping[str, TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        stop = start + _count_bytes(spec)
        entries[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors after it start at a multiple of 8 bytes
    if len(text) > HEADER_BYTES:
        raise CheckpointError(f"{len(specs):,} tensors are more than a checkpoint's file can list.")
    return len(text).to_bytes(8, "little") + text


def count_file_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the size in bytes of a file with these tensors."""
    return len(_make_header(specs)) + sum(map(_count_bytes, specs.values()))


class TensorFile:
    """A safetensors file being written; `bytes` and `crc32` cover everything written so far.

    Tensors must be added in the order of `specs`.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self._file = path.open("xb")
        self.bytes = self.crc32 = 0
        self._write(_make_header(specs))

    def add(self, tensor: Tensor) -> None:
        """Append the next tensor, which must be contiguous and in host memory."""
        # Viewed as bytes, because numpy has no bfloat16 or float8.
        self._write(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.bytes += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def close(self, complete: bool = True) -> None:
        """Close the file. If `complete`, flush it to disk first."""
        try:
            if complete:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


# Write one checkpoint: all of its files, or nothing.

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # another folder would not help
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointWriter:
    """A checkpoint being written into `folder`. Raises CheckpointError if `needed_bytes` are not free.

    An error in `write_file` is kept and raised by `finish`, because the ranks that send tensors wait for no reply.
    """

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        self.folder, self.needed_bytes = folder, needed_bytes
        self.written: dict[str, dict[str, int]] = {}
        self._failure: OSError | None = None
        self._file: TensorFile | None = None
        self._draft, self._lock = ExitStack(), ExitStack()
        try:
            self._lock.enter_context(lock_folder(folder))
            self._path = create_draft(folder)
            self._draft.callback(shutil.rmtree, self._path, ignore_errors=True)
            if (free := get_free_bytes(folder)) < needed_bytes:
                raise make_space_error(folder, needed_bytes, free)
        except OSError as error:
            self.discard()
            raise self._make_error(error) from error
        except CheckpointError:
            self.discard()
            raise

    def write_file(self, name: str, specs: Mapping[str, TensorSpec], tensors: Iterable[Tensor]) -> None:
        """Write the file `name` with `tensors`, which are in the order of `specs`."""
        file = self._try(lambda: TensorFile(self._path / name, specs))
        self._file = self._file if file is None else file  # `discard` closes the one that failed
        # After an error all tensors are still taken: a rank whose tensor nobody received would block in its send.
        for tensor in tensors:
            if file is not None:
                self._try(partial(file.add, tensor))
        if file is not None:
            self._try(file.close)
            self.written[name] = {"bytes": file.bytes, "crc32": file.crc32}

    def _try(self, work: Callable[[], T]) -> T | None:
        """Return the result of work on the disk; None if it fails, or if some has failed before."""
        if self._failure is None:
            try:
                return work()
            except OSError as error:
                self._failure = error
        return None

    def finish(self, manifest: Mapping[str, Any], keep: int) -> Path:
        """Publish the checkpoint on disk and remove all but the last `keep` of its training. Raises CheckpointError."""
        try:
            if self._failure:
                raise self._failure
            with (self._path / MANIFEST).open("x", encoding="utf-8") as file:
                file.write(serialise_manifest(manifest))
                file.flush()
                os.fsync(file.fileno())
            checkpoint = publish_draft(self._path, manifest["step"])
            self._draft.pop_all()  # it is no draft any more, so `discard` must not remove it
        except OSError as error:
            self.discard()
            raise self._make_error(error) from error
        try:
            flush_to_disk(self.folder)
        except OSError as error:
            self.discard()
            raise CheckpointError(
                f"{checkpoint} is written, but the disk did not confirm its name ({error.strerror or error}): after a "
                f"power cut it may be missing. All earlier checkpoints stay. {describe_remedy(error.errno)}"
            ) from error
        with suppress(OSError):  # one too many is no failure
            # Last: until the new checkpoint is on disk, no old one goes.
            checkpoints = [path for path in list_checkpoints(self.folder) if read_identity(path) == manifest[TRAINING]]
            prune(checkpoints, keep)
        return checkpoint

    def discard(self) -> None:
        """Remove unfinished files and release the lock. A finished checkpoint stays."""
        if self._file:
            with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
                self._file.close(complete=False)
        self._file = None
        self._draft.close()
        self._lock.close()

    def _make_error(self, error: OSError) -> CheckpointError:
        if error.errno in _FULL:
            return make_space_error(self.folder, self.needed_bytes, get_free_bytes(self.folder), error.strerror or "")
        mend = describe_remedy(error.errno) if error.errno in _PASSING else "Name a folder that this user may write to."
        return CheckpointError(
            f"{self.folder}: no checkpoint can be written here: {error.strerror or error}. Those that are there are as "
            f"they were. {mend}"
        )


def check_writable(folder: Path) -> None:
    """Try to create `folder` and a draft in it, before hours of training depend on that. Raises CheckpointError."""
    CheckpointWriter(folder, needed_bytes=1).discard()
