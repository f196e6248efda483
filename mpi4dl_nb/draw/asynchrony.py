"""Charts of synchronous and asynchronous replicas: loss by time and by images, and the staleness of the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from engines.errors import PlanError
from engines.train.asynchrony import ReplicaStudy
from mpi4dl_nb.draw.figure import BLUE, INK, ORANGE, Drawing

__all__ = ["show_asynchrony"]

WIDE = 10  # the loss axis is logarithmic if the largest loss exceeds the smallest by this factor


@dataclass(frozen=True)
class ModeStyle:
    """The line and bar style of one mode, and the definition of its staleness."""

    name: str
    colour: str
    line: str
    hatch: str
    late: str

    @property
    def patch(self) -> dict[str, str]:
        """The keywords of a bar: filled, or hatched on white."""
        return {
            "facecolor": "white" if self.hatch else self.colour,
            "edgecolor": self.colour,
            "hatch": self.hatch,
        }


LOOKS = {
    "synchronous": ModeStyle("synchronous", INK, "-", "", "always 0"),
    "server": ModeStyle("server", BLUE, "--", "//", "others' updates since the weights were read"),
    "peers": ModeStyle("peers", ORANGE, ":", "...", "own steps since the weights were offered"),
}


def show_asynchrony(studies: ReplicaStudy | Sequence[ReplicaStudy]) -> Drawing:
    """Plot running means of the loss against seconds and against images seen, and a histogram of the staleness.

    `studies` are of different modes on the same task. Raises PlanError if there is none, or if two have the same mode.

    >>> from engines.bench.asynchronous import bench_asynchronous, expand_modes
    >>> from mpi4dl_nb import Cluster, show_asynchrony
    >>> asked = expand_modes("server", replicas=2, steps=4, slow={})
    >>> with Cluster(3, backend="loopback") as cluster:
    ...     studies = cluster.call(lambda host: bench_asynchronous(host.world, asked))[0]
    >>> figure = show_asynchrony(studies)
    """
    found = [studies] if isinstance(studies, ReplicaStudy) else list(studies)
    modes = [study.mode for study in found]
    if not found or len(set(modes)) < len(modes):
        raise PlanError(f"The modes of these {len(modes)} studies are {modes}. Give one study, or one of each mode.")
    figure = Drawing(figsize=(11, 4.4), layout="constrained")
    by_time, by_images, stale = figure.subplots(1, 3)
    by_images.sharey(by_time)
    _draw_losses(by_time, found, lambda study: [turn.end_s for turn in study.turns])
    _draw_losses(by_images, found, lambda study: [study.images_per_batch * (n + 1) for n in range(len(study.turns))])
    by_time.set(xlabel="seconds", ylabel="loss, running mean")
    by_images.set(xlabel="images seen, of all replicas")
    by_images.tick_params(labelleft=False)
    width = 0.8 / len(found)
    for index, study in enumerate(found):  # each staleness has a group of bars, one bar per mode in which it occurred
        look, histogram = LOOKS[study.mode], study.histogram
        places = [late + (index - (len(found) - 1) / 2) * width for late in histogram]
        stale.bar(places, list(histogram.values()), width, **look.patch)
    stale.set(xlabel="staleness", ylabel="how often")
    stale.xaxis.set_major_locator(MaxNLocator(integer=True))
    stale.yaxis.set_major_locator(MaxNLocator(integer=True))
    chosen = found[0].asynchrony
    copies = f"{chosen.replicas} replica{'s'[: chosen.replicas > 1]}, {found[0].images_per_batch} images in each batch"
    slow = [f"replica {number} sleeps {seconds:g} s in each step" for number, seconds in chosen.slow.items() if seconds]
    title = "; ".join([copies, *slow])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    looks = [LOOKS[study.mode] for study in found]
    handles = [
        (Line2D([], [], linestyle=look.line, color=look.colour, linewidth=2), Patch(**look.patch)) for look in looks
    ]
    names = [f"{_format_name(study)} (staleness: {LOOKS[study.mode].late})" for study in found]
    style = {"loc": "outside lower left", "ncols": 1, "frameon": False, "fontsize": 9, "handlelength": 5}
    figure.legend(handles, names, handler_map={tuple: HandlerTuple(ndivide=None)}, **style)
    figure.alt = f"{title}. {' '.join(map(_describe_study, found))}"
    return figure


def _draw_losses(
    axes: Axes, studies: Sequence[ReplicaStudy], places: Callable[[ReplicaStudy], Sequence[float]]
) -> None:
    drawn = []
    for study in studies:
        look, losses = LOOKS[study.mode], compute_running_mean([turn.loss for turn in study.turns])
        axes.plot(places(study), losses, look.line, color=look.colour, linewidth=2, label=look.name)
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
    return f"{LOOKS[study.mode].name}{bound}{', aware of staleness' * chosen.staleness_aware}"


def _describe_study(study: ReplicaStudy) -> str:
    late = ", ".join(f"{staleness} ({count})" for staleness, count in study.histogram.items())
    return (
        f"{_format_name(study).capitalize()}: loss {study.turns[0].loss:.3g} at first, {study.final_loss:.3g} at "
        f"last, after {study.seconds:.3g} s and {len(study.turns) * study.images_per_batch} images "
        f"({study.images_per_s:.3g} images/s); staleness (how often): {late or 'none'}."
    )
