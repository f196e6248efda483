"""The training that a checkpoint belongs to: of a folder with several trainings, one takes only its own checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpi4dl_nb.engines.errors import CheckpointError
from mpi4dl_nb.engines.formatting import format_count
from mpi4dl_nb.engines.train.checkpoint_files import TRAINING, read_identity, read_manifest
from mpi4dl_nb.engines.train.checkpoint_folder import find_checkpoints, list_checkpoints, make_damaged_error

# A training has a random id, which its checkpoints carry. A training that loads a checkpoint goes on under its id.
#
#     the folder has                       who loads it                           gets the newest whole one
#     one training's checkpoints           any training, any reader               of them
#     those of several trainings           one of these trainings                 of its own
#                                          any other training, any reader         none: CheckpointError lists them
#
# What earlier versions saved has no id, and counts as one training. A checkpoint whose manifest is damaged may belong
# to any of them: it is passed over with a warning, and never removed.


def find_own_checkpoints(path: Path, identity: str | None = None) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints of one training in the folder `path`, the newest first, and those of all others.

    `identity` is the id of the training that asks (None: a reader without one). If `path` is a checkpoint, it is the
    only one, whomever it belongs to. Raises CheckpointError if the folder has none, or those of several other
    trainings.
    """
    checkpoints = find_checkpoints(path)
    if checkpoints == [path]:
        return checkpoints, []
    owners = {checkpoint: read_identity(checkpoint) for checkpoint in checkpoints}
    known = dict.fromkeys(owner for owner in owners.values() if owner is not None)
    if identity not in known and len(known) > 1:
        raise CheckpointError(
            f"{path}: it has the checkpoints of {len(known)} trainings. Name the one to load:\n"
            + "\n".join(
                _describe_newest([checkpoint for checkpoint in checkpoints if owners[checkpoint] == owner])
                for owner in known
            )
        )
    chosen = identity if identity in known else next(iter(known), None)
    owned = [checkpoint for checkpoint, owner in owners.items() if owner in (chosen, None)]
    return owned, [checkpoint for checkpoint in checkpoints if checkpoint not in owned]


def _describe_newest(paths: Sequence[Path]) -> str:
    """Return a line on the checkpoints of one training, the newest first."""
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(paths[0].stat().st_mtime))
    return f"{paths[0]} (of {saved}, the newest of {len(paths)})"


def describe_others(folder: Path, identity: str) -> str:
    """Return a sentence on the checkpoints in `folder` that saving leaves there: those of other trainings.

    It is empty if there are none, or no folder.
    """
    owners = [read_identity(checkpoint) for checkpoint in (list_checkpoints(folder) if folder.is_dir() else [])]
    others = [owner for owner in owners if owner not in (identity, None)]
    if not others:
        return ""
    count = len(set(others))
    return (
        f"{folder} has {format_count(len(others), 'checkpoint')} of {format_count(count, 'other training')}: "
        "saving leaves them there. To go on with one of them, load it by its name; otherwise remove them, or save "
        "elsewhere."
    )


def read_outline(path: Path) -> dict[str, Any]:
    """Return what tells a checkpoint from any other: its training, its step, and the checksums of its files.

    Raises CheckpointError.
    """
    manifest = read_manifest(path)
    return {"training": manifest.get(TRAINING, ""), "step": manifest["step"], "files": manifest["files"]}


def check_outline(path: Path, known: dict[str, Any]) -> None:
    """Raise DamagedError if the checkpoint at `path` is not the one whose outline is known; CheckpointError."""
    if (outline := read_outline(path)) != known:
        wrong = next(name for name, value in known.items() if outline[name] != value)
        differs = f"step {outline['step']} instead of {known['step']}" if wrong == "step" else f"other {wrong}"
        raise make_damaged_error(path, f"it is not the one that this training has saved, but one of {differs}")
