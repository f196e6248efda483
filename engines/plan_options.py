"""Plan fields in user interfaces: their meaning, their values as text and back, and the field that an error names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from engines.plan import PRECISIONS, SCHEDULES, Plan

__all__ = [
    "CHOICES",
    "GROUPS",
    "HELP",
    "WRITTEN",
    "find_plan_option",
    "find_plan_options",
    "format_value",
    "parse_value",
]

HELP: Mapping[str, str] = {
    "split_size": "stages that the model is cut into",
    "spatial_size": "how many leading stages are cut into tiles",
    "num_spatial_parts": "tiles of each spatial stage: one number, or one for each such as 4,2",
    "slice_method": "square, vertical, horizontal, or rows x columns such as 2x3",
    "balance": "layers of each stage such as 20,18, or auto",
    "parts": "micro-batches that a batch is cut into; batch norm normalises each by itself, as GPipe does",
    "bidirectional": "a second copy of the model runs through the ranks in mirrored order (GEMS)",
    "times": "pairs of batches, one in each direction, for an update",
    "local_dp": "ranks that share the images of a micro-batch in every stage behind the spatial ones",
    "data_parallel": "replicas of all, with batches of their own",
    "accumulate": "batches one after another that are added up before an update",
    "halo_d2": "halos travel once for several layers; where tiles overlap then, both ranks compute",
    "fused_layers": "layers between two exchanges of halo_d2, or auto: as many as are cheapest",
    "overlap_halos": "halos travel while what needs none is computed: for slow links",
    "schedule": "the order of micro-batches",
    "stages_per_rank": "stages on each rank behind the spatial ones, for the schedule interleaved",
    "precision": "the type of activations and halos",
    "checkpoint_activations": "keep what comes from other ranks, and compute the rest again for backward",
    "offload_activations": "what is kept for backward lies in a file: a GPU's on the host, a host's on its disk",
    "compile_segments": "fewer, larger kernels by torch.compile: for GPUs; the first steps compile",
    "sync_batchnorm": "batch norm over all tiles, as one process does it; off: each tile by itself",
}

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Stages": ("split_size", "balance"),
    "Tiles": ("spatial_size", "num_spatial_parts", "slice_method", "halo_d2", "fused_layers", "overlap_halos"),
    "Pipeline": ("parts", "schedule", "stages_per_rank"),
    "Directions and replicas": ("bidirectional", "times", "local_dp", "data_parallel", "accumulate"),
    "Numbers": ("precision", "checkpoint_activations", "offload_activations", "compile_segments", "sync_batchnorm"),
}
CHOICES: Mapping[str, tuple[str, ...]] = {"schedule": SCHEDULES, "precision": PRECISIONS}
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "num_spatial_parts": (),
    "slice_method": ("square", "vertical", "horizontal", "2x3"),
    "balance": ("auto",),
    "fused_layers": ("auto",),
}
"""The fields that take a word, a number or several of them, with values to propose."""

_NAMES = "|".join(field.name for field in fields(Plan))
_SET = re.compile(rf"\b({_NAMES})=")
_NAMED = re.compile(rf"\b({'|'.join(name for name in _NAMES.split('|') if '_' in name)})\b")


def find_plan_options(text: str) -> tuple[str, ...]:
    """Return the fields that a message names, in order: first those in `name=value`, then names that contain `_`.

    A name without `_` alone could be an English word.

    >>> find_plan_options("A batch of 3 images has parts=2. Use other parts, many times, or data_parallel.")
    ('parts', 'data_parallel')
    """
    return tuple(dict.fromkeys([*_SET.findall(text), *_NAMED.findall(text)]))


def find_plan_option(text: str, touched: str = "") -> str:
    """Return the field next to which to show a message; empty if the message names none.

    This is the field that was `touched` last, if the message names it, since it turned a valid plan into an invalid
    one. Otherwise it is the first: messages begin with the field that has to change.

    >>> text = "spatial_size=3 asks for more spatial stages than the split_size=2 stages there are."
    >>> find_plan_option(text), find_plan_option(text, touched="split_size"), find_plan_option(text, touched="parts")
    ('spatial_size', 'split_size', 'spatial_size')
    """
    named = find_plan_options(text)
    return touched if touched in named else next(iter(named), "")


def parse_value(text: str) -> Any:
    """Parse `4` as a number, `4,2` as a tuple, and anything else as a word.

    >>> parse_value("4"), parse_value("4, 2"), parse_value("auto"), parse_value("2x3,square")
    (4, (4, 2), 'auto', ('2x3', 'square'))
    """
    words = [word.strip() for word in text.strip().removesuffix(",").split(",")]
    parts = [int(word) if word.lstrip("-").isdecimal() else word for word in words]
    return tuple(parts) if "," in text else parts[0]


def format_value(value: Any) -> str:
    """Format a value so that `parse_value` restores it; None becomes an empty string.

    >>> format_value((4, 2)), format_value((4,)), format_value(None)
    ('4, 2', '4,', '')
    """
    if value is None:
        return ""
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(map(str, value)) if len(value) > 1 else f"{value[0]},"
