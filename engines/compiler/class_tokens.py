"""Positions beside the pixels, such as class tokens and registers: the first rank has them, in front of its own pixels.

tokens of 4 x 4 pixels on 2 x 1 tiles          rank 0   c 0 1 2 3 4 5 6 7
(N, 1 + 16, C), of which c is the class        rank 1     8 9 ...      15
"""

from __future__ import annotations

from mpi4dl_nb.engines.compiler.segments import Segments
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.graph.model_graph import Ref, TensorSpec


def take_lead(b: Segments, ref: Ref) -> Ref:
    """Return the positions of a value that lie beside its pixels, on every rank."""
    value, target = b.get_value(ref), f"{ref.name}.lead"
    if target not in b.values:
        dim = value.places[0].dim
        # The others add zeros to the first rank's.
        b.add_local_op(target, "tile.lead", ref, dim, value.lead, b.is_first, like=value.spec.resize(dim, value.lead))
    total = f"{target}.total"
    return Ref(total) if total in b.values else b.all_reduce(Ref(target))


def drop_lead(b: Segments, ref: Ref) -> Ref:
    """Return the pixels of a value alone."""
    return _take_part(b, ref, b.get_value(ref).separate()[0])


def separate_lead(b: Segments, ref: Ref) -> tuple[Ref, ...]:
    """Return the pixels of a value, and on the first rank what lies beside them, without a message."""
    pixels, *beside = b.get_value(ref).separate()
    return tuple(_take_part(b, ref, part) for part in (pixels, *(beside if b.is_first else ())))


def _take_part(b: Segments, ref: Ref, part: ValueLayout) -> Ref:
    value = b.get_value(ref)
    if part.name not in b.values:
        lead = value.lead if b.is_first else 0
        span = (lead, None) if part.places else (0, lead)
        b.add_local_op(
            part.name, "aten.slice.Tensor", ref, value.places[0].dim, *span, like=part.spec, axes=part.places
        )
        b.hold_own(part.name)
    return Ref(part.name)


def add_lead(b: Segments, name: str, lead: Ref, pixels: Ref, like: TensorSpec) -> Ref:
    """Add the value `name`: positions that every rank has, before this rank's own pixels, which are one merged axis."""
    places = b.get_value(pixels).places
    dim = places[0].dim
    count = b.get_value(lead).spec.shape[dim]
    if not b.is_first:
        # None of them, but the result depends on them here, too: it has a gradient on all ranks, or on none.
        lead = b.add_local_op(f"{name}.none", "aten.slice.Tensor", lead, dim, 0, 0, like=like.resize(dim, count))
    axes = [place._replace(lead=count) for place in places]
    return b.add_local_op(name, "aten.cat.default", (lead, pixels), dim, like=like, axes=axes)
