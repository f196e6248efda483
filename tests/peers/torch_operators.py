"""The jobs in PyTorch, and what one process computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.peers.jobs import Arrays, Job, make_cotangent

GROUPS = 2


class TorchOperators:
    """PyTorch's own functions."""

    def convolve(self, x: Tensor, kernel: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1) -> Tensor:
        return F.conv2d(x, kernel, stride=stride, padding=padding, dilation=dilation)

    def convolve_transposed(self, x: Tensor, kernel: Tensor, stride: int, padding: int) -> Tensor:
        return F.conv_transpose2d(x, kernel, stride=stride, padding=padding)

    def normalise(self, x: Tensor, scale: Tensor, shift: Tensor, kind: str) -> Tensor:
        if kind == "group":
            return F.group_norm(x, GROUPS, scale, shift)
        if kind == "instance":
            return F.instance_norm(x, weight=scale, bias=shift)
        return F.batch_norm(x, None, None, scale, shift, training=True)

    def pool_max(self, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
        return F.max_pool2d(x, size, stride, padding)

    def pool_globally(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 1)

    def double_bilinearly(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear")

    def rectify(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def concatenate(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], dim=1)


class JobNetwork(nn.Module):
    """A job as a module whose parameters are its weights."""

    def __init__(self, job: Job, inputs: Arrays) -> None:
        super().__init__()
        self.job, self.names = job, list(job.shapes)
        self.weights = nn.ParameterList(torch.from_numpy(inputs[name]) for name in self.names)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the job for an image batch (N, C, H, W)."""
        return self.job.forward(TorchOperators(), x, dict(zip(self.names, self.weights, strict=True)))


def compute_loss(output: Tensor, cotangent: Tensor) -> Tensor:
    """Return the loss whose gradient with respect to the output is the cotangent."""
    return (output * cotangent).sum()


def to_arrays(**values: Tensor) -> Arrays:
    """Return results as arrays: the `output`, the gradient of the `image`, and those of the weights by their names."""
    return {name: tensor.detach().numpy() for name, tensor in values.items()}


def compute_reference(job: Job) -> Arrays:
    """Return what one process computes with PyTorch."""
    inputs = job.make_inputs()
    network, image = JobNetwork(job, inputs), torch.from_numpy(inputs["image"]).requires_grad_()
    output = network(image)
    compute_loss(output, torch.from_numpy(make_cotangent(tuple(output.shape)))).backward()
    grads = {name: weight.grad for name, weight in zip(network.names, network.weights, strict=True)}
    return to_arrays(output=output, image=image.grad, **grads)
