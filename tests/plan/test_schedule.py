"""Schedules: as pictures, against their papers, and on placements that nobody thought of."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan.make_schedule import make_schedule
from mpi4dl_nb.engines.plan.schedule import SCHEDULES, ActionKind, Batch, PipelineAction, Schedule, Slot
from tests.sampling import set_trials

Stages = list[tuple[int, ...]]

TILES, LOOP = [(0, 1, 2, 3), (4,)], [(0, 1, 2, 3), (4,), (5,), (4,), (5,)]
GRID = [(ranks, micro_batches) for ranks in (2, 3, 4, 8) for micro_batches in range(1, 17)]


def make_line(ranks: int, per_rank: int = 1) -> Stages:
    return [(stage % ranks,) for stage in range(ranks * per_rank)]


def reverse_ranks(stages: Stages) -> Stages:
    last = max(rank for ranks in stages for rank in ranks)
    return [tuple(last - rank for rank in ranks) for ranks in stages]


def schedule_batches(name: str, placement: list[Stages], directions: tuple[int, ...], micro_batches: int) -> Schedule:
    """One batch of `micro_batches` for each entry of `directions`, numbered through."""
    starts = range(0, micro_batches * len(directions), micro_batches)
    numbers = [tuple(range(start, start + micro_batches)) for start in starts]
    return make_schedule(name, placement, [Batch(*each) for each in zip(directions, numbers, strict=True)])


PICTURES = {
    "GPipe, but the first goes back first": (
        ("fill_drain", [make_line(3)], (0,), 3),
        """
        F0 F1 F2 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2
        .  F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2 .  .
        .  .  F0 F1 F2 B0 B0 B1 B1 B2 B2 .  .  .  .
        """,
    ),
    "two batches, one flush after the other": (
        ("fill_drain", [make_line(2)], (0, 0), 2),
        """
        F0 F1 .  .  .  B0 B0 B1 B1 F2 F3 .  .  .  B2 B2 B3 B3
        .  F0 F1 B0 B0 B1 B1 .  .  .  F2 F3 B2 B2 B3 B3 .  .
        """,
    ),
    "1F1B": (
        ("1f1b", [make_line(3)], (0,), 4),
        """
        F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
        .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .
        """,
    ),
    "four tiles, then one rank": (
        ("1f1b", [TILES], (0,), 3),
        """
        F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
        """,
    ),
    "both directions, each by 1F1B": (
        ("1f1b", [make_line(3), reverse_ranks(make_line(3))], (0, 1), 2),
        """
        F0 F1 .  f2 b2 b2 f3 b3 b3 B0 B0 B1 B1 .  .
        .  F0 f2 F1 f3 B0 B0 b2 b2 B1 B1 b3 b3 .  .
        f2 f3 F0 B0 B0 F1 B1 B1 .  b2 b2 .  .  b3 b3
        """,
    ),
    "interleaved, two stages on a rank": (
        ("interleaved", [make_line(2, 2)], (0,), 2),
        """
        F0/0 F1/0 F0/2 F1/2 .    .    B0/2 B0/2 .    B1/2 B1/2 B0/0 B0/0 B1/0 B1/0
        .    F0/1 F1/1 F0/3 B0/3 B0/3 F1/3 B1/3 B1/3 B0/1 B0/1 B1/1 B1/1 .    .
        """,
    ),
    "ZB-H1": (
        ("zero_bubble", [make_line(3)], (0,), 4),
        """
        F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
        """,
    ),
    "GEMS": (
        ("gems", [make_line(3), reverse_ranks(make_line(3))], (0, 1, 0), 1),
        """
        F0 .  .  .  .  .  .  B0 B0 f1 b1 b1 F2 .  .  .  .  .  .  .  .  B2 B2
        .  F0 .  .  .  B0 B0 f1 .  .  .  .  b1 b1 F2 .  .  .  .  B2 B2 .  .
        .  .  F0 B0 B0 f1 .  .  .  .  .  .  .  .  b1 b1 F2 B2 B2 .  .  .  .
        """,
    ),
    "GEMS with tiles: ranks 1 to 3 are in both": (
        ("gems", [TILES, reverse_ranks(TILES)], (0, 1), 2),
        """
        F0 F1 .  .  .  B0 B0 B1 B1 .  f2 f3 b2 b2 b3 b3 .  .
        F0 F1 .  .  .  B0 B0 B1 B1 f2 f3 .  .  .  b2 b2 b3 b3
        F0 F1 .  .  .  B0 B0 B1 B1 f2 f3 .  .  .  b2 b2 b3 b3
        F0 F1 .  .  .  B0 B0 B1 B1 f2 f3 .  .  .  b2 b2 b3 b3
        .  F0 F1 B0 B0 B1 B1 .  .  f2 f3 .  .  .  b2 b2 b3 b3
        """,
    ),
}


@pytest.mark.parametrize(("made", "picture"), PICTURES.values(), ids=PICTURES)
def test_pictures(made, picture):
    assert schedule_batches(*made).format_table() == dedent(picture).strip()


def list_steps(made: Schedule, rank: int) -> list[str]:
    return [f"{work.kind.value}{work.micro_batch}" for work in made.get_actions(rank)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_1f1b_warms_up_and_then_alternates(name, ranks, micro_batches):
    made = schedule_batches(name, [make_line(ranks)], (0,), micro_batches)
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        pairs = [step for i in range(micro_batches - ahead) for step in (f"F{ahead + i}", f"B{i}")]
        expected = [f"F{i}" for i in range(ahead)] + pairs
        assert list_steps(made, rank) == expected + [f"B{i}" for i in range(micro_batches - ahead, micro_batches)]
        assert made.count_in_flight(rank) == min(ranks - rank, micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_fill_drain_goes_forward_and_then_back(ranks, micro_batches):
    made = schedule_batches("fill_drain", [make_line(ranks)], (0,), micro_batches)
    for rank in range(ranks):
        assert list_steps(made, rank) == [f"{kind}{i}" for kind in "FB" for i in range(micro_batches)]


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_zero_bubble_holds_no_more_than_1f1b(ranks, micro_batches):
    made, plain = (schedule_batches(name, [make_line(ranks)], (0,), micro_batches) for name in ("zero_bubble", "1f1b"))
    most = max(plain.count_in_flight(rank) for rank in range(ranks))
    assert max(made.count_in_flight(rank) for rank in range(ranks)) == most
    assert made.length <= plain.length


@pytest.mark.parametrize("per_rank", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_interleaved_takes_groups_in_megatrons_order(ranks, per_rank):
    """Narayanan et al. 2021, section 2.2.2: p micro-batches through a rank's first stage, then through its next."""
    made = schedule_batches("interleaved", [make_line(ranks, per_rank)], (0,), 2 * ranks)
    for rank in range(ranks):
        orders = {
            kind: [(work.micro_batch, work.stage // ranks) for work in made.get_actions(rank) if work.kind is kind]
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        }
        chunks = range(per_rank)
        for kind, chunk_order in ((ActionKind.FORWARD, chunks), (ActionKind.BACKWARD, chunks[::-1])):
            expected = [(g * ranks + i, c) for g in range(2) for c in chunk_order for i in range(ranks)]
            assert orders[kind] == expected
        megatron = (per_rank - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        assert made.count_in_flight(rank) == per_rank * ranks - rank <= megatron


def test_stages_on_a_few_ranks_loop_behind_tiles():
    made = schedule_batches("interleaved", [LOOP], (0,), 4)
    assert made.get_actions(0) == made.get_actions(3)
    assert [work.stage for work in made.get_actions(4)][:4] == [1, 1, 3, 3]


def test_mirrored_batches_share_a_rank_but_not_its_memory():
    placement = [make_line(4), reverse_ranks(make_line(4))]
    assert [schedule_batches("gems", placement, (0, 1, 0, 1), 3).count_in_flight(rank) for rank in range(4)] == [3] * 4
    assert [schedule_batches("fill_drain", placement, (0, 1), 3).count_in_flight(rank) for rank in range(4)] != [3] * 4


@st.composite
def draw_training_steps(draw) -> tuple[str, list[Stages], list[Batch]]:
    """Any schedule, stages on any ranks of up to six, one direction or two, and up to four batches."""
    anywhere = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=6)
    regular = st.builds(make_line, st.integers(1, 4), st.integers(1, 3))
    placement = [draw(st.one_of(anywhere, regular, st.sampled_from([TILES, LOOP])))]
    name = draw(st.sampled_from(list(SCHEDULES)))
    if name == "gems" or draw(st.booleans()):
        placement.append(draw(st.one_of(st.just(reverse_ranks(placement[0])), anywhere)))
    numbers = {rank: number for number, rank in enumerate(sorted({r for s in placement for on in s for r in on}))}
    dense = [[tuple(numbers[rank] for rank in on) for on in stages] for stages in placement]
    sizes = draw(st.lists(st.tuples(st.integers(0, len(dense) - 1), st.integers(0, 7)), min_size=1, max_size=4))
    ends = list(accumulate(size for _, size in sizes))
    batches = [Batch(way, tuple(range(end - size, end))) for (way, size), end in zip(sizes, ends, strict=True)]
    return name, dense, batches


@given(draw_training_steps())
@set_trials(300)
def test_each_rank_does_all_its_work_once_and_one_thing_at_a_time(step):
    name, placement, batches = step
    made = make_schedule(*step)
    kinds = set(ActionKind) if name == "zero_bubble" else {ActionKind.FORWARD, ActionKind.BACKWARD}
    for rank, lane in enumerate(made.lanes):
        expected = {
            PipelineAction(kind, batch.direction, stage, number)
            for batch in batches
            for stage, ranks in enumerate(placement[batch.direction])
            if rank in ranks
            for number in batch.micro_batches
            for kind in kinds
        }
        assert len(lane) == len(expected)
        assert set(made.get_actions(rank)) == expected
        assert all(one.stop <= other.start for one, other in pairwise(lane))


def find_slots(made: Schedule) -> dict[PipelineAction, Slot]:
    """When each work is done: by all of its ranks at once, hence in one order."""
    slots = {slot for lane in made.lanes for slot in lane}
    found = {slot.work: slot for slot in slots}
    assert len(found) == len(slots), "ranks of a stage do the same work at different times"
    return found


@given(draw_training_steps())
@set_trials(300)
def test_nothing_is_done_before_what_it_needs(step):
    name, placement, _ = step
    when = find_slots(make_schedule(*step))
    for work, slot in when.items():
        way, stage, number = work.direction, work.stage, work.micro_batch
        needs = {
            ActionKind.FORWARD: [PipelineAction(ActionKind.FORWARD, way, stage - 1, number)] if stage else [],
            ActionKind.BACKWARD: [PipelineAction(ActionKind.FORWARD, way, stage, number)]
            + [PipelineAction(ActionKind.BACKWARD, way, stage + 1, number)] * (stage + 1 < len(placement[way])),
            ActionKind.WEIGHTS: [PipelineAction(ActionKind.BACKWARD, way, stage, number)],
        }
        assert all(when[needed].stop <= slot.start for needed in needs[work.kind])
        units = 2 if work.kind is ActionKind.BACKWARD and name != "zero_bubble" else 1
        assert slot.stop - slot.start == units


@given(draw_training_steps())
@set_trials(300)
def test_a_stage_keeps_the_order_of_micro_batches_and_ends_a_batch_before_the_next(step):
    made, numbers = make_schedule(*step), {}
    for work, slot in sorted(find_slots(made).items(), key=lambda each: each[1].start):
        numbers.setdefault((work.direction, work.stage), {}).setdefault(work.kind, []).append((work.micro_batch, slot))
    for kinds in numbers.values():
        assert all([n for n, _ in done] == sorted(n for n, _ in done) for done in kinds.values())
        stops = dict(list(kinds.values())[-1])
        for batch in step[2]:
            begins = [slot.start for number, slot in kinds[ActionKind.FORWARD] if number in batch.micro_batches[:1]]
            before = [slot.stop for number, slot in stops.items() if number < min(batch.micro_batches, default=0)]
            assert all(max(before, default=0) <= begin for begin in begins)


@pytest.mark.parametrize("name", [name for name, rule in SCHEDULES.items() if rule.drains])
@given(step=draw_training_steps())
@set_trials(100)
def test_a_stage_drains_only_what_it_has_filled(name, step):
    _, placement, batches = step
    placement = placement * (1 + (len(placement) == 1))
    batch_of = {number: batch.micro_batches for batch in batches for number in batch.micro_batches}
    when = find_slots(make_schedule(name, placement, batches))
    for work, slot in when.items():
        if work.kind is ActionKind.BACKWARD:
            filled = [
                replace(work, kind=ActionKind.FORWARD, micro_batch=number) for number in batch_of[work.micro_batch]
            ]
            assert all(when[forward].stop <= slot.start for forward in filled)


@given(draw_training_steps())
@set_trials(300)
def test_no_rank_holds_more_than_it_may(step):
    name, placement, batches = step
    made = make_schedule(*step)
    batch_of = {number: index for index, batch in enumerate(batches) for number in batch.micro_batches}
    for rank in range(made.ranks):
        held = {ActionKind.BACKWARD: set(), ActionKind.WEIGHTS: set()}
        for work in made.get_actions(rank):
            what = work.direction, work.stage, work.micro_batch
            if work.kind is not ActionKind.FORWARD:
                held[work.kind].remove(what)
                continue
            for each in held.values():
                each.add(what)
            stages = placement[work.direction]
            first = next(stage for stage, ranks in enumerate(stages) if rank in ranks)
            mine = {kind: [w for w in each if w[0] == work.direction] for kind, each in held.items()}
            if SCHEDULES[name].limited:
                assert len(mine[ActionKind.BACKWARD]) <= len(stages) - first
            if SCHEDULES[name].splits:
                assert len(mine[ActionKind.WEIGHTS]) <= len(stages)
            if SCHEDULES[name].alone:
                assert len({batch_of[number] for _, _, number in held[ActionKind.BACKWARD]}) == 1


def test_what_makes_no_sense_is_refused():
    one = [Batch(0, (0, 1))]
    with pytest.raises(
        PlanError, match=r"'1f1f' is unknown\. Did you mean '1f1b'\? Choose one of fill_drain, 1f1b, interleaved"
    ):
        make_schedule("1f1f", [make_line(2)], one)
    with pytest.raises(PlanError, match="'gems' needs 2 directions, one of them mirrored, but the placement has 1"):
        make_schedule("gems", [make_line(2)], one)
    with pytest.raises(PlanError, match=r"Stage 1 of direction 0 is on ranks \(\)"):
        make_schedule("1f1b", [[(0,), ()]], one)
    with pytest.raises(PlanError, match=r"names the ranks 0, 2\. Number them from 0"):
        make_schedule("1f1b", [[(0,), (2,)]], one)
    with pytest.raises(PlanError, match="goes in direction 1, but the placement has 1"):
        make_schedule("1f1b", [make_line(2)], [Batch(1, (0,))])
    with pytest.raises(PlanError, match="Micro-batch 1 is in the step more than once"):
        make_schedule("1f1b", [make_line(2)], [*one, Batch(0, (1, 2))])
