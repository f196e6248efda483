"""Messages and bytes sent in a training step under several plans, counted from the ranks' programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from torch import nn

from engines.errors import PlanError
from engines.plan import Plan
from engines.program.compile import compile_plan
from engines.program.traffic import Traffic, count_traffic
from engines.training import prepare
from mpi4dl_nb.draw.bars import draw_legend
from mpi4dl_nb.draw.figure import INK, Drawing, format_bytes
from mpi4dl_nb.draw.timeline import LOOKS

__all__ = ["show_traffic"]

KINDS = ("halo", "stage", "all-reduce")
TrafficByKind = Mapping[str, Traffic]


def show_traffic(model: nn.Module, plans: Mapping[str, Plan], image_shape: Sequence[int]) -> Drawing:
    """Draw the messages and bytes of one training step (forward and backward) of the busiest rank under each plan.

    `plans` are keyed by their names in the figure; `image_shape` is (N, C, H, W).
    Raises PlanError, TraceError or ImageError, as `Training` does.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, show_traffic
    >>> plans = {"before each layer": Plan(split_size=1), "fused": Plan(split_size=1, halo_d2=True)}
    >>> figure = show_traffic(resnet20_v1(), plans, (2, 3, 64, 64))
    """
    if not plans:
        raise PlanError("There is no plan to show: give at least one, such as {'D1': Plan()}.")
    # Counted from the compiled programs, so that nothing runs and no rank is needed.
    sent: dict[str, TrafficByKind] = {}
    for name, plan in plans.items():
        traffic = map(count_traffic, compile_plan(prepare(model, plan, image_shape).graph, plan))
        sent[name] = max(traffic, key=lambda parts: sum(part.bytes for part in parts.values()))  # of the busiest rank
    figure = Drawing(figsize=(11, 1.9 + 0.5 * len(sent)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_bars(left, sent, lambda part: part.messages, "{:.0f}".format)
    _draw_bars(right, sent, lambda part: part.bytes / 2**20, lambda size: format_bytes(round(size * 2**20)))
    left.set(xlabel="messages sent", yticks=range(len(sent)), yticklabels=sent, ylim=(len(sent) - 0.4, -0.6))
    right.set(xlabel="megabytes sent")
    title = "One training step, forward and back: what the busiest rank sends"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    draw_legend(figure, [LOOKS[kind] for kind in KINDS])
    told = []
    for name, parts in sent.items():
        texts = [
            f"{part.messages} messages of {format_bytes(part.bytes)} for {LOOKS[kind].name}"
            for kind in KINDS
            if (part := parts.get(kind))
        ]
        told.append(f"{name}: {', '.join(texts)}")
    figure.alt = f"{title}. {'; '.join(told)}."
    return figure


def _draw_bars(
    axes: Axes, sent: Mapping[str, TrafficByKind], size: Callable[[Traffic], float], said: Callable[[float], str]
) -> None:
    """Draw one bar per plan, stacked by kind, with the sum at its end."""
    for row, parts in enumerate(sent.values()):
        end = 0.0
        for kind in KINDS:
            length, look = size(parts.get(kind, Traffic(0, 0))), LOOKS[kind]
            axes.barh(row, length, 0.6, end, color=look.colour, hatch=look.hatch, edgecolor=INK, linewidth=0.5)
            end += length
        axes.text(end, row, f" {said(end)}", va="center", fontsize=9)
    axes.margins(x=0.16)  # room for the number at the end of the longest bar
    axes.set_xlim(left=0)
