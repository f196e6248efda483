"""Small jobs that each system does: layers alone, a residual block and a U-Net, written for any library's operators.

The cotangent is the gradient of the output: with it, each output has a share of its own in all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float64]]
Weights = Mapping[str, Any]


class Operators(Protocol):
    """Operators of one library on (N, C, H, W).

    Kernels are (out, in, height, width), and (in, out, height, width) of a transposed convolution.
    """

    def convolve(self, x: Any, kernel: Any, stride: int = 1, padding: int = 0, dilation: int = 1) -> Any: ...

    def convolve_transposed(self, x: Any, kernel: Any, stride: int, padding: int) -> Any: ...

    def normalise(self, x: Any, scale: Any, shift: Any, kind: str) -> Any:
        """Return x minus its mean, divided by its deviation, of a `batch`, a `group` (of two) or an `instance`."""

    def pool_max(self, x: Any, size: int, stride: int, padding: int) -> Any: ...

    def pool_globally(self, x: Any) -> Any: ...

    def double_bilinearly(self, x: Any) -> Any: ...

    def rectify(self, x: Any) -> Any: ...

    def concatenate(self, x: Any, y: Any) -> Any: ...


@dataclass(frozen=True)
class Job:
    """A network of a few layers: `forward(operators, image, weights)`, and the shapes of its weights."""

    name: str
    forward: Callable[[Any, Any, Weights], Any]
    shapes: Mapping[str, tuple[int, ...]]
    image_shape: tuple[int, int, int, int] = (2, 4, 16, 16)

    def make_inputs(self) -> Arrays:
        """Return random float64 values of the image and of the weights, the same in each process."""
        random = np.random.default_rng(sum(map(ord, self.name)))
        shapes = {"image": self.image_shape, **self.shapes}
        return {name: random.standard_normal(shape) for name, shape in shapes.items()}


def make_cotangent(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the gradient of an output of this shape."""
    return np.random.default_rng(1).standard_normal(shape)


def _make_convolution(name: str, size: int, image_shape: tuple[int, int, int, int] = (2, 4, 16, 16), **how: int) -> Job:
    kernel = {"kernel": (4, image_shape[1], size, size)}
    return Job(name, lambda operators, x, w: operators.convolve(x, w["kernel"], **how), kernel, image_shape)


def _make_norm(kind: str) -> Job:
    def forward(operators: Operators, x: Any, w: Weights) -> Any:
        return operators.normalise(x, w["scale"], w["shift"], kind)

    return Job(f"{kind} norm", forward, {"scale": (4,), "shift": (4,)})


def _run_residual_block(operators: Operators, x: Any, w: Weights) -> Any:
    y = operators.convolve(x, w["first"], padding=1)
    y = operators.rectify(operators.normalise(y, w["scale"], w["shift"], "batch"))
    y = operators.convolve(y, w["second"], padding=1)
    y = operators.normalise(y, w["scale 2"], w["shift 2"], "batch")
    return operators.rectify(y + x)


def _run_unet(operators: Operators, x: Any, w: Weights) -> Any:
    fine = operators.rectify(operators.convolve(x, w["fine"], padding=1))
    coarse = operators.pool_max(fine, 2, 2, 0)
    coarse = operators.rectify(operators.convolve(coarse, w["coarse"], padding=1))
    upper = operators.convolve_transposed(coarse, w["up"], stride=2, padding=0)
    joined = operators.concatenate(fine, upper)
    return operators.convolve(joined, w["head"], padding=1)


def _run_two_convolutions(operators: Operators, x: Any, w: Weights) -> Any:
    y = operators.rectify(operators.convolve(x, w["first"], stride=2, padding=1))
    return operators.convolve(y, w["second"], padding=1)


_SCALES = {"scale": (4,), "shift": (4,), "scale 2": (4,), "shift 2": (4,)}
JOBS = (
    _make_convolution("convolution 3 x 3", 3, padding=1),
    _make_convolution("convolution 3 x 3, stride 2", 3, padding=1, stride=2),
    _make_convolution("convolution 7 x 7, stride 2", 7, padding=3, stride=2),
    _make_convolution("convolution 3 x 3, dilation 2", 3, padding=2, dilation=2),
    _make_convolution("convolution 4 x 4, stride 2", 4, padding=1, stride=2),
    Job(
        "transposed convolution 4 x 4, stride 2",
        lambda operators, x, w: operators.convolve_transposed(x, w["kernel"], stride=2, padding=1),
        {"kernel": (4, 3, 4, 4)},
    ),
    _make_norm("batch"),
    _make_norm("group"),
    _make_norm("instance"),
    Job("max pool 3 x 3, stride 2", lambda operators, x, w: operators.pool_max(x, 3, 2, 1), {}),
    Job("bilinear, 2 times as large", lambda operators, x, w: operators.double_bilinearly(x), {}),
    Job("global average pool", lambda operators, x, w: operators.pool_globally(x), {}),
    Job("residual block", _run_residual_block, {"first": (4, 4, 3, 3), "second": (4, 4, 3, 3), **_SCALES}),
    Job(
        "U-Net",
        _run_unet,
        {"fine": (4, 4, 3, 3), "coarse": (8, 4, 3, 3), "up": (8, 4, 2, 2), "head": (2, 8, 3, 3)},
    ),
    _make_convolution("convolution 3 x 3, 17 x 19 px", 3, (2, 4, 17, 19), padding=1),
    Job(
        "two convolutions, 66 x 96 px",
        _run_two_convolutions,
        {"first": (8, 3, 3, 3), "second": (8, 8, 3, 3)},
        (2, 3, 66, 96),
    ),
)
"""What networks for images are made of, and two small networks."""


def find_job(name: str) -> Job:
    """Return the job of this name. Raises KeyError."""
    return {job.name: job for job in JOBS}[name]
