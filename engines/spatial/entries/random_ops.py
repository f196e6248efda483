"""Random operators: tensors with pixels are drawn by whole-image position, all others alike on all tiles."""

from __future__ import annotations

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.program.instructions import DEVICE, SEED
from engines.spatial.align import get_local_ranges
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.rng import SETTINGS, draws, find_sample_number

__all__: list[str] = []


@register_rule(*draws, everywhere=True)
def lower_random(b: Builder, node: Node) -> None:
    """Draw the part of a random tensor that is on this tile."""
    a = node.arguments
    source = next((a[name] for name in ("self", "input") if name in a), None)
    axes = b.get_value(source).axes if isinstance(source, Ref) and b.is_tiled(source) else None
    # Numbers follow from the place in the whole image and the number of the draw: nothing is sent, and a stage that
    # is computed again draws the same.
    number = find_sample_number(b.graph, node)
    if number is None:
        apply_locally(b, node, axes)
        return
    place = get_local_ranges(b, node.spec, axes)
    if b.is_batch_sharded(Ref(node.name)):  # this rank's images of all those that the ranks share
        own = node.spec.shape[0]
        place[0] = (own * b.stage.shares, own * b.tile, own * (b.tile + 1))
    if not {"train", "training"} & set(a):
        settings = {name: a[name] for name in SETTINGS if name in a}
        if node.operator == "aten.bernoulli.default":
            settings["p"] = b.align_to_output(source)
        draw = SEED, number, place, DEVICE, node.operator.split(".")[1], getattr(torch, node.spec.dtype)
        b.add_local_op(node.name, "tile.draw", *draw, like=node.spec, axes=axes, **settings)
        return
    if "feature" in node.operator:
        place = [*place[:2], *((1, 0, 1) for _ in place[2:])]  # one number for each channel, broadcast over pixels
    if node.operator == "aten.rrelu.default":
        kernel, settings = "tile.rrelu", (a["lower"], a["upper"])
    else:
        kernel, settings = "tile.dropout", (a["p"], "alpha" in node.operator)
    x = b.align_to_output(source)
    b.add_local_op(node.name, kernel, x, SEED, number, place, DEVICE, *settings, like=node.spec, axes=axes)
