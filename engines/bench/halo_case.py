"""The halo exchange that a halo benchmark runs: the one that the compiler makes for one convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engines.comm.device import choose_device, choose_memory_format
from engines.comm.world import World
from engines.errors import PlanError
from engines.plan import Plan
from engines.program.compile import Compiler
from engines.program.exchange_runner import ExchangeRunner, make_exchange_runners
from engines.program.instructions import Compute, Exchange
from engines.program.message_buffers import SendQueue
from engines.program.segment import Segment
from engines.spatial.layout import check_fits
from engines.train.training import prepare

__all__ = ["HaloCase", "HaloSetup", "make_halo_setup"]


@dataclass(frozen=True, kw_only=True)
class HaloCase:
    """An image of (N, C, H, W) on the plan's tiles, read by a convolution with a kernel of 2 * `halo_px` + 1."""

    plan: Plan
    image_shape: tuple[int, int, int, int]
    out_channels: int
    halo_px: int
    device: str = "auto"

    def check(self, ranks: int) -> None:
        """Raise PlanError if there is nothing to exchange, or if ranks and tiles differ in number."""
        check_fits(self.plan, ranks)
        if ranks == 1:
            raise PlanError("One tile has nobody to borrow from. Use num_spatial_parts=2 or more.")
        height_px, width_px = self.image_shape[2:]
        if self.halo_px > min(height_px, width_px):
            raise PlanError(
                f"A halo of {self.halo_px} pixels is wider than the image of {height_px}x{width_px}. "
                f"Use --halo-len {min(height_px, width_px)} or less, or a larger --image-size."
            )


@dataclass(frozen=True)
class HaloSetup:
    """One rank's part: the exchange, and the convolution (with its weights) that reads the window."""

    exchange: Exchange
    convolution: Segment
    carrier: ExchangeRunner
    device: torch.device


def make_halo_setup(case: HaloCase, world: World) -> HaloSetup:
    """Return the exchange and the convolution of this rank, as compiled. Raises PlanError."""
    case.check(world.size)
    kernel_px = 2 * case.halo_px + 1
    model = nn.Conv2d(case.image_shape[1], case.out_channels, kernel_px, padding=case.halo_px)
    recipe = prepare(model, case.plan, case.image_shape)
    # The window's gradient is needed for the way back, although no weight lies before the image: `input_gradient`.
    #
    #     image tile --exchange--> window --conv2d--> output
    #                <--adjoint---        <--backward--
    forward = Compiler(recipe.graph, case.plan, input_gradient=True).compile_rank(world.rank).forward
    (exchange,) = (item for item in forward if isinstance(item, Exchange))
    (op,) = (op for item in forward if isinstance(item, Compute) for op in item.ops if "conv2d" in op.kernel)
    device = choose_device(case.device, world.rank)
    dtype = getattr(torch, case.plan.precision)
    weights = {
        name: tensor.to(device, dtype, memory_format=choose_memory_format(tensor.dim())).requires_grad_()
        for name, tensor in recipe.state.items()
    }
    convolution = Segment(Compute("convolution", (op,), (exchange.target,), (op.out,), True), weights)
    return HaloSetup(
        exchange, convolution, make_exchange_runners([exchange], world, device, SendQueue())[exchange.name], device
    )
