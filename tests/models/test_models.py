"""The models against the papers: published parameter counts and genotypes, and shapes at any image size."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import ceil

import pytest
import torch
from torch import Tensor, nn

import mpi4dl_nb.engines.models
from mpi4dl_nb.engines.models import (
    NORMAL,
    REDUCTION,
    Cell,
    FactorizedReduction,
    Genotype,
    amoebanetd,
    avg_pool_3x3,
    identity,
    max_pool_2x2,
    max_pool_3x3,
    resnet20_v1,
    resnet110_v2,
    resnet_v1,
    resnet_v2,
)

Make = Callable[..., nn.Module]
MODELS: dict[str, Make] = {
    "resnet20_v1": resnet20_v1,
    "resnet110_v2": resnet110_v2,
    "amoebanetd_6_64": lambda **choices: amoebanetd(6, 64, **choices),
}
SMALL: dict[str, Make] = {
    "v1": lambda: resnet_v1(8),
    "v2": lambda: resnet_v2(11),
    "amoebanetd": lambda: amoebanetd(3, 8),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
every_small_model = pytest.mark.parametrize("make", SMALL.values(), ids=SMALL.keys())


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def find_convolutions(model: nn.Module) -> dict[str, nn.Conv2d]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Conv2d)}


def list_shapes_after_blocks(model: nn.Module, image: Tensor) -> list[tuple[int, ...]]:
    """(channels, rows, columns) after the stem and after each block whose shape differs from the last."""
    shapes: list[tuple[int, ...]] = []

    def record_shape(_module: nn.Module, _inputs: object, out: Tensor | tuple[Tensor, Tensor]) -> None:
        shape = tuple((out if isinstance(out, Tensor) else out[0]).shape[1:])
        if shapes[-1:] != [shape]:
            shapes.append(shape)

    for part in (model.get_submodule("stem"), *model.get_submodule("blocks").children()):
        part.register_forward_hook(record_shape)
    model(image)
    return shapes


def test_the_package_shows_exactly_the_models() -> None:
    assert set(mpi4dl_nb.engines.models.__all__) == {
        "resnet20_v1",
        "resnet110_v2",
        "resnet_v1",
        "resnet_v2",
        "amoebanetd",
    }
    for name in mpi4dl_nb.engines.models.__all__:
        num_classes = inspect.signature(getattr(mpi4dl_nb.engines.models, name)).parameters["num_classes"]
        assert (num_classes.kind, num_classes.default) == (inspect.Parameter.KEYWORD_ONLY, 10)


# ---- all models


@pytest.mark.sampled(3)
@every_model
@pytest.mark.parametrize("size_px", [(32, 32), (33, 47), (100, 132)], ids="{0[0]}x{0[1]}".format)
def test_any_image_size_gives_logits(make: Make, size_px: tuple[int, int]) -> None:
    logits = make(num_classes=7).eval()(torch.randn(2, 3, *size_px))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()


@pytest.mark.sampled(1)
@every_model
@pytest.mark.parametrize("size_px", [(128, 128), (100, 132), (8192, 8192)], ids="{0[0]}x{0[1]}".format)
def test_export_on_meta_keeps_names_and_shapes(make: Make, size_px: tuple[int, int]) -> None:
    model = make().to("meta")
    image = torch.empty(2, 3, *size_px, device="meta")
    exported = torch.export.export(model, (image,), strict=False)
    graph = exported.module().graph
    (out,) = next(node for node in graph.nodes if node.op == "output").args[0]
    assert out.meta["val"].shape == (2, 10)
    assert exported.state_dict.keys() == model.state_dict().keys()
    convolved = sum(node.target == torch.ops.aten.conv2d.default for node in graph.nodes)
    assert convolved == len(find_convolutions(model)), "each convolution is called once"


@every_small_model
def test_every_parameter_gets_a_gradient(make: Make) -> None:
    """MPI4DL's v2 builds a projection in all 36 blocks and uses three: the other 33 never learn."""
    model = make()
    loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 64, 64)), torch.tensor([1, 4]))
    torch.autograd.backward(loss)
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_model
def test_no_convolution_has_a_bias_and_no_activation_works_in_place(make: Make) -> None:
    model = make().to("meta")
    assert [name for name, conv in find_convolutions(model).items() if conv.bias is not None] == []
    assert not any(part.inplace for part in model.modules() if isinstance(part, nn.ReLU))
    assert [name for name, _ in model.named_children()] == ["stem", "blocks", "head"]


# ---- ResNet


