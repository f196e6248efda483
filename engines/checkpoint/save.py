"""Save a training collectively: rank 0 writes, and each tensor comes from the first rank that holds it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engines.checkpoint.contents import CheckpointContents, RankState
from engines.checkpoint.writer import CheckpointWriter
from engines.comm.collective_errors import run_on_all
from engines.comm.world import Message, World
from engines.errors import CheckpointError
from engines.status_board import get_status_board
from engines.training import RankTraining

__all__ = ["KEEP", "save"]

KEEP = 3
_GIVEN = (1 << 23) - 2  # a tag that no program uses


def save(training: RankTraining, folder: Path, feed: Any = None, keep: int = KEEP) -> Path:
    """Write a checkpoint into `folder` and return its path; the last `keep` are kept. Collective, between steps.

    `feed` is the result of `Feed.state`, or None; `load` returns it. Rank 0 writes, and holds one tensor of another
    rank at a time. Raises CheckpointError on every rank. The training and the existing checkpoints are then unchanged.
    """
    # A rank that fails on its own would leave the others in a collective call. So each phase that may fail ends with an
    # exchange, after which either all ranks go on or all raise:
    #
    #   all ranks    state of this rank, checked     | all agree on `contents`
    #   rank 0       lock, draft, disk space         |
    #   all ranks    tensors to rank 0, file by file | rank 0 keeps its errors until the end
    #   rank 0       manifest, publish, prune        |
    world = training.worker.world
    share = run_on_all(world, partial(_collect_rank_state, training, feed, keep), CheckpointError)
    contents = CheckpointContents.of(training.recipe, world.all_gather(share.part))
    writer = None
    try:
        writer = run_on_all(
            world, lambda: None if world.rank else CheckpointWriter(folder, contents.bytes), CheckpointError
        )
        for file in contents.files:
            _write_file(world, writer, file, contents, share)
        done = run_on_all(
            world,
            lambda: writer and writer.finish(contents.make_manifest(training, writer.written, feed), keep),
            CheckpointError,
        )
        return world.all_gather(done)[0]  # type: ignore[no-any-return]
    # Whatever has failed, also on another rank: the draft goes and the lock is released.
    finally:
        if writer:
            writer.discard()


def _collect_rank_state(training: RankTraining, feed: Any, keep: int) -> RankState:
    """Return this rank's state, checked. Raises CheckpointError."""
    if keep < 1:
        raise CheckpointError(f"keep={keep} must be at least 1: the last checkpoint is always kept.")
    try:
        json.dumps(feed, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The feed's state cannot be written as JSON: {error}.") from error
    if training.worker.position and not training.worker.done:
        raise CheckpointError("The training is in the middle of a step. Save it when the step is done.")
    return RankState.of(training)


def _write_file(
    world: World, writer: CheckpointWriter | None, file: str, contents: CheckpointContents, share: RankState
) -> None:
    """Write one file: its tensors are sent to rank 0 one after another.

    for each tensor of the file, on every rank in the same order:
        its first holder   --- tensor --->   rank 0 appends it to the file; other ranks do nothing
    """
    if writer:
        writer.begin(file, contents.get_specs(file))
    for held, spec, giver in contents.iterate_tensors(file):
        get_status_board().report(f"saves {held}".encode())
        if world.rank == giver:
            tensor = share.tensors[held].detach().cpu().contiguous()
        elif world.rank == 0:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        else:
            continue
        # As all ranks iterate in the same order, one tag suffices, and sends and receives match.
        if giver and spec.numel:
            message = [Message(0 if world.rank else giver, _GIVEN, tensor)]
            world.exchange(*((message, []) if world.rank else ([], message))).wait()
        if writer:
            writer.add(tensor)
    if writer:
        writer.end(file)
