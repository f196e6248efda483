"""Random operators: tensors with pixels are drawn by whole-image position, all others alike on all tiles."""

from __future__ import annotations

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.program.instructions import DEVICE, SEED
from engines.spatial.align import get_local_ranges
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.rng import SETTINGS, AxisRanges, draws, find_sample_number

__all__: list[str] = []


@register_rule(*draws, everywhere=True)
def lower_random(b: Builder, node: Node) -> None:
    """Draw the part of a random tensor that is on this tile."""
    a = node.arguments
    source = next((a[name] for name in ("self", "input") if name in a), None)
    axes = b.get_value(source).axes if isinstance(source, Ref) and b.is_tiled(source) else None
    number = find_sample_number(b.graph, node)
    if number is None:
        apply_locally(b, node, axes)
        return
    place = _get_ranges(b, node, axes)
    if not {"train", "training"} & set(a):
        settings = {name: a[name] for name in SETTINGS if name in a}
        if node.operator == "aten.bernoulli.default":
            settings["p"] = b.align_to_output(source)
        name, dtype = node.operator.split(".")[1], getattr(torch, node.spec.dtype)
        b.add_local_op(
            node.name, "tile.draw", SEED, number, place, DEVICE, name, dtype, like=node.spec, axes=axes, **settings
        )
        return
    if node.operator == "aten.rrelu.default":
        b.add_local_op(
            node.name, "tile.rrelu", b.align_to_output(source), SEED, number, place, DEVICE, a["lower"], a["upper"],
            like=node.spec, axes=axes,
        )  # fmt: skip
        return
    if "feature" in node.operator:
        place = [*place[:2], *((1, 0, 1) for _ in place[2:])]  # one number for each channel, broadcast over pixels
    b.add_local_op(
        node.name,
        "tile.dropout",
        b.align_to_output(source),
        SEED,
        number,
        place,
        DEVICE,
        a["p"],
        "alpha" in node.operator,
        like=node.spec,
        axes=axes,
    )


def _get_ranges(b: Builder, node: Node, axes: tuple[int, int] | None) -> AxisRanges:
    """Return the ranges of the whole value, or of this rank's tile or share of it."""
    place = get_local_ranges(b, node.spec, axes)
    if b.is_batch_sharded(Ref(node.name)):
        own = node.spec.shape[0]
        place[0] = (own * b.stage.shares, own * b.tile, own * (b.tile + 1))
    return place
