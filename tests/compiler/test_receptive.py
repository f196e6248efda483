"""Receptive fields are held against autograd: what has a gradient from one output pixel."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.compiler import receptive
from mpi4dl_nb.engines.compiler.receptive import ReceptiveFields
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.trace import trace_inference
from mpi4dl_nb.engines.models import resnet20_v1

SHAPE = (1, 2, 40, 44)
NETS = {
    "convolutions": [nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 5, stride=2), nn.Conv2d(3, 2, (3, 1))],
    "even kernels": [nn.Conv2d(2, 3, 4, stride=2, padding=1), nn.Conv2d(3, 2, 2)],
    "pools": [nn.AvgPool2d(3, 2, 1), nn.Conv2d(2, 2, 3, padding=2), nn.AvgPool2d(2, ceil_mode=True)],
    "dilated": [nn.Conv2d(2, 2, 3, padding=4, dilation=4), nn.Conv2d(2, 2, 3, padding=1, dilation=1)],
    "transposed": [nn.Conv2d(2, 2, 3, stride=2), nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1)],
    "up again": [nn.AvgPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2, 2, 3, padding=1)],
    "norms in evaluation": [nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3)],
    "padded": [nn.ZeroPad2d((2, 0, 0, 2)), nn.Conv2d(2, 2, 3)],
}


class Block(nn.Module):
    """Two ways of different reach that meet."""

    def __init__(self) -> None:
        super().__init__()
        self.far, self.near = nn.Conv2d(2, 2, 7, padding=3), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.far(self.near(x)) + torch.cat([x, x], 1)[:, 1:3])


def find_field_by_autograd(net: nn.Module, shape: tuple[int, ...], pixel: tuple[int, int]) -> Tile:
    """The smallest rectangle that holds all pixels with a gradient from one pixel of the answer."""
    image = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    net(image)[..., pixel[0], pixel[1]].sum().backward()
    rows, cols = (image.grad[0].abs().sum((0, axis)).nonzero().flatten() for axis in (2, 1))
    return Tile(Span(int(rows[0]), int(rows[-1]) + 1), Span(int(cols[0]), int(cols[-1]) + 1))


def make_positive(net: nn.Module) -> nn.Module:
    """No two ways cancel each other."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(0.1, 1.0)
    return net.double().eval()


def make_fields(net: nn.Module, shape: tuple[int, ...] = SHAPE) -> ReceptiveFields:
    return ReceptiveFields(trace_inference(net, TensorSpec(shape, "float64")))


@pytest.mark.parametrize("name", [*NETS, "block"])
def test_it_is_where_autograd_finds_a_gradient(name):
    net = make_positive(Block() if name == "block" else nn.Sequential(*NETS[name]))
    fields = make_fields(net)
    node = fields.graph.prediction
    rows, cols = fields.get_size_px(node)
    for pixel in {(0, 0), (rows // 2, cols // 2), (rows // 3, cols - 1), (rows - 1, 1)}:
        assert fields.compute_field(node, *pixel).image == find_field_by_autograd(net, SHAPE, pixel)


def test_of_a_max_pool_the_largest_pixel_counts_and_all_are_looked_at():
    net = make_positive(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.MaxPool2d(4)))
    fields = make_fields(net)
    field = fields.compute_field(fields.graph.prediction, 3, 3)
    assert field.image == Tile(Span(11, 17), Span(11, 17))
    assert find_field_by_autograd(net, SHAPE, (3, 3)).is_inside(field.image)
    pixel = Tile(Span(3, 4), Span(3, 4))
    assert fields.compute_region(fields.graph.prediction, pixel, "conv2d") == Tile(Span(12, 16), Span(12, 16))


def test_a_slide_of_100000_px_has_one_too():
    """Of ResNet-20, whose last convolution sees a few hundred pixels at most, whatever the image."""
    fields = make_fields(resnet20_v1(), (1, 3, 100_000, 100_000))
    last = [node.name for node in fields.graph.nodes if node.operator == "aten.conv2d.default"][-1]
    rows, cols = fields.get_size_px(last)
    image = fields.compute_field(last, rows // 2, cols // 2).image
    assert (rows, cols) == (25_000, 25_000)
    assert 50 < image.shape[0] < 300
    assert image.shape[0] == image.shape[1]
    assert 50_000 in image.rows
    assert 50_000 in image.cols


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("conv2d", 40, 0), r"\(40, 0\) is not one of the 40 x 44 of conv2d: use rows 0 to 39"),
        (("conv2d", 0, -1), "not one of"),
        (("mean", 0, 0), "no value of rows and columns"),
        (("nothing", 0, 0), "no value of rows and columns"),
    ],
    ids=str,
)
def test_what_has_none_is_refused(asked, reason):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean((2, 3))

    with pytest.raises(PlanError, match=reason):
        make_fields(Net()).compute_field(*asked)


def test_the_example_runs():
    assert doctest.testmod(receptive).failed == 0
