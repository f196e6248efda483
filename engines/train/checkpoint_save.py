"""Save a training, once or periodically: which rank contributes which tensor, and the collective writing."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.status_board import get_status_board
from mpi4dl_nb.engines.comm.world import TENSOR_TAG, Message, World, run_on_all
from mpi4dl_nb.engines.errors import CheckpointError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.output_meaning import find_output_meaning
from mpi4dl_nb.engines.train.checkpoint_files import (
    FORMAT,
    TRAINING,
    CheckpointWriter,
    check_writable,
    count_file_bytes,
    get_tensor_spec,
)
from mpi4dl_nb.engines.train.checkpoint_owner import describe_others
from mpi4dl_nb.engines.train.checkpoint_reader import STATE, get_tensor_file
from mpi4dl_nb.engines.train.checkpoint_state import WeightState, collect_weight_states, encode_value
from mpi4dl_nb.engines.train.interrupts import StoppedError
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining

# The contents of a checkpoint, and which rank contributes which tensor.

_JSON_BYTES = 1 << 16  # of a manifest, besides a few hundred for each weight
_BYTES_PER_WEIGHT = 1 << 9


@dataclass(frozen=True)
class _RankMetadata:
    """What one rank reports to the others about its state: shapes and dtypes, but no tensors."""

    specs: Mapping[str, TensorSpec]
    states: Mapping[str, WeightState]
    optimiser: str | None
    scheduler: Mapping[str, Any] | None
    steps: int


def _collect_rank_state(training: RankTraining, feed: Any, keep: int) -> tuple[dict[str, Tensor], _RankMetadata]:
    """Return the tensors that this rank can contribute, and their metadata. Raises CheckpointError."""
    if keep < 1:
        raise CheckpointError(f"keep={keep} must be at least 1: the last checkpoint is always kept.")
    try:
        json.dumps(feed, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The feed's state cannot be written as JSON: {error}.") from error
    if training.worker.position and not training.worker.done:
        raise CheckpointError("The training is in the middle of a step. Save it when the step is done.")
    descent = training.worker.optimiser_step
    tensors = {**training.kept, **training.weights, **training.own_buffers}
    states: dict[str, WeightState] = {}
    optimiser = scheduler = None
    if descent.optimiser:
        optimiser = type(descent.optimiser).__name__
        names = {id(weight): name for name, weight in training.weights.items()}
        states, moving = collect_weight_states(descent.optimiser, names)
        tensors |= moving
    if descent.scheduler:
        kind = type(descent.scheduler).__name__
        scheduler = {"kind": kind, "state": encode_value(descent.scheduler.state_dict(), kind)}
    specs = {name: get_tensor_spec(tensor, name) for name, tensor in tensors.items()}
    return tensors, _RankMetadata(specs, states, optimiser, scheduler, training.worker.steps)


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of a file: its name on the ranks, and the first rank that has it."""

    held: str
    spec: TensorSpec
    source: int


