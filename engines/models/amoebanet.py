"""AmoebaNet-D: cells found by evolution, stacked as in GPipe and MPI4DL.

Cells: Real et al., Regularized Evolution for Image Classifier Architecture Search, arXiv:1802.01548.
Stack and sizes: Huang et al., GPipe, arXiv:1811.06965, Table 1 (a test checks the parameter counts).
Where reproductions differ, this follows the authors' TensorFlow code: no ReLU on the image, max-pools that take
the maximum, a ReLU before the head, and `NORMAL.concat`, which torchgpipe found to differ from the paper's.
Omitted, as in MPI4DL: the auxiliary head, drop-path and dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["amoebanetd"]

State = tuple[Tensor, Tensor]
"""The tensors passed between cells: x, the last cell's output, and skip, the output of the cell before that."""


def amoebanetd(num_layers: int, num_filters: int, *, num_classes: int = 10) -> AmoebaNetD:
    """Return AmoebaNet-D (L, D) of arXiv:1811.06965, Table 1: (N, 3, H, W) images -> (N, num_classes) logits.

    `num_layers` is the number of normal cells, in three equal groups; `num_filters` sets the width (the number of
    channels inside a cell of the first group). Children: `stem`, `blocks` (all cells, flat), `head`.
    Raises ValueError unless num_layers is a multiple of 3 and num_filters at least 8.
    """
    if num_layers < 3 or num_layers % 3:
        below = max(3, num_layers - num_layers % 3)
        raise ValueError(
            f"num_layers={num_layers} normal cells cannot form three equal groups. "
            f"Use a multiple of 3, such as num_layers={below} or {below + 3}."
        )
    if num_filters < 8:
        raise ValueError(
            f"num_filters={num_filters} is too narrow: the first cell has num_filters // 8 channels inside "
            "its convolutions. Use num_filters=8 or more."
        )
    return AmoebaNetD(num_layers, num_filters, num_classes)