def count_v1_parameters(n: int, classes: int) -> int:
    """Counted from arXiv:1512.03385, section 4.2: 2n 3x3 convolutions at 16, 32 and 64 channels."""
    total = (9 * 3 * 16 + 2 * 16) + 2 * n * (9 * 16 * 16 + 2 * 16)
    for wide in (32, 64):
        total += 9 * wide // 2 * wide + (2 * n - 1) * 9 * wide * wide + 2 * n * 2 * wide + wide // 2 * wide
    return total + (64 + 1) * classes


def count_v2_parameters(n: int, classes: int) -> int:
    """n bottlenecks (1x1, 3x3, 1x1) in each stage; the first of all has no batch norm before it."""
    total, before = 9 * 3 * 16 + 2 * 16 - 2 * 16, 16
    for inner, out in ((16, 64), (64, 128), (128, 256)):
        same_in_each = 9 * inner * inner + inner * out + 4 * inner
        first = before * inner + 2 * before + before * out
        total += n * same_in_each + first + (n - 1) * (out * inner + 2 * out)
        before = out
    return total + 2 * 256 + (256 + 1) * classes


@pytest.mark.parametrize("n", [1, 2, 3, 9, 12])
def test_resnet_parameters_in_closed_form(n: int) -> None:
    with torch.device("meta"):
        assert count_parameters(resnet_v1(6 * n + 2, num_classes=13)) == count_v1_parameters(n, classes=13)
        assert count_parameters(resnet_v2(9 * n + 2, num_classes=13)) == count_v2_parameters(n, classes=13)


@pytest.mark.parametrize(
    ("make", "depth", "keras_trainable"),
    [
        pytest.param(resnet_v1, 20, 273_066, id="ResNet20v1"),
        pytest.param(resnet_v2, 20, 570_602, id="ResNet20v2"),
    ],
)
def test_resnet_parameters_as_keras_publishes_them(make: Make, depth: int, keras_trainable: int) -> None:
    """The summaries that Keras' cifar10_resnet.py prints; its convolutions also have biases."""
    model = make(depth)
    biases = sum(conv.out_channels for conv in find_convolutions(model).values())
    assert count_parameters(model) + biases == keras_trainable


def test_the_two_named_resnets() -> None:
    assert count_parameters(resnet20_v1()) == 272_282  # "0.27M", arXiv:1512.03385, Table 6
    assert count_parameters(resnet110_v2()) == 3_291_610  # 3.3M, less Keras' 10,832 biases
    assert len(resnet110_v2().get_submodule("blocks")) == 36  # type: ignore[arg-type]


@pytest.mark.parametrize(("make", "depth"), [(resnet_v1, 20), (resnet_v1, 56), (resnet_v2, 29), (resnet_v2, 110)])
def test_depth_counts_convolutions_and_the_linear_layer(make: Make, depth: int) -> None:
    model = make(depth)
    on_the_path = [name for name in find_convolutions(model) if "shortcut" not in name]
    assert len(on_the_path) + 1 == depth
    projections = {name for name in find_convolutions(model) if "shortcut" in name}
    n = len(model.get_submodule("blocks")) // 3  # type: ignore[arg-type]
    widened = (n, 2 * n) if make is resnet_v1 else (0, n, 2 * n)
    assert projections == {f"blocks.{index}.shortcut" for index in widened}


def test_resnet_shapes_at_a_size_that_is_no_power_of_two() -> None:
    image = torch.randn(1, 3, 100, 135)
    assert list_shapes_after_blocks(resnet_v1(20), image) == [(16, 100, 135), (32, 50, 68), (64, 25, 34)]
    assert list_shapes_after_blocks(resnet_v2(20), image) == [
        (16, 100, 135),  # stem
        (64, 100, 135),
        (128, 50, 68),
        (256, 25, 34),
    ]


def test_v2_leaves_the_shortcut_clear_and_activates_before_each_convolution() -> None:
    def list_kinds(block: nn.Module) -> str:
        letters = {nn.BatchNorm2d: "B", nn.ReLU: "R", nn.Conv2d: "C"}
        return "".join(letters[type(part)] for part in block.get_submodule("branch").children())

    first, *others = resnet_v2(20).get_submodule("blocks").children()
    assert list_kinds(first) == "CBRCBRC", "the stem has activated its output already"
    assert {list_kinds(block) for block in others} == {"BRCBRCBRC"}
    assert {type(block.get_submodule("after")) for block in (first, *others)} == {nn.Identity}
    (kind,) = {list_kinds(block) for block in resnet_v1(20).get_submodule("blocks").children()}
    assert kind == "CBRCB"


