"""The layout: which rank holds which tile of which stage, in which replica and direction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan


@dataclass(frozen=True, slots=True)
class Role:
    """A rank's role: part `tile` of stage `stage`, in one replica and direction (1: mirrored).

    Tiles are numbered row by row. If ranks share a stage's images, `tile` is the number of the share.
    """

    stage: int
    tile: int
    direction: int = 0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class StageRanks:
    """The ranks of one stage, in tile order.

    `grid` are the tiles into which they split images, `shares` the parts into which they split a micro-batch's images.
    """

    grid: Grid
    ranks: tuple[int, ...]
    shares: int = 1

    @property
    def parts(self) -> Grid:
        """The parts into which values are cut: along the axis of the images if ranks share these, else tiles."""
        return Grid(self.shares) if self.shares > 1 else self.grid


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One copy of the model: the ranks of its stages."""

    replica: int
    direction: int
    stages: tuple[StageRanks, ...]


@dataclass(frozen=True)
class Layout:
    """All copies of the model.

    Ranks are ordered by replica, then stage, then tile row by row; mirrored copies in reverse.

    >>> Layout.of(Plan(split_size=2, spatial_size=1)).roles[4]
    (Role(stage=1, tile=0, direction=0, replica=0),)
    >>> [str(r.stage) for r in Layout.of(Plan(split_size=3, spatial_size=0, bidirectional=True)).roles[0]]
    ['0', '2']
    """

    pipes: tuple[Pipeline, ...]

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, plan: Plan) -> Layout:
        # The stages of one replica in forward order. Those after the spatial ones are dealt out to the ranks in turn,
        # so that stages per rank are interleaved. With spatial_size=1, 4 tiles, split_size=5 and two further ranks (two
        # stages for each of them):
        #
        #     rank     0 1 2 3   4   5
        #     stage    0 0 0 0   1   2
        #                        3   4
        stages, first = [], 0
        for grid in plan.grids[: plan.spatial_size]:
            stages.append(StageRanks(grid, tuple(range(first, first + grid.tiles))))
            first += grid.tiles
        rest = plan.split_size - plan.spatial_size
        turns = range(first, plan.replica_ranks, plan.local_dp)
        for index in range(rest):
            start = turns[index % len(turns)]
            shared_by = tuple(range(start, start + plan.local_dp))
            stages.append(StageRanks(plan.grids[-1], shared_by, plan.local_dp))
        size, pipes = plan.replica_ranks, []
        for replica, direction in product(range(plan.data_parallel), range(1 + plan.bidirectional)):
            placed = []
            for stage in stages:
                # A mirrored copy runs through the same ranks from the last to the first:
                #     direction 0   stage 0: 0 1 2 3   stage 1: 4
                #     direction 1   stage 0: 4 3 2 1   stage 1: 0
                ranks = (size - 1 - rank if direction else rank for rank in stage.ranks)
                placed.append(replace(stage, ranks=tuple(replica * size + rank for rank in ranks)))
            pipes.append(Pipeline(replica, direction, tuple(placed)))
        return cls(tuple(pipes))

    @property
    def stages(self) -> tuple[StageRanks, ...]:
        """The stages of the first copy."""
        return self.pipes[0].stages

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.roles)

    @cached_property
    def directions(self) -> int:
        """The number of directions in which copies of the model run through the ranks of a replica."""
        return len({pipe.direction for pipe in self.pipes})

    @cached_property
    def roles(self) -> tuple[tuple[Role, ...], ...]:
        """The roles of each rank, in rank order."""
        roles: dict[int, list[Role]] = {}
        for pipe in self.pipes:
            for index, stage in enumerate(pipe.stages):
                for tile, rank in enumerate(stage.ranks):
                    roles.setdefault(rank, []).append(Role(index, tile, pipe.direction, pipe.replica))
        return tuple(tuple(roles[rank]) for rank in sorted(roles))

    def describe_role(self, role: Role) -> str:
        """Describe a role in words, without its replica.

        >>> layout = Layout.of(Plan(split_size=1, spatial_size=0, local_dp=2))
        >>> layout.describe_role(layout.roles[1][0])
        'stage 0, share 1'
        """
        part = "share" if self.stages[role.stage].shares > 1 else "tile"
        return f"stage {role.stage}, {part} {role.tile}{', mirrored' * role.direction}"

    def describe_rank(self, rank: int) -> str:
        """Describe a rank's roles in words.

        >>> Layout.of(Plan(split_size=2, spatial_size=1)).describe_rank(2)
        'stage 0, tile 2'
        """
        several = len({pipe.replica for pipe in self.pipes}) > 1
        return "; ".join(
            self.describe_role(role) + (f", replica {role.replica}" if several else "") for role in self.roles[rank]
        )

    def find_ranks(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Return all ranks that hold one of these stages in any copy of the model, ascending."""
        # Cached: the compiler asks for the same stages again and again.
        key = tuple(stages)
        if key not in self._groups:
            ranks = {rank for stage in key for pipe in self.pipes for rank in pipe.stages[stage].ranks}
            self._groups[key] = tuple(sorted(ranks))
        return self._groups[key]

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {}

    def get_pipeline(self, role: Role) -> Pipeline:
        """Return the copy of the model to which a role belongs."""
        return self.pipes[role.replica * self.directions + role.direction]


def compute_threads(plan: Plan, rank: int, cores: int, here: int | None = None) -> int:
    """Return a rank's threads: the host's cores shared by the ranks that compute at the same time.

    These are the ranks of a stage, or all ranks if a step has several micro-batches. If only `here` of the ranks are on
    the host, at most that many share its cores. A rank that computes alone while others wait leaves one core to them if
    it has more than two: all threads of a kernel wait for the one that shares its core with a polling rank.

    >>> compute_threads(Plan(split_size=1, num_spatial_parts=64**2), rank=0, cores=2)
    1
    >>> compute_threads(Plan(split_size=1, num_spatial_parts=4), rank=0, cores=8, here=2)
    4
    >>> [compute_threads(Plan(split_size=2, spatial_size=0), rank=0, cores=cores) for cores in (2, 4)]
    [2, 3]
    """
    layout = Layout.of(plan)
    (role, *_) = layout.roles[rank]
    here = here or plan.ranks
    # With one micro-batch the stages compute one after another, so that a stage's ranks have all cores to themselves.
    together = min(here, plan.ranks if plan.micro_batches > 1 else len(layout.stages[role.stage].ranks))
    left = together == 1 < min(here, plan.ranks) and cores > 2
    return max(1, cores // together - left)


def check_fits(plan: Plan, engines: int) -> None:
    """Raise PlanError unless a plan needs exactly `engines` ranks."""
    if plan.ranks != engines:
        times = f", {plan.data_parallel} times" if plan.data_parallel > 1 else ""
        counts = ""
        if plan.ranks <= 256:  # more than these are too many to read
            counts = " + ".join(map(str, {s.ranks: len(s.ranks) for s in Layout.of(plan).stages}.values())) + " "
        raise PlanError(
            f"The plan needs {plan.ranks} ranks ({counts}over {plan.split_size} stages{times}), but "
            f"there are {engines}. Start {plan.ranks} ranks, or change split_size, spatial_size or num_spatial_parts."
        )
