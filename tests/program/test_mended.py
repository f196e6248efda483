"""Operators that are called in another way than PyTorch would, lest the process ends or waits, compute the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.profiler import profile

from mpi4dl_nb.engines.program.kernels import get_kernel


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (4, 1), (6, 3), (12, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pointwise_convolution(stride: tuple[int, int], channels: int, groups: int, dtype: torch.dtype):
    """Again and again: memory that is written beyond its end is seen later."""
    torch.manual_seed(0)
    near = 1e-4 if dtype == torch.float32 else 1e-12
    weight = torch.randn(12, channels // groups, 1, 1, dtype=dtype).to(memory_format=torch.channels_last)
    for _ in range(60):
        x = torch.randn(2, channels, 8, 31, dtype=dtype).to(memory_format=torch.channels_last)
        found, wanted = (
            _compute_gradients(convolve, x, weight)
            for convolve in (
                lambda x, w: get_kernel("aten.conv2d.default")(x, w, None, list(stride), [0, 0], [1, 1], groups),
                lambda x, w: functional.conv2d(x.contiguous(), w.contiguous(), None, stride, groups=groups),
            )
        )
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


def _compute_gradients(convolve, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    result = convolve(*inputs)
    return result.detach(), *torch.autograd.grad(result.square().sum(), inputs)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_convolution_of_volumes(data: st.DataObject):
    """Whole numbers, so that sums in another order are the same: of voxels' channels, or of images along the depth."""

    def per_axis(*choices: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.sampled_from(choices)] * 3)

    kernel, stride, dilation = data.draw(per_axis(1, 2, 3)), data.draw(per_axis(1, 1, 2, 3)), data.draw(per_axis(1, 2))
    padding, channels = data.draw(per_axis(0, 0, 1)), data.draw(st.sampled_from((3, 8)))
    layout = data.draw(st.sampled_from((torch.contiguous_format, torch.channels_last_3d)))
    shape = data.draw(st.sampled_from((1, 1, 2))), channels, *data.draw(per_axis(18, 21))
    x, weight, bias = (torch.randint(-2, 3, size).float() for size in (shape, (4, channels, *kernel), (4,)))
    x = x.contiguous(memory_format=layout)
    found, wanted = (
        _compute_gradients(lambda *inputs: convolve(*inputs, stride, padding, dilation), x, weight, bias)  # noqa: B023
        for convolve in (get_kernel("aten.conv3d.default"), functional.conv3d)
    )
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def test_a_convolution_of_a_large_volume_copies_no_windows():
    """PyTorch would: its rule for oneDNN leaves out the last axis."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    x, weight = torch.randn(1, 3, 48, 48, 48), torch.randn(8, 3, 3, 3, 3)
    kernels = get_kernel("aten.conv3d.default"), functional.conv3d
    with profile(acc_events=True) as seen_ours:
        found = _compute_gradients(kernels[0], x, weight)
    with profile(acc_events=True) as seen_plain:
        wanted = _compute_gradients(kernels[1], x, weight)
    assert not any("slow" in event.key for event in seen_ours.key_averages())
    assert any("slow" in event.key for event in seen_plain.key_averages())  # else the detour is needed no more
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())


@pytest.mark.parametrize(("side_px", "library"), [(48, "mkldnn"), (8, "slow")])
def test_one_thread_leaves_a_large_pointwise_convolution_to_onednn(side_px: int, library: str):
    """As several threads do: BLAS took two to three times as long. Small ones are no faster there."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, weight = torch.randn(1, 16, side_px, side_px), torch.randn(8, 16, 1, 1)
        with profile(acc_events=True) as seen:
            found = _compute_gradients(get_kernel("aten.conv2d.default"), x, weight)
        wanted = _compute_gradients(functional.conv2d, x.double(), weight.double())
    finally:
        torch.set_num_threads(before)
    assert any(library in event.key for event in seen.key_averages())
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
