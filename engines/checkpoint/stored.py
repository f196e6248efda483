"""A checkpoint on the disk, as it is read: nothing in it is trusted before it is checked."""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.checkpoint.folder import MANIFEST, newest
from engines.checkpoint.optimisers import WeightState
from engines.errors import CheckpointError, Mpi4dlError
from engines.regular import open_regular, read_bounded

__all__ = ["FORMAT", "STATE", "Checkpoint", "sealed", "tensors_of"]

FORMAT = 1
STATE = "training.safetensors"
"""The file of the optimiser's tensors."""

_CHUNK_BYTES = 1 << 22
_SEAL = "crc32"
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "step": int, "seed": int, "precision": str, "plan": dict, "model": dict, "files": dict, "optimiser": (dict,
    type(None)), "scheduler": (dict, type(None)), "loss_scale": (float, type(None)), "good_steps": int,
}  # fmt: skip


def tensors_of(owner: str) -> str:
    """The file with the `state_dict()` of the model, or of the loss."""
    return f"{owner}.safetensors"


def sealed(manifest: Mapping[str, Any]) -> str:
    """The manifest as text, with a sum of itself."""
    return json.dumps({**manifest, _SEAL: _sum(manifest)}, indent=1, allow_nan=False)


def _sum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True, allow_nan=False).encode())


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: `manifest` is its JSON, checked to be whole and of a format that is known."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint that is there, or the newest one of a folder of them. Raises CheckpointError."""
        found = newest(path)
        return cls(found, _manifest(found))

    @property
    def step(self) -> int:
        """How many steps the training had done."""
        return int(self.manifest["step"])

    @property
    def feed(self) -> Any:
        """What the feed said of itself."""
        return self.manifest.get("feed")

    @cached_property
    def weight_states(self) -> dict[str, WeightState]:
        """The optimiser's state of each weight that it moved."""
        with self.reading():
            stored = self.manifest["optimiser"] or {"options": [], "weights": {}}
            return {
                name: WeightState(stored["options"][each["options"]], each["values"], tuple(each["tensors"]))
                for name, each in stored["weights"].items()
            }

    def check_files(self) -> None:
        """Read every file once. Raises CheckpointError where one is missing, cut short or damaged."""
        for name, told in self.manifest["files"].items():
            with self.reading():
                file, size, crc32 = self.path / name, int(told["bytes"]), int(told["crc32"])
            if file.parent != self.path or file.is_symlink():
                raise self._damaged(f"{name!r} is no file of its own")
            self._check_file(file, size, crc32)

    def _check_file(self, file: Path, size: int, crc32: int) -> None:
        try:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode):
                raise self._damaged(f"{file.name} is no regular file")  # a pipe, say, which would be waited for
            if found.st_size != size:
                raise self._damaged(f"{file.name} has {found.st_size:,} bytes instead of {size:,}")
            if _file_sum(file) != crc32:
                raise self._damaged(f"the contents of {file.name} are not those that were written")
        except OSError as error:
            raise self._damaged(f"{file.name} cannot be read: {error.strerror}") from error

    def shapes(self, file: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape of each tensor of a file, and its type in the format's words."""
        with self.reading(), safe_open(self.path / file, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}

    def tensors(self, file: str, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Some tensors of a file, by the names that `names` gives to each."""
        if not names:
            return {}
        with self.reading(), safe_open(self.path / file, "pt") as opened:
            return {wanted: opened.get_tensor(name) for wanted, name in names.items()}

    def tensor(self, file: str, name: str) -> Tensor:
        """One tensor of a file."""
        return self.tensors(file, {name: name})[name]

    def reading(self) -> _Reading:
        """Within it, whatever is not as it should be is a CheckpointError, unless it is an error of ours already."""
        return _Reading(self)

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: this checkpoint is damaged: {why}. Load another one of {self.path.parent}."
        )


class _Reading:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        told = (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
        told += (RuntimeError, MemoryError)  # nested without end; a number too large for torch
        if isinstance(error, told) and not isinstance(error, Mpi4dlError):
            raise self.checkpoint._damaged(f"{type(error).__name__}: {error}") from error


def _file_sum(file: Path) -> int:
    crc32 = 0
    with open_regular(file) as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON. Raises CheckpointError."""
    damaged = Checkpoint(path, {})._damaged
    try:
        read = json.loads(read_bounded(path / MANIFEST))
        whole = isinstance(read, dict) and read.pop(_SEAL, None) == _sum(read)
    except OSError as error:
        raise damaged(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(f"{MANIFEST} is no JSON ({error})") from error
    if not isinstance(read, dict) or not isinstance(read.get("format"), int):
        raise CheckpointError(f"{path}: {MANIFEST} is not that of a checkpoint of this package.")
    if read["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: this checkpoint has format {read['format']} (written by version {read.get('package')}), but "
            f"this version reads format {FORMAT}. Use the version that wrote it, or load its weights alone: "
            "safetensors.torch.load_file."
        )
    if not whole:
        raise damaged(f"the contents of {MANIFEST} are not those that were written")
    if wrong := [name for name, kind in _FIELDS.items() if not isinstance(read.get(name), kind)]:
        raise damaged(f"{MANIFEST} does not say what {wrong[0]!r} is")
    return read
