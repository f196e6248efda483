"""ResNet v1 and v2 in the CIFAR design: three stages with equal numbers of blocks, for images of any size.

v1: He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385, section 4.2.
v2: He et al., Identity Mappings in Deep Residual Networks, arXiv:1603.05027, section 4.
Widths, strides and shortcuts are those of the Keras CIFAR-10 example, which MPI4DL also benchmarks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["resnet20_v1", "resnet110_v2", "resnet_v1", "resnet_v2"]

STEM_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class ResNetStage:
    """Blocks of one width: channels inside and after a block, and the stride of the first block."""

    inner: int
    out: int
    stride: int


V1_STAGES = (ResNetStage(16, 16, 1), ResNetStage(32, 32, 2), ResNetStage(64, 64, 2))
V2_STAGES = (ResNetStage(16, 64, 1), ResNetStage(64, 128, 2), ResNetStage(128, 256, 2))


class Residual(nn.Module):
    """A residual block, after(branch(x) + shortcut(x)): (N, C, H, W) -> (N, C', H', W')."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        # v1:  x --- conv norm relu conv norm --- + --- relu        v2:  x --- norm relu conv (3 times) --- +
        #       `------------ shortcut -----------'                       `---------- shortcut -------------'
        out: Tensor = self.after(self.branch(x) + self.shortcut(x))
        return out


BlockMaker = Callable[[int, ResNetStage, int], Residual]
"""(input channels, stage, stride) -> a block."""


def resnet20_v1(*, num_classes: int = 10) -> nn.Sequential:
    """Return the smallest ResNet of arXiv:1512.03385, section 4.2: (N, 3, H, W) images -> (N, num_classes) logits."""
    return resnet_v1(20, num_classes=num_classes)


def resnet110_v2(*, num_classes: int = 10) -> nn.Sequential:
    """Return MPI4DL's benchmark model of 36 pre-activation bottlenecks: (N, 3, H, W) -> (N, num_classes) logits."""
    return resnet_v2(110, num_classes=num_classes)


def resnet_v1(depth: int, *, num_classes: int = 10) -> nn.Sequential:
    """Return ResNet v1 of `depth` = 6n+2 layers: (N, 3, H, W) images -> (N, num_classes) logits.

    Children: `stem`, `blocks` (3n basic blocks, flat), `head`. Source: arXiv:1512.03385, section 4.2.
    Raises ValueError for any other depth.
    """
    repeats = count_blocks_per_stage("v1", depth, layers_per_n=6)
    return assemble(
        blocks=nn.Sequential(*stack_blocks(make_basic_block, V1_STAGES, repeats)),
        head=make_classifier(V1_STAGES[-1].out, num_classes),
    )


def resnet_v2(depth: int, *, num_classes: int = 10) -> nn.Sequential:
    """Return ResNet v2 of `depth` = 9n+2 layers: (N, 3, H, W) images -> (N, num_classes) logits.

    Children: `stem`, `blocks` (3n pre-activation bottlenecks, flat), `head`. Source: arXiv:1603.05027,
    section 4. Raises ValueError for any other depth.
    """
    repeats = count_blocks_per_stage("v2", depth, layers_per_n=9)
    channels = V2_STAGES[-1].out
    return assemble(
        blocks=nn.Sequential(*stack_blocks(make_bottleneck, V2_STAGES, repeats)),
        head=nn.Sequential(*make_norm_relu(channels), *make_classifier(channels, num_classes)),
    )


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


def assemble(blocks: nn.Module, head: nn.Module) -> nn.Sequential:
    """Return the whole model, with the child names `stem`, `blocks` and `head` that traces show."""
    stem = nn.Sequential(make_convolution(3, STEM_CHANNELS, kernel=3), *make_norm_relu(STEM_CHANNELS))
    return nn.Sequential(OrderedDict(stem=stem, blocks=blocks, head=head))


def stack_blocks(block: BlockMaker, stages: tuple[ResNetStage, ...], repeats: int) -> Iterator[Residual]:
    """Yield the blocks of all stages in order, `repeats` per stage; only the first block has the stage's stride."""
    channels = STEM_CHANNELS
    for stage in stages:
        for stride in (stage.stride, *[1] * (repeats - 1)):
            yield block(channels, stage, stride)
            channels = stage.out


def make_basic_block(channels: int, stage: ResNetStage, stride: int) -> Residual:
    """Return a v1 block: (N, channels, H, W) -> (N, stage.out, ceil(H / stride), ceil(W / stride))."""
    branch = nn.Sequential(
        make_convolution(channels, stage.inner, kernel=3, stride=stride),
        *make_norm_relu(stage.inner),
        make_convolution(stage.inner, stage.out, kernel=3),
        nn.BatchNorm2d(stage.out),
    )
    return Residual(branch, make_shortcut(channels, stage.out, stride), after=nn.ReLU())


def make_bottleneck(channels: int, stage: ResNetStage, stride: int) -> Residual:
    """Return a v2 block: (N, channels, H, W) -> (N, stage.out, ceil(H / stride), ceil(W / stride)).

    Normalisation and activation precede each convolution, so that the shortcut path has neither.
    """
    # Only the first block reads the stem's output, which the stem has already normalised and activated.
    before = [] if channels == STEM_CHANNELS else make_norm_relu(channels)
    branch = nn.Sequential(
        *before,
        make_convolution(channels, stage.inner, kernel=1, stride=stride),
        *make_norm_relu(stage.inner),
        make_convolution(stage.inner, stage.inner, kernel=3),
        *make_norm_relu(stage.inner),
        make_convolution(stage.inner, stage.out, kernel=1),
    )
    return Residual(branch, make_shortcut(channels, stage.out, stride), after=nn.Identity())


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