class AmoebaNetD(nn.Module):
    """AmoebaNet-D: (N, 3, H, W) images -> (N, num_classes) logits. The stem and four of the cells halve H and W."""

    def __init__(self, num_layers: int, num_filters: int, num_classes: int) -> None:
        super().__init__()
        channels = num_filters // 4
        cells, out_channels = stack_cells(channels, repeats=num_layers // 3)
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.blocks = nn.Sequential(*cells)
        self.head = nn.Sequential(
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out_channels, num_classes)
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x, _ = self.blocks((x, x))
        logits: Tensor = self.head(x)
        return logits


def stack_cells(channels: int, repeats: int) -> tuple[list[Cell], int]:
    """Return all cells in order and the channels after the last: 2 reductions, then 3 groups separated by 2 more."""
    group = [NORMAL] * repeats
    cells, x_channels, skip_channels, skip_is_larger = [], channels, channels, False
    # The skip comes from one cell earlier, so that after a reduction it is still twice as large as x.
    for genotype in (REDUCTION, REDUCTION, *group, REDUCTION, *group, REDUCTION, *group):
        channels *= genotype.stride  # half as many rows and columns, twice as many channels
        cells.append(Cell(genotype, channels, x_channels, skip_channels, skip_is_larger))
        x_channels, skip_channels = channels * len(genotype.concat), x_channels
        skip_is_larger = genotype.stride == 2
    return cells, x_channels


class Cell(nn.Module):
    """A cell: ((N, x, H, W), (N, skip, h, w)) -> ((N, channels * len(concat), H', W'), (N, x, H, W)).

    H' = ceil(H / genotype.stride), and likewise W'. The skip has size (H, W), or twice that if `skip_is_larger`.
    """

    def __init__(
        self, genotype: Genotype, channels: int, x_channels: int, skip_channels: int, skip_is_larger: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.enter_x = make_relu_conv_norm(x_channels, channels)
        enter_skip = FactorizedReduction if skip_is_larger else make_relu_conv_norm
        self.enter_skip = enter_skip(skip_channels, channels)
        self.sums = nn.ModuleList(
            Sum(left.make(channels, genotype.stride), right.make(channels, genotype.stride))
            for left, right in genotype.sums
        )

    def forward(self, state: State) -> State:
        # x    --enter_x-----> states[0]
        # skip --enter_skip--> states[1]
        # two earlier states   --sums[k]--> states[2 + k], for five k;  concat --> the next x;  x --> the next skip
        x, skip = state
        states = [self.enter_x(x), self.enter_skip(skip)]
        for total, (left, right) in zip(self.sums, self.genotype.sums, strict=True):
            states.append(total(states[left.reads], states[right.reads]))
        return torch.cat([states[index] for index in self.genotype.concat], dim=1), x


class Sum(nn.Module):
    """left(a) + right(b), for a and b of (N, C, H, W) -> (N, C, H', W')."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.left(a) + self.right(b)
        return out


class FactorizedReduction(nn.Module):
    """Downsampling by 2: (N, channels, H, W) -> (N, out, ceil(H / 2), ceil(W / 2)), for even `out`.

    Half of the output channels read the even rows and columns, the other half the odd ones.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        # One row and column of padding at the end, and one cut off at the start: the odd pixels come to even places.
        shifted = nn.functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return out


def make_relu_conv_norm(
    channels: int, out: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """Return ReLU, convolution and batch norm for odd kernels.

    (N, channels, H, W) -> (N, out, ceil(H / stride), ceil(W / stride)).
    """
    padding = (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(out))


# The operations: (channels, stride) -> a module from (N, C, H, W) to (N, C, ceil(H / stride), ceil(W / stride)).


def identity(channels: int, stride: int) -> nn.Module:
    """Return the identity, or a factorized reduction for stride 2."""
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return make_relu_conv_norm(channels, channels, stride=(stride, stride))


def conv_3x3(channels: int, stride: int) -> nn.Module:
    return make_bottleneck(channels, ((3, 3), (stride, stride)))


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    return make_bottleneck(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1)))


def make_bottleneck(channels: int, *convolutions: tuple[tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """Return (kernel, stride) convolutions on a quarter of the channels, between two 1x1 convolutions."""
    inner = channels // 4
    middle = (make_relu_conv_norm(inner, inner, kernel, stride) for kernel, stride in convolutions)
    return nn.Sequential(make_relu_conv_norm(channels, inner), *middle, make_relu_conv_norm(inner, channels))


def avg_pool_3x3(_channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(_channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(_channels: int, stride: int) -> nn.Module:
    # ceil_mode keeps the last row of an image with an odd number of rows, as all other operations here do.
    return nn.MaxPool2d(2, stride, ceil_mode=True)


@dataclass(frozen=True, slots=True)
class CellOperation:
    """An operation and the index of the state that it reads: 0 is x, 1 is skip, 2 to 6 are the sums in order."""

    reads: int
    operation: Callable[[int, int], nn.Module]

    def make(self, channels: int, cell_stride: int) -> nn.Module:
        """Return the operation as a module; only operations on the cell's two inputs have the cell's stride."""
        return self.operation(channels, cell_stride if self.reads < 2 else 1)


@dataclass(frozen=True, slots=True)
class Genotype:
    """Five sums of two operations each, and the states that are concatenated to the cell's output."""

    stride: int
    sums: tuple[tuple[CellOperation, CellOperation], ...]
    concat: tuple[int, ...]


NORMAL = Genotype(
    stride=1,
    sums=(
        (CellOperation(1, conv_1x1), CellOperation(1, max_pool_3x3)),
        (CellOperation(1, identity), CellOperation(0, conv_1x7_7x1)),
        (CellOperation(0, conv_1x1), CellOperation(0, conv_1x7_7x1)),
        (CellOperation(2, max_pool_3x3), CellOperation(2, identity)),
        (CellOperation(1, avg_pool_3x3), CellOperation(5, conv_1x1)),
    ),
    concat=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    stride=2,
    sums=(
        (CellOperation(0, max_pool_2x2), CellOperation(0, max_pool_3x3)),
        (CellOperation(2, identity), CellOperation(1, conv_3x3)),
        (CellOperation(2, conv_1x7_7x1), CellOperation(2, max_pool_3x3)),
        (CellOperation(3, identity), CellOperation(1, max_pool_2x2)),
        (CellOperation(2, avg_pool_3x3), CellOperation(3, conv_1x1)),
    ),
    concat=(4, 5, 6),
)
