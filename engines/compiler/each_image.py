"""Operators without a rule that compute each image by itself, where ranks share the images of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.local_rules import apply_locally, get_spec, map_refs, split_arguments
from mpi4dl_nb.engines.geometry.places import Place, Places
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec
from mpi4dl_nb.engines.program.instructions import DEVICE
from mpi4dl_nb.engines.program.kernels import get_kernel

FILLS = ("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty", "expand")
_RESHAPED = ("view.default", "reshape.default", "_unsafe_view.default", "unflatten.int")
SHAPED = {f"aten.{name}" for name in (*_RESHAPED, *(f"{name}.default" for name in FILLS))}
"""Operators whose arguments include the shape of the result: of the same values, or of values that are alike."""
_AXES = {"dim", "dims", "dimension", "dim0", "dim1", "dim2", "axis0", "axis1", "source", "destination"}
# Operators that only move axes: the shapes of their results say where the images went.
_MOVED = ("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims")
# Operators that add an axis, which they count among those of the result.
_ADDING = ("unsqueeze", "stack")
# Operators along the first axis, which no argument names; some only if there are no more than so many axes.
_ALONG_FIRST = (
    *("vstack", "vsplit", "flipud", "msort", "masked_scatter", "renorm", "hstack", "tril", "triu"),
    *("isin", "take", "put", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only", "segment_reduce"),
)
_IF_FEW_AXES = {"hstack": 1, "tril": 2, "triu": 2}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def describe_image_axis(node: Node, sizes: Mapping[str, TensorSpec], reads_images: bool) -> str:
    """Return how an operator works along the axis of the images, the first one; empty if it does not.

    `reads_images`: the first value that it reads has an entry for each image. `sizes` are the specs of all values.
    """
    name = node.operator.removeprefix("aten.").split(".")[0]
    ranks = [len(sizes[read].shape) for read in node.reads if read in sizes]
    count = len(node.spec.shape) if node.spec and name in _ADDING else next(iter(ranks), 0)
    # Axes, and numbers of entries, are those of what is read first: a table, perhaps, of which no rank has its own.
    if reads_images and name not in _MOVED:
        for argument in _AXES & node.arguments.keys() if name != "tile" else ():
            dims = node.arguments[argument]
            if any(type(dim) is int and count and dim % count == 0 for dim in _list_axes(dims)):
                return f"works along the axis of the images ({argument}={dims})"
        if _picks_images(node, sizes):
            return "picks or writes images by their numbers"
    along = name in _ALONG_FIRST and count <= _IF_FEW_AXES.get(name, count)
    if along or (name in _RECURRENT and node.arguments.get("batch_first") is not True):
        return "works along the first axis, that of the images"
    repeats = node.arguments.get("dims" if name == "tile" else "repeats")
    if isinstance(repeats, list | tuple) and len(repeats) == max(ranks, default=0) and repeats[0] != 1:
        return "repeats the images"
    return ""


def _list_axes(dims: Any) -> Sequence[Any]:
    """Return the axes that an argument names; the first one, if it is all of them."""
    if dims is None or dims in ([], ()):
        return [0]
    return dims if isinstance(dims, list | tuple) else [dims]


def _picks_images(node: Node, sizes: Mapping[str, TensorSpec]) -> bool:
    """Return whether an operator picks or writes entries of the first axis by their numbers in the whole batch."""
    # A mask has an entry for each of the images that a rank has; numbers count those of all ranks.
    indices = node.arguments.get("indices")
    chosen = indices[0] if isinstance(indices, list | tuple) and indices else None
    return chosen is not None and not (isinstance(chosen, Ref) and sizes[chosen.name].dtype == "bool")


def lower_each_image(b: Builder, node: Node) -> bool:
    """Lower an operator on the images of this rank, if it computes each image by itself; return whether it does."""
    tiled = [Ref(name) for name in dict.fromkeys(node.reads) if b.is_tiled(Ref(name))]
    layouts = [b.get_value(ref) for ref in tiled]
    if b.stage.shares == 1 or any(value.places != (Place(-len(value.spec.shape)),) for value in layouts):
        return False
    if len(tiled) > 1 and not node.operator.startswith("aten."):  # the second may number images of the first
        return False
    # Values that every rank holds may have an entry for each image, too: along the first axis or, for the states of a
    # recurrent layer, along the second one.
    images = next(iter(b.graph.inputs.values())).shape[0]
    whole = {name: get_spec(b, name).shape for name in node.reads if Ref(name) not in tiled and name in b.values}
    by_axis = [{name: axis for name, shape in whole.items() if shape[axis : axis + 1] == (images,)} for axis in (0, 1)]
    for cut in ({}, *filter(None, by_axis)):
        if describe_image_axis(node, b.graph.specs, Ref(node.reads[0]) in tiled or node.reads[0] in cut):
            continue
        # The same for all ranks of the stage.
        key, find_places = ("images", node.name, *cut.values()), partial(_find_result_places, b, node)
        if (places := b.memo.get_or_compute(key, (cut,), find_places)) is not None:
            _apply_to_images(b, node, cut, places)
            return True
    return False


def describe_joining(b: Builder, node: Node) -> str:
    """Return how an operator joins images that ranks share, as far as its arguments tell."""
    reads_images = b.is_tiled(Ref(node.reads[0]))
    return describe_image_axis(node, b.graph.specs, reads_images) or "joins the images of several ranks"


def _apply_to_images(b: Builder, node: Node, cut: Mapping[str, int], places: Places) -> None:
    """Run the operator on the rank's images, also of the whole values `cut`, along their axes."""
    parts = {Ref(name): _cut_images(b, node, name, axis) for name, axis in cut.items()}
    arguments = map_refs(lambda ref: parts.get(ref, ref), node.arguments)
    apply_locally(b, replace(node, arguments=arguments), places)


