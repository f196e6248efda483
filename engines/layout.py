"""Who does what: which rank holds which tile of which stage."""

from __future__ import annotations

from dataclasses import dataclass

from engines.errors import PlanError
from engines.plan import Plan
from engines.spatial.tiles import Grid

__all__ = ["Layout", "Role", "StageRanks", "check_fits"]


@dataclass(frozen=True, slots=True)
class Role:
    """What one rank is: tile `tile` (numbered row by row) of stage `stage`."""

    stage: int
    tile: int


@dataclass(frozen=True, slots=True)
class StageRanks:
    """The ranks of one stage, in tile order."""

    grid: Grid
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in stage order, tiles row by row inside a stage.

    >>> Layout.of(Plan(split_size=2, spatial_size=1)).role(4)
    Role(stage=1, tile=0)
    """

    stages: tuple[StageRanks, ...]

    @classmethod
    def of(cls, plan: Plan) -> Layout:
        """The layout that a plan asks for."""
        stages, first = [], 0
        for grid in plan.grids:
            stages.append(StageRanks(grid, tuple(range(first, first + grid.tiles))))
            first += grid.tiles
        return cls(tuple(stages))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(stage.ranks) for stage in self.stages)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each rank, in rank order."""
        return tuple(Role(index, tile) for index, stage in enumerate(self.stages) for tile in range(len(stage.ranks)))

    def role(self, rank: int) -> Role:
        """What rank `rank` is."""
        return self.roles[rank]


def check_fits(plan: Plan, engines: int) -> None:
    """Raises PlanError where a plan does not need exactly `engines` ranks."""
    if plan.ranks != engines:
        tiles = " + ".join(str(grid.tiles) for grid in plan.grids)
        raise PlanError(
            f"The plan needs {plan.ranks} ranks ({tiles} over {plan.split_size} stages), but there are {engines}. "
            f"Start {plan.ranks} ranks, or change split_size, spatial_size or num_spatial_parts."
        )
