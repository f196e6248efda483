"""Checkpoints: bytes, JSON, headers and values changed, sealed again or not; files missing, exchanged, or elsewhere.

What is not refused is loaded whole, and a step goes on from it. What is refused has changed nothing, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import CheckpointError, LossError
from mpi4dl_nb.engines.images.shard_reader import SamplerState
from mpi4dl_nb.engines.train.checkpoint_files import serialise_manifest
from mpi4dl_nb.engines.train.checkpoint_folder import MANIFEST, list_checkpoints
from mpi4dl_nb.engines.train.checkpoint_load import load
from mpi4dl_nb.engines.train.checkpoint_reader import STATE
from mpi4dl_nb.engines.train.checkpoint_save import save
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from tests.fuzz.damage import make_damaged_bytes, make_damaged_json
from tests.fuzz.judge import Case, Outside, Random
from tests.fuzz.tables import make_other
from tests.train.trainings import PLANS, copy_state, is_same, make_data, make_recipe

KINDS = [("adam", "step"), ("sgd", "cosine"), ("rmsprop", "cycle"), ("adagrad", "none")]
_FILES = ("model.safetensors", STATE)
_SIZES = (0, 1, 3, -1, 1 << 31, 1 << 62)


@cache
def _make_recipe(kind: int) -> Recipe:
    return make_recipe(PLANS["one rank"], *KINDS[kind])


@cache
def _make_checkpoints(kind: int) -> tuple[TemporaryDirectory[str], Path]:
    """A folder of two checkpoints, after one step and after two."""
    held = TemporaryDirectory()
    recipe = _make_recipe(kind)

    def work(world: LoopbackWorld) -> None:
        training = RankTraining(world, recipe)
        for number, whole in enumerate(make_data(recipe, 2)):
            training.step(training.cut(whole))
            save(training, Path(held.name), SamplerState(7, 0, 1 + number, 4 * (1 + number)).to_dict(20))

    run_ranks(1, work)
    return held, Path(held.name)


def read(path: Path, kind: int) -> None:
    """Load it, and go on for a step. Raises CheckpointError, and RuntimeError where that has changed anything."""
    recipe = _make_recipe(kind)

    def work(world: LoopbackWorld) -> None:
        training = RankTraining(world, recipe)
        before = copy_state(training)
        try:
            load(training, path)
        except CheckpointError as error:
            if not is_same(before, copy_state(training)):
                raise RuntimeError(f"what was refused has changed the training: {error}") from error
            raise
        with suppress(LossError):  # weights may be NaN or infinite
            training.step(training.cut(make_data(recipe, 1)[0]))

    run_ranks(1, work)


def write_whole_cases(folder: Path) -> Iterator[Case]:
    """Of each kind a folder, and a checkpoint."""
    for kind, names in enumerate(KINDS):
        path = Path(shutil.copytree(_make_checkpoints(kind)[1], folder / str(kind)))
        for each in (path, list_checkpoints(path)[0]):
            yield Case(f"{names}, {each.name}", each, lambda each=each, kind=kind: read(each, kind))


def write_damaged_case(folder: Path, number: int, random: Random, outside: Outside) -> Case:
    """The newest checkpoint of a folder, named by itself or with its folder."""
    kind = number % len(KINDS)
    given = Path(shutil.copytree(_make_checkpoints(kind)[1], folder / "given"))
    path = list_checkpoints(given)[-1]
    change = _CHANGES[int(random.integers(len(_CHANGES)))]
    told = change(path, random, outside)
    by_itself = bool(random.integers(2))
    asked = path if by_itself else given
    return Case(f"{KINDS[kind]}, {change.__name__}, {told}", given, lambda: read(asked, kind))


# ---- what is changed


def update_manifest(path: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """The manifest with other values, and with the sums of the files as they are now: as if written so."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["crc32"]
    for name, told in manifest["files"].items():
        content = (path / name).read_bytes()
        told.update(bytes=len(content), crc32=zlib.crc32(content))
    change(manifest)
    (path / MANIFEST).write_text(serialise_manifest(manifest))


def replace_bytes(path: Path, random: Random, outside: Outside) -> str:
    """Of any file, as a disk damages them."""
    files = sorted(path.iterdir())
    file = files[int(random.integers(len(files)))]
    told, content = make_damaged_bytes(file.read_bytes(), random)
    file.write_bytes(content)
    return f"{file.name}, {told}"


def replace_bytes_and_sums(path: Path, random: Random, outside: Outside) -> str:
    """Of tensors and their headers."""
    file = path / _FILES[int(random.integers(2))]
    told, content = make_damaged_bytes(file.read_bytes(), random)
    file.write_bytes(content)
    update_manifest(path)
    return f"{file.name}, {told}"


def replace_header(path: Path, random: Random, outside: Outside) -> str:
    """Names, types, shapes and places of tensors; its length, too."""
    file = path / _FILES[int(random.integers(2))]
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    told, text = make_damaged_json(
        content[8 : 8 + size], random, ("F64", "I64", "BOOL", "U8", "C64", [1 << 60], [3, 3], *_SIZES)
    )
    length = len(text) if random.integers(6) else int(random.choice([0, 1, len(text) + 1, 1 << 30, (1 << 63) - 1]))
    file.write_bytes(length.to_bytes(8, "little") + text + content[8 + size :])
    update_manifest(path)
    return f"{file.name}, {told}"


