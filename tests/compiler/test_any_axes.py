"""One code for any divided axes: a share of the batch, an H x W tile, a (D, H, W) block, and all four axes at once.

The layers read windows with any kernel, stride, padding and dilation along each divided axis. Values are whole numbers,
so that ranks and one process agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, find, given
from hypothesis import strategies as st
from torch import Tensor

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.geometry.places import to_places
from mpi4dl_nb.engines.geometry.tiles import Axes, Grid, Tile
from mpi4dl_nb.engines.geometry.windows import SlidingWindow, compute_halo_widths, compute_window
from mpi4dl_nb.engines.graph.model_graph import Ref, TensorSpec
from mpi4dl_nb.engines.plan.layout import StageRanks
from mpi4dl_nb.engines.program import kernels
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.kernels import pad_pixels
from mpi4dl_nb.engines.program.program import DirectionProgram, Program, ShardSpec, Step
from mpi4dl_nb.engines.program.worker import Worker
from tests.exact import finish, make_whole_numbers
from tests.sampling import set_trials

AXES = {"a share of the batch": (-4,), "a tile": (-2, -1), "a block": (-3, -2, -1), "all axes": (-4, -3, -2, -1)}
DIMENSIONS = {(-3, -2, -1): 5}  # (N, C, D, H, W); the others are (N, C, H, W)


@dataclass(frozen=True)
class Case:
    """Two layers of windows, on the ranks of one stage: `sizes` of the input and of each result, along the axes."""

    axes: Axes
    grid: Grid
    layers: tuple[tuple[SlidingWindow, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    fill: float

    def get_shape(self, number: int) -> tuple[int, ...]:
        shape = [2] * DIMENSIONS.get(self.axes, 4)
        for axis, size in zip(self.axes, self.sizes[number], strict=True):
            shape[axis] = size
        return tuple(shape)

    @property
    def widths(self) -> set[int]:
        """The widths of the first layer's halos, of all ranks and axes."""
        tiles = zip(self.grid.cut(*self.sizes[0]), self.grid.cut(*self.sizes[1]), strict=True)
        places = ((own, compute_window(out, self.layers[0])) for own, out in tiles)
        return {
            width
            for own, reads in places
            for each in map(compute_halo_widths, own, reads, self.sizes[0])
            for width in each
        }


