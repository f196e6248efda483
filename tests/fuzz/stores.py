"""Zarr folders: arrays and OME-Zarr groups of both versions; JSON and chunks damaged, missing, or elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zarr

from mpi4dl_nb.engines.images.picture import open_image
from tests.fuzz.damage import make_damaged_bytes, make_damaged_json
from tests.fuzz.judge import Case, Outside, Random
from tests.fuzz.pictures import look
from tests.fuzz.tables import make_other
from tests.images.made_slides import make_tissue

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_HUGE = 1 << 20  # of a file that has been made so
_CODECS = ("default", "gzip", "plain", "shards")
KINDS = [(version, codec, ome) for version in (2, 3) for codec in _CODECS for ome in (False, True)]
KINDS = [kind for kind in KINDS if kind[:2] != (2, "shards")]


def write_store(path: Path, version: int, codec: str, ome: bool) -> None:
    """A picture of 40 x 50 pixels: an array, or the two levels of an OME-Zarr group."""
    pixels = make_tissue(40, 50)
    options: dict[str, object] = {"chunks": (16, 16, 3)}
    if codec == "gzip":
        options["compressors"] = {"id": "gzip"} if version == 2 else {"name": "gzip", "configuration": {"level": 5}}
    elif codec == "plain":
        options["compressors"] = None
    elif codec == "shards":
        options["shards"] = (32, 32, 3)
    if not ome:
        zarr.create_array(path, data=pixels, zarr_format=version, **options)
        return
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, step in (("0", 1), ("1", 2)):
        group.create_array(name, data=np.ascontiguousarray(pixels[::step, ::step]), **options)
    axes = [{"name": "y", "unit": "micrometer"}, {"name": "x", "unit": "micrometer"}, {"name": "c"}]
    datasets = [
        {"path": name, "coordinateTransformations": [{"type": "scale", "scale": [scale, scale, 1]}]}
        for name, scale in (("0", 0.5), ("1", 1.0))
    ]
    told = {"multiscales": [{"version": "0.5" if version == 3 else "0.4", "axes": axes, "datasets": datasets}]}
    group.attrs.update({"ome": told} if version == 3 else told)


def write_whole_cases(folder: Path) -> Iterator[Case]:
    """Each store as it was made."""
    for number, _ in enumerate(KINDS):
        yield _write_case(folder / f"{number}.zarr", number, _describe_kind(number))


def write_damaged_case(folder: Path, number: int, random: Random, outside: Outside) -> Case:
    """One file of a store, or two."""
    path, kind = folder / "given" / "a.zarr", number % len(KINDS)
    case = _write_case(path, kind, _describe_kind(kind))
    canary = _write_elsewhere(kind, outside)
    leads = [str(canary), os.path.relpath(canary, path), "../" + os.path.relpath(canary, path), f"file://{canary}"]
    told = []
    for _ in range(int(random.integers(1, 3))):
        files = sorted(each for each in path.rglob("*") if each.is_file() and not each.is_symlink())
        files = [each for each in files if each.stat().st_size < _HUGE]
        metadata = [each for each in files if each.name in _METADATA]
        chunks = [each for each in files if each.name not in _METADATA]
        group = metadata if metadata and (random.integers(3) or not chunks) else chunks
        if not group:
            break
        file = group[int(random.integers(len(group)))]
        told.append(f"{file.relative_to(path)} {_damage_file(file, path, random, leads, canary)}")
    return Case(f"{case.told}: {'; '.join(told)}", path, case.read)


def _damage_file(file: Path, path: Path, random: Random, leads: list[str], canary: Path) -> str:
    way = int(random.integers(12))
    inner = file.relative_to(path)
    if way == 0 and (canary / inner).exists():
        return make_other(file, random, canary / inner)
    if way == 1 and file.parent != path and file.parent.name != "given":
        shutil.rmtree(file.parent)  # a level, or a row of chunks, is a folder elsewhere
        file.parent.symlink_to(canary / inner.parent)
        return "in a folder elsewhere"
    try:
        json.loads(file.read_bytes())
    except (ValueError, RecursionError):  # a chunk, or what was damaged before
        told, data = make_damaged_bytes(file.read_bytes(), random)
    else:
        told, data = make_damaged_json(file.read_bytes(), random, leads)
    file.write_bytes(data)
    return told


def _write_elsewhere(kind: int, outside: Outside) -> Path:
    """A whole store of the same kind that was not given."""
    whole = _make_store(kind)[1]
    for file in whole.rglob("*"):
        if file.is_file():
            outside.write_file(f"{kind}.zarr/{file.relative_to(whole)}", file.read_bytes())
    return outside.folder / f"{kind}.zarr"


def _describe_kind(kind: int) -> str:
    version, codec, ome = KINDS[kind]
    return f"v{version} {codec}{' OME' if ome else ''}"


@cache
def _make_store(kind: int) -> tuple[TemporaryDirectory[str], Path]:
    held = TemporaryDirectory()
    write_store(path := Path(held.name, "a.zarr"), *KINDS[kind])
    return held, path


def _write_case(path: Path, kind: int, told: str) -> Case:
    shutil.copytree(_make_store(kind)[1], path)
    return Case(told, path, lambda: look(open_image(path)))
