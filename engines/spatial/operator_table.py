"""The operator table: what each ATen operator needs so that tiles give exactly the whole image's result.

An entry is called only where an argument is tiled. It says which window a tile of outputs reads, with which
local kernel, and what is summed over ranks; everything else runs as it is. To add an operator, write a
function like those in `engines/spatial/entries/` under `@register_rule("aten.name.overload")`: see `register_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engines.errors import PlanError, TraceError
from engines.layer.graph import Node, Ref, find_ref_names
from engines.program.builder import Builder
from engines.spatial.gather_fallback import keep_own_tile, with_gathered_inputs
from engines.spatial.halo_overlap import split_interior
from engines.spatial.local_rules import apply_locally, is_pointwise, lower_pointwise
from engines.spatial.unsupported import NeedsGatherError, check_deterministic, make_gather_error, make_unsupported_error

__all__ = ["Rule", "get_rules", "lower", "register_rule"]

Rule = Callable[[Builder, Node], None]

_TABLE: dict[str, Rule] = {}
_EVERYWHERE: set[str] = set()
_IMAGES: dict[str, tuple[str, ...]] = {}
_SHARED: set[str] = set()


def register_rule(
    *operators: str, everywhere: bool = False, images: tuple[str, ...] = (), shared: bool = False
) -> Callable[[Rule], Rule]:
    """Add a rule to the table: a function of a `Builder` and a `Node`, called where an argument is tiled.

    `everywhere`: also where no argument is tiled. `images` names the only arguments that the rule takes tiled, and
    only with rows and columns last. `shared`: also where ranks share the images of a micro-batch, and one result is
    made of all of them. A cell of a notebook may add rules: the ranks of a `Training` made after
    that get them, and the kernels of `register_kernel`, by value.

    A custom operator that blurs over 3 x 3 pixels. Outputs read one pixel further than their tile, and what lies
    outside the image is 0; the kernel gets the window, and makes the tile of outputs of it:

    >>> from torch.nn.functional import avg_pool2d
    >>> from engines.spatial.kernels import register_kernel
    >>> from engines.spatial.windows import SlidingWindow
    >>> @register_kernel("mine.blur")
    ... def blur(window):
    ...     return avg_pool2d(window, 3, stride=1)
    >>> @register_rule("mine.blur.default", images=("x",))
    ... def blur_on_tiles(b, node):
    ...     rule = SlidingWindow(kernel=3, padding=1)
    ...     window = b.window(node.arguments["x"], node.spec.shape[-2:], rule, rule)
    ...     b.local(node.name, "mine.blur", b.padded(window), like=node.spec, axes=(-2, -1))
    """

    def add(rule: Rule) -> Rule:
        for name in operators:
            _TABLE[name] = rule
            _IMAGES[name] = images
            for names, holds in ((_EVERYWHERE, everywhere), (_SHARED, shared)):
                names.add(name) if holds else names.discard(name)
        return rule

    return add


def get_rules() -> dict[str, tuple[Rule, dict[str, Any]]]:
    """The table: for each operator its rule, and the arguments of `register_rule`."""
    return {
        name: (rule, {"everywhere": name in _EVERYWHERE, "images": _IMAGES[name], "shared": name in _SHARED})
        for name, rule in _TABLE.items()
    }


def lower(b: Builder, node: Node) -> None:
    """Append what one node of the graph is on this rank.

    Raises TraceError where a tiled value meets an operator that has no rule, and PlanError where what an operator
    leaves of a large image cannot be cut into tiles.
    """
    b.begin_node(node)
    try:
        _lower(b, node)
        if b.overlaps:
            split_interior(b, node, _lower)
    except (NeedsGatherError, PlanError) as refusal:
        if b.in_turn and len(b.stage.ranks) > 1:
            raise  # no tile ever has what all of them hold
        b.undo_node()
        _lower_gathered(b, node, refusal)
    except TraceError:
        if len(b.stage.ranks) > 1:
            raise
        b.undo_node()
        apply_locally(b, node, axes=None)  # one rank holds all of it, and needs no rule


def _lower_gathered(b: Builder, node: Node, refusal: NeedsGatherError | PlanError) -> None:
    """What no tile can do by itself, or leaves fewer rows or columns than there are tiles, every rank does wholly.

    A result in the shape of an image that was read is tiled as that was, any other is held by every rank. Raises the
    refusal, as a TraceError or PlanError, where that would take too many pixels.
    """
    images = [b.get_value(Ref(name)) for name in node.reads if b.is_tiled(Ref(name))]
    alike = (image.axes for image in images if node.spec and image.spec.shape == node.spec.shape)
    axes = getattr(refusal, "add_axes", None) or next(alike, None)
    try:
        whole = with_gathered_inputs(b, node)
    except NeedsGatherError:
        raise TraceError(str(refusal)) if isinstance(refusal, NeedsGatherError) else refusal from None
    if axes is None or not b.can_tile((node.spec.shape[axes[0]], node.spec.shape[axes[1]])):
        _lower(b, whole)
        return
    _lower(b, replace(whole, name=f"{node.name}.whole"))
    keep_own_tile(b, node, Ref(f"{node.name}.whole"), axes)


def _lower(b: Builder, node: Node) -> None:
    tiled = any(b.is_tiled(Ref(name)) for name in node.reads)
    joins = any(b.is_batch_sharded(Ref(name)) for name in node.reads) and not b.is_batch_sharded(Ref(node.name))
    if joins and node.operator not in _SHARED:
        raise make_unsupported_error(node, "joins images that ranks share (local_dp), for which there is no rule")
    if node.operator in _TABLE and (tiled or joins or node.operator in _EVERYWHERE):
        _check_images(b, node)
        _TABLE[node.operator](b, node)
    elif not tiled:
        check_deterministic(b, node)
        apply_locally(b, node, axes=None)
    elif is_pointwise(node.operator):
        lower_pointwise(b, node)
    else:
        raise make_unsupported_error(node)


def _check_images(b: Builder, node: Node) -> None:
    """Raises TraceError where a rule for images would read something else."""
    allowed = _IMAGES[node.operator]
    for name, argument in node.arguments.items() if allowed else ():
        for tiled in (Ref(read) for read in find_ref_names(argument) if b.is_tiled(Ref(read))):
            if name not in allowed:
                raise make_gather_error(node, f"takes pixels as its {name}")
            if b.get_value(tiled).axes != (-2, -1):
                raise make_gather_error(node, f"reads {tiled.name}, whose rows and columns are not its last two axes")
