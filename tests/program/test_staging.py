"""What travels from tensor to tensor: neither packed nor unpacked, and told so beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from mpi4dl_nb.engines.bench.halo import run_backward
from mpi4dl_nb.engines.comm import mpi
from mpi4dl_nb.engines.comm.device import choose_memory_format
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.comm.world import Message, Pending
from mpi4dl_nb.engines.geometry.tiles import Grid, Move, Tile, compute_moves
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import make_exchange_runners
from mpi4dl_nb.engines.program.message_buffers import SendQueue

SIDE_PX = 8


class Watched(LoopbackWorld):
    """Remembers where the messages of a rank lay."""

    def __init__(self, world: LoopbackWorld) -> None:
        super().__init__(world.rank, world.size, world._mail)
        self.sent: list[int] = []
        self.received: list[int] = []

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.sent += [message.tensor.data_ptr() for message in sends]
        self.received += [message.tensor.data_ptr() for message in receives]
        return super().exchange(sends, receives)


def make_exchange(rank: int, grid: Grid, images: int = 1) -> Exchange:
    """Rank 0 has the whole value; the ranks behind it want its tiles."""
    sides_px = (SIDE_PX,) * len(grid)
    wanted, whole = dict(enumerate(grid.cut(*sides_px), start=1)), Tile.whole(*sides_px)
    travelling = compute_moves({0: whole}, wanted)
    return Exchange(
        name="x",
        purpose="stage",
        source="x",
        target="y",
        axes=tuple(range(-len(grid), 0)),
        shape=(images, 3, *sides_px),
        dtype="float32",
        own=whole if rank == 0 else None,
        window=wanted.get(rank),
        fill=0.0,
        sends=tuple(move for move in travelling if move.source == rank),
        receives=tuple(move for move in travelling if move.target == rank),
        tag=2,
        differentiable=True,
    )


def make_image(shape: Sequence[int]) -> torch.Tensor:
    """Return an image or a volume, as ranks store it."""
    return torch.randn(*shape).contiguous(memory_format=choose_memory_format(len(shape)))


@pytest.mark.parametrize(
    ("grid", "images", "bare"),
    [
        (Grid(1, 1), 2, True),
        (Grid(2, 1), 1, True),
        (Grid(2, 1), 2, False),
        (Grid(1, 2), 1, False),
        (Grid(2, 1, 1), 1, True),
        (Grid(1, 2, 1), 1, False),
    ],
    ids=["a whole batch", "rows of one image", "rows of two images", "columns", "slabs", "rows of a volume"],
)
def test_pixels_in_a_row_travel_between_the_tensors_themselves(grid: Grid, images: int, bare: bool):
    def work(world: LoopbackWorld) -> None:
        step, watched = make_exchange(world.rank, grid, images), Watched(world)
        carrier = make_exchange_runners([step], watched, torch.device("cpu"), SendQueue())["x"]
        source = None
        if world.rank == 0:
            source = make_image(step.shape).requires_grad_()
        window = next(iter(carrier.wait_forward(carrier.start_forward(source)[0])), None)
        grad = None if window is None else window.clone()
        run_backward(carrier, grad, source)
        if world.rank:
            assert (watched.received, watched.sent) == ([window.data_ptr()], [grad.data_ptr()])  # it holds no more
            return
        torch.testing.assert_close(source.grad, source.detach(), rtol=0, atol=0)
        tops = [tile[0].start * source.stride(2) * source.itemsize for tile in grid.cut(*source.shape[2:])]
        assert (watched.sent == [source.data_ptr() + top for top in tops]) == bare
        assert (watched.received == [source.grad.data_ptr() + top for top in tops]) == bare
        assert source._version == 0  # autograd saw no change of what was sent
        told = step.count_staged_bytes(forward=True), step.count_staged_bytes(forward=False)
        assert told == (((0, 0), (0, 0)) if bare else ((source.nbytes, 0), (0, source.nbytes)))

    run_ranks(1 + grid.tiles, work)


@pytest.mark.parametrize("axes", [2, 3])
def test_what_is_in_a_row_is_so_in_memory(axes: int):
    """For all rectangles of a small image, and all boxes of a small volume."""
    step = make_exchange(0, Grid(*[1] * axes), images=2)
    tiles = [tile for parts in product((1, 2, 4), repeat=axes) for tile in Grid(*parts).cut(*step.shape[2:])]
    for frame in (step.own, tiles[-1]):
        values = make_image(step.compute_shape(frame))
        for tile in (tile & frame for tile in tiles if tile & frame):
            pixels = values[:, :, *tile.to_slices(frame)].movedim(1, -1)
            assert step.is_contiguous(tile, frame) == pixels.is_contiguous()


def test_what_goes_to_two_ranks_is_not_lent_all():
    """Both bring a gradient home, and these add up."""
    step = make_exchange(0, Grid(1, 1))
    twice = Exchange(
        **{name: getattr(step, name) for name in step.__slots__} | {"sends": (*step.sends, Move(0, 2, step.own))}
    )
    assert step.sends_all_once
    assert not twice.sends_all_once
    assert not step.is_persistent


class Library:
    """An MPI that says something of GPUs, or nothing."""

    def __init__(self, **functions: object) -> None:
        self.__dict__.update(functions)


def make_query(failed: int, supported: int) -> object:
    def query(kind: int, answer: object) -> int:
        answer._obj.value = supported  # of `ctypes.byref`
        return failed

    return query


@pytest.mark.parametrize(
    ("library", "aware"),
    [
        (Library(), False),
        (Library(MPIX_Query_cuda_support=lambda: 1), True),
        (Library(MPIX_Query_cuda_support=lambda: 0), False),
        (Library(MPIX_GPU_query_support=make_query(0, 1)), True),
        (Library(MPIX_GPU_query_support=make_query(0, 0)), False),
        (Library(MPIX_GPU_query_support=make_query(1, 1)), False),
    ],
    ids=["silent", "Open MPI with", "Open MPI without", "MPICH with", "MPICH without", "MPICH fails"],
)
def test_an_mpi_is_believed_to_take_gpu_memory_where_it_says_so(monkeypatch, library: Library, aware: bool):
    monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path: library)
    mpi.is_cuda_aware.cache_clear()
    try:
        assert mpi.is_cuda_aware() is aware
    finally:
        mpi.is_cuda_aware.cache_clear()


def test_the_mpi_of_this_machine_can_be_asked():
    assert hasattr(mpi.ctypes.CDLL(mpi.MPI.__file__), "MPI_Init")
