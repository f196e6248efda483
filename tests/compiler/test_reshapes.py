"""Other shapes for values in tiles: axes are split and merged in any way that keeps the order of values in memory.

Values are whole numbers, so that ranks and one process agree to the bit, gradients included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, find, given
from hypothesis import strategies as st
from torch import Tensor

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.operator_table import lower
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.geometry.places import (
    Place,
    Places,
    compute_local_shape,
    find_regrouping,
    get_sizes,
    split_shape,
    to_places,
)
from mpi4dl_nb.engines.geometry.tiles import Axes, Grid, Tile
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec
from mpi4dl_nb.engines.plan.layout import StageRanks
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.program import DirectionProgram, Program, ShardSpec, Step
from mpi4dl_nb.engines.program.worker import Worker
from tests.exact import finish, make_whole_numbers
from tests.sampling import set_trials

COUNTS = {"one axis": 1, "two axes": 2, "three axes": 3, "four axes": 4}


@dataclass(frozen=True)
class Case:
    """A value (2, 2, sharded axes) in other shapes, one after another: those of `shapes`, of which the last is its own.

    `dims` are the dimensions of the last but one over which a sum is taken.
    """

    grid: Grid
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]

    @property
    def axes(self) -> Axes:
        return tuple(range(-len(self.grid), 0))


@st.composite
def split_randomly(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Return factors of a size, the largest of which is first."""
    factors: list[int] = []
    for factor in (2, 3):
        while size % factor == 0 and size > factor and draw(st.booleans()):
            factors.append(factor)
            size //= factor
    return (size, *factors)


