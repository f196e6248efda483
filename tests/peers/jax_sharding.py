"""JAX on the jobs: `jit` with an image whose NamedSharding lies on a mesh of rows, or of rows and columns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.peers.forked import run_forked
from tests.peers.jobs import Arrays, Job, make_cotangent
from tests.peers.outcome import EXACT, Outcome, measure_errors
from tests.peers.torch_operators import GROUPS, compute_reference

MESHES = {2: ((2, 1), ("rows", None)), 4: ((2, 2), ("rows", "columns"))}
EPSILON = 1e-5  # of PyTorch's norms


def get_version() -> str:
    """Return the version of JAX."""
    import jax

    return jax.__version__


class JaxOperators:
    """The operators of the jobs in jax.numpy and jax.lax."""

    def convolve(self, x: Any, kernel: Any, stride: int = 1, padding: int = 0, dilation: int = 1) -> Any:
        from jax import lax

        return lax.conv_general_dilated(
            x, kernel, (stride, stride), [(padding, padding)] * 2, rhs_dilation=(dilation, dilation),
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )  # fmt: skip

    def convolve_transposed(self, x: Any, kernel: Any, stride: int, padding: int) -> Any:
        from jax import lax

        # The adjoint of a convolution: its kernel turned round, over an image with zeros between the pixels.
        turned = kernel[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
        width = kernel.shape[-1] - 1 - padding
        return lax.conv_general_dilated(
            x, turned, (1, 1), [(width, width)] * 2, lhs_dilation=(stride, stride),
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )  # fmt: skip

    def normalise(self, x: Any, scale: Any, shift: Any, kind: str) -> Any:
        n, c, h, w = x.shape
        groups = {"batch": x, "group": x.reshape(n, GROUPS, c // GROUPS, h, w), "instance": x}[kind]
        axes = {"batch": (0, 2, 3), "group": (2, 3, 4), "instance": (2, 3)}[kind]
        centred = groups - groups.mean(axes, keepdims=True)
        ready = centred / ((centred**2).mean(axes, keepdims=True) + EPSILON) ** 0.5
        return ready.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]

    def pool_max(self, x: Any, size: int, stride: int, padding: int) -> Any:
        from jax import lax

        border = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
        return lax.reduce_window(x, -np.inf, lax.max, (1, 1, size, size), (1, 1, stride, stride), border)

    def pool_globally(self, x: Any) -> Any:
        return x.mean((2, 3), keepdims=True)

    def double_bilinearly(self, x: Any) -> Any:
        from jax import image

        return image.resize(x, (*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3]), "bilinear")

    def rectify(self, x: Any) -> Any:
        import jax

        return jax.nn.relu(x)

    def concatenate(self, x: Any, y: Any) -> Any:
        from jax import numpy

        return numpy.concatenate([x, y], axis=1)


def run_jobs(names: list[str], ranks: int) -> Iterator[Outcome]:
    """Do jobs on as many devices of one process, one job after another."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks}"
    import jax

    jax.config.update("jax_enable_x64", True)

    def compute(job: Job, _rank: int, _folder: Path) -> Iterator[Arrays]:
        # The translation of the job is right, or nothing is said about JAX.
        whole = measure_errors(_compute(job, None), compute_reference(job))
        if max(whole.values()) > EXACT:
            raise RuntimeError(f"on one device too, the job differs from PyTorch's: {whole}")
        yield _compute(job, ranks)

    yield from run_forked(names, 1, compute)


def _compute(job: Job, ranks: int | None) -> Arrays:
    """Return the results with an image on as many devices; None: on one, without a mesh."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    inputs = job.make_inputs()
    image, weights = inputs["image"], {name: inputs[name] for name in job.shapes}
    if ranks:
        shape, axes = MESHES[ranks]
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("rows", "columns"))
        image = jax.device_put(image, NamedSharding(mesh, PartitionSpec(None, None, *axes)))
        weights = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))

    def compute_loss(image: Any, weights: Any) -> Any:
        output = job.forward(JaxOperators(), image, weights)
        return (output * make_cotangent(output.shape)).sum(), output

    (_, output), grads = jax.jit(jax.value_and_grad(compute_loss, argnums=(0, 1), has_aux=True))(image, weights)
    return {name: np.asarray(values) for name, values in {"output": output, "image": grads[0], **grads[1]}.items()}
