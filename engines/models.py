"""The plain models: ResNet v1 and v2, AmoebaNet-D, U-Nets, and a chain of convolutions for benchmarks.

They have no code for parallelism.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["amoebanetd", "resnet20_v1", "resnet110_v2", "resnet_v1", "resnet_v2"]


# ResNet v1 and v2 in the CIFAR design: three stages with equal numbers of blocks, for images of any size.
#
# v1: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385, section 4.2.
# v2: He et al., Identity Mappings in Deep Residual Networks, arXiv:1603.05027, section 4.
# Widths, strides and shortcuts are those of the Keras CIFAR-10 example, which MPI4DL also benchmarks.

STEM_CHANNELS = 16


# The three stages: channels inside and after a block, and the stride of the first block.
V1_STAGES = ((16, 16, 1), (32, 32, 2), (64, 64, 2))
V2_STAGES = ((16, 64, 1), (64, 128, 2), (128, 256, 2))


class Residual(nn.Module):
    """A residual block, after(branch(x) + shortcut(x)): (N, C, H, W) -> (N, C', H', W')."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.after = branch, shortcut, after

    def forward(self, x: Tensor) -> Tensor:
        # v1:  x --- conv norm relu conv norm --- + --- relu        v2:  x --- norm relu conv (3 times) --- +
        #       `------------ shortcut -----------'                       `---------- shortcut -------------'
        return self.after(self.branch(x) + self.shortcut(x))


def resnet20_v1(*, num_classes: int = 10) -> nn.Sequential:
    """Return the smallest ResNet of arXiv:1512.03385, section 4.2: (N, 3, H, W) images -> (N, num_classes) logits.

    >>> import torch
    >>> from mpi4dl_nb import resnet20_v1
    >>> resnet20_v1(num_classes=2)(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 2])
    """
    return resnet_v1(20, num_classes=num_classes)


def resnet110_v2(*, num_classes: int = 10) -> nn.Sequential:
    """Return MPI4DL's benchmark model of 36 pre-activation bottlenecks: (N, 3, H, W) -> (N, num_classes) logits.

    >>> import torch
    >>> from mpi4dl_nb import resnet110_v2
    >>> resnet110_v2(num_classes=2)(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 2])
    """
    return resnet_v2(110, num_classes=num_classes)


def resnet_v1(depth: int, *, num_classes: int = 10) -> nn.Sequential:
    """Return ResNet v1 of `depth` = 6n+2 layers: (N, 3, H, W) images -> (N, num_classes) logits.

    Children: `stem`, `blocks` (3n basic blocks, flat), `head`. Source: arXiv:1512.03385, section 4.2.
    Raises ValueError for any other depth.

    >>> import torch
    >>> from mpi4dl_nb import resnet_v1
    >>> resnet_v1(20, num_classes=2)(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 2])
    """
    repeats = count_blocks_per_stage("v1", depth, layers_per_n=6)
    return assemble(make_basic_block, V1_STAGES, repeats, [], num_classes)


def resnet_v2(depth: int, *, num_classes: int = 10) -> nn.Sequential:
    """Return ResNet v2 of `depth` = 9n+2 layers: (N, 3, H, W) images -> (N, num_classes) logits.

    Children: `stem`, `blocks` (3n pre-activation bottlenecks, flat), `head`. Source: arXiv:1603.05027,
    section 4. Raises ValueError for any other depth.

    >>> import torch
    >>> from mpi4dl_nb import resnet_v2
    >>> resnet_v2(29, num_classes=2)(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 2])
    """
    repeats = count_blocks_per_stage("v2", depth, layers_per_n=9)
    return assemble(make_bottleneck, V2_STAGES, repeats, make_norm_relu(V2_STAGES[-1][1]), num_classes)


def count_blocks_per_stage(version: str, depth: int, layers_per_n: int) -> int:
    """Return n for a depth of `layers_per_n` * n + 2: stem, n blocks in each of three stages, linear layer.

    >>> count_blocks_per_stage("v2", 110, layers_per_n=9)
    12
    """
    n, rest = divmod(depth - 2, layers_per_n)
    if n >= 1 and rest == 0:
        return n
    nearest = sorted({layers_per_n * max(1, m) + 2 for m in (n, n + 1)})
    raise ValueError(
        f"There is no ResNet {version} of depth {depth}: the depth is {layers_per_n}n+2, with "
        f"n >= 1 blocks in each of three stages. Use depth={' or '.join(map(str, nearest))}."
    )


def assemble(
    make_block: Callable[[int, int, int, int], Residual],
    stages: Sequence[tuple[int, int, int]],
    repeats: int,
    before_head: Sequence[nn.Module],
    num_classes: int,
) -> nn.Sequential:
    """Return the whole model, with `repeats` blocks in each stage. Its child names are those that traces show."""
    blocks, channels = [], STEM_CHANNELS
    for inner, out, first_stride in stages:
        for stride in (first_stride, *[1] * (repeats - 1)):
            blocks.append(make_block(channels, inner, out, stride))
            channels = out
    # Weights are drawn in this order: blocks, head, stem.
    head = nn.Sequential(*before_head, *make_classifier(channels, num_classes))
    stem = nn.Sequential(make_convolution(3, STEM_CHANNELS, kernel=3), *make_norm_relu(STEM_CHANNELS))
    return nn.Sequential(OrderedDict(stem=stem, blocks=nn.Sequential(*blocks), head=head))


def make_basic_block(channels: int, inner: int, out: int, stride: int) -> Residual:
    """Return a v1 block: (N, channels, H, W) -> (N, out, ceil(H / stride), ceil(W / stride))."""
    branch = nn.Sequential(
        make_convolution(channels, inner, kernel=3, stride=stride),
        *make_norm_relu(inner),
        make_convolution(inner, out, kernel=3),
        nn.BatchNorm2d(out),
    )
    return Residual(branch, make_shortcut(channels, out, stride), after=nn.ReLU())


def make_bottleneck(channels: int, inner: int, out: int, stride: int) -> Residual:
    """Return a v2 block: (N, channels, H, W) -> (N, out, ceil(H / stride), ceil(W / stride)).

    Normalisation and activation precede each convolution, so that the shortcut path has neither.
    """
    # Only the first block reads the stem's output, which the stem has already normalised and activated.
    before = [] if channels == STEM_CHANNELS else make_norm_relu(channels)
    branch = nn.Sequential(
        *before,
        make_convolution(channels, inner, kernel=1, stride=stride),
        *make_norm_relu(inner),
        make_convolution(inner, inner, kernel=3),
        *make_norm_relu(inner),
        make_convolution(inner, out, kernel=1),
    )
    return Residual(branch, make_shortcut(channels, out, stride), after=nn.Identity())


def make_shortcut(channels: int, out: int, stride: int) -> nn.Module:
    """Return the identity if the channels are equal, else a 1x1 projection (option B of arXiv:1512.03385)."""
    return nn.Identity() if channels == out else make_convolution(channels, out, kernel=1, stride=stride)


def make_convolution(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a He-initialised convolution without bias, for odd kernels.

    (N, channels, H, W) -> (N, out, ceil(H / stride), ceil(W / stride)).
    """
    # Even the projections have no bias, although no batch norm follows them directly: in v1 the branch's batch norm
    # adds its beta to every channel, and in v2 each reader subtracts the channel's mean.
    conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


def make_norm_relu(channels: int) -> list[nn.Module]:
    """Return batch norm and ReLU for (N, channels, H, W)."""
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def make_classifier(channels: int, num_classes: int) -> nn.Sequential:
    """Return global average pooling and a linear layer: (N, channels, H, W) -> (N, num_classes)."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


# AmoebaNet-D: cells found by evolution, stacked as in GPipe and MPI4DL.
#
# Cells: Real et al., Regularized Evolution for Image Classifier Architecture Search, arXiv:1802.01548.
# Stack and sizes: Huang et al., GPipe, arXiv:1811.06965, Table 1 (a test checks the parameter counts).
# Where reproductions differ, this follows the authors' TensorFlow code: no ReLU on the image, max-pools that take
# the maximum, a ReLU before the head, and `NORMAL.concat`, which torchgpipe found to differ from the paper's.
# Omitted, as in MPI4DL: the auxiliary head, drop-path and dropout.


State = tuple[Tensor, Tensor]
"""The tensors passed between cells: x, the last cell's output, and skip, the output of the cell before that."""


def amoebanetd(num_layers: int, num_filters: int, *, num_classes: int = 10) -> AmoebaNetD:
    """Return AmoebaNet-D (L, D) of arXiv:1811.06965, Table 1: (N, 3, H, W) images -> (N, num_classes) logits.

    `num_layers` is the number of normal cells, in three equal groups; `num_filters` sets the width (the number of
    channels inside a cell of the first group). Children: `stem`, `blocks` (all cells, flat), `head`.
    Raises ValueError unless num_layers is a multiple of 3 and num_filters at least 8.

    >>> import torch
    >>> from mpi4dl_nb import amoebanetd
    >>> amoebanetd(num_layers=3, num_filters=64, num_classes=2)(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 2])
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
        self.head = nn.Sequential(nn.ReLU(), *make_classifier(out_channels, num_classes))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x, _ = self.blocks((x, x))
        return self.head(x)


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
            Sum(*(genotype.make_operation(*term, channels) for term in pair)) for pair in genotype.sums
        )

    def forward(self, state: State) -> State:
        # x    --enter_x-----> states[0]
        # skip --enter_skip--> states[1]
        # two earlier states   --sums[k]--> states[2 + k], for five k;  concat --> the next x;  x --> the next skip
        x, skip = state
        states = [self.enter_x(x), self.enter_skip(skip)]
        for total, ((a, _), (b, _)) in zip(self.sums, self.genotype.sums, strict=True):
            states.append(total(states[a], states[b]))
        return torch.cat([states[index] for index in self.genotype.concat], dim=1), x


class Sum(nn.Module):
    """left(a) + right(b), for a and b of (N, C, H, W) -> (N, C, H', W')."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a) + self.right(b)


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
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))


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
    return make_separable_bottleneck(channels, ((3, 3), (stride, stride)))


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    return make_separable_bottleneck(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1)))


