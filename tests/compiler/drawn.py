"""Modules on images of any size and grid, as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from mpi4dl_nb.engines.geometry.tiles import Grid, split_axis
from mpi4dl_nb.engines.geometry.windows import SlidingWindow, compute_halo_widths
from tests.exact import assert_exact, make_tiled_plan

Pair = tuple[int, int]
seeds = st.integers(0, 2**16)


@dataclass(frozen=True)
class Geometry:
    """A window sliding over an image, and the grid that cuts both the image and the outputs.

    `spare_px` are the last pixels that no output reads, because the stride does not come out even.
    """

    grid: Grid
    image_px: Pair
    out_px: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    spare_px: Pair

    @property
    def rules(self) -> list[SlidingWindow]:
        settings = zip(self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [SlidingWindow(*axis) for axis in settings]

    @property
    def has_tile_thinner_than_its_halo(self) -> bool:
        """Then a halo comes from beyond the neighbour."""
        return any(
            0 < len(own) < max(compute_halo_widths(own, rule(out), image))
            for image, out_px, parts, rule in zip(
                self.image_px, self.out_px, (self.grid.rows, self.grid.cols), self.rules, strict=True
            )
            for own, out in zip(split_axis(image, parts), split_axis(out_px, parts), strict=True)
        )


@st.composite
def generate_grids(draw: st.DrawFn, *sizes_px: Pair) -> Grid:
    """A grid of 2 to 9 tiles that can cut images of all these sizes."""
    most_rows, most_cols = (min(4, *axis) for axis in zip((4, 4), *sizes_px, strict=True))
    rows = draw(st.integers(1, most_rows))
    grid = Grid(rows, draw(st.integers(1, min(most_cols, 9 // rows))))
    assume(grid.tiles > 1)
    return grid


@st.composite
def generate_geometries(
    draw: st.DrawFn, pool: bool = False, dilated: bool = True, strided: bool = True, few: bool = False
) -> Geometry:
    """Pools may pad by half their kernel at most, and have no windows without a pixel.

    `few`: of outputs there are fewer rows or columns than tiles.
    """

    def pair(low: int, high: int) -> Pair:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel, out_px = pair(1, 4), pair(1, 3 if few else 8)
    stride = pair(1, 3) if strided else (1, 1)
    dilation = pair(1, 3) if dilated else (1, 1)
    padding = tuple(draw(st.integers(0, k // 2 if pool else 4)) for k in kernel)
    spare_px = tuple(draw(st.integers(0, s - 1)) for s in stride)
    settings = zip(out_px, kernel, stride, padding, dilation, spare_px, strict=True)
    image_px = tuple((n - 1) * s + d * (k - 1) + 1 - 2 * p + spare for n, k, s, p, d, spare in settings)
    assume(min(image_px) > 0)
    grid = draw(generate_grids(image_px) if few else generate_grids(image_px, out_px))
    assume(not few or out_px[0] < grid.rows or out_px[1] < grid.cols)
    return Geometry(grid, image_px, out_px, kernel, stride, padding, dilation, spare_px)


@st.composite
def generate_images_on_grids(draw: st.DrawFn) -> tuple[Grid, Pair]:
    """An image that no operator makes smaller."""
    size_px = draw(st.integers(1, 11)), draw(st.integers(1, 11))
    return draw(generate_grids(size_px)), size_px


class Calls(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def check(
    model: nn.Module | Callable[[Tensor], Tensor], images: Tensor, grid: Grid, fused: int = 0, **how: object
) -> None:
    """The model on tiles is the model on the whole image; `fused` layers share an exchange, if any."""
    module = model if isinstance(model, nn.Module) else Calls(model)
    assert_exact(module, images, make_tiled_plan(grid, fused), **how)
