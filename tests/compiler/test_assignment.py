"""Values of which a part is assigned: rows, columns, channels, masks, on tiles as on the whole image."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan
from tests.compiler.drawn import Calls, Pair, check, generate_images_on_grids, seeds
from tests.exact import assert_exact, make_tiled_plan, make_whole_numbers, prepare_worker
from tests.sampling import set_trials

Write = Callable[[Tensor, Tensor], None]


def make_forward(write: Write) -> Callable[[Tensor], Tensor]:
    """What `write(y, x)` makes of a copy y of 2 x, and something after it."""

    def forward(x: Tensor) -> Tensor:
        y = 2 * x
        write(y, x)
        return y * y + x

    return forward


def set_to(place: object) -> Callable[[object], Write]:
    def make(value: object) -> Write:
        def write(y: Tensor, x: Tensor) -> None:
            y[place] = value(x) if callable(value) else value

        return write

    return make


def write_crosswise(y: Tensor, x: Tensor) -> None:
    y[:, :, 1:, :] = x[:, :, :-1, :]
    y[:, :, :, :-1] += 3 * x[:, :, :, 1:]
    y[:, 1, 0] = 5


def write_nested_parts(y: Tensor, x: Tensor) -> None:
    y[:, 1:][:, :, 1:].mul_(3)
    y[..., 0, :].add_(x[..., -1, :])


ALL = slice(None)
WRITES: dict[str, Write] = {
    "channels": set_to((ALL, slice(0, 2)))(lambda x: x[:, 2:] * 3),
    "a channel": set_to((ALL, 1))(lambda x: x[:, 0] + 1),
    "images": set_to(slice(0, 1))(lambda x: x[1:] * 2),
    "an image": set_to(1)(lambda x: x[0]),
    "rows but the first": set_to((ALL, ALL, slice(1, None)))(lambda x: x[:, :, :-1]),
    "columns but the last": set_to((..., slice(None, -1)))(lambda x: x[..., 1:] * 3),
    "every other column": set_to((..., slice(1, None, 2)))(lambda x: x[..., 1::2] * 5),
    "every third row": set_to((ALL, ALL, slice(1, None, 3)))(7),
    "some rows, from further up": set_to((ALL, ALL, slice(-3, None)))(lambda x: x[:, :, :3] * 3),
    "a row": set_to((ALL, ALL, 0))(1.5),
    "the last row": set_to((ALL, ALL, -1))(lambda x: x[:, :, 0] * 3),
    "a column": set_to((..., 2))(lambda x: x[..., 0] + 1),
    "a pixel": set_to((..., 1, 2))(lambda x: x[..., 0, 0] * 3),
    "an inner rectangle": set_to((..., slice(1, -1), slice(1, -1)))(lambda x: x[..., 2:, 2:]),
    "rows, by what all tiles hold": set_to((ALL, ALL, slice(2, None)))(lambda x: x.sum((2, 3), keepdim=True)),
    "all": set_to(ALL)(lambda x: x * 3),
    "a list of channels": set_to((ALL, [2, 0]))(lambda x: x[:, [1, 3]] * 3),
    "a list of channels, a number": set_to((ALL, [2, 0]))(4),
    "a list of rows": set_to((ALL, ALL, [2, 0]))(lambda x: x[:, :, [1, 2]] * 3),
    "a list of columns, a number": set_to((..., [2, 0]))(4),
    "a list of rows, by one row": set_to((ALL, ALL, [2, 0]))(lambda x: x[:, :, 1:2]),
    "what is negative": lambda y, x: y.__setitem__(y < 0, 0),
    "what is negative, by others": lambda y, x: y.__setitem__(y < 0, x[y < 0]),
    "some channels' negative pixels": lambda y, x: y[:, 1:].__setitem__(y[:, 1:] < 0, -7),
    "pixels, by a vector of channels": lambda y, x: y.permute(0, 2, 3, 1).__setitem__(
        x.sum(1) > 0, torch.arange(4.0, dtype=x.dtype)
    ),
    "masked fill": lambda y, x: y.masked_fill_(x > 1, 5),
    "copy": lambda y, x: y.copy_(x * 3),
    "copy of one channel": lambda y, x: y.copy_(x[:, :1]),
    "fill": lambda y, x: y[:, 1:].fill_(3),
    "zero": lambda y, x: y[:, :, 1:].zero_(),
    "parts of parts": write_nested_parts,
    "several": write_crosswise,
    "index fill": lambda y, x: y.index_fill_(1, torch.tensor([0, 2]), 6),
    "index fill of rows, some of them twice": lambda y, x: y.index_fill_(2, torch.tensor([3, 0, -1, 3]), 6),
    "index fill of a column": lambda y, x: y.index_fill_(-1, torch.tensor([1]), 6),
    "scatter of a number": lambda y, x: y.scatter_(1, x.argmax(1, keepdim=True), 9),
    "scatter of values": lambda y, x: y.scatter_(1, x.argmax(1, keepdim=True), x[:, :1]),
    "scatter_add": lambda y, x: y.scatter_add_(1, x.argmax(1, keepdim=True), x[:, :1]),
    "unsqueezed in place": lambda y, x: y.unsqueeze_(1).mul_(3).squeeze_(1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITES)
@set_trials(3)
@given(case=generate_images_on_grids(), seed=seeds)
def test_assignment(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    assume(min(size_px) > 3)
    check(make_forward(WRITES[name]), make_whole_numbers(2, 4, *size_px, seed=seed), grid)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITES)
def test_assignment_on_uneven_tiles_and_strips(name: str):
    for grid in ("2x3", "4x1", "1x5"):
        check(make_forward(WRITES[name]), make_whole_numbers(2, 4, 7, 11), Grid(*map(int, grid.split("x"))))


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(1, 2)])
def test_a_list_of_lines_by_one_pixel_of_each(grid: Grid):
    """The part is tiled along its two lines, and broadcast across them."""

    def write(y: Tensor, x: Tensor) -> None:
        y[:, :, [2, 0]] = x[:, :, [1, 2], :1] * 3
        y[..., [3, 1]] = x[..., :1, [0, 2]]

    check(make_forward(write), make_whole_numbers(2, 4, 6, 8), grid)


PICKS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels by a list": lambda x: x[:, [2, 1, 0]] * 2,
    "rows by a list": lambda x: x[:, :, [3, 0, 2, 2]] * 2,
    "columns by a list": lambda x: x[..., [3, 0, 2, -1]] * 2,
    "rows by index_select": lambda x: x.index_select(2, torch.tensor([1, 3, 0, 0])) * 2,
    "channels by index_select": lambda x: x.index_select(1, torch.tensor([1, 3])) * 2,
    "a row": lambda x: x[:, :, 1] * 2,
    "a column on all rows": lambda x: x * x[..., -1:],
    "two rows": lambda x: x[:, :, 1:3].sum(2, keepdim=True) + x,
    "rows, channels last": lambda x: x.permute(0, 2, 3, 1)[:, 1:].mul(2).permute(0, 3, 1, 2),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PICKS)
@set_trials(3)
@given(case=generate_images_on_grids(), seed=seeds)
def test_picks(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    assume(min(size_px) > 3)
    check(PICKS[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid)


def swap_halves(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :2] = x[:, 2:]
    y[:, 2:] = x[:, :2]
    return y


def pad_zeros(x: Tensor) -> Tensor:
    n, channels, height, width = x.shape
    y = x.new_zeros(n, channels, height + 3, width + 2)
    y[:, :, 1:-2, 1:-1] = x
    return y


def copy_into_memory(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.copy_(x * 2)
    return y + x


def apply_one_hot(x: Tensor) -> Tensor:
    hot = torch.zeros(x.shape, dtype=x.dtype).scatter_(1, x.argmax(1, keepdim=True), 1)
    return hot * x


def apply_window_mask(x: Tensor) -> Tensor:
    """As torchvision's shifted windows have it: numbers of regions, written into a constant."""
    mask = x.new_zeros(x.shape[-2:])
    for count, (rows, cols) in enumerate(((slice(0, -2), slice(0, -1)), (slice(-2, None), slice(-1, None)))):
        mask[rows, cols] = count + 1
    return x * mask


