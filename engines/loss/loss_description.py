"""Description of the loss of a training step: that of the whole batch, or a mean over the micro-batches' losses."""

from __future__ import annotations

import warnings

from engines.layer.graph import ModelGraph
from engines.plan import OPTIONS, Plan

__all__ = ["WHOLE_BATCH", "describe_step_loss", "warn_of_mean"]

WHOLE_BATCH = "of the whole batch"


def describe_step_loss(graph: ModelGraph, plan: Plan) -> str:
    """Return a phrase that says what the loss of a step is, for the description of a training."""
    if plan.micro_batches == 1 or graph.whole is None or not graph.whole.unknown:
        return WHOLE_BATCH
    return f"mean of the losses of {plan.micro_batches} micro-batches, each computed by itself"


def warn_of_mean(graph: ModelGraph, plan: Plan, stacklevel: int) -> None:
    """Warn if the loss is computed for each micro-batch separately, and so may differ from that of the whole batch."""
    if describe_step_loss(graph, plan) == WHOLE_BATCH:
        return
    chosen = ", ".join(f"{name}={value!r}" for name, value in plan.chosen.items() if OPTIONS[name].divides == "step")
    warnings.warn(
        f"The loss of a step is the mean of the losses of its {plan.micro_batches} micro-batches ({chosen}), each "
        "computed by itself, and not the loss of the whole batch: as far as its trace tells it is no sum or mean over "
        f"the batch (see {graph.whole.unknown if graph.whole else ''}). verify() compares with one process that does "
        "the same. For the whole batch's loss use a plan with one micro-batch, or a loss that is such a sum or mean.",
        stacklevel=stacklevel + 1,
    )