@st.composite
def merge_randomly(draw: st.DrawFn, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape with some neighbours merged."""
    merged = [shape[0]]
    for size in shape[1:]:
        if draw(st.booleans()):
            merged[-1] *= size
        else:
            merged.append(size)
    return tuple(merged)


@st.composite
def generate_cases(draw: st.DrawFn, axes: int) -> Case:
    grid = Grid(*(draw(st.integers(1, 3 if axes < 3 else 2)) for _ in range(axes)))
    assume(1 < grid.tiles <= 8)
    sizes = [draw(st.sampled_from([n for n in (2, 3, 4, 5, 6, 7, 8, 12) if n >= parts])) for parts in grid]
    parts = [draw(split_randomly(size)) for size in sizes]
    assume(all(pieces[0] >= count for pieces, count in zip(parts, grid, strict=True)))
    whole, split = (2, 2, *sizes), (2, 2, *(factor for pieces in parts for factor in pieces))
    assume(math.prod(whole) < 5_000)
    shapes = whole, draw(merge_randomly(whole)), split, draw(merge_randomly(split)), whole
    dims = [dim for dim in range(len(shapes[3])) if draw(st.booleans())]
    return Case(grid, shapes, tuple(dims or range(len(shapes[3]))))


# ---- what a reshape reads and where it leaves the axes, without ranks


def cut(whole: Tensor, places: Places, tile: Tile) -> Tensor:
    """Return a tile of a value, in the value's own shape; positions outside of it are not asked for."""
    shape, axes = split_shape(tuple(whole.shape), places)
    part = whole.reshape(shape)
    for axis, span in zip(axes, tile, strict=True):
        part = part.narrow(axis, span.start, len(span))
    return part.reshape(compute_local_shape(tuple(whole.shape), places, tile))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", COUNTS.values(), ids=COUNTS)
def test_what_a_tile_reads_holds_exactly_its_values(axes: int):
    @set_trials(150)
    @given(case=generate_cases(axes))
    def check(case: Case) -> None:
        places, x = to_places(case.axes), torch.arange(math.prod(case.shapes[0])).reshape(case.shapes[0])
        for before, after in zip(case.shapes, case.shapes[1:], strict=False):
            regrouped = find_regrouping(before, places, after)
            assert regrouped is not None
            old_px, new_px = get_sizes(before, places), get_sizes(after, regrouped.places)
            for tile in case.grid.cut(*new_px):
                read = Tile(*(rule(span) for rule, span in zip(regrouped.rules, tile, strict=True)))
                assert read.is_inside(Tile.whole(*old_px))
                got = set(cut(x.reshape(before), places, read).flatten().tolist())
                wanted = set(cut(x.reshape(after), regrouped.places, tile).flatten().tolist())
                # All that is needed, and of each axis no more than one group more.
                assert wanted <= got
                spare = math.prod(
                    len(span) + 2 * max(1, new // old) for span, old, new in zip(tile, old_px, new_px, strict=True)
                )
                assert len(got) * math.prod(new_px) <= spare * x.numel()
            places = regrouped.places
        assert places == to_places(case.axes)  # back in its own shape, each axis is a dimension again

    check()


def test_shapes_that_mix_rows_and_columns_are_told_from_those_that_do_not():
    image = to_places((-2, -1))
    assert find_regrouping((2, 3, 6, 10), image, (2, 3, 4, 15)) is None
    assert find_regrouping((2, 3, 6, 10), image, (2, 3, 10, 6)) is None
    assert find_regrouping((2, 3, 6, 10), image, (2, 2, 9, 10)) is None
    # The channels may be mixed with the images in any way: no sharded axis is among them.
    assert find_regrouping((4, 6, 5, 7), image, (3, 8, 5, 7)).places == image
    assert find_regrouping((4, 6, 5, 7), image, (3, 8, 35)).places == (Place(-1, 1, 7), Place(-1, 5, 1))


# ---- the same on ranks


def make_node(name: str, operator: str, sizes: Sequence[int], **arguments: object) -> Node:
    spec = TensorSpec(tuple(sizes), "float64")
    return Node(name, f"aten.{operator}", arguments, spec, "", "", 0)


def list_nodes(case: Case) -> list[Node]:
    """List a model: reshapes with an operator for each value between, and once a sum, which is added to all values."""
    nodes, x = [], "x"
    for number, shape in enumerate(case.shapes[1:]):
        nodes.append(make_node(f"shape{number}", "reshape.default", shape, self=Ref(x), shape=list(shape)))
        nodes.append(make_node(f"y{number}", "mul.Tensor", shape, self=Ref(f"shape{number}"), other=Ref("weight")))
        x = f"y{number}"
        if number == 2:
            total = [1 if dim in case.dims else size for dim, size in enumerate(shape)]
            reads = {"self": Ref(x), "dim": list(case.dims), "keepdim": True, "dtype": None}
            nodes.append(make_node("total", "sum.dim_IntList", total, **reads))
            nodes.append(make_node("z", "add.Tensor", shape, self=Ref(x), other=Ref("total"), alpha=1))
            x = "z"
    return nodes


def run_in_one_process(case: Case, x: Tensor, weight: Tensor) -> Tensor:
    for number, shape in enumerate(case.shapes[1:]):
        x = x.reshape(shape) * weight
        if number == 2:
            x = x + x.sum(case.dims, keepdim=True)
    return x


def build_program(case: Case, rank: int) -> tuple[Program, ShardSpec]:
    ranks = StageRanks(case.grid, tuple(range(case.grid.tiles)))
    specs = {"weight": TensorSpec((), "float64")}
    graph = SimpleNamespace(trainable=frozenset({"weight"}), specs=specs, constants={}, nodes=())
    b = Builder(graph, ranks, rank, tag=2)
    spec = TensorSpec(case.shapes[0], "float64")
    b.values["x"] = ValueLayout("x", spec, to_places(case.axes), differentiable=True)
    for node in list_nodes(case):
        lower(b, node)
    b.end_nodes()
    out = Ref(f"y{len(case.shapes) - 2}")
    scalar = TensorSpec((), "float64")
    square = b.add_local_op("product", "aten.mul.Tensor", out, out, like=spec, axes=case.axes)
    total = b.all_reduce(b.add_local_op("sum", "aten.sum.default", square, like=scalar))
    loss = b.add_local_op("loss", "aten.alias.default", total, like=scalar).name
    forward = tuple(b.finish([loss, out.name]))
    shard = ShardSpec(b.get_tiles(get_sizes(spec.shape, to_places(case.axes)))[rank], case.axes)
    way = DirectionProgram({0: forward}, {"x": shard}, loss, out.name, rank == 0, frozenset({loss, out.name}))
    back = [Step(item.adjoint, Phase.BACKWARD) for item in reversed(forward)]
    steps = (*(Step(item, Phase.FORWARD) for item in forward), *back)
    return Program(rank, steps, {0: way}, {0: 0}, 1, ("weight",), ()), shard


def run_case(world: LoopbackWorld, case: Case, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    program, shard = build_program(case, world.rank)
    weights = {"weight": weight.clone().requires_grad_()}
    worker = Worker(program, world, weights, {})
    worker.restart({0: {"x": shard.cut(x).clone().requires_grad_()}})
    finish(worker)
    way = program.direction_programs[0]
    return {
        "y": worker.peek(way.prediction),
        "loss": worker.peek(way.loss),
        "grad": worker.peek("x").grad,
        "weight": weights["weight"].grad,
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", COUNTS.values(), ids=COUNTS)
def test_ranks_compute_the_whole_to_the_bit(axes: int):
    @set_trials(40)
    @given(case=generate_cases(axes))
    def check(case: Case) -> None:
        x, weight = make_whole_numbers(*case.shapes[0], seed=1), torch.tensor(2.0, dtype=torch.float64)
        reads, factor = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = run_in_one_process(case, reads, factor)
        loss = (y * y).sum()
        loss.backward()
        runs = run_ranks(case.grid.tiles, lambda world: run_case(world, case, x, weight))
        for rank, run in enumerate(runs):
            _, shard = build_program(case, rank)
            assert torch.equal(run["y"], shard.cut(y))
            assert torch.equal(run["loss"], loss)
            assert torch.equal(run["grad"], shard.cut(reads.grad))
        assert torch.equal(sum(run["weight"] for run in runs), factor.grad)

    check()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", COUNTS.values(), ids=COUNTS)
def test_the_search_space_holds_groups_across_tiles(axes: int):
    def crosses(case: Case) -> bool:
        """Whether a group of the split shape lies on two tiles of the whole, and all of it is merged then."""
        regrouped = find_regrouping(case.shapes[0], to_places(case.axes), case.shapes[2])
        groups = case.grid.cut(*get_sizes(case.shapes[2], regrouped.places))
        reads = [Tile(*(rule(span) for rule, span in zip(regrouped.rules, tile, strict=True))) for tile in groups]
        return tuple(reads) != case.grid.cut(*case.shapes[0][2:]) and len(case.shapes[3]) < len(case.shapes[2])

    assert find(generate_cases(axes), crosses)