def replace_tensor(path: Path, random: Random, outside: Outside) -> str:
    """One of another shape or type, in a file that is whole."""
    file = path / _FILES[int(random.integers(4) > 0)]
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    tensors = {name: told for name, told in entries.items() if name != "__metadata__"}
    name = sorted(tensors)[int(random.integers(len(tensors)))]
    start, stop = tensors[name]["data_offsets"]
    bytes_of = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}
    dtype = str(random.choice(list(bytes_of)))
    count = (stop - start) // bytes_of[dtype]
    shapes = [[count], [1, count], [count, 1], [count, 1, 1, 1, 1]] + ([[2, count // 2]] if count % 2 == 0 else [])
    shape = shapes[int(random.integers(len(shapes)))]
    if count * bytes_of[dtype] != stop - start:
        return "nothing"
    entries[name].update(dtype=dtype, shape=shape)
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    update_manifest(path)
    return f"{name} of type {dtype} and shape {shape}"


def replace_manifest(path: Path, random: Random, outside: Outside) -> str:
    """Any of its values, sealed where it can be."""
    text = (path / MANIFEST).read_bytes()
    document = json.loads(text)
    del document["crc32"]
    canary = outside.write_file("weights.safetensors", (path / _FILES[0]).read_bytes())
    told, changed = make_damaged_json(json.dumps(document).encode(), random, (str(canary), f"../{canary.name}"))
    with suppress(ValueError, TypeError, RecursionError, AttributeError):
        changed = serialise_manifest(json.loads(changed)).encode()
    (path / MANIFEST).write_bytes(changed)
    return told


def replace_state(path: Path, random: Random, outside: Outside) -> str:
    """Values of the optimiser, the scheduler and the feed, with others of every type: one change each."""
    text = json.loads((path / MANIFEST).read_text())
    part = str(random.choice([name for name in ("optimiser", "scheduler", "feed") if text[name]]))
    values = (
        {"python": "float", "value": "nan"},
        {"python": "tensor", "dtype": "int8", "value": [[1]]},
        1e308,
        -5,
        "x",
    )
    told, changed = make_damaged_json(json.dumps(text[part]).encode(), random, (*values, 10**400, [0.1, 0.2, 0.3]))
    with suppress(ValueError, TypeError, RecursionError):
        held = json.loads(changed)
        update_manifest(path, lambda manifest: manifest.update({part: held}))
    return f"{part}, {told}"


def replace_file(path: Path, random: Random, outside: Outside) -> str:
    """It becomes something else, or a link that leads out."""
    files = sorted(path.iterdir())
    file = files[int(random.integers(len(files)))]
    canary = outside.write_file(f"odd-{file.name}", file.read_bytes())
    return f"{file.name}, {make_other(file, random, canary)}"


def replace_name(path: Path, random: Random, outside: Outside) -> str:
    """A file that it lists lies elsewhere, with the right sum."""
    canary = outside.write_file("weights.safetensors", (path / _FILES[0]).read_bytes())
    content = canary.stat()
    told = {"bytes": content.st_size, "crc32": zlib.crc32((path / _FILES[0]).read_bytes())}
    names = (str(canary), os.path.relpath(canary, path), "link.safetensors", "..", ".", "", "a\0b", "x/y", "/dev/zero")
    name = names[int(random.integers(len(names)))]
    (path / "link.safetensors").symlink_to(canary)
    if random.integers(2):
        update_manifest(path, lambda manifest: manifest["files"].update({name: told}))
        return f"{name[-20:]!r} is listed"
    (path / _FILES[0]).unlink()
    (path / _FILES[0]).symlink_to(canary)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["crc32"], manifest["files"][_FILES[0]]
    (path / MANIFEST).write_text(serialise_manifest(manifest))
    return "the weights are a link that is not listed"


def exchange_files(path: Path, random: Random, outside: Outside) -> str:
    """Files of one checkpoint in another one, or in each other's place, sealed or not; or the whole is a link."""
    other = list_checkpoints(path.parent)[0]
    way = int(random.integers(4))
    if way == 0:
        shutil.copyfile(other / _FILES[1], path / _FILES[1])
    elif way == 1:
        first, second = (path / name for name in _FILES)
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)
    elif way == 2:
        for file in path.iterdir():
            outside.write_file(f"whole/{file.name}", file.read_bytes())
        shutil.rmtree(path)
        path.with_name("00003-step-3").symlink_to(outside.write_file(f"whole/{MANIFEST}", b"").parent)
        shutil.copytree(other, path)
        return "a link to another checkpoint"
    else:
        (path / MANIFEST).write_bytes((other / MANIFEST).read_bytes())
    if random.integers(2):
        update_manifest(path)
    return f"way {way}"


_CHANGES = (
    replace_bytes, replace_bytes_and_sums, replace_header, replace_tensor, replace_manifest,
    replace_state, replace_state, replace_state, replace_file, replace_name, exchange_files,
)  # fmt: skip