def test_v2_block_in_the_words_of_the_paper() -> None:
    """arXiv:1603.05027, equation 1 with h the identity: x + F(x)."""
    block = list(resnet_v2(20).eval().get_submodule("blocks").children())[1]
    x = torch.randn(1, 64, 7, 5)
    b1, _, c1, b2, _, c2, b3, _, c3 = block.get_submodule("branch").children()
    assert torch.equal(block(x), c3(b3(c2(b2(c1(b1(x).relu())).relu())).relu()) + x)


@pytest.mark.parametrize(
    ("make", "depth", "told"),
    [
        (resnet_v1, 21, r"^There is no ResNet v1 of depth 21: the depth is 6n\+2.* Use depth=20 or 26\.$"),
        (resnet_v2, 100, r"^There is no ResNet v2 of depth 100: the depth is 9n\+2.* Use depth=92 or 101\.$"),
        (resnet_v2, 50, r"Use depth=47 or 56\.$"),
        (resnet_v1, 7, r"Use depth=8\.$"),
        (resnet_v1, 2, r"Use depth=8\.$"),
        (resnet_v2, -5, r"Use depth=11\.$"),
    ],
)
def test_a_wrong_depth_is_refused_with_its_neighbours(make: Make, depth: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make(depth)


# ---- AmoebaNet-D


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_layers", "num_filters", "gpipe", "torchgpipe"),
    [
        (18, 208, "82M", "81.5M"),
        (18, 416, "318M", "319.0M"),
        (18, 544, "542M", "542.7M"),
        (36, 544, "1.05B", "1.06B"),
        (72, 512, "1.8B", "1.84B"),
    ],
)
def test_amoebanetd_parameters_as_published(num_layers: int, num_filters: int, gpipe: str, torchgpipe: str) -> None:
    """arXiv:1811.06965, Table 1 (ImageNet), and torchgpipe's reproduction of it, given with more digits."""

    def parse_number(text: str) -> float:
        return float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]

    with torch.device("meta"):
        count = count_parameters(amoebanetd(num_layers, num_filters, num_classes=1000))
    last_digit = 0.1e6 if torchgpipe.endswith("M") else 0.01e9
    assert abs(count - parse_number(torchgpipe)) <= last_digit / 2
    assert count == pytest.approx(parse_number(gpipe), rel=0.03)


@pytest.mark.parametrize(
    ("genotype", "operations", "reads", "used"),
    [
        pytest.param(
            NORMAL,
            "conv_1x1 max_pool_3x3 identity conv_1x7_7x1 conv_1x1 conv_1x7_7x1 max_pool_3x3 identity "
            "avg_pool_3x3 conv_1x1",
            [1, 1, 1, 0, 0, 0, 2, 2, 1, 5],
            [0, 1, 1, 0, 0, 1, 0],
            id="normal",
        ),
        pytest.param(
            REDUCTION,
            "max_pool_2x2 max_pool_3x3 identity conv_3x3 conv_1x7_7x1 max_pool_3x3 identity max_pool_2x2 "
            "avg_pool_3x3 conv_1x1",
            [0, 0, 2, 1, 2, 2, 3, 1, 2, 3],
            [1, 1, 1, 1, 0, 0, 0],
            id="reduction",
        ),
    ],
)
def test_genotype_as_published(genotype: Genotype, operations: str, reads: list[int], used: list[int]) -> None:
    """As the authors' TensorFlow code lists them: operations, the states they read, the states left out."""
    steps = [step for pair in genotype.sums for step in pair]
    assert [operation.__name__ for _, operation in steps] == operations.split()
    assert [state for state, _ in steps] == reads
    assert genotype.concat == tuple(index for index, left_out in enumerate(used) if not left_out)


def test_normal_cell_written_out() -> None:
    cell = Cell(NORMAL, channels=8, x_channels=5, skip_channels=3, skip_is_larger=False).eval()
    x, skip = torch.randn(1, 5, 9, 7), torch.randn(1, 3, 9, 7)
    p, q, sums = cell.enter_x(x), cell.enter_skip(skip), cell.sums
    a, b, c = sums[0](q, q), sums[1](q, p), sums[2](p, p)
    d = sums[3](a, a)
    out, passed_on = cell((x, skip))
    assert torch.equal(out, torch.cat([p, b, c, sums[4](q, d)], dim=1))
    assert passed_on is x


