"""The user's choices: how a model, an image and a batch are distributed over ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown, format_count, format_html_table
from mpi4dl_nb.engines.geometry.tiles import Grid, find_compact_grid
from mpi4dl_nb.engines.plan.schedule import SCHEDULES, ScheduleRule, get_schedule_rule

PRECISIONS = ("float32", "float64", "bfloat16", "float16")
HALF = ("bfloat16", "float16")
ATTENTION_KEYS = ("auto", "gather", "ring")
MOST, MOST_TILES = 1 << 20, 1 << 32
"""Upper bounds: of the counts of stages, replicas and micro-batches, and of the tiles of a stage. They bound loops."""
_GRID = re.compile(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){0,2}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class PlanOption:
    """What flags, widgets, documents and checks need to know of one field of a plan.

    A new field that is a count, a word or a switch needs nothing else: add it to `Plan` with its option, and read it
    where it takes effect. A fraction would need `parse_value`, `_check_value` and a control that take one.

    - `help`: one line that says what it is; `group`: the title under which it is shown.
    - `low`: the least value of a count; None if the field is no count. `choices`: the values, if there are few.
    - `proposals`: values to propose for a field that is written as text (a word, a number, or several); else None.
    - `flags`: further names of its command-line flag.
    - `divides`: what it divides images among: `step` (into micro-batches) or `micro_batch`; empty: nothing.
    - `results`: how the results differ from those of the default; empty: they do not, but for rounding.
    - `kept`: when a training resumes on another number of ranks, this field keeps its value; fields that are not
      `kept` are chosen again.
    - `phrase`: how a summary mentions a value that is not the default; empty: in words of its own.
    """

    help: str
    group: str
    low: int | None = None
    choices: Collection[str] = ()
    proposals: tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    divides: str = ""
    results: str = ""
    kept: bool = False
    phrase: str = ""


def _option(default: Any, **option: Any) -> Any:
    return field(default=default, metadata={"option": PlanOption(**option)})


_stages = partial(_option, group="Stages")
_tiles = partial(_option, group="Tiles")
_pipeline = partial(_option, group="Pipeline")
_replicas = partial(_option, group="Directions and replicas")
_numbers = partial(_option, group="Numbers", kept=True)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A plan: what is computed on which rank. It is frozen, and checked when it is made.

    `split_size` stages, of which the first `spatial_size` are cut into `num_spatial_parts` tiles each by
    `slice_method`: `square` (of any other number, and of volumes, the grid with the smallest halos), `vertical`
    (strips along the width), `horizontal`, or a grid such as `2x3` (rows x columns). Volumes are cut by `depth`
    (slabs) or a grid such as `2x2x2` (planes x rows x columns), signals by a number such as `4`. `num_spatial_parts`
    and `slice_method` take one value, or one per spatial stage. `balance` is `auto` or the number of layers in each
    stage.
    `halo_d2` exchanges halos once per `fused_layers` layers (`auto`: the cheapest number) instead of before each
    windowed operator; where tiles overlap, both ranks compute the overlap.
    `overlap_halos` computes the interior, which needs no halo, during the halo exchange, and the borders after it. It
    is meant for slow links: on one machine messages occupy the cores that compute, and computing in pieces costs more
    than the overlap saves.
    `precision` is the type of weights and activations. With `bfloat16` or `float16` activations are cast as
    `torch.autocast` would; images, weights, gradients, optimiser and buffers stay float32 (`held_in`), and the loss of
    `float16` is scaled.
    `sync_batchnorm=False`: batch norm normalises each tile by itself, without a message; the result differs from that
    of one process. Its running statistics are then the means of the ranks' own statistics, taken at the update. With
    `halo_d2`, each of two ranks that compute the same pixels normalises them with its own statistics. Other norms stay
    exact.

    `attention_keys` is how attention over the pixels of several tiles gets the keys and values of the other ranks:
    `gather` them on every rank, or let them travel in a `ring`, which takes less memory; where a ring has no rule for
    what the model does, up to 128 x 128 keys are gathered. `auto` gathers up to 128 x 128 keys.

    A batch has `parts` micro-batches. Batch norm normalises each micro-batch by itself, as GPipe does. For a model with
    batch norm, a step of several micro-batches or replicas therefore differs from one process on the whole batch; it
    equals one process that takes the micro-batches one after another, to which `verify` compares it. An
    `nn.SyncBatchNorm` normalises by the statistics of all replicas, which must have one micro-batch each.
    `schedule` is the order of micro-batches: `fill_drain` (GPipe), `1f1b`, `interleaved` (with `stages_per_rank` stages
    on each rank after the spatial stages), `zero_bubble`, or `gems`.
    `bidirectional` runs `times` pairs of batches through two copies of the model in mirrored rank order (GEMS).
    `data_parallel` is the number of replicas, which have batches of their own. `accumulate` is the number of
    consecutive batches whose gradients are accumulated. A training step takes all these `batches`. Its loss is that of
    all their images in one batch if the loss is a sum or a mean over the batch, whatever labels the mean counts
    (`ignore_index`, class weights, masks). For any other loss, such as Dice over the batch, it is the mean of the
    micro-batches' own losses, and a training reports this.
    `local_dp` ranks share the images of each micro-batch in every stage after the spatial stages.
    `checkpoint_activations` keeps only the outputs of layers and what arrives from other ranks, and recomputes the rest
    for backward.
    `offload_activations` moves the activations that are saved for backward: those of a GPU to host memory, and, as far
    as memory is short, those of the host to an anonymous temporary file (in TMPDIR).
    `compile_segments` uses `torch.compile` to make fewer, larger kernels of the operators between two communications.
    The first steps compile, for up to minutes; the last bits of the results differ, and `zero_bubble` computes a
    compiled segment's weight gradients together with its input gradients. It is meant for GPUs: on the CPU cores that
    were measured it is slower.

    Raises PlanError with the numbers and a remedy.

    >>> Plan(split_size=2, spatial_size=1, num_spatial_parts=4).ranks
    5
    >>> [str(grid) for grid in Plan(split_size=3, spatial_size=2, slice_method=("2x3", "vertical")).grids]
    ['2x3', '1x4', '1x1']
    """

    split_size: int = _stages(2, help="number of stages that the model is cut into", low=1)
    spatial_size: int = _tiles(1, help="number of leading stages that are cut into tiles", low=0)
    num_spatial_parts: int | tuple[int, ...] | None = _tiles(
        None, help="tiles of each spatial stage: one number, or one for each such as 4,2", low=1, proposals=()
    )
    slice_method: str | tuple[str, ...] = _tiles(
        "square",
        help="square, vertical, horizontal, or rows x columns such as 2x3; for volumes depth, or three such as 2x2x2",
        proposals=("square", "vertical", "horizontal", "2x3", "depth", "2x2x2"),
    )
    balance: str | tuple[int, ...] = _stages(
        "auto", help="layers of each stage such as 20,18, or auto", proposals=("auto",)
    )
    parts: int = _pipeline(
        1,
        help="micro-batches that a batch is cut into; batch norm normalises each by itself, as GPipe does",
        low=1,
        divides="step",
        results="batch norm normalises each micro-batch by itself",
    )
    bidirectional: bool = _replicas(
        False, help="a second copy of the model runs through the ranks in mirrored order (GEMS)", divides="step"
    )
    times: int = _replicas(1, help="pairs of batches per update, one batch in each direction", low=1, divides="step")
    local_dp: int = _replicas(
        1,
        help="ranks that share the images of a micro-batch in every stage after the spatial ones",
        low=1,
        flags=("--local-DP",),
        divides="micro_batch",
    )
    data_parallel: int = _replicas(1, help="replicas of the whole plan, each with its own batch", low=1, divides="step")
    accumulate: int = _replicas(1, help="batches whose gradients are accumulated per update", low=1, divides="step")
    halo_d2: bool = _tiles(
        False,
        help="exchange halos once per several layers; both ranks compute the overlap",
        flags=("--halo-D2",),
        phrase="fused halos",
    )
    fused_layers: int | str = _tiles(
        1, help="layers between two exchanges of halo_d2, or auto: the cheapest number", low=1, proposals=("auto",)
    )
    overlap_halos: bool = _tiles(False, help="compute the interior while halos are exchanged: for slow links")
    attention_keys: str = _tiles(
        "auto",
        help="how attention gets the keys of other tiles: gather, ring, or auto (gather up to 128 x 128 keys)",
        choices=ATTENTION_KEYS,
    )
    schedule: str = _pipeline("fill_drain", help="the order of micro-batches", choices=SCHEDULES)
    stages_per_rank: int = _pipeline(
        1, help="stages on each rank after the spatial stages, for the schedule interleaved", low=1
    )
    precision: str = _numbers(
        "float32",
        help="the type of activations and halos",
        choices=PRECISIONS,
        flags=("--dtype",),
        results="activations are rounded to the type",
    )
    checkpoint_activations: bool = _numbers(
        False,
        help="keep layer outputs and what other ranks send; recompute the rest for backward",
        phrase="recomputed activations",
    )
    offload_activations: bool = _numbers(
        False,
        help="move saved activations from GPU to host memory, or from host memory to a file",
        phrase="activations in a file",
    )
    compile_segments: bool = _numbers(
        False, help="fewer, larger kernels by torch.compile: for GPUs; the first steps are slow", phrase="compiled"
    )
    sync_batchnorm: bool = _numbers(
        True,
        help="batch norm over all tiles, as one process does it; off: each tile by itself",
        results="batch norm normalises each tile by itself",
    )

    def __post_init__(self) -> None:
        for knob in fields(self):
            _check_value(knob.name, knob.metadata["option"], getattr(self, knob.name), knob.default)
        if self.spatial_size > self.split_size:
            raise PlanError(
                f"spatial_size={self.spatial_size} asks for more spatial stages than the split_size="
                f"{self.split_size} stages there are. Use spatial_size <= {self.split_size}, or a larger split_size."
            )
        if self.fused_layers != 1 and not self.halo_d2:
            raise PlanError(
                f"fused_layers={self.fused_layers!r} counts the layers between two exchanges of halo_d2, which is off. "
                "Set halo_d2=True, or leave fused_layers at 1."
            )
        if self.balance != "auto":
            if not isinstance(self.balance, tuple) or not all(type(n) is int and n > 0 for n in self.balance):
                raise PlanError(
                    f"balance={self.balance!r} must be 'auto' or a tuple of layers per stage, such as (20, 19)."
                )
            if len(self.balance) != self.split_size:
                raise PlanError(
                    f"balance={self.balance} names {len(self.balance)} stages but split_size={self.split_size}. "
                    f"Give {self.split_size} numbers, or set split_size={len(self.balance)}."
                )
        _check_order(self)
        _ = self.grids  # raises PlanError unless slice methods and numbers of tiles fit each other

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The tile grid of each stage; a stage that is not spatial has one tile."""
        methods = _expand_per_stage("slice_method", self.slice_method, self.spatial_size)
        counts = _expand_per_stage("num_spatial_parts", self.num_spatial_parts, self.spatial_size)
        spatial = tuple(make_grid(method, count) for method, count in zip(methods, counts, strict=True))
        axes = {len(grid) for grid in spatial} or {2}
        if len(axes) > 1:
            raise PlanError(
                f"slice_method={self.slice_method!r} cuts images along {' and '.join(map(str, sorted(axes)))} axes. "
                "Use grids with as many numbers in every stage."
            )
        return spatial + (Grid(*(1,) * axes.pop()),) * (self.split_size - self.spatial_size)

    def fit(self, size_px: Sequence[int]) -> Plan:
        """Return the plan for images of that size, with a grid for each number of tiles that `square` has to divide.

        Images keep a square. Of any other number, and of signals and volumes, it is the grid with the smallest halos.

        >>> Plan(num_spatial_parts=8).fit((64, 64, 16)).slice_method
        '2x4x1'
        >>> Plan(num_spatial_parts=4).fit((1024, 512)) == Plan(num_spatial_parts=4)
        True
        """

        def find_method(method: str, grid: Grid) -> str:
            is_square = len(size_px) == len(grid) and len(set(grid)) == 1
            return method if method != "square" or is_square else str(find_compact_grid(size_px, grid.tiles))

        methods = _expand_per_stage("slice_method", self.slice_method, self.spatial_size)
        spatial = self.grids[: self.spatial_size] if size_px else ()
        fitting = tuple(map(find_method, methods, spatial))
        if not spatial or fitting == methods:
            return self
        return replace(self, slice_method=fitting[0] if len(set(fitting)) == 1 else fitting)

    @property
    def held_in(self) -> str:
        """The type of images, weights, gradients and buffers.

        >>> Plan(precision="bfloat16").held_in, Plan(precision="float64").held_in
        ('float32', 'float64')
        """
        return "float32" if self.precision in HALF else self.precision

    @property
    def replica_ranks(self) -> int:
        """The number of ranks of one replica."""
        behind = (self.split_size - self.spatial_size) // self.stages_per_rank
        return sum(grid.tiles for grid in self.grids[: self.spatial_size]) + behind * self.local_dp

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan needs."""
        return self.data_parallel * self.replica_ranks

    @property
    def replica_batches(self) -> int:
        """The number of batches that one replica takes in a training step."""
        return self.accumulate * (2 * self.times if self.bidirectional else 1)

    @property
    def batches(self) -> int:
        """The number of batches of a training step, which takes this many times the images of one batch.

        >>> Plan(data_parallel=2, accumulate=3).batches
        6
        """
        return self.data_parallel * self.replica_batches

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a training step.

        >>> Plan(parts=4, bidirectional=True, times=2, data_parallel=3).micro_batches
        48
        """
        return self.batches * self.parts

    @property
    def summary(self) -> str:
        """One line: the grid of each stage, the number of micro-batches, directions, replicas and ranks.

        >>> Plan(split_size=2, spatial_size=1).summary
        '2 stages: 2x2 tiles -> 1 rank; 5 ranks'
        """
        behind = f"{self.local_dp} ranks" if self.local_dp > 1 else "1 rank"
        names = [f"{g} tiles" if g.tiles > 1 else "1 rank" for g in self.grids[: self.spatial_size]]
        names += [behind] * (self.split_size - self.spatial_size)
        text = f"{format_count(self.split_size, 'stage')}: {' -> '.join(names)}"
        text += f"; {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        text += f"; {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        text += ", both ways" if self.bidirectional else ""
        text += "".join(f"; {phrase}" for phrase in self.phrases)
        text += f"; {self.data_parallel} replicas" if self.data_parallel > 1 else ""
        return f"{text}; {format_count(self.ranks, 'rank')}"

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields that are not at their defaults.

        >>> Plan(split_size=2, parts=4).chosen
        {'parts': 4}
        """
        return {knob.name: value for knob in fields(self) if (value := getattr(self, knob.name)) != knob.default}

    @property
    def rule(self) -> ScheduleRule:
        """What the plan's schedule does."""
        return get_schedule_rule(self.schedule)

    @property
    def phrases(self) -> list[str]:
        """How the switches that are not at their defaults are mentioned in a summary.

        >>> Plan(halo_d2=True, compile_segments=True).phrases
        ['fused halos', 'compiled']
        """
        return [option.phrase for name, option in OPTIONS.items() if option.phrase and name in self.chosen]

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in self.chosen.items())})"

    def _repr_html_(self) -> str:
        chosen = {name: repr(value) for name, value in self.chosen.items()}
        rest = {"all knobs" if not chosen else "all other knobs": "at their defaults"}
        return format_html_table("Plan", {"layout": self.summary, "ranks": self.ranks, **chosen, **rest})