def make_separable_bottleneck(channels: int, *convolutions: tuple[tuple[int, int], tuple[int, int]]) -> nn.Sequential:
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


Operation = Callable[[int, int], nn.Module]


@dataclass(frozen=True, slots=True)
class Genotype:
    """Five sums of two operations each, and the states that are concatenated to the cell's output.

    Before each operation is the index of the state that it reads: 0 is x, 1 is skip, 2 to 6 are the sums in order.
    """

    stride: int
    sums: tuple[tuple[tuple[int, Operation], tuple[int, Operation]], ...]
    concat: tuple[int, ...]

    def make_operation(self, reads: int, operation: Operation, channels: int) -> nn.Module:
        """Return an operation as a module; only operations on the cell's two inputs have the cell's stride."""
        return operation(channels, self.stride if reads < 2 else 1)


NORMAL = Genotype(
    stride=1,
    sums=(
        ((1, conv_1x1), (1, max_pool_3x3)),
        ((1, identity), (0, conv_1x7_7x1)),
        ((0, conv_1x1), (0, conv_1x7_7x1)),
        ((2, max_pool_3x3), (2, identity)),
        ((1, avg_pool_3x3), (5, conv_1x1)),
    ),
    concat=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    stride=2,
    sums=(
        ((0, max_pool_2x2), (0, max_pool_3x3)),
        ((2, identity), (1, conv_3x3)),
        ((2, conv_1x7_7x1), (2, max_pool_3x3)),
        ((3, identity), (1, max_pool_2x2)),
        ((2, avg_pool_3x3), (3, conv_1x1)),
    ),
    concat=(4, 5, 6),
)


