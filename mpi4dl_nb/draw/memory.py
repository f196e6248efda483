"""Memory of the ranks of a plan in a training step: by kind, over the step, and by layer at the peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from torch import nn

from mpi4dl_nb.draw.figure import BLUE, CASING, INK, ORANGE, BarStyle, Drawing, Style, draw_legend, draw_stacks
from mpi4dl_nb.engines.compiler.trace_cache import Loss, TraceCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes, format_count, format_ranks
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.explain import describe_plan
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import resolve_machine
from mpi4dl_nb.engines.predict.rank_memory import PeakMemory, PlanMemory, predict_plan_memory
from mpi4dl_nb.engines.program.effects import Phase

LOOKS = {
    "weights": BarStyle("weights and buffers", "#56b4e9", ""),
    "gradients": BarStyle("gradients of weights", "#e69f00", "//"),
    "optimiser": BarStyle("state of the optimiser", "#bfbfbf", "++"),
    "inputs": BarStyle("images and labels", "#f0e442", "|||"),
    "activations": BarStyle("activations for backward", "#cfe8d5", ""),
    "halos": BarStyle("halos", "#009e73", "xxx"),
    "passing": BarStyle("passing: made and let go", "#ffffff", ".."),
    "messages": BarStyle("memory of messages", "#cc79a7", "\\\\"),
}
MOST_RANKS, MOST_LAYERS, MOST_LETTERS = 12, 8, 34
ROW_IN, CURVE_IN = 0.3, 1.9
RED = "#b71c1c"

BytesByKind = Mapping[str, int]
MemoryRows = Sequence[tuple[str, BytesByKind]]
"""Each row's name, and its bytes by kind."""


def show_memory(
    plan: Plan,
    model: nn.Module | ModelGraph,
    image_shape: Sequence[int] | None = None,
    machine: Machine | str | None = None,
    rank: int | None = None,
    loss: Loss | None = None,
    optimiser_states: int = 1,
) -> Drawing:
    """Draw the peak memory of all ranks, the memory of one `rank` over the step, and its layers' part at the peak.

    `image_shape` is (N, C, H, W) of a batch. A model is traced at that size, which takes seconds; its graph
    (`training.recipe.graph`) is not. `machine` (or its name) determines how much a rank may use.
    If `rank` is None, the rank with the largest peak is taken. `optimiser_states` is how many numbers the optimiser
    keeps for each weight: momentum 1, Adam 2.
    Nothing is run. Raises PlanError, TraceError or ImageError.

    >>> from mpi4dl_nb import Plan, resnet20_v1, show_memory
    >>> figure = show_memory(Plan(split_size=2, num_spatial_parts=4), resnet20_v1(), (2, 3, 64, 64), machine="Summit")
    """
    graph, plan = trace_model("show_memory", model, plan, image_shape, loss)
    rank_bytes = resolve_machine(machine).get_rank_bytes(plan.ranks) if machine else None
    return draw_memory(predict_plan_memory(graph, plan, optimiser_states), rank_bytes, rank)


def trace_model(
    caller: str, model: nn.Module | ModelGraph, plan: Plan, image_shape: Sequence[int] | None, loss: Loss | None
) -> tuple[ModelGraph, Plan]:
    """Return the graph of a model, traced at `image_shape` unless it is a graph, and the plan for images of that size.

    Raises PlanError without a shape.
    """
    if not isinstance(model, nn.Module):
        graph = model
    elif image_shape is None:
        raise PlanError(f"{caller} needs the image_shape (N, C, H, W) of a batch, to trace the model with it.")
    else:
        graph = TraceCache(model, image_shape, loss or nn.CrossEntropyLoss()).get_graph(plan)
    return graph, plan.fit(graph.inputs["images"].shape[2:])


