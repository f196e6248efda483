"""Forecast of a plan's cost, before a cluster is started."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from engines.graph.trace_cache import Loss
from engines.plan import Plan
from engines.predict import forecast as predicted
from engines.predict.forecast import Forecast
from engines.predict.machine import Machine
from engines.predict.machines import resolve_machine
from engines.predict.sizes import Sizes
from engines.train.training import Optimiser, sgd
from mpi4dl_nb.plan_tuner import count_optimiser_states

__all__ = ["forecast"]


def forecast(
    model: nn.Module | Sizes,
    plan: Plan,
    image_shape: Sequence[int],
    machine: Machine | str,
    loss: Loss | None = None,
    optimiser: Optimiser = sgd,
) -> Forecast:
    """Predict a training step under a plan on a machine, which may be elsewhere: time, timeline, memory of each rank.

    `image_shape` is (N, C, H, W) of one batch. `machine` is the result of `cluster.calibrate()`, or the name of a known
    machine, such as "Summit". Raises PlanError, TraceError or ImageError.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, forecast
    >>> foreseen = forecast(resnet20_v1(), Plan(split_size=2, num_spatial_parts=4), (2, 3, 64, 64), "Summit")
    >>> foreseen.ranks, len(foreseen.memory), 0 < foreseen.seconds < 1
    (5, 5, True)
    """
    sizes = Sizes.of(model, loss)
    states = count_optimiser_states(optimiser, sizes.model, sizes.loss)
    return predicted.forecast(sizes.graph(plan, image_shape), plan, resolve_machine(machine), states)
