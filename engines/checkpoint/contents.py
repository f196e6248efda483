"""The contents of a checkpoint, and which rank contributes which tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from engines.checkpoint.checkpoint_reader import STATE, get_tensor_file
from engines.checkpoint.json_values import encode_value
from engines.checkpoint.manifest import FORMAT
from engines.checkpoint.tensor_file import count_file_bytes, get_tensor_spec
from engines.checkpoint.weight_state import WeightState, collect_weight_states, get_class_name
from engines.errors import CheckpointError
from engines.layer.graph import TensorSpec
from engines.layer.state_names import OWNERS
from engines.training import RankTraining, Recipe

__all__ = ["CheckpointContents", "RankMetadata", "RankState", "compute_fingerprint"]

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
