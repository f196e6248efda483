"""The operator table: what each ATen operator needs so that tiles give exactly the whole image's result.

An entry is called only where an argument is tiled. It says which window a tile of outputs reads, with which
local kernel, and what is summed over ranks; everything else runs as it is. To add an operator, write a
function like those in `engines/spatial/entries/` under `@entry("aten.name.overload")`: see `entry`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engines.errors import PlanError, TraceError
from engines.layer.graph import Node, Ref, references
from engines.program.builder import Builder
from engines.spatial.overlap import in_pieces
from engines.spatial.plain import as_it_is, is_pointwise, pointwise
from engines.spatial.refusals import WholeError, apart, check_deterministic, no_rule
from engines.spatial.whole import own_part, with_whole

__all__ = ["Rule", "entry", "lower", "rules"]

Rule = Callable[[Builder, Node], None]

_TABLE: dict[str, Rule] = {}
_EVERYWHERE: set[str] = set()
_IMAGES: dict[str, tuple[str, ...]] = {}
_SHARED: set[str] = set()


def entry(
    *operators: str, everywhere: bool = False, images: tuple[str, ...] = (), shared: bool = False
) -> Callable[[Rule], Rule]:
    """Add a rule to the table: a function of a `Builder` and a `Node`, called where an argument is tiled.

    `everywhere`: also where no argument is tiled. `images` names the only arguments that the rule takes tiled, and
    only with rows and columns last. `shared`: also where ranks share the images of a micro-batch, and one result is
    made of all of them. A cell of a notebook may add rules: the ranks of a `Training` made after
    that get them, and the kernels of `local_kernel`, by value.

    A custom operator that blurs over 3 x 3 pixels. Outputs read one pixel further than their tile, and what lies
    outside the image is 0; the kernel gets the window, and makes the tile of outputs of it:

    >>> from torch.nn.functional import avg_pool2d
    >>> from engines.spatial.kernels import local_kernel
    >>> from engines.spatial.windows import SlidingWindow
    >>> @local_kernel("mine.blur")
    ... def blur(window):
    ...     return avg_pool2d(window, 3, stride=1)
    >>> @entry("mine.blur.default", images=("x",))
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


def rules() -> dict[str, tuple[Rule, dict[str, Any]]]:
    """The table: for each operator its rule, and the arguments of `entry`."""
    return {
        name: (rule, {"everywhere": name in _EVERYWHERE, "images": _IMAGES[name], "shared": name in _SHARED})
        for name, rule in _TABLE.items()
    }


def lower(b: Builder, node: Node) -> None:
    """Append what one node of the graph is on this rank.

    Raises TraceError where a tiled value meets an operator that has no rule, and PlanError where what an operator
    leaves of a large image cannot be cut into tiles.
    """
    b.at(node)
    try:
        _lower(b, node)
        if b.overlaps:
            in_pieces(b, node, _lower)
    except (WholeError, PlanError) as refusal:
        if b.in_turn and len(b.stage.ranks) > 1:
            raise  # no tile ever has what all of them hold
        b.forget()
        _instead(b, node, refusal)
    except TraceError:
        if len(b.stage.ranks) > 1:
            raise
        b.forget()
        as_it_is(b, node, axes=None)  # one rank holds all of it, and needs no rule


def _instead(b: Builder, node: Node, refusal: WholeError | PlanError) -> None:
    """What no tile can do by itself, or leaves fewer rows or columns than there are tiles, every rank does wholly.

    A result in the shape of an image that was read is tiled as that was, any other is held by every rank. Raises the
    refusal, as a TraceError or PlanError, where that would take too many pixels.
    """
    images = [b.value(Ref(name)) for name in node.reads if b.is_tiled(Ref(name))]
    alike = (image.axes for image in images if node.spec and image.spec.shape == node.spec.shape)
    axes = getattr(refusal, "axes", None) or next(alike, None)
    try:
        whole = with_whole(b, node)
    except WholeError:
        raise TraceError(str(refusal)) if isinstance(refusal, WholeError) else refusal from None
    if axes is None or not b.fits((node.spec.shape[axes[0]], node.spec.shape[axes[1]])):
        _lower(b, whole)
        return
    _lower(b, replace(whole, name=f"{node.name}.whole"))
    own_part(b, node, Ref(f"{node.name}.whole"), axes)


def _lower(b: Builder, node: Node) -> None:
    tiled = any(b.is_tiled(Ref(name)) for name in node.reads)
    joins = any(b.is_parted(Ref(name)) for name in node.reads) and not b.is_parted(Ref(node.name))
    if joins and node.operator not in _SHARED:
        raise no_rule(node, "joins images that ranks share (local_dp), for which there is no rule")
    if node.operator in _TABLE and (tiled or joins or node.operator in _EVERYWHERE):
        _check_images(b, node)
        _TABLE[node.operator](b, node)
    elif not tiled:
        check_deterministic(b, node)
        as_it_is(b, node, axes=None)
    elif is_pointwise(node.operator):
        pointwise(b, node)
    else:
        raise no_rule(node)


def _check_images(b: Builder, node: Node) -> None:
    """Raises TraceError where a rule for images would read something else."""
    allowed = _IMAGES[node.operator]
    for name, argument in node.arguments.items() if allowed else ():
        for tiled in (Ref(read) for read in references(argument) if b.is_tiled(Ref(read))):
            if name not in allowed:
                raise apart(node, f"takes pixels as its {name}")
            if b.value(tiled).axes != (-2, -1):
                raise apart(node, f"reads {tiled.name}, whose rows and columns are not its last two axes")
