"""FLOPs of every operator of the table, held against PyTorch's own counter on real tensors; what a product costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import mpi4dl_nb.engines.compiler.entries  # noqa: F401  (fills the operator table)
from mpi4dl_nb.engines.compiler.operator_table import get_rules, is_user_defined
from mpi4dl_nb.engines.graph.export_reader import FlopCount, count_flops
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.trace import trace_inference
from mpi4dl_nb.engines.predict.kernel_effects import LocalTensor
from mpi4dl_nb.engines.predict.rank_tally import build_op_tally
from mpi4dl_nb.engines.predict.tallies import BY_ARITHMETIC
from mpi4dl_nb.engines.program.kernels import get_operator

OPERATORS = sorted(
    name.removeprefix("aten.")
    for name, (rule, *_) in get_rules().items()
    if name.startswith("aten.") and not is_user_defined(rule)
)
X = (1, 2, 4, 4)
LINE, BLOCK = (1, 2, 8), (1, 2, 4, 4, 4)


def make_values(*shape: int) -> Tensor:
    return torch.rand(shape)


def make_places(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


EXAMPLES: dict[str, tuple[Any, ...]] = {
    "_upsample_bicubic2d_aa.vec": (make_values(*X), [8, 8], False, None),
    "_upsample_bilinear2d_aa.vec": (make_values(*X), [8, 8], False, None),
    "_upsample_nearest_exact1d.vec": (make_values(*LINE), [9], None),
    "_upsample_nearest_exact2d.vec": (make_values(*X), [8, 8], None),
    "_upsample_nearest_exact3d.vec": (make_values(*BLOCK), [8, 8, 8], None),
    "adaptive_avg_pool1d.default": (make_values(*LINE), [2]),
    "adaptive_avg_pool3d.default": (make_values(*BLOCK), [2, 2, 2]),
    "adaptive_max_pool1d.default": (make_values(*LINE), [2]),
    "adaptive_max_pool3d.default": (make_values(*BLOCK), [2, 2, 2]),
    "avg_pool1d.default": (make_values(*LINE), [2]),
    "avg_pool3d.default": (make_values(*BLOCK), [2, 2, 2]),
    "batch_norm.default": (make_values(*X), None, None, None, None, True, 0.1, 1e-5, False),
    "bmm.default": (make_values(2, 3, 4), make_values(2, 4, 5)),
    "broadcast_to.default": (make_values(*X), [3, 2, 4, 4]),
    "conv1d.default": (make_values(*LINE), make_values(3, 2, 3)),
    "conv1d.padding": (make_values(*LINE), make_values(4, 1, 3), None, [1], "same", [1], 2),
    "conv3d.default": (make_values(*BLOCK), make_values(3, 2, 3, 3, 3)),
    "conv3d.padding": (make_values(*BLOCK), make_values(4, 1, 3, 3, 3), None, [1] * 3, "same", [1] * 3, 2),
    "conv_transpose1d.default": (make_values(*LINE), make_values(2, 3, 2), make_values(3), [2]),
    "conv_transpose3d.input": (make_values(*BLOCK), make_values(2, 3, 2, 2, 2), make_values(3), [2, 2, 2]),
    "max_pool1d.default": (make_values(*LINE), [2]),
    "max_pool1d_with_indices.default": (make_values(*LINE), [2]),
    "max_pool3d.default": (make_values(*BLOCK), [2, 2, 2]),
    "max_pool3d_with_indices.default": (make_values(*BLOCK), [2, 2, 2]),
    "max_unpool3d.default": (
        *(make_values(1, 2, 2, 2, 2), make_places(1, 2, 2, 2, 2)),
        *([4, 4, 4], [2, 2, 2], [0, 0, 0]),
    ),
    "upsample_linear1d.vec": (make_values(*LINE), [9], False, None),
    "upsample_nearest1d.vec": (make_values(*LINE), [9], None),
    "upsample_nearest3d.vec": (make_values(*BLOCK), [8, 8, 8], None),
    "upsample_trilinear3d.vec": (make_values(*BLOCK), [8, 8, 8], False, None),
    "conv2d.default": (make_values(*X), make_values(3, 2, 3, 3)),
    "conv2d.padding": (make_values(*X), make_values(4, 1, 3, 3), None, [1, 1], "same", [1, 1], 2),
    "conv_transpose2d.input": (make_values(*X), make_values(2, 3, 2, 2), make_values(3), [2, 2]),
    "einsum.default": ("nchw,dc->ndhw", [make_values(*X), make_values(3, 2)]),
    "expand.default": (make_values(*X), [3, 2, 4, 4]),
    "flip.default": (make_values(*X), [2]),
    "gather.default": (make_values(*X), 1, make_places(*X)),
    "grid_sampler.default": (make_values(*X), make_values(1, 3, 3, 2), 0, 0, False),
    "index.Tensor": (make_values(*X), [make_places(1)]),
    "index_fill.int_Scalar": (make_values(*X), 1, make_places(1), 0.5),
    "index_put.default": (make_values(*X), [make_places(1)], make_values(*X)),
    "index_select.default": (make_values(*X), 1, make_places(1)),
    "instance_norm.default": (make_values(*X), None, None, None, None, True, 0.1, 1e-5, False),
    "layer_norm.default": (make_values(*X), [4, 4]),
    "linear.default": (make_values(*X), make_values(3, 4), make_values(3)),
    "logsumexp.default": (make_values(*X), [1]),
    "matmul.default": (make_values(*X), make_values(4, 5)),
    "max_unpool2d.default": (make_values(1, 2, 2, 2), make_places(1, 2, 2, 2), [4, 4]),
    "movedim.intlist": (make_values(*X), [1], [2]),
    "nll_loss_nd.default": (make_values(*X), make_places(1, 4, 4)),
    "numpy_T.default": (make_values(4, 3),),
    "one_hot.default": (make_places(4), 3),
    "permute.default": (make_values(*X), [0, 2, 3, 1]),
    "prelu.default": (make_values(*X), make_values(2)),
    "col2im.default": (make_values(1, 8, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    "randint.low": (1, 5, [4]),
    "repeat.default": (make_values(*X), [2, 1, 1, 1]),
    "reshape.default": (make_values(*X), [2, 16]),
    "rms_norm.default": (make_values(*X), [4, 4]),
    "roll.default": (make_values(*X), [1], [2]),
    "scaled_dot_product_attention.default": (make_values(2, 3, 4), make_values(2, 5, 4), make_values(2, 5, 6)),
    "scatter.src": (make_values(*X), 1, make_places(*X), make_values(*X)),
    "scatter.value": (make_values(*X), 1, make_places(*X), 0.5),
    "scatter_add.default": (make_values(*X), 1, make_places(*X), make_values(*X)),
    "select_scatter.default": (make_values(*X), make_values(1, 4, 4), 1, 0),
    "split_with_sizes.default": (make_values(*X), [1, 1], 1),
    "squeeze.dims": (make_values(*X), [0]),
    "t.default": (make_values(4, 3),),
    "unflatten.int": (make_values(*X), 1, [1, 2]),
    "upsample_bicubic2d.vec": (make_values(*X), [8, 8], False, None),
    "upsample_bilinear2d.vec": (make_values(*X), [8, 8], False, None),
    "upsample_nearest2d.vec": (make_values(*X), [8, 8], None),
    "view.default": (make_values(*X), [2, 16]),
}
"""Where `guess` would not do, or would say less."""


def guess(argument: Any) -> Any:
    """A value for an argument that has no default, by its type."""
    return {
        "Tensor": make_values(*X), "List[Tensor]": [make_values(*X), make_values(*X)], "int": 1, "List[int]": [1, 1],
        "float": 0.5, "number": 2, "bool": False, "str": "",
    }.get(str(argument.type))  # fmt: skip


def make_example(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which an operator runs, on real tensors."""
    needed = [each for each in get_operator(f"aten.{name}")._schema.arguments if not each.has_default_value()]
    args = EXAMPLES.get(name) or tuple(guess(each) for each in needed if not each.kwarg_only)
    return args, {each.name: guess(each) for each in needed if each.kwarg_only}


