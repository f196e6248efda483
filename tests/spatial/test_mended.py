"""Operators that are called in another way than PyTorch would, lest the process ends, compute the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engines.spatial.kernels import kernel


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
            _gradients(convolve, x, weight)
            for convolve in (
                lambda x, w: kernel("aten.conv2d.default")(x, w, None, list(stride), [0, 0], [1, 1], groups),
                lambda x, w: functional.conv2d(x.contiguous(), w.contiguous(), None, stride, groups=groups),
            )
        )
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


def _gradients(convolve, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = (tensor.detach().requires_grad_() for tensor in (x, weight))
    made = convolve(x, weight)
    return made.detach(), *torch.autograd.grad(made.square().sum(), (x, weight))
