"""Write a safetensors file tensor by tensor, so that the writer holds at most one of them in memory.

The library itself writes from a dict that holds all tensors. Layout: https://github.com/huggingface/safetensors#format:
8 bytes with the header's length, the header as JSON, and the tensors' bytes one after another.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engines.errors import CheckpointError
from engines.layer.graph import TensorSpec

__all__ = ["HEADER_BYTES", "TensorFile", "count_file_bytes", "get_tensor_spec", "parse_dtype"]

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
    found = next((name for name, known in _CODES.items() if known == code), None)
    if found is None:
        raise ValueError(f"{code!r} is no type of tensor that a checkpoint holds")
    return getattr(torch, found)  # type: ignore[no-any-return]


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
        self._write(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))

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
