"""The operator table: how each ATen operator gives exactly the whole image's result on tiles.

A rule runs if one of its arguments is tiled, which includes those of which ranks share the images (`local_dp`). A rule
registered with `everywhere=True` always runs. A rule determines which window a tile of outputs reads, the local
kernel, and the sums over ranks. Pointwise operators, and those that read nothing tiled, need none; `lower` says what
becomes of the others. To add an operator, write a function like those in
`engines/compiler/entries/` under `@register_rule("aten.name.overload")`: see `register_rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.each_image import describe_joining, lower_each_image
from mpi4dl_nb.engines.compiler.halo_overlap import split_interior
from mpi4dl_nb.engines.compiler.local_rules import (
    NeedsGatherError,
    align_arguments,
    all_gather_pixels,
    apply_locally,
    check_deterministic,
    cut_to_tile,
    is_pointwise,
    make_gather_error,
    make_shared_images_error,
    make_unsupported_error,
    map_refs,
)
from mpi4dl_nb.engines.compiler.value_layout import MergedAxesError, ValueLayout
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.geometry.places import get_sizes
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, find_ref_names
from mpi4dl_nb.engines.program.kernels import Kernel, get_kernels, register_kernel

Rule = Callable[[Builder, Node], None]

_TABLE: dict[str, tuple[Rule, dict[str, Any]]] = {}
"""For each operator its rule and the arguments of `register_rule`."""


def register_rule(
    *operators: str,
    everywhere: bool = False,
    images: tuple[str, ...] = (),
    tiled: tuple[str, ...] = (),
) -> Callable[[Rule], Rule]:
    """Register a rule: a function of a `Builder` and a `Node`, called if an argument of the operator is tiled.

    `everywhere`: the rule is also called if no argument is tiled. `tiled` names the only arguments that the rule
    accepts tiled; `images` does so for those that must have rows and columns as last axes. A rule that asks for the
    `axes` of a value of which rows and columns are merged, as in tokens (N, H * W, C), is left, and the value is
    gathered if it has few pixels. Where ranks share the images of a batch, that axis is the sharded one; a rule that
    refuses it is left, too, and the operator is run on each rank's images if it computes each image by itself. A
    notebook cell may register rules, and replaces them when it runs again: the ranks of a `Training` created afterwards
    receive them, and the kernels of `register_kernel`, by value.

    A rule that cannot do its work raises `make_gather_error`: few pixels are then gathered, and many refused.

    The example is a custom operator that blurs over 3 x 3 pixels. Outputs read one pixel beyond their tile, and pixels
    outside the image are 0. The kernel computes the tile of outputs from the window:

    >>> from torch.nn.functional import avg_pool2d
    >>> from mpi4dl_nb.engines.program.kernels import register_kernel
    >>> from mpi4dl_nb.engines.geometry.windows import SlidingWindow
    >>> @register_kernel("mine.blur")
    ... def blur(window):
    ...     return avg_pool2d(window, 3, stride=1)
    >>> @register_rule("mine.blur.default", images=("x",))
    ... def blur_on_tiles(b, node):
    ...     rule = SlidingWindow(kernel=3, padding=1)
    ...     window = b.read_window(node.arguments["x"], b.get_image_px(node.spec), rule, rule)
    ...     b.add_local_op(node.name, "mine.blur", b.pad_window(window), like=node.spec, axes=b.image_axes)
    """

    def add(rule: Rule) -> Rule:
        for name in operators:
            _TABLE[name] = rule, {"everywhere": everywhere, "images": images, "tiled": tiled}
        return rule

    return add


def get_rules() -> dict[str, tuple[Rule, dict[str, Any]]]:
    """Return, for each operator, its rule and the arguments of `register_rule`."""
    return dict(_TABLE)


def lower(b: Builder, node: Node) -> None:
    """Append the instructions of one graph node on this rank.

    Raises TraceError if a tiled value of many pixels meets an operator without a rule, and PlanError if an operator's
    result of a large image cannot be cut into tiles.
    """
    # What is tried, in order:
    #
    #     the operator's rule, or its kernel on own pixels if it is pointwise or reads no tiled value
    #     the same once more, in pieces, if a halo exchange can overlap with the interior (`split_interior`)
    #     refused, where ranks share images, but computes each image by itself: on the rank's own (`lower_each_image`)
    #     refused, or too few rows or columns for the tiles: gathered, if the pixels are few (`_lower_gathered`)
    #     no rule, one rank: the operator itself
    b.begin_node(node)
    try:
        _lower(b, node)
        if b.overlaps:
            split_interior(b, node, _lower)
    except (NeedsGatherError, MergedAxesError, PlanError) as refusal:
        if isinstance(refusal, MergedAxesError):
            refusal = make_gather_error(node, f"needs rows and columns as dimensions, but {refusal}")
        if b.tile_by_tile and len(b.stage.ranks) > 1:
            raise refusal  # tiles are computed one after another, so none can gather what the others hold
        b.undo_node()
        if not lower_each_image(b, node):
            _lower_gathered(b, node, refusal)
    except TraceError:
        if len(b.stage.ranks) > 1:
            raise
        b.undo_node()
        apply_locally(b, node, axes=())  # a single rank holds the whole value and needs no rule


def _lower_gathered(b: Builder, node: Node, refusal: NeedsGatherError | PlanError) -> None:
    """Lower a node on gathered inputs, since no tile can compute it alone or it leaves too few rows or columns.

    A result in the shape of an image that the node reads is tiled like that image; every rank holds any other result.
    Raises the refusal, as a TraceError or PlanError, if too many pixels would be gathered.
    """
    images = [b.get_value(Ref(name)) for name in node.reads if b.is_tiled(Ref(name))]
    alike = (image.places for image in images if node.spec and image.spec.shape == node.spec.shape)
    places = getattr(refusal, "places", ()) or next(alike, ())
    try:
        arguments = map_refs(lambda ref: all_gather_pixels(b, node, ref), node.arguments)
    except NeedsGatherError as beyond:
        if b.stage.shares > 1:
            raise make_shared_images_error(node, f"{describe_joining(b, node)}, and {beyond.why}") from None
        raise (TraceError(str(refusal)) if isinstance(refusal, NeedsGatherError) else refusal) from None
    if not places or not b.can_tile(get_sizes(node.result.shape, places)):
        _lower(b, replace(node, arguments=arguments))
        return
    whole = f"{node.name}.whole"
    _lower(b, replace(node, name=whole, arguments=arguments))
    part = cut_to_tile(b, node, Ref(whole), ValueLayout(node.name, node.result, places, differentiable=True))
    b.add_local_op(node.name, "aten.alias.default", part, like=node.result, axes=places)


def _lower(b: Builder, node: Node) -> None:
    tiled = [Ref(name) for name in node.reads if b.is_tiled(Ref(name))]
    rule, how = _TABLE.get(node.operator, (None, {}))
    if rule and (tiled or how["everywhere"]):
        _check_tiled(b, node, how["images"], how["images"] + how["tiled"])
        rule(b, node)
    elif not tiled or is_pointwise(node.operator):
        check_deterministic(b, node)
        changes = align_arguments(b, node) if tiled else {}
        apply_locally(b, node, b.get_value(tiled[0]).places if tiled else (), **changes)
    elif node.operator.startswith("aten.") or b.stage.shares > 1:
        check_deterministic(b, node)
        raise make_gather_error(node, "has no entry in the operator table")
    else:
        raise make_unsupported_error(node)  # a user's operator, which the ranks may not have


def _check_tiled(b: Builder, node: Node, images: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    """Raise TraceError if the node reads a tiled value that its rule does not accept; `images` must have image axes."""
    for name, argument in node.arguments.items() if allowed else ():
        for tiled in (Ref(read) for read in find_ref_names(argument) if b.is_tiled(Ref(read))):
            if name not in allowed:
                raise make_gather_error(node, f"takes pixels as its {name}")
            if name in images and b.get_value(tiled).axes != b.image_axes:
                raise make_gather_error(node, f"reads {tiled.name}, whose rows and columns are not its last two axes")


# Users' additions to the operator table, in a form that is sent to the ranks.


def is_user_defined(function: Callable[..., Any]) -> bool:
    """Return whether a function is a user's, not this package's or torch's; a class method is judged by its class."""
    owner = getattr(function, "__self__", None)
    home = getattr(owner if isinstance(owner, type) else function, "__module__", None) or "__main__"
    return home not in ("builtins", "_operator") and not home.startswith(("mpi4dl_nb.", "torch."))


@dataclass(frozen=True)
class UserOps:
    """Users' rules and kernels, sent to the ranks by value."""

    rules: tuple[tuple[str, Rule, dict[str, Any]], ...] = ()
    kernels: tuple[tuple[str, Kernel], ...] = ()

    @classmethod
    def snapshot(cls) -> UserOps:
        """Return all that are registered so far."""
        return cls(
            tuple((name, *what) for name, what in get_rules().items() if is_user_defined(what[0])),
            tuple((name, function) for name, function in get_kernels().items() if is_user_defined(function)),
        )

    def register(self) -> None:
        """Register the rules and kernels in this process."""
        for name, rule, how in self.rules:
            register_rule(name, **how)(rule)
        for name, function in self.kernels:
            register_kernel(name)(function)
