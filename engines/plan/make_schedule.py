"""Pipeline schedules as data: the order in which each rank takes micro-batches through its stages.

One simulation makes all of them; a schedule is only its rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.schedule import (
    ActionKind,
    Batch,
    PipelineAction,
    Schedule,
    ScheduleRule,
    Slot,
    compute_bubble_share,
    get_schedule_rule,
)

Stages = Sequence[Sequence[int]]
"""The stages of one direction, each with the ranks that work on it together."""


def make_schedule(name: str, placement: Sequence[Stages], batches: Sequence[Batch]) -> Schedule:
    """Return the schedule of one training step.

    `placement[direction][stage]` are the ranks, of 0 to R - 1, that work on a stage together. A forward takes one unit
    of time, a backward two (in `zero_bubble` one, and the weights' gradient one). Two ranks have their common actions
    in the same order, so ranks that follow their orders never deadlock. A stage begins a batch only when it has
    finished the previous one of the same direction, and runs backwards in the order of the forwards: every schedule
    accumulates the gradients in the same order.

    - `fill_drain`: all micro-batches forward, then all backward (Huang et al. 2019, GPipe, section 2.3; there the last
      one goes backward first, which takes the same time).
    - `1f1b`: a stage starts a backward as soon as it can, and holds at most as many micro-batches as there are stages
      from it to the last (Narayanan et al. 2021, Efficient Large-Scale Language Model Training, section 2.2.1).
    - `interleaved`: the same with several stages per rank (ibid., section 2.2.2; here ranks start fewer forwards before
      the first backward, for the same bubble).
    - `zero_bubble`: ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.1).
    - `gems`: a batch follows the previous one, of the opposite direction, rank by rank, so that a rank holds
      activations of one batch only (Jain et al. 2020, GEMS).

    Raises PlanError if the name is unknown, or placement or batches are invalid.

    >>> print(make_schedule("1f1b", [[(0,), (1,)]], [Batch(0, (0, 1, 2))]).format_table())
    F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    """
    rule = get_schedule_rule(name)
    if rule.mirrored and len(placement) < 2:
        raise PlanError(
            f"schedule={name!r} needs 2 directions, one of them mirrored, but the placement has {len(placement)}. "
            "Set bidirectional=True, or choose fill_drain."
        )
    for direction, stages in enumerate(placement):
        for stage, ranks in enumerate(stages):
            if not ranks or len(set(ranks)) < len(ranks):
                raise PlanError(
                    f"Stage {stage} of direction {direction} is on ranks {tuple(ranks)}. "
                    "Give at least one rank, each once."
                )
    numbers = {rank for stages in placement for ranks in stages for rank in ranks}
    if not numbers or numbers != set(range(len(numbers))):
        raise PlanError(
            f"The placement names the ranks {_format_numbers(numbers)}. Number them from 0, and leave none out."
        )
    for batch in batches:
        if batch.direction not in range(len(placement)):
            raise PlanError(
                f"A batch goes in direction {batch.direction}, but the placement has {len(placement)}: "
                f"use 0 to {len(placement) - 1}, or place another direction."
            )
    times = Counter(micro_batch for batch in batches for micro_batch in batch.micro_batches)
    if twice := [micro_batch for micro_batch, count in times.items() if count > 1]:
        raise PlanError(
            f"Micro-batch {_format_numbers(twice)} is in the step more than once. Number them through over its batches."
        )
    return Schedule(name, simulate(rule, placement, make_queues(placement, batches)))


def _format_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"


def compute_plan_bubble(plan: Plan) -> float | None:
    """Return the idle fraction of a plan's schedule if all its stages took the same time; None if there is no formula.

    There is no formula for two directions (except `gems`), for several batches in a row, or for plans in which only
    some stages are interleaved.

    >>> compute_plan_bubble(Plan(split_size=4, spatial_size=0, parts=9, schedule="1f1b"))
    0.25
    """
    rule, some_interleaved = plan.rule, plan.stages_per_rank > 1 and plan.spatial_size > 0
    several = plan.replica_batches > 1 and (not rule.mirrored or plan.stages_per_rank > 1 or plan.accumulate > 1)
    if rule.count_bubble is None or some_interleaved or several:
        return None
    return compute_bubble_share(plan.schedule, plan.split_size, plan.parts, plan.stages_per_rank, plan.replica_batches)


# The order in which the micro-batches of a direction are processed, and what each of them waits for.


@dataclass(frozen=True, slots=True)
class QueuedMicroBatch:
    """One micro-batch in the queue of its direction. `batch` and `group` are ranges of positions in that queue.

    A rank with several stages takes a whole group through one stage before it takes any of it through the next.
    `earlier` is, for each direction, the number of micro-batches in the batches before this one's.
    """

    micro_batch: int
    batch: range
    group: range
    earlier: tuple[int, ...]


def make_queues(placement: Sequence[Stages], batches: Sequence[Batch]) -> list[list[QueuedMicroBatch]]:
    """Return the micro-batches of each direction, in the order of the batches.

    >>> [[turn.group for turn in queue] for queue in make_queues([[(0,), (1,), (0,), (1,)]], [Batch(0, (5, 6, 7))])]
    [[range(0, 2), range(0, 2), range(2, 3)]]
    """
    sizes = [_compute_group_size(stages) for stages in placement]
    queues: list[list[QueuedMicroBatch]] = [[] for _ in placement]
    # Positions in the queue of one direction, for batches of 3 micro-batches and groups of 2:
    #
    #   position   0 1 2   3 4 5   6 7 8
    #   batch     |     |       |       |
    #   group     |   | |   |   |   |   |      a batch ends its last group early
    for batch in batches:
        # Counted in the order of `batches`, so it also covers the batches of the other directions.
        earlier = tuple(len(queue) for queue in queues)
        queue, size = queues[batch.direction], sizes[batch.direction]
        places = range(len(queue), len(queue) + len(batch.micro_batches))
        for index, micro_batch in enumerate(batch.micro_batches):
            start = index // size * size
            queue.append(QueuedMicroBatch(micro_batch, places, places[start : start + size], earlier))
    return queues


def _compute_group_size(stages: Stages) -> int:
    """Return the least number of stages from one stage of a rank to its next: the group then returns just in time.

    Megatron groups micro-batches in the same way (Narayanan et al. 2021, section 2.2.2).

    >>> _compute_group_size([(0, 1), (2,), (3,), (2,), (3,)])
    2
    """
    pairs = combinations(enumerate(map(frozenset, stages)), 2)
    apart = (later - stage for (stage, ranks), (later, later_ranks) in pairs if ranks & later_ranks)
    return min(apart, default=len(stages))


# The simulation that makes schedules: an action starts as soon as its inputs are ready and all its ranks are free.


FORWARD, BACKWARD, WEIGHTS = ActionKind
KINDS = tuple(ActionKind)


@dataclass(eq=False)
class _StageState:
    """One stage of one direction, and how many micro-batches its ranks have started and finished, by kind."""

    rule: ScheduleRule
    direction: int
    stage: int
    stages: int
    ranks: tuple[int, ...]
    queue: Sequence[QueuedMicroBatch]
    before: _StageState | None = None
    after: _StageState | None = None
    sharing: list[_StageState] = field(default_factory=list)  # stages that share a rank, any direction, itself too
    # Of each of its ranks: how many forwards it may hold, and its stages in this direction.
    quotas: list[tuple[int, list[_StageState]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = dict.fromkeys(ActionKind, 0)
        self.done = dict.fromkeys(ActionKind, 0)
        self.last = list(self.rule.units)[-1]

    def compute_priority(self, kind: ActionKind) -> tuple[int, ...]:
        """Return a sort key; the least starts first.

        Forwards come first, since all later stages wait for them; the limit makes forwards and backwards alternate.
        """
        turn = self.queue[self.started[kind]]
        depth = self.stage if kind is FORWARD else self.stages - 1 - self.stage
        return KINDS.index(kind), turn.group.start, depth, self.started[kind], self.direction

    def is_ready(self, kind: ActionKind) -> bool:
        """Return whether the next micro-batch has all its inputs; free ranks are not considered."""
        position = self.started[kind]
        if position == len(self.queue):
            return False
        if kind is WEIGHTS:
            return self.done[BACKWARD] > position
        if kind is BACKWARD:
            needs = self.queue[position].batch.stop if self.rule.drains else position + 1
            return self.done[FORWARD] >= needs and (self.after is None or self.after.done[BACKWARD] > position)
        turn = self.queue[position]
        if self.before is not None and self.before.done[FORWARD] <= position:
            return False
        # The batches before must be finished: on this stage, or (`alone`) on all stages of its ranks. `last` is the
        # kind that ends a micro-batch here: WEIGHTS where the rule splits it off, else BACKWARD.
        watched = self.sharing if self.rule.alone else (self,)
        if any(post.done[post.last] < turn.earlier[post.direction] for post in watched):
            return False
        # The other stages of its ranks must have started all that comes first: of earlier stages this group as well, of
        # later stages all groups before it. A rank with the stages 0 and 2 thus starts, in groups of two (`F1/2`:
        # micro-batch 1 in stage 2):
        #
        #   F0/0 F1/0   F0/2 F1/2   F2/0 F3/0   F2/2 F3/2
        for post in self.sharing:
            first = turn.group.stop if post.stage < self.stage else turn.group.start
            if post is not self and post.direction == self.direction and post.started[FORWARD] < first:
                return False
        # May the ranks hold one more forward? Weights' gradients are deferred until a rank holds as much as the first
        # rank may, and no longer. 1F1B on three ranks, the limits are 3, 2 and 1:
        #
        #   F0 F1 F2 .  .  .  .  B0 B0 F3        3 held: F3 waits for B0
        #   .  F0 F1 .  .  B0 B0 F2              2 held: F2 waits for B0
        #   .  .  F0 B0 B0 F1 B1 B1
        return not self.rule.limited or all(
            _count_held(posts, BACKWARD) < limit and _count_held(posts, self.last) < self.stages
            for limit, posts in self.quotas
        )

    def start(self, kind: ActionKind, now: int) -> Slot:
        """Start the next micro-batch."""
        work = PipelineAction(kind, self.direction, self.stage, self.queue[self.started[kind]].micro_batch)
        self.started[kind] += 1
        return Slot(work, now, now + self.rule.units[kind])


def _count_held(posts: Iterable[_StageState], until: ActionKind) -> int:
    return sum(post.started[FORWARD] - post.done[until] for post in posts)


def simulate(
    rule: ScheduleRule, placement: Sequence[Stages], queues: Sequence[Sequence[QueuedMicroBatch]]
) -> tuple[tuple[Slot, ...], ...]:
    """Return the slots of each rank, in order of time.

    No rank waits for ever. Consider, of the forwards left, the first in the order of batches, groups and stages: its
    inputs are ready, so only the limit can block it. A rank with k stages before this one, which are at least a group's
    size g apart, may hold k g forwards, and one more for each stage from here to the last. If it is full, it therefore
    holds a micro-batch of this very stage that has gone on to a later one. The same holds if that micro-batch is
    blocked, and so on to the last stage, where a micro-batch goes backward.
    """
    posts: list[_StageState] = []
    for direction, stages in enumerate(placement):
        count, queue = len(stages), queues[direction]
        line = [_StageState(rule, direction, stage, count, tuple(ranks), queue) for stage, ranks in enumerate(stages)]
        quotas: dict[int, tuple[int, list[_StageState]]] = {}
        for post, before, after in zip(line, [None, *line], [*line[1:], None], strict=False):
            post.before, post.after = before, after
            post.quotas = [quotas.setdefault(rank, (count - post.stage, [])) for rank in post.ranks]
            for _, mine in post.quotas:
                mine.append(post)
        posts += line
    for post in posts:
        post.sharing = [other for other in posts if set(other.ranks) & set(post.ranks)]
    # A simulation by events: at each time at which an action ends, start whatever can start, in order of priority.
    #
    #   now = 2    running: F1 on rank 0 (ends at 3), B0 on rank 3 (ends at 4)    -> next event at 3
    lanes: list[list[Slot]] = [[] for _ in {rank for post in posts for rank in post.ranks}]
    running: list[tuple[_StageState, Slot]] = []
    now = 0
    while started := _start(posts, lanes, now) + running:
        # Advance to the next time at which an action ends: only then can others become ready.
        now = min(slot.stop for _, slot in started)
        running = [(post, slot) for post, slot in started if slot.stop > now]
        for post, slot in started:
            post.done[slot.work.kind] += slot.stop == now
    return tuple(map(tuple, lanes))


def _start(posts: Iterable[_StageState], lanes: Sequence[list[Slot]], now: int) -> list[tuple[_StageState, Slot]]:
    """Start the actions that can start, by priority."""
    idle = {rank for rank, lane in enumerate(lanes) if not lane or lane[-1].stop <= now}
    able = [post for post in posts if idle.issuperset(post.ranks)]
    candidates = [(post, kind) for post in able for kind in post.rule.units if post.is_ready(kind)]
    started = []
    for post, kind in sorted(candidates, key=lambda pair: pair[0].compute_priority(pair[1])):
        # An action of higher priority may have taken one of the ranks.
        if idle.issuperset(post.ranks):
            idle.difference_update(post.ranks)
            slot = post.start(kind, now)
            for rank in post.ranks:
                lanes[rank].append(slot)
            started.append((post, slot))
    return started
