"""Forecasts before a cluster is started: of one plan, and studies of many, with a status line while they run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict import sizes, studies
from mpi4dl_nb.engines.predict.forecast import Forecast
from mpi4dl_nb.engines.predict.forecast import forecast as forecast_step
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import resolve_machine
from mpi4dl_nb.engines.predict.sizes import Sizes
from mpi4dl_nb.engines.train.optimiser_trial import count_optimiser_states
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.recipe import sgd
from mpi4dl_nb.status_line import LATER_S, show_status, with_status


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

    >>> from mpi4dl_nb import Plan, forecast, resnet20_v1
    >>> foreseen = forecast(resnet20_v1(), Plan(split_size=2, num_spatial_parts=4), (2, 3, 64, 64), "Summit")
    >>> foreseen.ranks, len(foreseen.memory), 0 < foreseen.seconds < 1
    (5, 5, True)
    """
    plan, subject = plan.fit(image_shape[2:]), Sizes.of(model, loss)
    states = count_optimiser_states(optimiser, subject.model, subject.loss)
    with show_status(f"Tracing {subject.name} for {plan.summary} ...", LATER_S) as line:
        graph = subject.graph(plan, image_shape)
        line.update(f"Compiling and simulating {plan.summary} ...")
        return forecast_step(graph, plan, resolve_machine(machine), states)


capabilities = with_status("Forecasting plans", counts="seen")(studies.capabilities)
scaling = with_status("Forecasting the plan for each number of ranks")(studies.scaling)
largest_image = with_status("Looking for the largest image that fits")(sizes.largest_image)