@dataclass(frozen=True)
class _CheckpointContents:
    """The contents of a checkpoint. `files` maps each file to its tensors by their names in it, in their order."""

    parts: Sequence[_RankMetadata]
    states: Mapping[str, WeightState]
    files: Mapping[str, Mapping[str, _StoredTensor]]

    @classmethod
    def of(cls, recipe: Recipe, parts: Sequence[_RankMetadata]) -> _CheckpointContents:
        """Return the contents, equal on all ranks given equal `parts`. Raises CheckpointError if steps differ."""
        if len(steps := {part.steps for part in parts}) > 1:
            raise CheckpointError(
                f"Ranks were stopped while they changed their weights, after {min(steps) - 1} to {max(steps) - 1} "
                "steps: what they hold is no state of the training. Load the last checkpoint."
            )
        # All ranks that have a tensor, or update a weight, agree on it: the first of them counts.
        sources = {name: rank for rank in reversed(range(len(parts))) for name in parts[rank].specs}
        states: dict[str, WeightState] = {}
        for part in parts:
            states |= {name: state for name, state in part.states.items() if name not in states}
        names = {
            get_tensor_file(owner): names.on_ranks
            for owner, names in recipe.names.items()
            if names.names or owner == "model"
        }
        names[STATE] = {f"{name}/{key}": f"{name}/{key}" for name, state in states.items() for key in state.tensors}
        files = {}
        for file, on_ranks in names.items():
            stored = {
                name: _StoredTensor(held, parts[sources[held]].specs[held], sources[held])
                for name, held in on_ranks.items()
            }
            # By decreasing element size: the format requires each tensor aligned to it, and has no gaps.
            ordered = sorted(stored, key=lambda name: getattr(torch, stored[name].spec.dtype).itemsize, reverse=True)
            files[file] = {name: stored[name] for name in ordered}
        return cls(parts, states, files)

    def get_specs(self, file: str) -> dict[str, TensorSpec]:
        return {name: tensor.spec for name, tensor in self.files[file].items()}

    @property
    def bytes(self) -> int:
        """Free disk space in bytes that the checkpoint needs, slightly overestimated."""
        tensors = sum(count_file_bytes(self.get_specs(file)) for file in self.files)
        return tensors + _JSON_BYTES + _BYTES_PER_WEIGHT * len(self.states)

    def make_manifest(self, training: RankTraining, written: Mapping[str, Any], feed: Any) -> dict[str, Any]:
        """Return everything that is not a tensor. `written` holds the size and checksum of each file."""
        worker, plan = training.worker, training.recipe.plan
        descent = worker.optimiser_step
        optimiser = next((part.optimiser for part in self.parts if part.optimiser), None)
        package = "unknown"
        with suppress(PackageNotFoundError):
            package = version("mpi4dl_nb")
        # Options that many weights share are stored once; a weight refers to them by index.
        options: list[Mapping[str, Any]] = []
        weights = {}
        for name, state in self.states.items():
            if state.options not in options:
                options.append(state.options)
            index = options.index(state.options)
            weights[name] = {"options": index, "tensors": list(state.tensors), "values": dict(state.values)}
        return {
            "format": FORMAT,
            TRAINING: training.identity,
            "package": package,
            "torch": torch.__version__,
            "step": worker.steps - 1,
            "seed": worker.seed,
            "precision": plan.precision,
            "plan": asdict(plan),
            "outputs": find_output_meaning(training.graph).name.lower(),
            "model": {"tensors": len(self.files[get_tensor_file("model")])},
            "files": dict(written),
            "optimiser": {"kind": optimiser, "options": options, "weights": weights} if optimiser else None,
            "scheduler": next((part.scheduler for part in self.parts if part.scheduler), None),
            "loss_scale": descent.scale if descent.scaled else None,
            "good_steps": descent.good_steps,
            "feed": feed,
        }


# Save a training collectively: rank 0 writes, and each tensor comes from the first rank that holds it.


KEEP = 3


def save(training: RankTraining, folder: Path, feed: Any = None, keep: int = KEEP) -> Path:
    """Write a checkpoint into `folder` and return its path; the last `keep` of this training are kept.

    Collective, between steps. Checkpoints of other trainings stay.

    `feed` is the result of `RankLoader.get_state`, or None; `load` returns it. Rank 0 writes, and holds one tensor of
    another rank at a time. Raises CheckpointError on every rank. The training and the existing checkpoints are then
    unchanged.
    """
    # A rank that fails on its own would leave the others in a collective call. So each phase that may fail ends with an
    # exchange, after which either all ranks go on or all raise:
    #
    #   all ranks    state of this rank, checked     | all agree on `contents`
    #   rank 0       lock, draft, disk space         |
    #   all ranks    tensors to rank 0, file by file | rank 0 keeps its errors until the end
    #   rank 0       manifest, publish, prune        |
    world = training.worker.world
    tensors, metadata = run_on_all(world, partial(_collect_rank_state, training, feed, keep), CheckpointError)
    contents = _CheckpointContents.of(training.recipe, world.all_gather(metadata))
    writer = None
    try:
        writer = run_on_all(
            world, lambda: None if world.rank else CheckpointWriter(folder, contents.bytes), CheckpointError
        )
        for file, stored in contents.files.items():
            arriving = _gather_tensors(world, stored.values(), tensors)
            if writer:
                writer.write_file(file, contents.get_specs(file), arriving)
            else:
                list(arriving)
        done = run_on_all(
            world,
            lambda: writer and writer.finish(contents.make_manifest(training, writer.written, feed), keep),
            CheckpointError,
        )
        return world.all_gather(done)[0]
    # Whatever has failed, also on another rank: the draft goes and the lock is released.
    finally:
        if writer:
            writer.discard()