NEW = {
    "shifted": swap_halves,
    "padded": pad_zeros,
    "into memory": copy_into_memory,
    "one hot": apply_one_hot,
    "mask": apply_window_mask,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NEW)
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_what_is_written_into_new_memory(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    assume(min(size_px) > 3)
    check(NEW[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*WRITES, *NEW])
@pytest.mark.parametrize("how", [{"halo_d2": True, "fused_layers": 2}, {"overlap_halos": True}])
def test_assignment_between_convolutions(name: str, how: dict[str, object]):
    """With fused halos a tile writes what its neighbours write, too."""
    write = make_forward(WRITES[name]) if name in WRITES else NEW[name]

    class Between(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False).double()
            self.last = torch.nn.Conv2d(4, 2, 3, padding=1).double()
            for index, weight in enumerate(self.parameters()):
                weight.data = make_whole_numbers(*weight.shape, seed=index, low=-1, high=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(write(self.first(x)))

    plan = Plan(split_size=1, spatial_size=1, slice_method="2x2", precision="float64", **how)
    assert_exact(Between(), make_whole_numbers(2, 4, 11, 9), plan)


@given(low=st.integers(0, 9), high=st.integers(0, 9), step=st.integers(1, 4), axis=st.sampled_from([2, 3]), seed=seeds)
@set_trials(40)
def test_any_slice(low: int, high: int, step: int, axis: int, seed: int):
    """Also those that lie in one tile, or that leave a tile out."""
    size = len(range(9)[low:high:step])
    assume(size > 0)

    def write(y: Tensor, x: Tensor) -> None:
        place = [ALL] * 4
        place[axis] = slice(low, high, step)
        y[tuple(place)] = x.narrow(axis, 0, size) * 3

    check(make_forward(write), make_whole_numbers(1, 2, 9, 9, seed=seed), Grid(3, 3))


def test_what_is_written_through_a_view_is_seen_through_others():
    def forward(x: Tensor) -> Tensor:
        y = 2 * x
        seen, turned = y[:, 1:], y.permute(0, 2, 3, 1)
        y[:, :, 1:] = x[:, :, :-1]
        seen.mul_(3)
        turned[..., 0].add_(1)
        return y + seen.sum(1, keepdim=True) + turned.permute(0, 3, 1, 2)

    check(forward, make_whole_numbers(2, 4, 7, 6), Grid(2, 2))


def test_rows_that_are_not_known_before_are_refused():
    plan = Plan(split_size=1, spatial_size=1, slice_method="2x1", precision="float64")

    def forward(x: Tensor) -> Tensor:
        y = 2 * x
        y[:, :, x[0, 0, :, 0].argsort()] = x
        return y

    with pytest.raises(TraceError, match="not known before"):
        assert_exact(Calls(forward), make_whole_numbers(1, 2, 150, 140), plan)


def test_rows_that_are_written_twice_are_refused():
    """PyTorch leaves open which value stays, and gives the gradient of the row to each of them."""
    plan = Plan(split_size=1, spatial_size=1, slice_method="2x1", precision="float64")

    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y[:, :, torch.tensor([1, 100, 1])] = x[:, :, :3]
        return y

    with pytest.raises(TraceError, match="writes to a row or column twice"):
        assert_exact(Calls(forward), make_whole_numbers(1, 2, 150, 140), plan)


@pytest.mark.parametrize("number", [6, -7])
def test_rows_that_an_image_does_not_have_are_refused(number: int):
    """One process fails when it runs; counted in a circle, they would be other rows."""
    image, place = make_whole_numbers(1, 2, 6, 8), (ALL, ALL, [0, number])
    index = torch.tensor(place[2])
    for forward in (make_forward(set_to(place)(4)), lambda x: 2 * x[place], lambda x: (2 * x).index_fill(2, index, 4)):
        with pytest.raises(TraceError, match=rf"aten.index.* picks number {number} of 6 .*numbers from -6 to 5"):
            prepare_worker(Calls(forward), image, image[:, :, :1], make_tiled_plan("2x1"))
