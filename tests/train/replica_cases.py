"""Replicas that do not wait for each other, on seven ranks; each case runs on every rank, over any transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.world import SubGroup, World
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.asynchrony import Asynchrony, ReplicaStudy
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, to_plain_names, train_reference
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.train_replicas import replay, train_replicas
from mpi4dl_nb.engines.train.verify import verify
from tests.zoo import Chain, Skips

RANKS, SHAPE = 7, (2, 3, 10, 12)
ALONE = Plan(split_size=1, spatial_size=0, precision="float64")
TILED = Plan(split_size=1, num_spatial_parts=2, slice_method="vertical", precision="float64")
STAGES = Plan(split_size=2, spatial_size=0, precision="float64", parts=2, schedule="1f1b")
LOSS = nn.CrossEntropyLoss()
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)


@cache
def make_model(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@cache
def prepare_recipe(kind: type[nn.Module], plan: Plan) -> Recipe:
    return replace(prepare(make_model(kind), plan, SHAPE, optimiser=SGD), seed=5)


def share_recipe(world: World, kind: type[nn.Module], plan: Plan) -> Recipe:
    """The recipe on every rank; one of them has traced the model."""
    return world.all_gather(prepare_recipe(kind, plan) if world.rank == 0 else None)[0]


def make_batch(number: int) -> Mapping[str, Tensor]:
    """Batch `number`."""
    random = torch.Generator().manual_seed(number)
    images = torch.randn(SHAPE, generator=random, dtype=torch.float64)
    return {"images": images, "labels": torch.randint(5, SHAPE[:1], generator=random)}


def compute_distance(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """|mine - theirs| / |theirs|, all tensors as one vector."""
    assert mine.keys() == theirs.keys()
    squares = [((mine[n] - t).square().sum(), t.square().sum()) for n, t in theirs.items()]
    return float((sum(d for d, _ in squares) / sum(t for _, t in squares)) ** 0.5)


def run_study(world: World, kind: type[nn.Module], plan: Plan, **chosen: object) -> ReplicaStudy:
    return train_replicas(world, share_recipe(world, kind, plan), Asynchrony(**chosen), make_batch)


def assert_replayed(world: World, kind: type[nn.Module], plan: Plan, study: ReplicaStudy) -> None:
    """One process that does the same again has the same weights."""
    if world.rank == 0:
        again = replay(study, make_model(kind), LOSS, prepare_recipe(kind, plan), make_batch)
        assert len(again) == len(study.weights)
        for mine, theirs in zip(study.weights, again, strict=True):
            assert compute_distance(to_plain_names(mine), theirs) <= 1e-10


def assert_like_one_process(world: World, kind: type[nn.Module], study: ReplicaStudy) -> None:
    """The plain model, trained on the same batches in the order of the study."""
    if world.rank == 0:
        order = [deed.subject for deed in study.deeds]
        oracle = train_reference(
            ReferenceTraining(make_model(kind), LOSS, SGD, torch.float64, seed=5), map(make_batch, order)
        )
        for mine in study.weights:
            assert compute_distance(to_plain_names(mine), oracle.weights) <= 1e-10
        wanted = [losses[0] for losses in oracle.losses]
        found = {turn.batch: turn.loss for turn in study.turns}
        torch.testing.assert_close([found[batch] for batch in order], wanted, rtol=1e-10, atol=0)


def check_server_replay(world: World) -> None:
    study = run_study(world, Skips, ALONE, replicas=4, steps=5, slow={1: 0.03})
    assert len(study.deeds) == len(study.turns) == len(study.staleness) == 20
    assert sorted(turn.batch for turn in study.turns) == list(range(20))
    assert study.histogram.keys() != {0}
    assert_replayed(world, Skips, ALONE, study)


def check_server_of_tiles_replay(world: World) -> None:
    study = run_study(world, Skips, TILED, replicas=3, steps=3)
    assert_replayed(world, Skips, TILED, study)


def check_staleness_aware_server_of_stages_replay(world: World) -> None:
    study = run_study(world, Skips, STAGES, replicas=3, steps=3, staleness_aware=True, slow={0: 0.02})
    assert_replayed(world, Skips, STAGES, study)


def check_turns_without_staleness(world: World) -> None:
    study = run_study(world, Chain, ALONE, replicas=3, steps=3, max_staleness=0)
    assert study.histogram == {0: 9}
    assert study.batches == (3, 3, 3)
    assert_like_one_process(world, Chain, study)


def check_bounded_staleness(world: World) -> None:
    study = run_study(world, Chain, ALONE, replicas=4, steps=4, max_staleness=2, slow={3: 0.02})
    assert len(study.staleness) == 16
    assert max(study.staleness) <= 2
    assert_replayed(world, Chain, ALONE, study)


def check_one_replica_and_a_server(world: World) -> None:
    study = run_study(world, Skips, ALONE, replicas=1, steps=3)
    assert_like_one_process(world, Skips, study)


def check_one_peer(world: World) -> None:
    study = run_study(world, Skips, ALONE, mode="peers", replicas=1, steps=3)
    assert_like_one_process(world, Skips, study)


def check_peers_replay(world: World) -> None:
    study = run_study(world, Skips, ALONE, mode="peers", replicas=4, steps=5, slow={2: 0.03})
    kinds = [deed.kind for deed in study.deeds]
    assert kinds.count("offer") == kinds.count("answer") == kinds.count("close") == len(study.staleness) > 0
    assert kinds.count("step") == len(study.turns) >= 20
    assert_replayed(world, Skips, ALONE, study)


def check_peers_of_tiles_replay(world: World) -> None:
    study = run_study(world, Skips, TILED, mode="peers", replicas=3, steps=4, average_every=2)
    assert_replayed(world, Skips, TILED, study)


def check_peers_keep_their_sum_and_converge(world: World) -> None:
    """Without updates only the means are left: nothing is gained or lost by them."""
    recipe = share_recipe(world, Chain, ALONE)
    still = replace(recipe, optimiser=partial(torch.optim.SGD, lr=0.0))
    own = {n: w.double() + world.rank if n in recipe.graph.trainable else w for n, w in recipe.state.items()}
    study = train_replicas(world, replace(still, state=own), Asynchrony(mode="peers", replicas=5, steps=12), make_batch)
    rows = [torch.cat([copy[n].flatten() for n in sorted(recipe.graph.trainable)]) for copy in study.weights]
    first = torch.cat([recipe.state[n].double().flatten() for n in sorted(recipe.graph.trainable)])
    torch.testing.assert_close(sum(rows) / 5, first + 2, rtol=1e-12, atol=1e-12)
    assert max(float((a - b).abs().max()) for a, b in pairwise(rows)) < 1


def check_schedulers_and_bounded_gradients_replay(world: World) -> None:
    """The server steps the scheduler and bounds the norm, or each peer does."""
    rules = {"clip_norm": 0.2, "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)}
    recipe = replace(share_recipe(world, Chain, TILED), **rules)
    for chosen in ({"staleness_aware": True}, {"mode": "peers"}):
        study = train_replicas(world, recipe, Asynchrony(replicas=3, steps=4, **chosen), make_batch)
        if world.rank == 0:
            again = replay(study, make_model(Chain), LOSS, recipe, make_batch)
            for mine, theirs in zip(study.weights, again, strict=True):
                assert compute_distance(to_plain_names(mine), theirs) <= 1e-10


def check_synchronous_replicas(world: World) -> None:
    study = run_study(world, Skips, STAGES, mode="synchronous", replicas=3, steps=3, slow={0: 0.01})
    assert study.histogram == {0: 3}
    assert study.batches == (3, 3, 3)
    if world.rank == 0:
        steps = [[make_batch(3 * step + replica) for replica in range(3)] for step in range(3)]
        whole = [{name: torch.cat([part[name] for part in parts]) for name in parts[0]} for parts in steps]
        alone = ReferenceTraining(make_model(Skips), LOSS, SGD, torch.float64, seed=5, micro_batches=6)
        oracle = train_reference(alone, whole)
        assert compute_distance(to_plain_names(study.weights[0]), oracle.weights) <= 1e-10


def check_sub_worlds_at_once(world: World) -> None:
    """Three ranks and four of them verify plans of their own, whatever their numbers are outside."""
    ranks = (5, 1, 3) if world.rank in (1, 3, 5) else (0, 2, 4, 6)
    sub = SubGroup(world, ranks)
    assert sub.all_gather((world.rank, "x" * world.rank)) == [(rank, "x" * rank) for rank in ranks]
    plan = replace(TILED, num_spatial_parts=len(ranks))
    assert verify(sub, share_recipe(sub, Skips, plan), make_model(Skips), LOSS, seed=0)["ok"]
    sub.barrier()


def _check_failure(world: World, fails: int, **chosen: object) -> None:
    """Rank `fails` cannot read its second batch: all others stop, at once and by an error."""

    def make_batch_or_fail(number: int) -> Mapping[str, Tensor]:
        if world.rank == fails and number > 2:
            raise RankError("no such picture")
        return make_batch(number)

    said, recipe = "nothing", share_recipe(world, Chain, TILED)
    try:
        train_replicas(world, recipe, Asynchrony(replicas=3, steps=50, **chosen), make_batch_or_fail)
    except RankError as error:
        said = str(error)
        world.revoke()
    world.recover()
    told = world.all_gather(said)
    assert told[fails] == "no such picture"
    assert "nothing" not in told


def check_failure_under_a_server(world: World) -> None:
    _check_failure(world, fails=3, mode="server", max_staleness=1)


def check_failure_among_peers(world: World) -> None:
    _check_failure(world, fails=4, mode="peers")


CASES = {
    case.__name__: case
    for case in (
        check_server_replay, check_server_of_tiles_replay, check_staleness_aware_server_of_stages_replay,
        check_turns_without_staleness, check_bounded_staleness, check_one_replica_and_a_server,
        check_one_peer, check_peers_replay, check_peers_of_tiles_replay,
        check_schedulers_and_bounded_gradients_replay, check_peers_keep_their_sum_and_converge,
        check_synchronous_replicas, check_sub_worlds_at_once, check_failure_under_a_server,
        check_failure_among_peers,
    )
}  # fmt: skip
