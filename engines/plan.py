"""The user's choices: how a model, an image and a batch are spread over ranks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

from engines.errors import PlanError
from engines.spatial.tiles import Grid

__all__ = ["HALF", "Plan"]

SCHEDULES = ("fill_drain", "1f1b", "interleaved", "zero_bubble", "gems")
PRECISIONS = ("float32", "float64", "bfloat16", "float16")
HALF = ("bfloat16", "float16")
SLICE_METHODS = "square, vertical, horizontal, or a grid such as 2x3"

# The only value that this version can run of each knob whose engine is still to come.
_NOT_YET: dict[str, Any] = {
    "parts": 1,
    "bidirectional": False,
    "times": 1,
    "local_dp": 1,
    "data_parallel": 1,
    "schedule": "fill_drain",
    "checkpoint_activations": False,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs where. Frozen, and checked when it is made; a change makes a new value.

    `split_size` stages, of which the first `spatial_size` are cut into `num_spatial_parts` tiles each
    by `slice_method`: `square`, `vertical` (strips along the width), `horizontal`, or a grid such as
    `2x3` (rows x columns). Both take one value, or one per spatial stage.
    `balance` is `auto` or the number of layers in each stage.
    `halo_d2` exchanges halos once per `fused_layers` layers (`auto`: as many as are cheapest) instead of before each
    windowed operator; where tiles overlap then, both ranks compute.
    `precision` is the type that weights and activations are held in. With `bfloat16` or `float16` activations are cast
    as `torch.autocast` would; images, weights, gradients, optimiser and buffers stay float32 (`held_in`), and the loss
    of `float16` is scaled.
    `sync_batchnorm=False`: batch norm normalises each tile by itself, without a message, which is not what one process
    does. Its running statistics are then the means of the tiles' own, taken at the update. With `halo_d2`, pixels
    that two ranks compute are normalised by each with its own statistics. Other norms are not concerned.

    `parts` (micro-batches), `bidirectional` and `times` (GEMS), `local_dp`, `data_parallel`, `schedule` and
    `checkpoint_activations` are checked, and refused where this version has no engine for them yet.

    Raises PlanError, with the numbers and the mend.

    >>> Plan(split_size=2, spatial_size=1, num_spatial_parts=4).ranks
    5
    >>> [str(grid) for grid in Plan(split_size=3, spatial_size=2, slice_method=("2x3", "vertical")).grids]
    ['2x3', '1x4', '1x1']
    """

    split_size: int = 2
    spatial_size: int = 1
    num_spatial_parts: int | tuple[int, ...] | None = None
    slice_method: str | tuple[str, ...] = "square"
    balance: str | tuple[int, ...] = "auto"
    parts: int = 1
    bidirectional: bool = False
    times: int = 1
    local_dp: int = 1
    data_parallel: int = 1
    halo_d2: bool = False
    fused_layers: int | str = 1
    schedule: str = "fill_drain"
    precision: str = "float32"
    checkpoint_activations: bool = False
    sync_batchnorm: bool = True

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("precision", self.precision, PRECISIONS)
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
        _check_balance(self.balance, self.split_size)
        _refuse_what_is_to_come(self)
        _ = self.grids

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The tile grid of each stage; a stage that is not spatial has one tile."""
        methods = _per_stage("slice_method", self.slice_method, self.spatial_size)
        counts = _per_stage("num_spatial_parts", self.num_spatial_parts, self.spatial_size)
        spatial = tuple(grid(method, count) for method, count in zip(methods, counts, strict=True))
        return spatial + (Grid(1, 1),) * (self.split_size - self.spatial_size)

    @property
    def held_in(self) -> str:
        """The type of images, weights, gradients and buffers.

        >>> Plan(precision="bfloat16").held_in, Plan(precision="float64").held_in
        ('float32', 'float64')
        """
        return "float32" if self.precision in HALF else self.precision

    @property
    def ranks(self) -> int:
        """Ranks that the plan needs."""
        return sum(grid.tiles for grid in self.grids)

    @property
    def summary(self) -> str:
        """One line: the grid of each stage.

        >>> Plan(split_size=2, spatial_size=1).summary
        '2 stages: 2x2 tiles -> 1 rank; 5 ranks'
        """
        stages = " -> ".join(f"{g} tiles" if g.tiles > 1 else "1 rank" for g in self.grids)
        return (
            f"{self.split_size} stage{'s'[: self.split_size > 1]}: {stages}; {self.ranks} rank{'s'[: self.ranks > 1]}"
        )


def grid(method: str, tiles: int | None) -> Grid:
    """The grid that a slice method gives for a number of tiles (None: 4, or what the grid itself says).

    >>> grid("vertical", 3)
    Grid(rows=1, cols=3)
    """
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", method):
        result = Grid(int(match[1]), int(match[2]))
        if tiles not in (None, result.tiles):
            raise PlanError(
                f"slice_method={method!r} makes {result.tiles} tiles but num_spatial_parts={tiles}. "
                f"Set num_spatial_parts={result.tiles}, or leave it out."
            )
        return result
    count = 4 if tiles is None else tiles
    if method == "square":
        return _square(count)
    if method in ("vertical", "horizontal"):
        return Grid(1, count) if method == "vertical" else Grid(count, 1)
    raise PlanError(f"slice_method={method!r} is unknown. Choose {SLICE_METHODS}.")


def _square(count: int) -> Grid:
    side = math.isqrt(count)
    if side * side != count:
        raise PlanError(
            f"num_spatial_parts={count} is no square number, which slice_method='square' needs. "
            f"Use {side * side} or {(side + 1) ** 2}, or another slice_method, such as '{_nearly_square(count)}'."
        )
    return Grid(side, side)


def _nearly_square(count: int) -> Grid:
    """The grid of `count` tiles whose sides are closest.

    >>> str(_nearly_square(6)), str(_nearly_square(5))
    ('2x3', '1x5')
    """
    rows = max(side for side in range(1, math.isqrt(count) + 1) if count % side == 0)
    return Grid(rows, count // rows)


def _per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    """One value for each spatial stage, from one for all or a tuple."""
    if not isinstance(value, tuple):
        return (value,) * stages
    if len(value) != stages:
        raise PlanError(
            f"{name}={value} has {len(value)} entries but spatial_size={stages}. "
            f"Give one value for all, or exactly {stages}."
        )
    return value


def _check_counts(plan: Plan) -> None:
    """Whole numbers, each at least 1 (`spatial_size`: 0)."""
    names = ["split_size", "spatial_size", "num_spatial_parts", "parts", "times", "local_dp", "data_parallel"]
    names += [] if plan.fused_layers == "auto" else ["fused_layers"]
    for name in names:
        value = getattr(plan, name)
        low = 0 if name == "spatial_size" else 1
        for count in value if isinstance(value, tuple) else (value,):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < low):
                raise PlanError(f"{name}={value!r} must be a whole number of at least {low}.")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}={value!r} is unknown. Choose one of {', '.join(choices)}.")


def _check_balance(balance: str | tuple[int, ...], stages: int) -> None:
    if balance == "auto":
        return
    if not isinstance(balance, tuple) or not all(type(n) is int and n > 0 for n in balance):
        raise PlanError(f"balance={balance!r} must be 'auto' or a tuple of layers per stage, such as (20, 19).")
    if len(balance) != stages:
        raise PlanError(
            f"balance={balance} names {len(balance)} stages but split_size={stages}. "
            f"Give {stages} numbers, or set split_size={len(balance)}."
        )


def _refuse_what_is_to_come(plan: Plan) -> None:
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name in _NOT_YET and value != _NOT_YET[field.name]:
            raise PlanError(
                f"{field.name}={value!r} has no engine in this version yet: "
                f"leave {field.name} at {_NOT_YET[field.name]!r}."
            )
