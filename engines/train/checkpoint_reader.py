"""Read a checkpoint from disk. Its contents are untrusted until they have been checked."""

from __future__ import annotations

import errno
import os
import stat
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpi4dl_nb.engines.errors import DamagedError, Mpi4dlError
from mpi4dl_nb.engines.graph.owners import OWNERS
from mpi4dl_nb.engines.images.regular_file import open_regular
from mpi4dl_nb.engines.train.checkpoint_files import HEADER_BYTES, TRAINING, read_manifest
from mpi4dl_nb.engines.train.checkpoint_folder import get_number, make_damaged_error, make_read_error
from mpi4dl_nb.engines.train.checkpoint_owner import find_own_checkpoints
from mpi4dl_nb.engines.train.checkpoint_state import WeightState

STATE = "training.safetensors"
"""Name of the file with the optimiser's tensors."""

_CHUNK_BYTES = 1 << 22
_LARGE_BYTES = 1 << 30
# What malformed contents may raise: in safetensors, in torch, or in the code that takes the JSON apart.
_MALFORMED = (SafetensorError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def get_tensor_file(owner: str) -> str:
    """Return the name of the file with the `state_dict()` of `owner`: "model" or "loss"."""
    return f"{owner}.safetensors"


_FILES = (*map(get_tensor_file, OWNERS), STATE)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk. `manifest` is its JSON, complete and of a supported format.

    `passed_over` holds a message for each newer checkpoint of the folder that is damaged, and one for those of others.
    """

    path: Path
    manifest: Mapping[str, Any]
    passed_over: tuple[str, ...] = ()

    @classmethod
    def open(
        cls,
        path: Path,
        hold: Callable[[Checkpoint], object] | None = None,
        only: Collection[str] | None = None,
        identity: str | None = None,
    ) -> Checkpoint:
        """Return the checkpoint at `path`, or the newest intact one of a training if `path` is a folder of checkpoints.

        Which training that is, `find_own_checkpoints` says; `identity` is the id of the one that asks.

        Every byte of its files is read and compared with the checksums. With `only`, the other files are neither read
        nor required to exist. `hold` checks whether a checkpoint fits its purpose. For a large checkpoint, `hold` is
        called before gigabytes are read. Raises DamagedError if the checkpoint, or every checkpoint of the folder, is
        damaged; UnreadableError if memory, file handles or permissions are lacking, which says nothing about the files;
        and CheckpointError.
        """
        #   newest    damaged                  -> the next older one, and a warning at the end
        #             does not fit             -> raises
        #             cannot be read now       -> raises
        #             whole                    -> taken
        candidates, others = find_own_checkpoints(path, identity)
        wrong: list[DamagedError] = []
        for candidate in candidates:
            try:
                if (
                    candidate != path
                    and candidate.is_symlink()
                    and not candidate.resolve().is_relative_to(candidate.parent.resolve())
                ):
                    raise make_damaged_error(candidate, "it is a link that leads out of its folder")
                passed_over = [
                    f"{damaged} is damaged, and an older checkpoint is taken: {error.why}."
                    for damaged, error in zip(candidates, wrong, strict=False)
                ]
                if newer := [other for other in others if get_number(other) > get_number(candidate)]:
                    passed_over.append(f"{newer[0]} is newer, but of another training: {candidate} is of this one.")
                checkpoint = cls(candidate, read_manifest(candidate), tuple(passed_over))
                checkpoint._check_files(hold, only)
                return checkpoint
            # Only damage leads to the next older checkpoint. A checkpoint that does not fit, or that cannot be read
            # now, raises: falling back from it would silently discard newer work.
            except DamagedError as error:
                wrong.append(error)
        if len(wrong) == 1:
            raise wrong[0]
        listed = "".join(f"\n{damaged.name}: {error.why}" for damaged, error in zip(candidates, wrong, strict=True))
        raise DamagedError(f"{path}: none of its {len(candidates)} checkpoints is whole.{listed}")

    def warn_of_passed_over(self, stacklevel: int) -> None:
        """Warn of newer checkpoints that were passed over: the training resumes from an earlier step than expected."""
        for text in self.passed_over:
            warnings.warn(text, stacklevel=stacklevel + 1)

    @property
    def step(self) -> int:
        """Number of steps that the training had completed."""
        return int(self.manifest["step"])

    @property
    def identity(self) -> str:
        """The id of the training that saved it; "" if it was saved without one."""
        return str(self.manifest.get(TRAINING, ""))

    @property
    def feed(self) -> Any:
        """State of the feed as it was saved, or None."""
        return self.manifest.get("feed")

    @cached_property
    def weight_states(self) -> dict[str, WeightState]:
        """The optimiser's state by weight, for every weight that the optimiser updates."""
        states = {}
        with self.translate_errors():
            stored = self.manifest["optimiser"] or {"options": [], "weights": {}}
            options = stored["options"]
            for name, state in stored["weights"].items():
                index = state["options"]
                # Python would take True as index 1, and -1 as the last index.
                if not isinstance(options, list) or isinstance(index, bool) or not 0 <= index < len(options):
                    raise IndexError(f"there are no options {str(index)[:20]}")
                tensors, values = state["tensors"], state["values"]
                if not all(isinstance(mapping, dict) for mapping in (options[index], values)):
                    raise TypeError("the options or values of a weight are no dict")
                if not isinstance(tensors, list) or not all(isinstance(key, str) for key in tensors):
                    raise TypeError("the names of a weight's tensors are no list of texts")
                if reserved := {"params", "param_names"} & options[index].keys():
                    raise ValueError(f"{min(reserved)!r} is no option")
                states[name] = WeightState(options[index], values, tuple(tensors))
        return states

    def _check_files(self, hold: Callable[[Checkpoint], object] | None, only: Collection[str] | None) -> None:
        """Read every file once; the arguments are those of `open`.

        Raises DamagedError if a file is missing, truncated or changed, and what `hold` raises.
        """
        sums: dict[str, int] = {}
        size = 0
        # The manifest is untrusted: its names must not lead out of the checkpoint ("../x", or a link).
        for name, entry in self.manifest["files"].items():
            if only is not None and name not in only:
                continue
            with self.translate_errors():
                file, sums[name] = self.path / name, int(entry["crc32"])
                if file.parent != self.path or file.is_symlink():
                    raise make_damaged_error(self.path, f"{name!r} is no file of its own")
                expected = int(entry["bytes"])
                try:
                    status = file.stat()
                except OSError as error:
                    raise make_read_error(self.path, file.name, error) from error
                if not stat.S_ISREG(status.st_mode):  # reading a pipe, for example, would block
                    raise make_damaged_error(self.path, f"{file.name} is no regular file")
                if status.st_size != expected:
                    raise make_damaged_error(
                        self.path, f"{file.name} has {status.st_size:,} bytes instead of {expected:,}"
                    )
                size += expected
        if other := sums.keys() - set(_FILES):
            raise make_damaged_error(self.path, f"{min(other)!r} is no file of a checkpoint")
        # Cheap checks come first: names and sizes, then whether the checkpoint fits. The checksums read every byte.
        if hold and size > _LARGE_BYTES:
            hold(self)
        for name, crc32 in sums.items():
            self._check_crc32(name, crc32)

    def _check_crc32(self, name: str, crc32: int) -> None:
        checksum = 0
        try:
            with open_regular(self.path / name) as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    checksum = zlib.crc32(chunk, checksum)
        except (OSError, MemoryError) as error:
            raise make_read_error(self.path, name, error) from error
        if checksum != crc32:
            raise make_damaged_error(self.path, f"the contents of {name} are not those that were written")

    def read_shapes(self, file: str) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the format's dtype code of each tensor in `file`."""
        with self._open_file(file) as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}

    def read_tensors(self, file: str, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Read tensors of `file`. `names` maps the key of each result to the tensor's name in the file."""
        if not names:
            return {}
        with self._open_file(file) as opened:
            return {wanted: opened.get_tensor(name) for wanted, name in names.items()}

    def read_tensor(self, file: str, name: str) -> Tensor:
        """Read one tensor of `file`."""
        return self.read_tensors(file, {name: name})[name]

    @contextmanager
    def _open_file(self, file: str) -> Iterator[Any]:
        """Open a file listed in the manifest with safetensors, after its header size is checked."""
        if file not in self.manifest["files"]:
            raise make_damaged_error(self.path, f"{file} is not among the files that it lists")
        with self.translate_errors():
            # The library parses the whole header, of any length that the first 8 bytes state.
            with open_regular(self.path / file) as handle:
                header = handle.read(8)
            if len(header) == 8 and (size := int.from_bytes(header, "little")) > HEADER_BYTES:
                raise make_damaged_error(self.path, f"the header of {file} would have {size:,} bytes")
            try:
                opened = safe_open(self.path / file, "pt")
            except FileNotFoundError as error:  # the library raises this for every file that it cannot open
                # If this plain open fails too, it raises the true error. Otherwise the cause is a lack of handles.
                open_regular(self.path / file).close()
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
            with opened:
                yield opened

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Convert any error within the context to a CheckpointError, except errors of this package."""
        try:
            yield
        except Mpi4dlError:
            raise
        except (OSError, MemoryError, *_MALFORMED) as error:
            raise make_read_error(self.path, "", error) from error
