"""`checkpoint.json`, the manifest of a checkpoint: protected by a checksum, and validated as untrusted input."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engines.checkpoint.checkpoint_errors import make_damaged_error, make_read_error
from engines.checkpoint.folder import MANIFEST
from engines.errors import CheckpointError
from engines.program.update import GOOD_STEPS
from engines.regular_file import read_bounded

__all__ = ["FORMAT", "MOST_STEPS", "read_manifest", "serialise_manifest"]

FORMAT = 1
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
    if read["loss_scale"] is not None and read["good_steps"] >= GOOD_STEPS:
        raise make_damaged_error(
            path, f"it counts {read['good_steps']} good steps, but the loss scale grows after {GOOD_STEPS}"
        )
    return read


def _make_integer_check(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _make_type_check(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_scale(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isfinite(value) and 0 < value <= _LARGEST_SCALE)


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "step": _make_integer_check(0, MOST_STEPS),
    "seed": _make_integer_check(-(1 << 63), (1 << 64) - 1),
    "precision": _make_type_check(str),
    "plan": _make_type_check(dict),
    "model": _make_type_check(dict),
    "files": _make_type_check(dict),
    "optimiser": _make_type_check(dict, type(None)),
    "scheduler": _make_type_check(dict, type(None)),
    "loss_scale": _is_scale,
    "good_steps": _make_integer_check(0, MOST_STEPS),
}