# A plain U-Net for the segmentation of images: one class per pixel.


class UNet(nn.Module):
    """U-Net: a contracting and an expanding path with skip connections between equal sizes.

    Ronneberger, Fischer and Brox, 2015 (arXiv:1505.04597), figure 1, with padded convolutions and batch norm.
    It has `width` channels at full size, doubled at each of `depth` halvings.

    (N, channels, H, W) -> (N, num_classes, H, W); H and W must be divisible by 2 ** depth.

    >>> import torch
    >>> from mpi4dl_nb import UNet
    >>> UNet(num_classes=2, width=8)(torch.randn(1, 3, 32, 32)).shape
    torch.Size([1, 2, 32, 32])
    """

    layers: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d)

    def __init__(self, *, num_classes: int = 2, width: int = 16, depth: int = 2, channels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        convolution, transposed, norm, pool = self.layers
        make_block = partial(_make_block, convolution, norm)
        self.down = nn.ModuleList(make_block(*pair) for pair in zip([channels, *widths], widths, strict=False))
        self.pool = pool(2)
        self.up = nn.ModuleList(transposed(2 * wide, wide, 2, stride=2) for wide in widths[-2::-1])
        self.merge = nn.ModuleList(make_block(2 * wide, wide) for wide in widths[-2::-1])
        self.head = convolution(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits per pixel: (N, channels, H, W) -> (N, num_classes, H, W)."""
        # For depth=2:
        #
        #     down[0] ----------------- skip ----------------> merge[1] --> head    full size, `width` channels
        #        `-- pool, down[1] ---- skip ---> merge[0] --up[1]--'               half, 2 * `width`
        #               `-- pool, down[2] --up[0]--'                                quarter, 4 * `width`
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        x = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


class UNet3d(UNet):
    """The U-Net along three axes, for volumes: (N, channels, D, H, W) -> (N, num_classes, D, H, W).

    Çiçek et al., 2016 (arXiv:1606.06650), figure 2, with padded convolutions; otherwise as `UNet`.

    >>> import torch
    >>> UNet3d(num_classes=2, width=4)(torch.randn(1, 1, 8, 16, 16)).shape
    torch.Size([1, 2, 8, 16, 16])
    """

    layers = (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.MaxPool3d)

    def __init__(self, *, num_classes: int = 2, width: int = 16, depth: int = 2, channels: int = 1) -> None:
        super().__init__(num_classes=num_classes, width=width, depth=depth, channels=channels)


def _make_block(convolution: type[nn.Module], norm: type[nn.Module], before: int, after: int) -> nn.Sequential:
    layers = []
    for channels in (before, after):
        layer = convolution(channels, after, 3, padding=1, bias=False)
        layers.append(nn.Sequential(layer, norm(after), nn.ReLU(inplace=True)))
    return nn.Sequential(*layers)


# A network of any depth and width, made of equal layers in sequence, to study scaling.


def chain(num_layers: int = 20, num_filters: int = 16, *, num_classes: int = 10) -> nn.Sequential:
    """Return a network of a stem, `num_layers` 3 x 3 convolutions with batch norm and ReLU, and a classifier.

    The stem divides the image's sides by 4. Plain PyTorch: (N, 3, H, W) -> (N, num_classes).

    >>> sum(isinstance(layer, nn.Conv2d) for layer in chain(5))
    6
    """
    layers: list[nn.Module] = [nn.Conv2d(3, num_filters, 4, stride=4)]
    for _ in range(num_layers):
        layers += [nn.Conv2d(num_filters, num_filters, 3, padding=1, bias=False), nn.BatchNorm2d(num_filters)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, *make_classifier(num_filters, num_classes))