def test_reduction_cell_written_out() -> None:
    cell = Cell(REDUCTION, channels=8, x_channels=5, skip_channels=3, skip_is_larger=True).eval()
    x, skip = torch.randn(1, 5, 9, 7), torch.randn(1, 3, 17, 14)
    p, q, sums = cell.enter_x(x), cell.enter_skip(skip), cell.sums
    a = sums[0](p, p)
    b = sums[1](a, q)
    out, passed_on = cell((x, skip))
    assert torch.equal(out, torch.cat([sums[2](a, a), sums[3](b, q), sums[4](a, b)], dim=1))
    assert out.shape == (1, 24, 5, 4)
    assert passed_on is x


@pytest.mark.parametrize("size_px", [(8, 8), (9, 7), (1, 2)], ids="{0[0]}x{0[1]}".format)
def test_every_operation_rounds_up_where_it_halves(size_px: tuple[int, int]) -> None:
    """torchgpipe's 2x2 pool rounds down, so that its cells fail on images such as 100x132."""
    for genotype in (NORMAL, REDUCTION):
        for step in (step for pair in genotype.sums for step in pair):
            stride = genotype.stride if step[0] < 2 else 1
            out = genotype.make_operation(*step, 8).eval()(torch.randn(1, 8, *size_px))
            assert out.shape == (1, 8, *(ceil(px / stride) for px in size_px)), step
    halved = identity(8, 2).eval()(torch.randn(1, 8, *size_px))
    assert halved.shape == (1, 8, *(ceil(px / 2) for px in size_px))


def test_pools_at_the_edge_see_only_the_image() -> None:
    """The max_pool_3x3 of torchgpipe and of MPI4DL averages; MPI4DL pads max-pools with zeros."""
    image = -torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    assert max_pool_3x3(1, 1)(image)[0, 0, 0].tolist() == [-1, -1, -2, -3]
    assert max_pool_2x2(1, 2)(image[..., :3])[0, 0].tolist() == [[-1, -3], [-9, -11]]
    assert avg_pool_3x3(1, 1)(image)[0, 0, 0, 0] == -(1 + 2 + 5 + 6) / 4


def test_factorized_reduction_sees_even_pixels_and_odd_pixels() -> None:
    """MPI4DL leaves out the shift, so that both halves see the even pixels and the odd ones are lost."""
    reduction = FactorizedReduction(channels=1, out=2)
    reduction.norm = nn.Identity()  # type: ignore[assignment]
    for conv in (reduction.even, reduction.odd):
        nn.init.ones_(conv.weight)
    even, odd = reduction(torch.arange(1.0, 16.0).reshape(1, 1, 3, 5))[0].tolist()
    assert even == [[1, 3, 5], [11, 13, 15]]
    assert odd == [[7, 9, 0], [0, 0, 0]], "beyond the image there are zeros"


def test_amoebanetd_shapes_at_a_size_that_is_no_power_of_two() -> None:
    assert list_shapes_after_blocks(amoebanetd(3, 64), torch.randn(1, 3, 100, 132)) == [
        (16, 50, 66),  # stem: a quarter of num_filters
        (3 * 32, 25, 33),
        (3 * 64, 13, 17),
        (4 * 64, 13, 17),  # first group of normal cells, on num_filters channels
        (3 * 128, 7, 9),
        (4 * 128, 7, 9),
        (3 * 256, 4, 5),
        (4 * 256, 4, 5),
    ]


def test_normal_cells_stand_in_three_equal_groups() -> None:
    cells = amoebanetd(9, 8).get_submodule("blocks").children()
    drawn = "".join("N" if isinstance(cell, Cell) and cell.genotype is NORMAL else "R" for cell in cells)
    assert drawn == "RR" + "NNN" + "R" + "NNN" + "R" + "NNN"


@pytest.mark.parametrize(
    ("num_layers", "num_filters", "told"),
    [
        (4, 512, r"num_layers=4 normal cells cannot form three equal groups.*num_layers=3 or 6\."),
        (0, 64, r"num_layers=0 .*num_layers=3 or 6\."),
        (-1, 64, r"num_layers=-1 .*num_layers=3 or 6\."),
        (20, 416, r"num_layers=18 or 21\."),
        (18, 7, r"num_filters=7 is too narrow.*Use num_filters=8 or more\."),
    ],
)
def test_wrong_sizes_are_refused_with_a_remedy(num_layers: int, num_filters: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        amoebanetd(num_layers, num_filters)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_filters", [8, 9, 11, 21, 214])
def test_odd_widths_are_rounded_down_as_in_the_reference(num_filters: int) -> None:
    with torch.device("meta"):
        logits = amoebanetd(3, num_filters)(torch.empty(2, 3, 64, 64))
    assert logits.shape == (2, 10)
