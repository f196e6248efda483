"""Random operators: what has pixels is drawn by their place in the whole image, what has none alike on all tiles."""

from __future__ import annotations

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.program.instructions import DEVICE, SEED
from engines.spatial.draws import SETTINGS, Place, draw_number, draws
from engines.spatial.ops import entry
from engines.spatial.places import places_of
from engines.spatial.plain import as_it_is

__all__: list[str] = []


@entry(*draws, everywhere=True)
def draw(b: Builder, node: Node) -> None:
    """The part of one draw that lies on this tile."""
    a = node.arguments
    source = next((a[name] for name in ("self", "input") if name in a), None)
    axes = b.value(source).axes if isinstance(source, Ref) and b.is_tiled(source) else None
    number = draw_number(b.graph, node)
    if number is None:
        as_it_is(b, node, axes)
        return
    place = _place(b, node, axes)
    if not {"train", "training"} & set(a):
        settings = {name: a[name] for name in SETTINGS if name in a}
        if node.operator == "aten.bernoulli.default":
            settings["p"] = b.beneath(source)
        name, dtype = node.operator.split(".")[1], getattr(torch, node.spec.dtype)
        b.local(node.name, "tile.draw", SEED, number, place, DEVICE, name, dtype, like=node.spec, axes=axes, **settings)
        return
    if node.operator == "aten.rrelu.default":
        b.local(
            node.name, "tile.rrelu", b.beneath(source), SEED, number, place, DEVICE, a["lower"], a["upper"],
            like=node.spec, axes=axes,
        )  # fmt: skip
        return
    if "feature" in node.operator:
        place = [*place[:2], *((1, 0, 1) for _ in place[2:])]
    b.local(
        node.name, "tile.dropout", b.beneath(source), SEED, number, place, DEVICE, a["p"], "alpha" in node.operator,
        like=node.spec, axes=axes,
    )  # fmt: skip


def _place(b: Builder, node: Node, axes: tuple[int, int] | None) -> Place:
    """The whole value, or this rank's tile or share of it."""
    place = places_of(b, node.spec, axes)
    if b.is_parted(Ref(node.name)):
        own = node.spec.shape[0]
        place[0] = (own * b.stage.shares, own * b.tile, own * (b.tile + 1))
    return place
