"""Charts that compare: what plans send, how modes of replicas learn, and how benchmark results grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.typing import LineStyleType
from torch import Tensor, nn

from mpi4dl_nb.draw.figure import BLUE, INK, ORANGE, BarStyle, Drawing, Style, draw_legend, draw_stacks
from mpi4dl_nb.draw.timeline import LOOKS
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.trace_cache import Loss, TraceCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes, format_count, format_number, format_percent, format_seconds
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.program import Traffic, count_traffic
from mpi4dl_nb.engines.train.asynchrony import ReplicaStudy

if TYPE_CHECKING:
    from mpi4dl_nb.benchmarks.cases import BenchmarkStudy
    from mpi4dl_nb.benchmarks.results import BenchmarkRow

# Messages and bytes sent in a training step under several plans, counted from the ranks' programs.


KINDS = ("halo", "stage", "all-reduce", "ring")
TrafficByKind = Mapping[str, Traffic]


def show_traffic(
    model: nn.Module,
    plans: Mapping[str, Plan],
    image_shape: Sequence[int],
    loss: Loss | None = None,
    labels: TensorSpec | Tensor | None = None,
) -> Drawing:
    """Draw the messages and bytes of one training step (forward and backward) of the busiest rank under each plan.

    `plans` are keyed by their names in the figure; `image_shape` is (N, C, H, W), and `loss` and `labels` are as for
    `Training`.
    Raises PlanError, TraceError or ImageError, as `Training` does.

    >>> from mpi4dl_nb import Plan, resnet20_v1, show_traffic
    >>> plans = {"before each layer": Plan(split_size=1), "fused": Plan(split_size=1, halo_d2=True)}
    >>> figure = show_traffic(resnet20_v1(), plans, (2, 3, 64, 64))
    """
    if not plans:
        raise PlanError("There is no plan to show: give at least one, such as {'D1': Plan()}.")
    # Counted from the compiled programs, so that nothing runs and no rank is needed.
    sent: dict[str, TrafficByKind] = {}
    traces = TraceCache(model, image_shape, loss or nn.CrossEntropyLoss(), labels)
    for name, plan in plans.items():
        traffic = map(count_traffic, compile_plan(traces.get_graph(plan), plan))
        sent[name] = max(traffic, key=lambda parts: sum(part.bytes for part in parts.values()))  # of the busiest rank
    figure = Drawing(figsize=(11, 1.9 + 0.5 * len(sent)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    looks = {kind: LOOKS[kind] for kind in KINDS}
    messages = [{kind: part.messages for kind, part in parts.items()} for parts in sent.values()]
    sizes = [{kind: part.bytes / 2**20 for kind, part in parts.items()} for parts in sent.values()]
    draw_stacks(left, looks, messages, [str(sum(row.values())) for row in messages])
    draw_stacks(right, looks, sizes, [format_bytes(round(sum(row.values()) * 2**20)) for row in sizes])
    left.set(xlabel="messages sent", yticks=range(len(sent)), yticklabels=sent)
    right.set(xlabel="megabytes sent")
    for axes in (left, right):
        axes.margins(x=0.16)  # room for the number at the end of the longest bar
        axes.set_xlim(left=0)
    title = "One training step, forward and back: what the busiest rank sends"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    draw_legend(figure, list(looks.values()))
    descriptions = []
    for name, parts in sent.items():
        texts = [
            f"{part.messages} messages of {format_bytes(part.bytes)} for {LOOKS[kind].name}"
            for kind in KINDS
            if (part := parts.get(kind))
        ]
        descriptions.append(f"{name}: {', '.join(texts)}")
    figure.alt = f"{title}. {'; '.join(descriptions)}."
    return figure


# Synchronous and asynchronous replicas: loss by time and by images, and the staleness of the updates.


WIDE = 10  # the loss axis is logarithmic if the largest loss exceeds the smallest by this factor


@dataclass(frozen=True)
class ModeStyle:
    """The line and bar style of one mode, and the definition of its staleness."""

    colour: str
    line: LineStyleType
    hatch: str
    late: str

    @property
    def patch(self) -> Style:
        """The keywords of a bar: filled, or hatched on white."""
        face = "white" if self.hatch else self.colour
        return {"facecolor": face, "edgecolor": self.colour, "hatch": self.hatch}


MODES = {
    "synchronous": ModeStyle(INK, "-", "", "always 0"),
    "server": ModeStyle(BLUE, "--", "//", "others' updates since the weights were read"),
    "peers": ModeStyle(ORANGE, ":", "...", "own steps since the weights were offered"),
}


def show_asynchrony(studies: ReplicaStudy | Sequence[ReplicaStudy]) -> Drawing:
    """Plot running means of the loss against seconds and against images seen, and a histogram of the staleness.

    `studies` are of different modes on the same task. Raises PlanError if there is none, or if two have the same mode.

    >>> from mpi4dl_nb.engines.bench.asynchronous import bench_asynchronous, expand_modes
    >>> from mpi4dl_nb import Cluster, show_asynchrony
    >>> asked = expand_modes("server", replicas=2, steps=4, slow={})
    >>> with Cluster(3, backend="loopback") as cluster:
    ...     studies = cluster.call(lambda host: bench_asynchronous(host.world, asked))[0]
    >>> figure = show_asynchrony(studies)
    """
    shown = [studies] if isinstance(studies, ReplicaStudy) else list(studies)
    modes = [study.mode for study in shown]
    if not shown or len(set(modes)) < len(modes):
        raise PlanError(f"The modes of these {len(modes)} studies are {modes}. Give one study, or one of each mode.")
    figure = Drawing(figsize=(11, 4.4), layout="constrained")
    by_time, by_images, stale = figure.subplots(1, 3)
    by_images.sharey(by_time)
    _draw_losses(by_time, shown, lambda study: [turn.end_s for turn in study.turns])
    _draw_losses(by_images, shown, lambda study: [study.images_per_batch * (n + 1) for n in range(len(study.turns))])
    by_time.set(xlabel="seconds", ylabel="loss, running mean")
    by_images.set(xlabel="images seen, of all replicas")
    by_images.tick_params(labelleft=False)
    width = 0.8 / len(shown)
    for index, study in enumerate(shown):  # each staleness has a group of bars, one bar per mode in which it occurred
        look, histogram = MODES[study.mode], study.histogram
        places = [late + (index - (len(shown) - 1) / 2) * width for late in histogram]
        stale.bar(places, list(histogram.values()), width, **look.patch)
    stale.set(xlabel="staleness", ylabel="how often")
    stale.xaxis.set_major_locator(MaxNLocator(integer=True))
    stale.yaxis.set_major_locator(MaxNLocator(integer=True))
    chosen = shown[0].asynchrony
    copies = f"{format_count(chosen.replicas, 'replica')}, {shown[0].images_per_batch} images in each batch"
    slow = [
        f"replica {replica} sleeps {seconds:g} s in each step" for replica, seconds in chosen.slow.items() if seconds
    ]
    title = "; ".join([copies, *slow])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    looks = [MODES[study.mode] for study in shown]
    handles: list[Any] = [  # pairs, which the types of Matplotlib lack
        (Line2D([], [], linestyle=look.line, color=look.colour, linewidth=2), Patch(**look.patch)) for look in looks
    ]
    names = [f"{_format_name(study)} (staleness: {MODES[study.mode].late})" for study in shown]
    style: Style = {"loc": "outside lower left", "ncols": 1, "frameon": False, "fontsize": 9, "handlelength": 5}
    figure.legend(handles, names, handler_map={tuple: HandlerTuple(ndivide=None)}, **style)
    figure.alt = f"{title}."
    for study in shown:
        late = ", ".join(f"{staleness} ({count})" for staleness, count in study.histogram.items())
        figure.alt += (
            f" {_format_name(study).capitalize()}: loss {study.turns[0].loss:.3g} at first, {study.final_loss:.3g} at "
            f"last, after {format_seconds(study.seconds)} and {len(study.turns) * study.images_per_batch} images "
            f"({format_number(study.images_per_s)} images/s); staleness (how often): {late or 'none'}."
        )
    return figure


def _draw_losses(
    axes: Axes, studies: Sequence[ReplicaStudy], places: Callable[[ReplicaStudy], Sequence[float]]
) -> None:
    drawn = []
    for study in studies:
        look, losses = MODES[study.mode], compute_running_mean([turn.loss for turn in study.turns])
        axes.plot(places(study), losses, look.line, color=look.colour, linewidth=2, label=study.mode)
        axes.plot(places(study)[-1:], losses[-1:], "o", color=look.colour, markersize=6)
        drawn += losses
    # A loss that falls by orders of magnitude is a curve along the axis on a linear scale. Ticks at 1, 2 and 5 are then
    # plain numbers, as the range is seldom more than two powers of 10.
    if max(drawn) > WIDE * min(drawn) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd", linewidth=0.6)


def compute_running_mean(losses: Sequence[float]) -> list[float]:
    """Return the trailing mean of each loss over a window of a tenth of all losses, at least one.

    >>> compute_running_mean([4.0, 2.0, 0.0] + [0.0] * 17)[:4]
    [4.0, 3.0, 1.0, 0.0]
    """
    width = max(1, len(losses) // 10)
    return [fmean(losses[max(0, end - width) : end]) for end in range(1, len(losses) + 1)]


def _format_name(study: ReplicaStudy) -> str:
    """Return the name of the mode and its options."""
    chosen = study.asynchrony
    bound = f", at most {chosen.max_staleness} stale" if chosen.max_staleness is not None else ""
    return f"{study.mode}{bound}{', aware of staleness' * chosen.staleness_aware}"


# Benchmark results against the quantity that grows: ratios, and the phases of the ranks' time.


PHASES = {
    "forward": BarStyle("forward", "#56b4e9", ""),
    "backward": BarStyle("backward", "#0072b2", "//"),
    "messages": BarStyle("messages", "#009e73", "xxx"),
    "sums": BarStyle("sums", "#f0e442", "|||"),
    "update": BarStyle("update", "#cc79a7", "--"),
    "waiting": BarStyle("waiting", "#ffffff", ".."),
}


def show_growth(study: BenchmarkStudy, rows: Sequence[BenchmarkRow]) -> Drawing:
    """Plot the ratio of a study, or its `drawn` columns, against what grows, and the phases of all ranks' time.

    Raises PlanError if nothing grows in the study or nothing was measured.
    """
    if not study.grows or not rows:
        raise PlanError(f"{study.title!r} has nothing that grows to show: give a study with `grows`, and its rows.")
    figure = Drawing(figsize=(11 if study.phases else 6.5, 3.8), layout="constrained")
    left, *right = figure.subplots(1, 1 + study.phases, squeeze=False)[0]
    sizes = [row.at or 1 for row in rows]
    if study.drawn:
        for column, marker in zip(study.drawn, "os^", strict=False):
            left.plot(sizes, [row.get_number(column) for row in rows], marker=marker, label=study.columns[column])
        what = "bytes"
        left.set_yscale("log", base=2)
        left.yaxis.set_major_formatter(lambda value, _: format_bytes(int(value)))
        left.legend(frameon=False)
    else:
        what, ratios = study.columns[study.ratio], [row.get_number(study.ratio) for row in rows]
        errors = [ratio * row.spread / 2 for ratio, row in zip(ratios, rows, strict=True)]  # bars as long as the spread
        left.errorbar(sizes, ratios, yerr=errors, color=BLUE, marker="o", capsize=3, elinewidth=0.8)
        left.axhline(1, color="#767676", linewidth=1, linestyle="--")
        # One noisy row must not flatten the others: an error bar beyond 1.5 times the largest ratio is cut off.
        highest = max(r + e for r, e in zip(ratios, errors, strict=True))
        left.set_ylim(bottom=0, top=1.15 * max(1.0, min(highest, 1.5 * max(ratios))))
    left.set(ylabel=what, xscale="log", xlabel=study.grows)
    # Ticks at the measured sizes; every third of many, as labels of neighbours would overlap.
    shown = sizes if len(sizes) <= 6 else sizes[::3]
    left.set_xticks(shown, [format_bytes(size) if study.grows == "bytes" else f"{size:,}" for size in shown])
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xticks([], minor=True)
    left.grid(color="#dddddd", linewidth=0.6)
    shares = [{name: row.get_number(f"phases.{name}") for name in PHASES if study.phases} for row in rows]
    if study.phases:
        draw_stacks(
            right[0], PHASES, [{name: 100 * share for name, share in fractions.items()} for fractions in shares]
        )
        right[0].set(xlim=(0, 100), xlabel="% of all ranks' time")
        right[0].set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9, color=INK)
        draw_legend(figure, list(PHASES.values()))
    figure.suptitle(f"{study.title}: {what} by {study.grows}", x=0.01, ha="left", fontsize=10)
    descriptions = []
    for row, parts in zip(rows, shares, strict=True):
        drawn = (f"{format_bytes(int(row.get_number(column)))} {study.columns[column]}" for column in study.drawn)
        phases = ", ".join(f"{format_percent(share)} {name}" for name, share in parts.items() if share)
        numbers = ", ".join(drawn) or format_number(row.get_number(study.ratio))
        descriptions.append(f"{row.name}: {numbers}{f' ({phases})' * study.phases}")
    figure.alt = f"{study.title}. {'; '.join(descriptions)}."
    return figure