def _cut_images(b: Builder, node: Node, name: str, axis: int) -> Ref:
    """Return this rank's images of a value that every rank holds."""
    spec = get_spec(b, name)
    (span,) = b.get_tiles((spec.shape[axis],))[b.rank]
    return b.add_local_op(
        f"{node.name}.{name}.images", "tile.cut", Ref(name), (axis,), ((span.start, span.stop),), like=spec
    )


def _find_result_places(b: Builder, node: Node, cut: Mapping[str, int]) -> Places | None:
    """Return where the images are in the result of an operator, by running it for all images and for those of a rank.

    `cut` are whole values of which the rank's images are taken, with their axes. None: the images are not the first
    axis of each result that is read, or the result for some images depends on others.
    """
    probe = _Probe(b, node, cut)
    try:
        whole, share = (probe.run(probe.make_empty(is_share)) for is_share in (False, True))
        places = tuple({Place(-len(result.shape)) for result in whole})
        alike = all(_keeps_share(b, *pair) for pair in zip(whole, share, strict=True))
        if len(places) != 1 or not alike or not (node.short_operator in _KNOWN or probe.is_separable()):
            return None
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):  # it cannot run on a part, or here
        return None
    return places


def _keeps_share(b: Builder, whole: Tensor, share: Tensor) -> bool:
    """Return whether the first axis, and no other, has as many entries fewer as a rank has images."""
    shares = b.stage.shares
    if not whole.dim() or whole.shape[0] % shares:
        return False
    return (whole.shape[0] // shares, *whole.shape[1:]) == tuple(share.shape)


# Operators that compute each image by itself if the shapes of their results do: layers, whose numbers take long.
_OF_ANY_SIZE = ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_KNOWN = {
    *(f"{name}{count}d" for name in _OF_ANY_SIZE for count in (1, 2, 3)),
    *("convolution", "group_norm", "instance_norm", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle"),
    *("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "im2col", "col2im", "pad"),
}
_MOST_NUMBERS = 1 << 24  # of what an operator reads, beside weights: an eighth of a GB in float64


@dataclass(frozen=True)
class _Probe:
    """The arguments of an operator for all images, and for the images of a rank, as tensors without or with numbers."""

    b: Builder
    node: Node
    cut: Mapping[str, int]

    def make_empty(self, is_share: bool) -> Any:
        """Return the arguments as tensors without numbers, of all images or of as many as a rank has."""

        def make(name: str) -> Tensor:
            spec, axis = get_spec(self.b, name), self._get_axis(name)
            sizes = list(spec.shape)
            if is_share and axis is not None:
                sizes[axis] = len(range(0, sizes[axis], self.b.stage.shares))
            return torch.empty(sizes, dtype=getattr(torch, spec.dtype), device="meta")

        return self._make_arguments(make, "meta")

    def is_separable(self) -> bool:
        """Return whether the result for the images of each rank is that part of the result for all images.

        It is tried with random numbers, once for a stage. Of too many numbers, the shapes count alone, unless some
        may be numbers of images, or the images may be the rows of a matrix.
        """
        specs = {name: get_spec(self.b, name) for name in dict.fromkeys(self.node.reads)}
        read = [spec for name, spec in specs.items() if name in self.b.values]
        if sum(spec.numel for spec in read) > _MOST_NUMBERS:
            return all(spec.is_floating and len(spec.shape) > 2 for spec in read)
        # Whole numbers may be those of images, of classes or of a table: small ones, and as many as there are images.
        images = max(self.b.get_value(Ref(name)).spec.shape[0] for name in specs if self._get_axis(name) is not None)
        return all(self._is_separable_for(specs, most) for most in (2, images, 4 * images))

    def _is_separable_for(self, specs: Mapping[str, TensorSpec], most: int) -> bool:
        """Return whether it is so for whole numbers below `most`, or the operator refuses them for all images."""
        generator, numbers = torch.Generator().manual_seed(most), {}
        for name, spec in specs.items():
            drawn = torch.rand(spec.shape, generator=generator, dtype=torch.float64)
            below = 2 if spec.dtype == "bool" else most
            numbers[name] = drawn if spec.is_floating else (drawn * below).floor().to(getattr(torch, spec.dtype))
        try:
            whole = self.run(self._make_arguments(numbers.__getitem__, "cpu"))
        except (RuntimeError, IndexError):  # numbers beyond a table
            return most > 2
        for share in range(self.b.stage.shares):

            def take(name: str, share: int = share) -> Tensor:
                axis = self._get_axis(name)
                return numbers[name] if axis is None else numbers[name].chunk(self.b.stage.shares, axis)[share]

            for result, part in zip(whole, self.run(self._make_arguments(take, "cpu")), strict=True):
                expected = result.chunk(self.b.stage.shares)[share]
                if not torch.allclose(expected, part, rtol=1e-9, atol=1e-12, equal_nan=True):
                    return False
        return True

    def _get_axis(self, name: str) -> int | None:
        value = self.b.get_value(Ref(name))
        return value.places[0].dim if value.places else self.cut.get(name)

    def _make_arguments(self, make: Callable[[str], Tensor], device: str) -> Any:
        return map_refs(lambda ref: device if ref == DEVICE else make(ref.name), split_arguments(self.node, {}))

    def run(self, arguments: Any) -> Sequence[Tensor]:
        """Return the result of the operator; of several, those that are read."""
        positional, keywords = arguments
        result = get_kernel(self.node.operator)(*positional, **keywords)
        if isinstance(result, Tensor):
            return [result]
        readers = (other for other in self.b.graph.nodes if other.operator == "getitem")
        picked = {reader.arguments["1"] for reader in readers if self.node.name in reader.reads}
        return [result[index] for index in sorted(picked)]
