"""Patches of images on tiles, and images that are added up from patches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mpi4dl_nb.engines.program.exchange import Exchange
from tests.compiler.drawn import Calls, Geometry, check, generate_geometries, seeds
from tests.compiler.test_whole import make_compiler
from tests.exact import make_whole_numbers
from tests.sampling import set_trials


def take(x: Tensor, case: Geometry) -> Tensor:
    return F.unfold(x, case.kernel, case.dilation, case.padding, case.stride)


def make_images(case: Geometry, seed: int) -> Tensor:
    return make_whole_numbers(2, 2, *case.image_px, seed=seed)


@pytest.mark.parametrize("fused", [0, 2])
@set_trials(12)
@given(case=generate_geometries(), seed=seeds)
def test_patches(fused: int, case: Geometry, seed: int):
    check(lambda x: take(x, case) * 2, make_images(case, seed), case.grid, fused)


@pytest.mark.parametrize("fused", [0, 2])
@set_trials(12)
@given(case=generate_geometries(), seed=seeds)
def test_images_are_added_up_from_patches(fused: int, case: Geometry, seed: int):
    def mix(x: Tensor) -> Tensor:
        return F.fold(take(x, case) * 3, case.image_px, case.kernel, case.dilation, case.padding, case.stride) + x

    check(mix, make_images(case, seed), case.grid, fused)


@set_trials(12)
@given(case=generate_geometries(dilated=False), seed=seeds, last=st.booleans())
def test_windows_along_an_axis(case: Geometry, seed: int, last: bool):
    """In channels first and last; a pad in front makes room for all windows."""
    rows, cols = ((case.kernel[axis], case.stride[axis]) for axis in (0, 1))

    def take_windows(x: Tensor) -> Tensor:
        x = F.pad(x, (case.padding[1],) * 2 + (case.padding[0],) * 2)
        x = x.permute(0, 2, 3, 1) if last else x
        first = 1 if last else 2
        return (2 * x.unfold(first, *rows).unfold(first + 1, *cols)).sum((-2, -1))

    check(take_windows, make_images(case, seed), case.grid)


def test_patches_of_a_large_image_are_in_tiles():
    """As in MobileViT v2 (Mehta and Rastegari, 2022, arXiv:2206.02680)."""

    def attend_in_patches(x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).unflatten(1, (x.shape[1], 4))
        mixed = patches * patches.softmax(-1).sum(-1, keepdim=True)
        return F.fold(mixed.flatten(1, 2), x.shape[2:], 2, stride=2)

    program = make_compiler(Calls(attend_in_patches), (1, 4, 512, 768)).compile_rank(0)
    exchanges = [item for item in program.forward if isinstance(item, Exchange)]
    assert sum(item.compute_bytes(item.receives) for item in exchanges) < 2048  # the maxima of the softmax