OPTIONS: Mapping[str, PlanOption] = {knob.name: knob.metadata["option"] for knob in fields(Plan)}
"""What is known of each field, by its name."""


# `help(Plan)` lists each field with its default, its meaning, and how its results differ from the default's.
_LINES = "\n".join(
    f"    - `{knob.name}={knob.default!r}`: {option.help}" + (f" ({option.results})" if option.results else "")
    for knob, option in zip(fields(Plan), OPTIONS.values(), strict=True)
)
Plan.__doc__ = f"{Plan.__doc__}\n    Fields:\n\n{_LINES}\n    "


def make_grid(method: Any, tiles: int | None) -> Grid:
    """Return the grid that a slice method makes of a number of tiles (None: 4, or the number that the grid itself has).

    Raises PlanError if the method is unknown, or does not fit the number of tiles.

    >>> make_grid("vertical", 3), make_grid("depth", 3)
    (Grid(1, 3), Grid(3, 1, 1))
    """
    if isinstance(method, str) and _GRID.fullmatch(method):
        result = Grid(*map(int, method.split("x")))
        if result.tiles > MOST_TILES:
            raise PlanError(f"slice_method={method!r} makes {result.tiles:,} tiles, but there may be {MOST_TILES:,}.")
        if tiles not in (None, result.tiles):
            raise PlanError(
                f"slice_method={method!r} makes {result.tiles} tiles but num_spatial_parts={tiles}. "
                f"Set num_spatial_parts={result.tiles}, or leave it out."
            )
        return result
    count = 4 if tiles is None else tiles
    strips = {"vertical": Grid(1, count), "horizontal": Grid(count, 1), "depth": Grid(count, 1, 1)}
    if method in strips:
        return strips[method]
    if method != "square":
        remedy = "Choose square, vertical, horizontal, depth, or a grid as 2x3 or 2x2x2."
        known = ("square", *strips)
        raise PlanError(describe_unknown(f"slice_method={method!r} is unknown", method, known, remedy))
    # The sides are as close as the number allows: 2x2 of 4, 2x3 of 6, 1x5 of 5.
    rows = max(divisor for divisor in range(1, math.isqrt(count) + 1) if count % divisor == 0)
    return Grid(rows, count // rows)


def _expand_per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    """Return one value for each spatial stage, from a single value or a tuple.

    Raises PlanError if the lengths differ.
    """
    if not isinstance(value, tuple):
        return (value,) * stages
    if len(value) != stages:
        raise PlanError(
            f"{name}={value} has {len(value)} entries but spatial_size={stages}. "
            f"Give one value for all, or exactly {stages}."
        )
    return value


def _check_value(name: str, option: PlanOption, value: Any, default: Any) -> None:
    """Raise PlanError unless the value is one that the option allows by itself, whatever the other options are."""
    if isinstance(default, bool) and not isinstance(value, bool):
        raise PlanError(f"{name}={value!r} must be True or False.")
    if option.choices and value not in tuple(option.choices):
        raise PlanError(describe_unknown(f"{name}={value!r} is unknown", value, option.choices))
    if option.low is None or value in (option.proposals or ()):
        return
    several = default is None
    for count in value if several and isinstance(value, tuple) else (value,):
        if several and count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < option.low:
            raise PlanError(f"{name}={value!r} must be a whole number of at least {option.low}.")
        most = MOST_TILES if several else MOST
        if count > most:
            raise PlanError(f"{name} must be a whole number of at most {most:,}.")


def _check_order(plan: Plan) -> None:
    """Raise PlanError if fields that set the order of work contradict each other."""
    behind = plan.split_size - plan.spatial_size
    if plan.times > 1 and not plan.bidirectional:
        raise PlanError(
            f"times={plan.times} counts pairs of batches through both directions, but bidirectional is off. "
            "Set bidirectional=True, or leave times at 1."
        )
    if plan.schedule == "gems" and not plan.bidirectional:
        raise PlanError("schedule='gems' is an order of two directions. Set bidirectional=True, or use '1f1b'.")
    if (plan.schedule == "interleaved") != (plan.stages_per_rank > 1):
        raise PlanError(
            f"schedule={plan.schedule!r} with stages_per_rank={plan.stages_per_rank}: only 'interleaved' has several "
            "stages per rank. Use schedule='interleaved' with stages_per_rank=2 or more, or leave both."
        )
    if behind % plan.stages_per_rank:
        raise PlanError(
            f"stages_per_rank={plan.stages_per_rank}, but the {behind} stages behind the spatial ones cannot be dealt "
            f"out {plan.stages_per_rank} at a time. "
            f"Use split_size={plan.split_size - behind % plan.stages_per_rank}, or another stages_per_rank."
        )
    if plan.local_dp > 1 and not behind:
        raise PlanError(
            f"local_dp={plan.local_dp} shares stages behind the spatial ones, but all {plan.split_size} are spatial. "
            "Use spatial_size < split_size, or data_parallel."
        )
    if plan.bidirectional and not plan.sync_batchnorm:
        raise PlanError(
            "sync_batchnorm=False lets each rank count its own tile, but with bidirectional=True it has another tile "
            "in the other direction. Leave sync_batchnorm at True, or use data_parallel."
        )
