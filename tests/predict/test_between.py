"""Numbers read between those that were sampled."""

from __future__ import annotations

import math

import pytest

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.predict.machine import Machine, Speed, interpolate

FIXED_S, BYTES_PER_S = 1e-4, 3e10
TWINS = (1 << 17, 132_000, 137_000)
SAMPLED = (*TWINS, 1 << 20, 1 << 23)


def compute_kernel_s(size: int) -> float:
    """A kernel that has much to do before it comes to its values."""
    return FIXED_S + size / BYTES_PER_S


@pytest.fixture
def machine():
    speeds = tuple(
        Speed((float(size),), size / compute_kernel_s(size), size / compute_kernel_s(size)) for size in SAMPLED
    )
    return Machine("sampled", "an example", {"norm": speeds})


@pytest.mark.parametrize("size", [1 << 18, 400_000, 1 << 19, 1 << 21])
def test_what_small_kernels_have_to_do_anyway_does_not_grow_with_their_size(machine, size):
    """However many samples of nearly one size there are beside it."""
    assert machine.estimate_seconds("norm", size, (size,)) == pytest.approx(compute_kernel_s(size), rel=0.3)
    alone_s = size / (TWINS[0] / compute_kernel_s(TWINS[0]))
    off_s = abs(machine.estimate_seconds("norm", size, (size,)) - compute_kernel_s(size))
    assert off_s < abs(alone_s - compute_kernel_s(size)) / 2


def test_beyond_the_largest_sample_nothing_is_faster(machine):
    assert machine.estimate_seconds("norm", 1 << 30, (1 << 30,)) == pytest.approx(
        (1 << 30) / (SAMPLED[-1] / compute_kernel_s(1 << 23))
    )


def test_what_was_sampled_is_read_again():
    sizes = [(16.0, 1024.0), (16.0, 4096.0), (64.0, 1024.0), (64.0, 4096.0)]
    numbers = [1.0, 3.0, 2.0, 5.0]
    for size, number in zip(sizes, numbers, strict=True):
        assert interpolate(sizes, size, numbers) == pytest.approx(number, rel=1e-4)


def test_along_an_axis_of_which_the_samples_say_nothing_numbers_stay():
    sizes, numbers = [(16.0, 4.0), (64.0, 4.0)], [1.0, 4.0]
    assert interpolate(sizes, (32.0, 4.0), numbers) == pytest.approx(2, rel=0.01)
    assert interpolate(sizes, (32.0, 8.0), numbers) == pytest.approx(2, rel=0.05)


def test_a_power_law_of_two_sizes_is_read_as_one():
    sizes = [(float(a), float(b)) for a in (8, 32, 128) for b in (16, 256, 4096)]
    law = [math.sqrt(a) * b**0.25 for a, b in sizes]
    assert interpolate(sizes, (64.0, 64.0), law) == pytest.approx(math.sqrt(64) * 64**0.25, rel=0.05)


def test_a_class_without_samples_is_reported_by_name():
    with pytest.raises(PlanError, match="no speed for norm"):
        Machine.from_json(Machine("none", "an example", {"norm": ()}).to_json()).estimate_seconds("norm", 8, (8,))


def test_samples_without_a_size_say_what_they_say():
    assert interpolate([(), ()], (2.0, 3.0), [4.0, 4.0]) == pytest.approx(4.0)