def _gather_tensors(world: World, stored: Collection[_StoredTensor], tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Send each tensor from its source to rank 0, one after another, and yield them there."""
    for description in stored:
        get_status_board().report(f"saves {description.held}".encode())
        if world.rank == description.source:
            tensor = tensors[description.held].detach().cpu().contiguous()
        elif world.rank == 0:
            tensor = torch.empty(description.spec.shape, dtype=getattr(torch, description.spec.dtype))
        else:
            continue
        # As all ranks iterate in the same order, one tag suffices, and sends and receives match.
        if description.source and description.spec.numel:
            message = [Message(0 if world.rank else description.source, TENSOR_TAG, tensor)]
            world.exchange(*((message, []) if world.rank else ([], message))).wait()
        if world.rank == 0:
            yield tensor


# Save a training periodically while it runs.


class CheckpointManager:
    """Saves a training after every `every` steps, or after each epoch if `every` is None.

    `save()` writes a checkpoint, `step()` returns the number of completed steps, and `asked()` the signal that requests
    the end, or 0. `tell` receives the message of an error after which training continues.
    """

    def __init__(
        self,
        save: Callable[[], Path],
        step: Callable[[], int],
        every: int | None,
        asked: Callable[[], int],
        tell: Callable[[str], object],
    ) -> None:
        self.save, self.step, self.every, self.asked, self.tell = save, step, every, asked, tell
        self.saved_step = step()
        self.path: Path | None = None  # of the last checkpoint

    def save_after_step(self) -> None:
        """Save if a checkpoint is due. Raises StoppedError, after saving, if a signal has requested the end.

        If a periodic checkpoint cannot be written (for example, the disk is full), report the error and continue.
        """
        if signal_number := self.asked():
            path = self.save_now()
            name = signal.Signals(signal_number).name
            raise StoppedError(
                f"Stopped by {name} after {self.step()} steps. Saved as {path}: go on from there.", signal_number
            )
        if self.every and self.step() % self.every == 0:
            self._try()

    def save_after_epoch(self) -> None:
        """Save, unless checkpoints are written by step."""
        if not self.every:
            self._try()

    def save_at_end(self) -> None:
        """Save the final state, unless it is saved already. Raises CheckpointError."""
        if self.saved_step != self.step():
            self.save_now()

    def save_now(self) -> Path:
        """Save unconditionally. Raises CheckpointError."""
        self.path = self.save()
        self.saved_step = self.step()
        return self.path

    def _try(self) -> None:
        try:
            self.save_now()
        except CheckpointError as error:
            self.tell(f"Not saved after {self.step()} steps: {error}")


def make_rank_manager(
    training: RankTraining,
    folder: Path,
    state: Callable[[], Any],
    every: int | None = None,
    keep: int = KEEP,
    asked: Callable[[], int] = lambda: 0,
) -> CheckpointManager:
    """Return a manager for all ranks. Collective, as are the calls of its methods.

    `state()` returns the feed's state, and `asked()` the signal that this rank has received, or 0. Raises
    CheckpointError, on every rank, if the folder is not writable.
    """
    world = training.worker.world
    run_on_all(world, lambda: None if world.rank else check_writable(folder), CheckpointError)
    if world.rank == 0 and (others := describe_others(folder, training.identity)):
        print(others, file=sys.stderr, flush=True)
    return CheckpointManager(
        save=lambda: save(training, folder, state(), keep),
        step=lambda: training.worker.steps - 1,
        every=every,
        # A signal may reach some ranks only, or ranks in different steps. All ranks agree on it, because saving is
        # collective: a rank that stopped alone would block the others.
        asked=lambda: max(world.all_gather(asked())),
        tell=partial(print, file=sys.stderr, flush=True) if world.rank == 0 else lambda text: None,
    )
