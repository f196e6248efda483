"""What operators keep for backward, as PyTorch itself tells."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.predict.kernel_effects import LiveBytes, LocalTensor, infer_effect
from mpi4dl_nb.engines.program import kernels
from mpi4dl_nb.engines.program.kernels import register_kernel


def make_image(*shape: int) -> LocalTensor:
    return LocalTensor.of(TensorSpec(shape, "float32"), needs_gradient=True)


X = make_image(2, 4, 8, 8)
CONV3D = [1, 1, 1], [1, 1, 1], [1, 1, 1], 1
UPSAMPLE = [2] * 3, [0] * 3, [0] * 3, 1, [1] * 3, ((0, 0),) * 3


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "weight", "settings"),
    [("aten.conv3d.default", (8, 8, 3, 3, 3), CONV3D), ("tile.conv_transpose", (8, 8, 2, 2, 2), UPSAMPLE)],
)
def test_convolutions_of_volumes_take_what_is_told(kernel: str, weight: tuple[int, ...], settings, images: int):
    """Held against the live tensors of the real kernel: what forward leaves, and what backward takes for a while."""
    x = torch.randn(images, 8, 24, 24, 24).contiguous(memory_format=torch.channels_last_3d)
    read = [tensor.requires_grad_() for tensor in (x, torch.randn(weight), torch.randn(8))]
    effect = infer_effect(kernel, [*map(LocalTensor.describe, read), *settings], {})
    with LiveBytes() as forward:
        result = kernels.get_kernel(kernel)(*read, *settings)
    assert forward.now == effect.made[0].bytes + effect.saves_bytes == result.nbytes
    # A sum over the planes of a kernel has one more result for a while; a bias is added in place.
    assert forward.peak <= (2 if (kernel, images) == ("aten.conv3d.default", 1) else 1) * result.nbytes
    upstream = torch.ones_like(result)
    with LiveBytes() as backward:
        grads = torch.autograd.grad(result, read, upstream)
    assert backward.peak - sum(grad.nbytes for grad in grads) == pytest.approx(effect.back_bytes, abs=1 << 14)


def test_a_convolution_keeps_what_it_reads():
    effect = infer_effect("aten.conv2d.default", [X, make_image(6, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], 1], {})
    assert (effect.saves, effect.saves_made, effect.saves_bytes) == ({0, 1}, frozenset(), 0)
    assert effect.made[0].bytes == 2 * 6 * 8 * 8 * 4


def test_a_relu_keeps_what_it_makes():
    effect = infer_effect("aten.relu.default", [X], {})
    assert (effect.saves, effect.saves_made, effect.saves_bytes) == (frozenset(), {0}, 0)


def test_a_sum_keeps_nothing_and_passes_its_gradient_on():
    effect = infer_effect("aten.add.Tensor", [X, X], {})
    assert (effect.saves, effect.saves_made, effect.passes) == (frozenset(), frozenset(), {0, 1})


def test_a_max_pool_keeps_its_places_as_int64():
    effect = infer_effect("aten.max_pool2d.default", [X, [2, 2], [2, 2]], {})
    assert effect.saves == {0}
    assert effect.saves_bytes == 2 * 4 * 4 * 4 * 8


def test_a_view_lies_in_what_it_shows():
    assert infer_effect("aten.permute.default", [X, [0, 2, 3, 1]], {}).made[0].shares == 0


def test_batch_norm_over_tiles_keeps_what_it_reads():
    assert 0 in infer_effect("tile.moments", [X, 0, 4], {}).saves


def test_a_kernel_that_needs_numbers_is_run_for_real_where_that_is_cheap(monkeypatch):
    monkeypatch.setattr(kernels, "_KERNELS", dict(kernels._KERNELS))  # the table of other tests stays as it is

    @register_kernel("tests.by_value")
    def by_value(x):
        return x * float(x.sum())

    assert infer_effect("tests.by_value", [X], {}).made[0].local.spec.shape == (2, 4, 8, 8)
    with pytest.raises(TraceError, match=r"tests.by_value cannot be run without memory .*register_fake"):
        infer_effect("tests.by_value", [make_image(1, 1, 1 << 14, 1 << 13)], {})


def test_half_precision_keeps_half_the_bytes():
    half = LocalTensor.of(TensorSpec((2, 4, 8, 8), "bfloat16"), needs_gradient=True)
    sizes = [infer_effect("aten.relu.default", [each], {}).made[0].bytes for each in (half, X)]
    assert sizes == [1024, 2048]


QUERIES = torch.full((2, 2, 64, 16), 0.5)
KEYS = torch.full((2, 2, 96, 16), 0.5)


@pytest.mark.parametrize(
    ("keys", "mask", "settings"),
    {
        "plain": (KEYS, None, ()),
        "in an order": (QUERIES, None, (0.0, True)),
        "added": (KEYS, torch.zeros(64, 96), ()),
        "hidden": (KEYS, torch.ones(64, 96, dtype=torch.bool), ()),
        "one key": (KEYS[:, :, :1], torch.zeros(64, 1), ()),
        "trained": (KEYS, torch.zeros(64, 96, requires_grad=True), ()),
        "dropped": (KEYS, None, (0.25,)),
        "narrow values": (KEYS[..., :8], None, ()),
        "float64": (KEYS.double(), None, ()),
    }.values(),
    ids=["plain", "in an order", "added", "hidden", "one key", "trained", "dropped", "narrow values", "float64"],
)
def test_attention_keeps_a_matrix_of_scores_only_where_its_kernel_does(keys, mask, settings):
    """Held against the live tensors of the real kernel."""
    key = KEYS if keys.shape[-1] < 16 else keys
    read = [x.clone().requires_grad_() for x in (QUERIES.to(keys.dtype), key, keys)]
    with LiveBytes() as live:
        result = F.scaled_dot_product_attention(*read, mask, *settings)
    arguments = [*map(LocalTensor.describe, read), mask if mask is None else LocalTensor.describe(mask), *settings]
    effect = infer_effect("aten.scaled_dot_product_attention.default", arguments, {})
    assert result.grad_fn is not None
    assert effect.made[0].bytes + effect.saves_bytes == live.now
    assert effect.flops == 2 * 2 * 2 * 64 * keys.shape[-2] * (16 + keys.shape[-1])
