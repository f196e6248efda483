"""The sizes of images that a model takes, next to one that it refuses: for the remedy in an error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.outside_state import restore_outside_state
from mpi4dl_nb.engines.graph.traceability import make_fake_copy, make_fake_tensor
from mpi4dl_nb.engines.graph.watch_forward import ONE_AT_A_TIME, silence_exporter

_FACTORS = 3, 5, 7
"""Beside powers of two, of which layers that halve their images need the sides: the sides of windows."""
_MULTIPLES = 64, 128 * math.prod(_FACTORS)
_SEARCH_S = 3.0  # of computing, so that other programs do not change the answer
_AXES = "planes", "rows", "columns"

Size = tuple[int, ...]


def suggest_sizes(model: nn.Module, images: TensorSpec) -> str:
    """Return a sentence with the next smaller and larger size at which a model runs, if it does not run at its own.

    A run of a large model takes seconds: if the model cannot run at the most likely sizes, it is run just twice.
    """
    if len(images.shape) < 3 or not isinstance(model, nn.Module):
        return ""
    if len(images.shape) == 3 and can_run(model, replace(images, shape=(1, *images.shape))):
        return f" It does run on {(1, *images.shape)}: one image is a batch of one."
    outer, whole, end_s = images.shape[:2], images.shape[2:], time.thread_time() + _SEARCH_S

    def runs(size: Size) -> bool:
        return can_run(model, replace(images, shape=(*outer, *size)))

    multiple = next((step for step in _MULTIPLES if runs(_find_probe(whole, [step] * len(whole)))), None)
    if multiple is None or runs(whole):
        return ""
    steps = _reduce_steps(whole, multiple, lambda size: time.thread_time() < end_s and runs(size))
    pairs = list(zip(whole, steps, strict=True))
    nearest = tuple(side - side % step for side, step in pairs), tuple(-(-side // step) * step for side, step in pairs)
    sizes = [" x ".join(map(str, size)) for size in nearest if all(size) and runs(size)]
    if not sizes:
        return ""
    remedy = "crop or pad the images to one of these" if len(sizes) > 1 else "give images of that size"
    picture = ", a picture with crop_picture" * (len(whole) == 2)
    return f" It does run on {' px and on '.join(sizes)} px ({_describe_steps(steps)}): {remedy}{picture}."


def _find_probe(whole: Size, steps: Sequence[int]) -> Size:
    """Return a size near `whole` whose sides are multiples of `steps`, and of no more than that.

    >>> _find_probe((43, 7), [4, 1])  # 44 would be one of 11, 48 one of 16; a side of step 1 stays
    (44, 7)
    >>> _find_probe((47, 7), [4, 1])
    (52, 7)
    """
    sides = []
    for side, step in zip(whole, steps, strict=True):
        count = -(-side // step)
        while step > 1 and math.gcd(count, math.prod((2, *_FACTORS))) > 1:
            count += 1
        sides.append(side if step == 1 else count * step)
    return tuple(sides)


def _reduce_steps(whole: Size, step: int, runs: Callable[[Size], bool]) -> list[int]:
    """Return the least step of each side, given one of which all sides may be multiples; 1 if a side may stay."""
    #     64 64      all sides: 32 32 runs, 16 16 runs, 8 8 does not
    #     16 16      the first: 43 16 does not run, nor does 8 16
    #     16 16      the second: 16 50 runs
    #     16  1
    steps = [_reduce_step(step, lambda less: runs(_find_probe(whole, [less] * len(whole))))] * len(whole)
    for axis in range(len(whole) if len(whole) > 1 else 0):

        def runs_at(less: int, axis: int = axis) -> bool:
            return runs(_find_probe(whole, [*steps[:axis], less, *steps[axis + 1 :]]))

        steps[axis] = 1 if runs_at(1) else _reduce_step(steps[axis], runs_at)
    return steps


def _reduce_step(step: int, runs_at: Callable[[int], bool]) -> int:
    for factor in (*_FACTORS, 2):
        while step % factor == 0 and step > factor and runs_at(step // factor):
            step //= factor
    return step


def _describe_steps(steps: Sequence[int]) -> str:
    """Return which sides must be multiples of what.

    >>> _describe_steps([8, 8]), _describe_steps([4, 1, 1]), _describe_steps([1, 16, 8])
    ('multiples of 8', 'planes in multiples of 4', 'rows in multiples of 16, columns of 8')
    """
    if len(set(steps)) == 1:
        return f"multiples of {steps[0]}"
    named = [(name, step) for name, step in zip(_AXES[-len(steps) :], steps, strict=True) if step > 1]
    (first, multiple), *others = named
    return ", ".join([f"{first} in multiples of {multiple}", *(f"{name} of {step}" for name, step in others)])


def can_run(model: nn.Module, images: TensorSpec) -> bool:
    """Return whether a model runs on such images, without running it on real ones."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with ONE_AT_A_TIME, restore_outside_state(model), silence_exporter(), mode, torch.no_grad():
            make_fake_copy(model, mode, images.dtype)(make_fake_tensor(mode, images))
    except Exception:  # a model may raise anything
        return False
    return True