def count_pytorch_flops(name: str) -> tuple[int, Any]:
    """FLOPs that PyTorch has a formula for, and what the operator makes."""
    args, kwargs = make_example(name)
    with FlopCounterMode(display=False) as counter:
        made = get_operator(f"aten.{name}")(*args, **kwargs)
    return counter.get_total_flops(), made


def make_node(name: str) -> fx.Node:
    """The operator as a trace has it, tensors being nodes with what they look like."""
    graph = fx.Graph()

    def enter(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = item.to("meta")
        return node

    args, kwargs = tree_map(enter, make_example(name))
    node = graph.call_function(get_operator(f"aten.{name}"), args, kwargs)
    node.meta["val"] = count_pytorch_flops(name)[1]
    return node


def convert_to_local(item: Any) -> Any:
    if not isinstance(item, Tensor):
        return item
    return LocalTensor(TensorSpec(tuple(item.shape), str(item.dtype).removeprefix("torch.")), item.stride(), False)


@pytest.mark.sampled(157)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_traced_operator_has_the_flops_of_pytorchs_counter(name: str):
    """Where that knows none, one for each element of the result, and none for several results."""
    known, made = count_pytorch_flops(name)
    elements = made.numel() if isinstance(made, Tensor) else 0
    assert count_flops(make_node(name)) == (known or elements)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_rank_is_priced_by_the_flops_of_pytorchs_counter(name: str):
    known, _ = count_pytorch_flops(name)
    tally = build_op_tally(f"aten.{name}", *tree_map(convert_to_local, make_example(name)))
    assert (tally.kind in BY_ARITHMETIC) == (known > 0)
    assert known in (tally.flops, 0)


def test_the_table_has_products_and_convolutions():
    """So that the two above hold more than zeros."""
    known = {name: count_pytorch_flops(name)[0] for name in OPERATORS}
    assert {name: count for name, count in known.items() if count} == {
        "bmm.default": 2 * 2 * 3 * 4 * 5,
        "conv1d.default": 2 * 3 * 2 * 6 * 3,
        "conv1d.padding": 2 * 4 * 8 * 3,
        "conv2d.default": 2 * 3 * 2 * 2 * 2 * 9,
        "conv2d.padding": 2 * 4 * 4 * 4 * 9,
        "conv3d.default": 2 * 3 * 2 * 2 * 2 * 2 * 27,
        "conv3d.padding": 2 * 4 * 4 * 4 * 4 * 27,
        "conv_transpose1d.default": 2 * 2 * 8 * 3 * 2,
        "conv_transpose2d.input": 2 * 2 * 4 * 4 * 3 * 2 * 2,
        "conv_transpose3d.input": 2 * 2 * 4 * 4 * 4 * 3 * 2 * 2 * 2,
        "einsum.default": 2 * 3 * 2 * 4 * 4,
        "linear.default": 2 * 2 * 4 * 4 * 3,
        "matmul.default": 2 * 2 * 4 * 4 * 5,
        "scaled_dot_product_attention.default": 2 * 2 * 3 * 5 * (4 + 6),
    }


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """x is (8, 64, 64)."""
        one = torch.bmm(x, x)
        two = torch.baddbmm(one, one, x)
        return torch.einsum("bij,bjk->bik", two, x)


def test_products_and_attention_in_a_model():
    graph = trace_inference(Products(), TensorSpec((8, 64, 64), "float32"))
    assert [node.flops for node in graph.nodes] == [2 * 8 * 64**3] * 3
    attention = trace_inference(Attends(), TensorSpec((2, 3, 8, 8), "float32")).nodes[-1]
    assert attention.flops == 2 * (2 * 2 * 3 * 3 * 64)


VECTORS = {
    "mv": (torch.mv, (make_values(4, 5), make_values(5)), 2 * 4 * 5),
    "a stack by a vector": (torch.matmul, (make_values(3, 4, 5), make_values(5)), 2 * 3 * 4 * 5),
    "dot": (torch.dot, (make_values(5), make_values(5)), 2 * 5),
    "addmv": (torch.addmv, (make_values(4), make_values(4, 5), make_values(5)), 2 * 4 * 5),
    "addbmm": (torch.addbmm, (make_values(3, 5), make_values(2, 3, 4), make_values(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
    "bilinear": (F.bilinear, (make_values(2, 3), make_values(2, 4), make_values(5, 3, 4)), 3 * 2 * 5 * 3 * 4),
    "attention on a CPU": (F.scaled_dot_product_attention, (make_values(1, 2, 6, 4),) * 3, 2 * 2 * 2 * 6 * 6 * 4),
}


@pytest.mark.parametrize("name", VECTORS)
def test_products_that_pytorchs_registry_leaves_out(name: str):
    function, args, expected = VECTORS[name]
    with FlopCount() as count:
        function(*args)
    assert count.total == expected


def test_a_formula_that_a_user_has_registered_counts():
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    @torch.library.custom_op("flops_test::blend", mutates_args=())
    def blend(x: Tensor) -> Tensor:
        return x.clone()

    blend.register_fake(torch.empty_like)
    packet = torch.ops.flops_test.blend
    try:
        register_flop_formula(packet)(lambda shape, *, out_shape=None: 7 * math.prod(shape))
        tally = build_op_tally("flops_test.blend.default", (convert_to_local(make_values(*X)),))
        assert tally.flops == 7 * math.prod(X)
    finally:
        flop_registry.pop(packet, None)
