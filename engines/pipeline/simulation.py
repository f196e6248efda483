"""The simulation that makes schedules: work starts as soon as it may and all its ranks are free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from engines.pipeline.queues import QueuedMicroBatch, Stages
from engines.pipeline.work import ActionKind, PipelineAction, Slot

__all__ = ["ScheduleRule", "simulate"]

FORWARD, BACKWARD, WEIGHTS = ActionKind
KINDS = tuple(ActionKind)
WHOLE, SPLIT = {FORWARD: 1, BACKWARD: 2}, {FORWARD: 1, BACKWARD: 1, WEIGHTS: 1}


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What tells one schedule from another.

    `drains`: a stage goes back only when it has the whole batch forward.
    `limited`: a rank holds at most as many forwards of a direction as there are stages from its first one on.
    `splits`: the gradient of the weights is work by itself, and waits until there is nothing else to do.
    `alone`: a rank begins a batch only when it is done with all earlier ones, of whatever direction.
    """

    drains: bool = False
    limited: bool = False
    splits: bool = False
    alone: bool = False

    @property
    def units(self) -> dict[ActionKind, int]:
        """How long each kind of work takes, in units of one forward."""
        return SPLIT if self.splits else WHOLE


@dataclass(eq=False)
class _RankQuota:
    """What one rank does in one direction: its stages, and how many forwards it may hold."""

    limit: int
    posts: list[_StageState] = field(default_factory=list)


@dataclass(eq=False)
class _StageState:
    """One stage of one direction, and how many micro-batches its ranks have started and done, by kind."""

    rule: ScheduleRule
    direction: int
    stage: int
    stages: int
    ranks: tuple[int, ...]
    queue: Sequence[QueuedMicroBatch]
    before: _StageState | None = None
    behind: _StageState | None = None
    beside: list[_StageState] = field(default_factory=list)  # those of any direction that share a rank, itself included
    shares: list[_RankQuota] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = dict.fromkeys(ActionKind, 0)
        self.done = dict.fromkeys(ActionKind, 0)
        self.last = list(self.rule.units)[-1]

    def compute_priority(self, kind: ActionKind) -> tuple[int, ...]:
        """Least first. Forwards are, for all later stages wait for them; the limit makes them alternate."""
        turn = self.queue[self.started[kind]]
        depth = self.stage if kind is FORWARD else self.stages - 1 - self.stage
        return KINDS.index(kind), turn.group.start, depth, self.started[kind], self.direction

    def is_ready(self, kind: ActionKind) -> bool:
        """Whether the next micro-batch has all that it waits for, but for free ranks."""
        place = self.started[kind]
        if place == len(self.queue):
            return False
        if kind is WEIGHTS:
            return self.done[BACKWARD] > place
        if kind is BACKWARD:
            needs = self.queue[place].batch.stop if self.rule.drains else place + 1
            return self.done[FORWARD] >= needs and (self.behind is None or self.behind.done[BACKWARD] > place)
        fed = self.before is None or self.before.done[FORWARD] > place
        return fed and self._can_begin(self.queue[place]) and self._is_next(self.queue[place]) and self._has_room()

    def start(self, kind: ActionKind, now: int) -> Slot:
        """Begin the next micro-batch."""
        work = PipelineAction(kind, self.direction, self.stage, self.queue[self.started[kind]].micro_batch)
        self.started[kind] += 1
        return Slot(work, now, now + self.rule.units[kind])

    def _can_begin(self, turn: QueuedMicroBatch) -> bool:
        """Whether the batches before are finished."""
        watched = self.beside if self.rule.alone else (self,)
        return all(post.done[post.last] >= turn.earlier[post.direction] for post in watched)

    def _is_next(self, turn: QueuedMicroBatch) -> bool:
        """Whether the ranks' other stages have taken all that comes before it: group by group, each in stage order."""
        return all(
            post.started[FORWARD] >= (turn.group.stop if post.stage < self.stage else turn.group.start)
            for post in self.beside
            if post.direction == self.direction and post is not self
        )

    def _has_room(self) -> bool:
        """Weights' gradients are put off until a rank holds as much as the first one may, not longer."""
        if not self.rule.limited:
            return True
        return all(
            _count_held(share.posts, BACKWARD) < share.limit and _count_held(share.posts, self.last) < self.stages
            for share in self.shares
        )


def _count_held(posts: Iterable[_StageState], until: ActionKind) -> int:
    return sum(post.started[FORWARD] - post.done[until] for post in posts)


def _make_stages(
    rule: ScheduleRule, direction: int, stages: Stages, queue: Sequence[QueuedMicroBatch]
) -> list[_StageState]:
    """The posts of one direction, joined to each other."""
    count = len(stages)
    line = [_StageState(rule, direction, stage, count, tuple(ranks), queue) for stage, ranks in enumerate(stages)]
    shares: dict[int, _RankQuota] = {}
    for post in line:
        post.before = line[post.stage - 1] if post.stage else None
        post.behind = line[post.stage + 1] if post.stage + 1 < count else None
        post.shares = [shares.setdefault(rank, _RankQuota(count - post.stage)) for rank in post.ranks]
        for share in post.shares:
            share.posts.append(post)
    return line


def simulate(
    rule: ScheduleRule, placement: Sequence[Stages], queues: Sequence[Sequence[QueuedMicroBatch]]
) -> tuple[tuple[Slot, ...], ...]:
    """The slots of each rank, in order of time.

    No rank waits for ever. Of the forwards that are left, take the first in the order of batches, groups and
    stages: what it needs is done, and only the limit can hold it up. A rank of k stages before this one, which lie
    at least a group's size g apart, may hold k g forwards, and one more for each stage from here to the last. If it
    is full, then with a micro-batch of this very stage that is further on; the same holds where that one is held
    up, and so on to the last stage, where a micro-batch goes back.
    """
    lines = [_make_stages(rule, direction, stages, queues[direction]) for direction, stages in enumerate(placement)]
    posts = [post for line in lines for post in line]
    for post in posts:
        post.beside = [other for other in posts if set(other.ranks) & set(post.ranks)]
    lanes: list[list[Slot]] = [[] for _ in {rank for post in posts for rank in post.ranks}]
    running: list[tuple[_StageState, Slot]] = []
    now = 0
    while started := _start(posts, lanes, now) + running:
        now = min(slot.stop for _, slot in started)
        running = [(post, slot) for post, slot in started if slot.stop > now]
        for post, slot in started:
            post.done[slot.work.kind] += slot.stop == now
    return tuple(map(tuple, lanes))


def _start(posts: Iterable[_StageState], lanes: Sequence[list[Slot]], now: int) -> list[tuple[_StageState, Slot]]:
    """Start what may start, most urgent first."""
    idle = {rank for rank, lane in enumerate(lanes) if not lane or lane[-1].stop <= now}
    able = [post for post in posts if idle.issuperset(post.ranks)]
    found = [
        (post.compute_priority(kind), post, kind) for post in able for kind in post.rule.units if post.is_ready(kind)
    ]
    started = []
    for _, post, kind in sorted(found, key=itemgetter(0)):
        if idle.issuperset(post.ranks):
            idle.difference_update(post.ranks)
            slot = post.start(kind, now)
            for rank in post.ranks:
                lanes[rank].append(slot)
            started.append((post, slot))
    return started
