"""Moves: painted pixel by pixel, and held to be a linear map with its adjoint."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mpi4dl_nb.engines.bench.halo import run_backward
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.geometry.tiles import Grid, Move, Span, Tile, compute_moves
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import make_exchange_runners
from mpi4dl_nb.engines.program.message_buffers import SendQueue
from tests.exact import make_whole_numbers

Tiles = Mapping[int, Tile]
Case = tuple[tuple[int, int], Tiles, Tiles]


@st.composite
def generate_rectangles(draw: st.DrawFn, size_px: tuple[int, int]) -> Tile:
    """Any rectangle, which may be empty, reach beyond the image or lie wholly outside."""
    starts = [draw(st.integers(-3, size + 2)) for size in size_px]
    return Tile(*(Span(start, start + draw(st.integers(0, 9))) for start in starts))


@st.composite
def generate_cases(draw: st.DrawFn) -> Case:
    """An image's size, what each rank owns (a grid over some of the ranks) and what each rank wants."""
    grid = Grid(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    size_px = draw(st.integers(grid.rows, 9)), draw(st.integers(grid.cols, 9))
    ranks = draw(st.permutations(range(grid.tiles + draw(st.integers(0, 2)))))
    owned = dict(zip(ranks, grid.cut(*size_px), strict=False))
    wants = draw(st.lists(st.sampled_from(ranks), unique=True))
    return size_px, owned, {rank: draw(generate_rectangles(size_px)) for rank in wants}


def list_pixels(tile: Tile) -> set[tuple[int, int]]:
    return set(product(range(tile.rows.start, tile.rows.stop), range(tile.cols.start, tile.cols.stop)))


def is_wider_than_a_neighbour(case: Case) -> bool:
    """Whether somebody's pixels come from three owners along one axis."""
    _, owned, wanted = case
    got = compute_moves(owned, wanted)
    return any(len({m.tile.cols for m in got if m.target == rank}) > 2 for rank in wanted)


@given(case=generate_cases())
def test_every_wanted_pixel_arrives_once_from_its_owner(case: Case):
    (height_px, width_px), owned, wanted = case
    owner = {pixel: rank for rank, tile in owned.items() for pixel in list_pixels(tile)}
    assert owner.keys() == list_pixels(Tile.whole(height_px, width_px))
    painted = [
        (move.target, pixel, move.source) for move in compute_moves(owned, wanted) for pixel in list_pixels(move.tile)
    ]
    expected = [
        (target, pixel, owner[pixel])
        for target, want in wanted.items()
        for pixel in list_pixels(want)
        if pixel in owner
    ]
    assert sorted(painted) == sorted(expected)


@given(case=generate_cases())
def test_no_move_is_empty_and_own_pixels_are_among_them(case: Case):
    _, owned, wanted = case
    found = compute_moves(owned, wanted)
    assert all(move.tile for move in found)
    assert {(m.source, m.tile) for m in found if m.source == m.target} == {
        (rank, tile) for rank, want in wanted.items() if rank in owned and (tile := owned[rank] & want)
    }


def test_the_search_space_holds_halos_wider_than_a_neighbour():
    assert is_wider_than_a_neighbour(find(generate_cases(), is_wider_than_a_neighbour))


def test_the_gather_of_four_tiles_is_four_moves():
    owned = dict(enumerate(Grid(2, 2).cut(4, 6)))
    assert compute_moves(owned, {9: Tile.whole(4, 6)}) == tuple(Move(rank, 9, owned[rank]) for rank in range(4))


# ---- the linear map: F fills each rank's window, F* sends gradients home


def exchange(rank: int, case: Case, fill: float) -> Exchange:
    """What the rank does of F; what it keeps is not sent."""
    (height_px, width_px), owned, wanted = case
    travelling = [move for move in compute_moves(owned, wanted) if move.source != move.target]
    return Exchange(
        name="x",
        purpose="test",
        source="x",
        target="y",
        axes=(-2, -1),
        shape=(2, 1, height_px, width_px),
        dtype="float64",
        own=owned.get(rank),
        window=wanted.get(rank),
        fill=fill,
        sends=tuple(move for move in travelling if move.source == rank),
        receives=tuple(move for move in travelling if move.target == rank),
        tag=1,
        differentiable=True,
    )


class FarMemory(LoopbackWorld):
    """Ranks whose messages pass through memory next to their tensors, as those of GPUs do."""

    def __init__(self, world: LoopbackWorld) -> None:
        super().__init__(world.rank, world.size, world._mail)

    def can_access(self, device: torch.device) -> bool:
        return False


def exchange_both_ways(world: LoopbackWorld, case: Case, fill: float) -> tuple[Tensor | None, ...]:
    """x, Fx, y and F*y of one rank; None where the rank has none."""
    step, cpu = exchange(world.rank, case, fill), torch.device("cpu")
    x = None if step.own is None else make_whole_numbers(2, 1, *step.own.shape, seed=world.rank)
    carrier = make_exchange_runners([step], world, cpu, SendQueue())["x"]
    fx = next(iter(carrier.wait_forward(carrier.start_forward(x)[0])), None)
    y = None if fx is None else make_whole_numbers(*fx.shape, seed=100 + world.rank)
    source = None if x is None else x.clone().requires_grad_()
    run_backward(carrier, None if y is None else y.clone(), source)
    return x, fx, y, None if source is None else source.grad


@st.composite
def generate_reachable_cases(draw: st.DrawFn) -> Case:
    """Windows with at least one pixel of the image: no other is ever exchanged."""
    size_px, owned, wanted = draw(generate_cases())
    return size_px, owned, {rank: tile for rank, tile in wanted.items() if tile & Tile.whole(*size_px)}


@settings(max_examples=150)
@given(case=generate_reachable_cases())
def test_the_way_back_is_the_adjoint(case: Case):
    """<Fx, y> = <x, F*y> over all ranks, exactly: these are whole numbers."""
    _, owned, wanted = case
    ranks = 1 + max((*owned, *wanted))
    runs = run_ranks(ranks, lambda world: exchange_both_ways(world, case, fill=0.0))
    forward = sum((fx * y).sum().item() for _, fx, y, _ in runs if fx is not None)
    backward = sum((x * grad).sum().item() for x, _, _, grad in runs if x is not None)
    assert forward == backward


@settings(max_examples=150)
@given(case=generate_reachable_cases(), fill=st.sampled_from([0.0, -7.0, float("-inf")]), far=st.booleans())
def test_a_window_holds_the_whole_images_pixels_and_the_fill(case: Case, fill: float, far: bool):
    (height_px, width_px), owned, wanted = case
    ranks = 1 + max((*owned, *wanted))
    runs = run_ranks(ranks, lambda world: exchange_both_ways(FarMemory(world) if far else world, case, fill))
    whole = torch.zeros(2, 1, height_px, width_px).double()
    home = torch.zeros_like(whole)
    for rank, tile in owned.items():
        whole[..., *tile.to_slices(Tile.whole(0, 0))] = runs[rank][0]
    margin = 16
    padded = torch.nn.functional.pad(whole, (margin,) * 4, value=fill)
    landed = torch.zeros_like(padded)
    for rank, tile in wanted.items():
        inside = tile.to_slices(Tile(Span(-margin, 0), Span(-margin, 0)))
        assert torch.equal(runs[rank][1], padded[..., *inside])
        landed[..., *inside] += runs[rank][2]
    home = landed[..., margin : margin + height_px, margin : margin + width_px]
    for rank, tile in owned.items():
        assert torch.equal(runs[rank][3], home[..., *tile.to_slices(Tile.whole(0, 0))])