def draw_memory(memory: PlanMemory, rank_bytes: int | None = None, rank: int | None = None) -> Drawing:
    """Draw the figure of `show_memory` from a finished prediction. Raises PlanError if the plan has no such rank."""
    count = memory.plan.ranks
    if rank is not None and rank not in range(count):
        raise PlanError(f"rank={rank} is none of the plan's {format_count(count, 'rank')}. Use 0 to {count - 1}.")
    # All replicas hold the same, so that the prediction is of one of them.
    chosen = memory.fullest if rank is None else rank % memory.plan.replica_ranks
    asked = chosen if rank is None else rank
    moment = memory.find_peak(chosen)
    ranks = _make_rank_rows(memory)
    # The largest layers in the model's order, then all others as one row, then what belongs to no layer.
    large = {name for name, _ in moment.get_largest_layers(MOST_LAYERS)}
    layers = [(name or "the model itself", kinds) for name, kinds in moment.layers.items() if name in large]
    if others := [kinds for name, kinds in moment.layers.items() if name not in large]:
        total = {kind: sum(kinds.get(kind, 0) for kinds in others) for kind in LOOKS}
        layers.append((format_count(len(others), "other layer"), total))
    layers += [("of no layer", moment.rest)] if moment.rest else []
    heights = [ROW_IN * len(ranks) + 0.5, CURVE_IN, ROW_IN * len(layers) + 0.5]
    figure = Drawing(figsize=(11, 2.1 + sum(heights)), layout="constrained")
    upper, curve, lower = figure.subplots(3, height_ratios=heights)
    unit, size = _choose_unit(ranks)
    _draw_rows(upper, ranks, size)
    _draw_limit(upper, rank_bytes, size, memory.peak_bytes)
    _draw_curve(curve, memory, moment, size)
    inner, part = _choose_unit(layers)
    _draw_rows(lower, layers, part)
    upper.set(xlabel=f"{unit} of tensors, each rank at its own fullest moment")
    curve.set(ylabel=f"{unit} held")
    lower.set(xlabel=f"{inner} at that moment")
    title = f"Memory of a training step: {describe_plan(memory.plan)}, {format_count(count, 'rank')}"
    verdict = f"The fullest rank holds {format_bytes(memory.peak_bytes)}"
    if rank_bytes is not None:
        fits = "it fits" if memory.peak_bytes <= rank_bytes else "it does not fit"
        verdict += f" of the {format_bytes(rank_bytes)} that it may use: {fits}"
    figure.suptitle(f"{title}\n{verdict}.", x=0.01, ha="left", fontsize=10)
    upper.set_title("All ranks", loc="left", fontsize=10)
    curve.set_title(f"Rank {asked} through its step: fullest in {moment.words}", loc="left", fontsize=10)
    lower.set_title(f"What rank {asked} holds then, by the model's layers", loc="left", fontsize=10)
    met = {kind for _, kinds in (*ranks, *layers) for kind, count in kinds.items() if count}
    draw_legend(figure, [look for kind, look in LOOKS.items() if kind in met])
    figure.alt = (
        f"{title}. {verdict}. {'; '.join(_describe_rows(ranks))}. "
        f"Rank {asked} is fullest in {moment.words}: {'; '.join(_describe_rows(layers))}."
    )
    return figure


def _make_rank_rows(memory: PlanMemory) -> MemoryRows:
    """Return one row per group of ranks with equal memory; only the `MOST_RANKS` largest if there are more."""
    groups: dict[tuple[int, ...], list[int]] = {}  # ranks of a stage mostly hold the same: one bar stands for all
    for rank_memory in memory.ranks:
        groups.setdefault(tuple(rank_memory.at_peak.values()), []).append(rank_memory.rank)
    rows = [(members, memory.ranks[members[0]].at_peak) for members in groups.values()]
    if len(rows) > MOST_RANKS:
        rows = sorted(sorted(rows, key=lambda row: -sum(row[1].values()))[:MOST_RANKS])
    copies = f", each of {memory.plan.data_parallel:,} replicas" if memory.plan.data_parallel > 1 else ""
    return [(f"{format_ranks(members)}{copies}", kinds) for members, kinds in rows]


