"""Figure of a running training: loss, speed, and the time and memory of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mpi4dl_nb.draw.figure import BLUE, INK, ORANGE, BarRows, BarStyle, Drawing, Looks, draw_legend, draw_stacks
from mpi4dl_nb.engines.formatting import format_bytes, format_number
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.program.timeline import TimeShares
from mpi4dl_nb.engines.train.history import History, Progress
from mpi4dl_nb.engines.train.interrupts import StoppedError
from mpi4dl_nb.engines.train.step_report import build_timeline

WORKS = BarStyle("works", "#56b4e9", "")
COMMUNICATES = BarStyle("communicates", "#f0e442", "xxx")
WAITS = BarStyle("waits for others", "#ffffff", "...")
OTHER = BarStyle("other: between instructions", "#c8c8c8", "")
MEMORY = BarStyle("memory", "#cccccc", "//")
LOOKS = {"works": WORKS, "communicates": COMMUNICATES, "waits": WAITS, "other": OTHER}

CURVES_IN, ROW_IN = 2.5, 0.32
SEEN = 2.0  # held-out losses within so many ranges of the training losses stay visible
POINTS = 400  # of a curve; more would be indistinguishable
LABELLED = 0.09  # fraction of a bar; shorter parts have no room for a number
NUMBER_BOX = {"boxstyle": "square,pad=0.15", "facecolor": "white", "linewidth": 0}


def show_progress(progress: Progress) -> Drawing:
    """Plot loss and images per second by step, and below them the time and memory of each rank.

    The time of the ranks is that of the last step.

    >>> import torch
    >>> from mpi4dl_nb import Cluster, Monitor, Plan, Training, resnet20_v1, show_progress
    >>> batch, monitor = (torch.randn(2, 3, 32, 32), torch.tensor([3, 7])), Monitor()
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), Plan(split_size=2, spatial_size=0), cluster, (2, 3, 32, 32))
    ...     history = training.fit([batch], epochs=2, progress=False, monitor=monitor)
    >>> "rank 1" in show_progress(monitor.progress).alt
    True
    """
    names, used, held = format_rank_names(progress.plan), compute_uses(progress), get_memory_bytes(progress)
    tall = [CURVES_IN, max(2, len(names)) * ROW_IN + 0.3]
    figure = Drawing(figsize=(11, sum(tall) + 0.8), layout="constrained")
    (loss, speed), (use, memory) = figure.subplots(2, 2, height_ratios=tall)
    _draw_curve(loss, progress.losses, "loss", BLUE)
    _draw_evaluation(loss, progress)
    _draw_curve(speed, progress.speeds, "images per second", INK)
    speed.set_ylim(0, 1.15 * max(progress.speeds, default=1))
    for end in progress.ends if len(progress.ends) <= POINTS // 10 else ():  # more lines would hide the curves
        for axes in (loss, speed):
            axes.axvline(end + 0.5, color="#888888", linewidth=0.8, linestyle=":")
    rows = [_get_shares(used[rank]) if rank in used else {} for rank in range(len(names))]
    _draw_rows(use, "time of the last step, in %", names, LOOKS, rows)
    for bars in use.containers:
        descriptions = [f"{100 * bar.get_width():.0f}" if bar.get_width() >= LABELLED else "" for bar in bars]
        use.bar_label(bars, descriptions, label_type="center", fontsize=8.5, color=INK, bbox=NUMBER_BOX)
    most = max(held.values(), default=1)
    sizes, texts = [{"memory": size / most} for size in held.values()], [format_bytes(size) for size in held.values()]
    _draw_rows(memory, "memory after the last step", list(held), {"memory": MEMORY}, sizes, texts)
    if used:
        draw_legend(figure, list(LOOKS.values()))
    else:  # before the first step there are no bars, and no names of bars
        use.remove()
        memory.remove()
    # The figure is drawn less often than the numbers above it, so that it says of which step it is.
    step = f"after step {len(progress.losses)}" if progress.losses else ""
    figure.text(0.99, 0.02, step, ha="right", va="bottom", fontsize=9, color=INK)
    of = f" of {progress.total}" if progress.total is not None else ""
    descriptions = [f"A training, {progress.state}: {len(progress.losses)}{of} steps done"]
    if progress.losses:
        descriptions += [f"loss from {progress.losses[0]:.4g} to {progress.losses[-1]:.4g}"]
        descriptions += [f"{progress.speeds[-1]:.3g} images per second in the last step"]
    ranks = [
        f"{names[rank]}: works {use.work:.0%}, communicates {use.communication:.0%}, waits {use.waiting:.0%}"
        for rank, use in used.items()
    ]
    memories = [f"memory of {name}: {format_bytes(size)}" for name, size in held.items()]
    figure.alt = ". ".join(filter(None, (", ".join(descriptions), "; ".join(ranks), "; ".join(memories)))) + "."
    return figure


def format_rank_names(plan: Plan) -> list[str]:
    """Return the name of each rank, such as `rank 1: stage 0, tile 1`."""
    # Of a rank with several roles, only the first is named: there is no room for more.
    layout = Layout.of(plan)
    texts = [layout.describe_role(roles[0]) if roles else "no work" for roles in layout.roles]
    return [f"rank {rank}: {text}" for rank, text in enumerate(texts)]


def get_memory_bytes(progress: Progress) -> dict[str, int]:
    """Return the memory of each rank, or of all ranks together if they share one process."""
    if progress.one_process and progress.reports:
        return {"all ranks": progress.reports[0].memory_bytes}
    return {f"rank {rank}": report.memory_bytes for rank, report in enumerate(progress.reports)}


def compute_uses(progress: Progress) -> dict[int, TimeShares]:
    """Return the time shares of each rank in the last step; empty before the first one."""
    timeline = build_timeline(progress.reports)
    return timeline.time_shares if timeline.events else {}


def _get_shares(use: TimeShares) -> dict[str, float]:
    """Return the time shares by the names in `LOOKS`."""
    return {"works": use.work, "communicates": use.communication, "waits": use.waiting, "other": use.other}


def _draw_curve(axes: Axes, values: Sequence[float], name: str, colour: str) -> None:
    """Plot each step, or means of neighbours if there are more than `POINTS`, and the last point as a dot."""
    axes.set_title(f"{name}, by step", loc="left", fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")  # no offset text over the title
    if not values:
        axes.set(xlim=(0, 10), ylim=(0, 1), xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no step yet", transform=axes.transAxes, ha="center", va="center", color="#555555")
        return
    # Each point is the mean of the steps from one edge to the next, at the middle of their numbers (from 1).
    edges = np.unique(np.linspace(0, len(values), min(len(values), POINTS) + 1).astype(int))
    steps = (edges[:-1] + edges[1:] + 1) / 2
    means = np.add.reduceat(np.asarray(values, dtype=float), edges[:-1]) / np.diff(edges)
    axes.plot(steps, means, color=colour, linewidth=1.4)
    axes.plot(steps[-1:], means[-1:], "o", color=colour, markersize=4)
    axes.set_xlim(0.5, max(len(values), 2) + 0.5)


def _draw_evaluation(axes: Axes, progress: Progress) -> None:
    """Plot the held-out losses, if any. An outlier does not stretch the axis."""
    both = zip(progress.ends, progress.epochs, strict=True)
    judged = [(end, epoch.held_out.loss) for end, epoch in both if epoch.held_out]
    if judged:
        axes.plot(*zip(*judged, strict=True), "D--", color=ORANGE, markersize=5, linewidth=1, label="held out")
        axes.legend(loc="upper right", fontsize=9, frameon=False)
        # The axis has the range of the training's losses, grown by the held-out ones near it. A held-out loss far
        # beyond (while the running averages of batch norm are young) would flatten the curve.
        low, high = min(progress.losses), max(progress.losses)
        near = [loss for _, loss in judged if low - SEEN * (high - low) <= loss <= high + SEEN * (high - low)]
        low, high = min([low, *near]), max([high, *near])
        room = 0.05 * (high - low) or 0.05
        axes.set_ylim(low - room, high + room)


def _draw_rows(
    axes: Axes, title: str, names: Sequence[str], looks: Looks, rows: BarRows, ends: Sequence[str] = ()
) -> None:
    """Draw one bar, at most 1 long, per name."""
    draw_stacks(axes, looks, rows, ends, high=0.8)
    axes.set(xlim=(0, 1), xticks=[])
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)


# Numbers of a running training as HTML, cheap enough for an update every second.


EPOCHS = 6  # the last ones; the History has all of them
SIDE_BY_SIDE = "display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 2em"
RANKS = 16  # more than that are in the figure only
SCORES = {"loss": ".5g", "accuracy": ".3f", "dice": ".3f"}
EPOCH_COLUMNS = {"epoch": "d"} | SCORES | {f"held_out_{name}": form for name, form in SCORES.items()}
EPOCH_COLUMNS |= {"images_per_s": ".2f", "data_wait": ".0%"}
"""Columns of the table of epochs, with the formats of their numbers."""


def format_progress_html(progress: Progress) -> str:
    """Return a line of numbers, and a progress bar of the steps."""
    of, last = f" of {progress.total}" if progress.total is not None else "", progress.last
    descriptions = [f"step {len(progress.losses)}{of}"]
    if last is not None:
        wait = last.wait_s / (last.seconds + last.wait_s)
        descriptions = [f"epoch {last.epoch}, {descriptions[0]}", f"loss {last.loss:.5g}"]
        descriptions += [f"{format_number(progress.speeds[-1])} images/s"]
        descriptions += [f"accuracy {last.accuracy:.3f}"] if last.accuracy is not None else []
        descriptions += [f"waiting for images {wait:.0%}", f"{format_duration(progress.seconds)} so far"]
        descriptions += [f"about {format_duration(progress.left_s)} left"] if progress.left_s is not None else []
        descriptions += [f"{progress.left_out} bad images left out"] if progress.left_out else []
    line, bar = " · ".join(map(escape, descriptions)), ""
    if progress.total:
        style = "width:100%;height:1.1em;margin:0.2em 0"  # to the edge: a page need not draw the rest of a bar
        done = f'value="{len(progress.losses)}" max="{progress.total}"'
        bar = f'<progress aria-label="steps done" {done} style="{style}"></progress>'
    return f'<div style="line-height:1.5"><p style="margin:0"><b>{escape(progress.state)}</b> · {line}</p>{bar}</div>'


def format_tables_html(progress: Progress) -> str:
    """Return tables of the ranks in the last step, and of the last epochs."""
    used, held, names = compute_uses(progress), get_memory_bytes(progress), format_rank_names(progress.plan)
    # Ranks that are threads of one process have one memory, which has a row of its own.
    together = next(iter(held.values()), 0) if progress.one_process else None
    rows: list[Sequence[str]] = []
    for rank, use in used.items():
        shares = (f"{share:.0%}" for share in _get_shares(use).values())
        rows.append((names[rank], *shares, "" if together is not None else format_bytes(held[f"rank {rank}"])))
    rows += [("all ranks: one process", "", "", "", "", format_bytes(together))] if together else []
    heads: Sequence[str] = ("rank", "works", "communicates", "waits", "other", "memory")
    ranks = _format_table("Ranks in the last step", heads, rows if len(rows) <= RANKS else [])
    # The last epochs, newest first, without the columns that are empty.
    records = [epoch.record for epoch in reversed(progress.epochs[-EPOCHS:])]
    kept = {name: form for name, form in EPOCH_COLUMNS.items() if any(record[name] is not None for record in records)}
    rows = [["" if record[name] is None else format(record[name], kept[name]) for name in kept] for record in records]
    heads = tuple("images/s" if name == "images_per_s" else name.replace("_", " ") for name in kept)
    return f'<div style="{SIDE_BY_SIDE}">{ranks}{_format_table("Last epochs", heads, rows)}</div>'


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(59.6), format_duration(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def describe_outcome(outcome: History | BaseException) -> str:
    """Describe how a `fit` has ended."""
    match outcome:
        case History(stopped=True, saved=None):
            return f"stopped after {len(outcome.losses)} steps; the ranks keep what they have learned"
        case History(stopped=True):
            return f"stopped after {len(outcome.losses)} steps; saved as {outcome.saved}"
        case History():
            return f"done; saved as {outcome.saved}" if outcome.saved else "done"
        case StoppedError():
            return str(outcome)
        case KeyboardInterrupt():
            return "stopped by an interrupt; the ranks keep what they have learned"
    return f"ended by an error: {outcome}"


def _format_table(caption: str, heads: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cell = 'style="text-align:right;padding:0 0.6em"'
    first = 'style="text-align:left;padding:0 0.6em 0 0;font-weight:normal"'
    styles = first, *[cell] * (len(rows[0]) - 1)
    head = "".join(f'<th scope="col" {style}>{escape(name)}</th>' for style, name in zip(styles, heads, strict=True))
    body = ""
    for name, *values in rows:
        cells = "".join(f"<td {cell}>{escape(text)}</td>" for text in values)
        body += f'<tr><th scope="row" {first}>{escape(name)}</th>{cells}</tr>'
    words = f'<caption style="text-align:left;font-weight:bold">{caption}</caption>'
    return f"<table>{words}<tr>{head}</tr>{body}</table>"