@st.composite
def generate_cases(draw: st.DrawFn, axes: Axes) -> Case:
    grid = Grid(*(draw(st.integers(1, 3 if len(axes) < 3 else 2)) for _ in axes))
    assume(1 < grid.tiles <= 8)
    sizes, layers = [tuple(draw(st.integers(parts, 9)) for parts in grid)], []
    for _ in range(2):
        rules = tuple(
            SlidingWindow(*(draw(st.integers(low, high)) for low, high in ((1, 4), (1, 3), (0, 3), (1, 2))))
            for _ in axes
        )
        read = zip(rules, sizes[-1], strict=True)
        made = tuple((n + 2 * r.padding - r.dilation * (r.kernel - 1) - 1) // r.stride + 1 for r, n in read)
        assume(all(size >= parts for size, parts in zip(made, grid, strict=True)) and max(made) < 20)
        layers.append(rules)
        sizes.append(made)
    return Case(axes, grid, tuple(layers), tuple(sizes), draw(st.sampled_from([0.0, -3.0])))


# ---- the layer: a weighted sum of each window


def sum_windows(x: Tensor, rules: Sequence[SlidingWindow], axes: Axes) -> Tensor:
    for axis, rule in zip(axes, rules, strict=True):
        reach = rule.dilation * (rule.kernel - 1) + 1
        weights = torch.arange(1, rule.kernel + 1, dtype=x.dtype)
        x = x.unfold(axis + x.dim(), reach, rule.stride)[..., :: rule.dilation] @ weights
    return x


@pytest.fixture(scope="module", autouse=True)
def layer() -> Iterator[None]:
    kernels.register_kernel("test.sum_windows")(sum_windows)
    yield
    del kernels._KERNELS["test.sum_windows"]


@contextmanager
def run_in_one_process(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """The input with its gradient, and the result."""
    x = make_whole_numbers(*case.get_shape(0), seed=1).requires_grad_()
    y = x
    for rules in case.layers:
        margins = tuple((rule.padding, rule.padding) for rule in rules)
        y = sum_windows(pad_pixels(y, margins, case.fill, case.axes), rules, case.axes)
    (y * make_whole_numbers(*y.shape, seed=2)).sum().backward()
    yield x, y


# ---- the same on ranks


def build_program(case: Case, rank: int) -> tuple[Program, ShardSpec]:
    """Two layers as a rule of the operator table would make them, the loss, and the way back."""
    ranks = StageRanks(case.grid, tuple(range(case.grid.tiles)))
    b = Builder(SimpleNamespace(trainable=frozenset()), ranks, rank, tag=2)
    for name, number in (("x", 0), ("weights", 2)):
        spec = TensorSpec(case.get_shape(number), "float64")
        b.values[name] = ValueLayout(name, spec, to_places(case.axes), name == "x")
    ref = Ref("x")
    for number, rules in enumerate(case.layers, 1):
        window = b.pad_window(b.read_window(ref, case.sizes[number], *rules, fill=case.fill))
        like = TensorSpec(case.get_shape(number), "float64")
        ref = b.add_local_op(f"y{number}", "test.sum_windows", window, rules, case.axes, like=like, axes=case.axes)
    b.add_local_op("product", "aten.mul.Tensor", ref, Ref("weights"), like=like, axes=case.axes)
    scalar = TensorSpec((), "float64")
    total = b.all_reduce(b.add_local_op("sum", "aten.sum.default", Ref("product"), like=scalar))
    loss = b.add_local_op("loss", "aten.alias.default", total, like=scalar).name
    forward = tuple(b.finish([loss, "y2"]))
    shards = {"x": b.get_tiles(case.sizes[0])[rank], "weights": b.get_tiles(case.sizes[2])[rank]}
    feeds = {name: ShardSpec(tile, case.axes) for name, tile in shards.items()}
    way = DirectionProgram({0: forward}, feeds, loss, "y2", rank == 0, frozenset({loss, "y2"}))
    back = [Step(item.adjoint, Phase.BACKWARD) for item in reversed(forward)]
    steps = (*(Step(item, Phase.FORWARD) for item in forward), *back)
    return Program(rank, steps, {0: way}, {0: 0}, 1, (), ()), ShardSpec(shards["weights"], case.axes)


def run_case(world: LoopbackWorld, case: Case, wholes: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the loss and the gradient of the input, of one rank."""
    program, _ = build_program(case, world.rank)
    worker = Worker(program, world, {}, {})
    feeds = program.direction_programs[0].input_shards
    worker.restart({0: {name: feeds[name].cut(wholes[name]).clone().requires_grad_(name == "x") for name in feeds}})
    finish(worker)
    return worker.peek("y2"), worker.peek(program.direction_programs[0].loss), worker.peek("x").grad


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_ranks_compute_the_whole_to_the_bit(axes: Axes):
    @set_trials(40)
    @given(case=generate_cases(axes))
    def check(case: Case) -> None:
        with run_in_one_process(case) as (x, y):
            wholes = {"x": x.detach(), "weights": make_whole_numbers(*y.shape, seed=2)}
            runs = run_ranks(case.grid.tiles, lambda world: run_case(world, case, wholes))
            for rank, (made, loss, grad) in enumerate(runs):
                program, out = build_program(case, rank)
                assert torch.equal(made, out.cut(y))
                assert torch.equal(loss, (y * wholes["weights"]).sum())
                assert torch.equal(grad, program.direction_programs[0].input_shards["x"].cut(x.grad))

    check()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_the_search_space_holds_wide_halos_and_uneven_tiles(axes: Axes):
    def is_hard(case: Case) -> bool:
        tiles = case.grid.cut(*case.sizes[0])
        return len({tile.shape for tile in tiles}) > 1 and max(case.widths) > min(map(min, (t.shape for t in tiles)))

    assert is_hard(find(generate_cases(axes), is_hard))


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_tiles_along_any_axes_are_a_partition(axes: Axes):
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        grid = Grid(*(data.draw(st.integers(1, 3)) for _ in axes))
        sizes = [data.draw(st.integers(parts, 7)) for parts in grid]
        painted = torch.zeros(sizes)
        for number, tile in enumerate(grid.cut(*sizes)):
            painted[tile.to_slices(Tile.whole(*sizes))] += 1
            assert grid.get_tile(number, *sizes) == tile
        assert bool((painted == 1).all())
        assert grid.tiles == math.prod(grid)

    check()