def _choose_unit(rows: MemoryRows) -> tuple[str, int]:
    return ("GB", 1 << 30) if max(sum(kinds.values()) for _, kinds in rows) >= 1 << 30 else ("MB", 1 << 20)


def _draw_rows(axes: Axes, rows: MemoryRows, size: int) -> None:
    """Draw one bar per row, stacked by kind, with the sum at its end."""
    totals = [sum(kinds.values()) for _, kinds in rows]
    lengths = [{kind: count / size for kind, count in kinds.items()} for _, kinds in rows]
    draw_stacks(axes, LOOKS, lengths, list(map(format_bytes, totals)))
    axes.set_xlim(0, 1.14 * max(totals) / size)
    names = [name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 4].rstrip()} ..." for name, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)


def make_limit_look(is_exceeded: bool) -> Style:
    """Return the look of a line at the memory that a rank may use: red if something is beyond it."""
    return {"color": RED if is_exceeded else INK, "linewidth": 1.8, "linestyle": "--"}


def _draw_limit(axes: Axes, rank_bytes: int | None, size: int, peak_bytes: int) -> None:
    """Draw a line at the memory that a rank may use, red if a rank needs more.

    A limit over 4 times the axis' end is in the title only.
    """
    longest = axes.get_xlim()[1]
    if rank_bytes is None or rank_bytes / size > 4 * longest:
        return
    # The bars keep their scale unless the limit is beyond them.
    limit = rank_bytes / size
    axes.set_xlim(0, max(longest, 1.14 * limit))
    look = make_limit_look(peak_bytes > rank_bytes)
    axes.axvline(limit, **look)
    on_left = limit > 0.5 * axes.get_xlim()[1]
    style: Style = {"ha": "right" if on_left else "left", "va": "bottom", "fontsize": 9, "color": look["color"]}
    style |= {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(f"a rank may use {format_bytes(rank_bytes)}", (limit, 1), (-4 if on_left else 4, 3), **style)


def _draw_curve(axes: Axes, memory: PlanMemory, moment: PeakMemory, size: int) -> None:
    """Plot the bytes held after each instruction, with backward shaded, and mark the peak."""
    rank_memory, steps = memory.ranks[moment.rank], memory.programs[moment.rank].steps
    held = [count / size for count in rank_memory.after]
    # Each step k is drawn from k + 0.5 to k + 1.5, so that its number is in the middle.
    backward = [step.phase not in (Phase.FORWARD, Phase.UPDATE) for step in steps]
    edges = [step + 0.5 for step in range(len(steps) + 1)]
    axes.stairs(held, edges, baseline=None, color=BLUE, linewidth=1.8, zorder=3)
    top, where = 1.25 * moment.bytes / size, [*backward, backward[-1]]
    axes.fill_between(edges, 0, top, where=where, step="post", color="#ececec", linewidth=0, zorder=0)
    instruction, height = moment.step + 1, moment.bytes / size
    axes.plot(instruction, height, marker="o", markersize=8, color=ORANGE, markeredgecolor=INK, zorder=5)
    on_left = instruction > 0.6 * len(steps)
    style: Style = {"ha": "right" if on_left else "left", "fontsize": 9, "color": INK, "path_effects": CASING}
    text, offset = f"{format_bytes(moment.bytes)} in instruction {instruction}", (-9 if on_left else 9, 6)
    axes.annotate(text, (instruction, height), offset, textcoords="offset points", **style)
    axes.set(xlim=(0.5, len(steps) + 0.5), ylim=(0, top))
    axes.set_xlabel("instructions of the rank's program, in their order; grey: backward", fontsize=10)


def _describe_rows(rows: MemoryRows) -> Iterable[str]:
    """Yield each row with its sum, and its kinds of at least 5 % of that, in words."""
    for name, kinds in rows:
        total = sum(kinds.values())
        large = {kind: count for kind, count in kinds.items() if 20 * count >= total > 0}
        parts = (f"{LOOKS[kind].name} {format_bytes(count)}" for kind, count in large.items())
        yield f"{name}: {format_bytes(total)} ({', '.join(parts)})"
