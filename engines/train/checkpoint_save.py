"""Save a training: which rank contributes which tensor, and the collective writing of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.comm.status_board import get_status_board
from engines.comm.world import TENSOR_TAG, Message, World, run_on_all
from engines.errors import CheckpointError
from engines.graph.model_graph import TensorSpec
from engines.graph.trace import OWNERS
from engines.train.checkpoint_files import FORMAT, count_file_bytes, get_tensor_spec
from engines.train.checkpoint_reader import STATE, get_tensor_file
from engines.train.checkpoint_values import WeightState, collect_weight_states, encode_value, get_class_name
from engines.train.checkpoint_writer import CheckpointWriter
from engines.train.training import RankTraining, Recipe

__all__ = ["KEEP", "CheckpointContents", "RankMetadata", "RankState", "compute_fingerprint", "save"]


# The contents of a checkpoint, and which rank contributes which tensor.

_JSON_BYTES = 1 << 16  # of a manifest, besides a few hundred for each weight
_BYTES_PER_WEIGHT = 1 << 9


@dataclass(frozen=True)
class RankMetadata:
    """What one rank reports to the others about its state: shapes and dtypes, but no tensors."""

    specs: Mapping[str, TensorSpec]
    states: Mapping[str, WeightState]
    optimiser: str | None
    scheduler: Mapping[str, Any] | None
    steps: int


@dataclass(frozen=True)
class RankState:
    """The tensors that one rank can contribute to a checkpoint, by name, and their metadata (`part`)."""

    tensors: Mapping[str, Tensor]
    part: RankMetadata

    @classmethod
    def of(cls, training: RankTraining) -> RankState:
        """Return the state of this rank. Raises CheckpointError if something cannot be written."""
        descent = training.worker.optimiser_step

        tensors = {**training.kept, **training.weights, **training.own_buffers}
        states: dict[str, WeightState] = {}
        if descent.optimiser:
            names = {id(weight): name for name, weight in training.weights.items()}
            states, moving = collect_weight_states(descent.optimiser, names)
            tensors |= moving
        paced = descent.scheduler
        scheduler = (
            {"kind": get_class_name(paced), "state": encode_value(paced.state_dict(), get_class_name(paced))}
            if paced
            else None
        )
        specs = {name: get_tensor_spec(tensor, name) for name, tensor in tensors.items()}
        optimiser = get_class_name(descent.optimiser) if descent.optimiser else None
        return cls(tensors, RankMetadata(specs, states, optimiser, scheduler, training.worker.steps))


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a checkpoint. `files` maps each file to {name in the file: name on the ranks}."""

    parts: Sequence[RankMetadata]
    files: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, recipe: Recipe, parts: Sequence[RankMetadata]) -> CheckpointContents:
        """Return the contents, equal on all ranks given equal `parts`. Raises CheckpointError if steps differ."""
        if len(steps := {part.steps for part in parts}) > 1:
            raise CheckpointError(
                f"Ranks were stopped while they changed their weights, after {min(steps) - 1} to {max(steps) - 1} "
                "steps: what they hold is no state of the training. Load the last checkpoint."
            )
        files = {
            get_tensor_file(owner): {name: names.held.get(name, OWNERS[owner] + name) for name in names.names}
            for owner, names in recipe.names.items()
            if names.names or owner == "model"
        }
        contents = cls(parts, files)
        states = contents.states
        files[STATE] = {f"{name}/{key}": f"{name}/{key}" for name, state in states.items() for key in state.tensors}
        # By decreasing element size: the format requires each tensor aligned to its element size, and has no gaps.
        for file, held in files.items():
            widths = {name: getattr(torch, spec.dtype).itemsize for name, spec in contents.get_specs(file).items()}
            files[file] = {name: held[name] for name in sorted(held, key=widths.__getitem__, reverse=True)}
        return contents

    @property
    def states(self) -> dict[str, WeightState]:
        """The optimiser's state of every weight, taken from the first rank that updates it; all such ranks agree."""
        found: dict[str, WeightState] = {}
        for part in self.parts:
            found |= {name: state for name, state in part.states.items() if name not in found}
        return found

    @property
    def source_ranks(self) -> dict[str, int]:
        """The first rank that holds each tensor."""
        return {name: rank for rank in reversed(range(len(self.parts))) for name in self.parts[rank].specs}

    def get_specs(self, file: str) -> dict[str, TensorSpec]:
        """Return the specs of the tensors of a file."""
        givers = self.source_ranks
        return {name: self.parts[givers[held]].specs[held] for name, held in self.files[file].items()}

    def iterate_tensors(self, file: str) -> Iterator[tuple[str, TensorSpec, int]]:
        """Yield, for each tensor of a file in its order: its name on the ranks, its spec, and its source rank."""
        givers, specs = self.source_ranks, self.get_specs(file)
        return ((held, specs[name], givers[held]) for name, held in self.files[file].items())

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
        model = self.get_specs(get_tensor_file("model"))
        package = "unknown"
        with suppress(PackageNotFoundError):
            package = version("mpi4dl_nb")
        # Options that many weights share are stored once; a weight refers to them by number.
        options: list[Mapping[str, Any]] = []
        weights = {}
        for name, state in self.states.items():
            if state.options not in options:
                options.append(state.options)
            number = options.index(state.options)
            weights[name] = {"options": number, "tensors": list(state.tensors), "values": dict(state.values)}
        return {
            "format": FORMAT,
            "package": package,
            "torch": torch.__version__,
            "step": worker.steps - 1,
            "seed": worker.seed,
            "precision": plan.precision,
            "plan": asdict(plan),
            "model": {"tensors": len(model), "fingerprint": compute_fingerprint(model)},
            "files": dict(written),
            "optimiser": {"kind": optimiser, "options": options, "weights": weights} if optimiser else None,
            "scheduler": next((part.scheduler for part in self.parts if part.scheduler), None),
            "loss_scale": descent.scale if descent.scaled else None,
            "good_steps": descent.good_steps,
            "feed": feed,
        }


def compute_fingerprint(model: Mapping[str, TensorSpec]) -> str:
    """Return a hash of a model's names, shapes and dtypes; models that differ in one of them have different hashes."""
    told = [[name, list(spec.shape), spec.dtype] for name, spec in sorted(model.items())]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


# Save a training collectively: rank 0 writes, and each tensor comes from the first rank that holds it.


KEEP = 3


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
            message = [Message(0 if world.rank else giver, TENSOR_TAG, tensor)]
            world.exchange(*((message, []) if world.rank else ([], message))).wait()
        if writer:
            writer.add(tensor)
    if writer:
        writer.end(file)
