"""A loss that is a module with weights and buffers of its own: trained on the ranks as in one process."""

from __future__ import annotations

import pytest
import torch

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, record_rank_run, verify
from tests.train.trainings import PLANS, Weighted, make_net, make_recipe


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["tiles and a stage", "both ways", "tiles to the loss"])
def test_a_loss_is_trained_as_in_one_process(name: str):
    recipe, model = make_recipe(PLANS[name], "sgd", loss=Weighted()), make_net()
    line, *_ = run_ranks(recipe.plan.ranks, lambda world: verify(world, recipe, model, Weighted(), seed=0))
    assert line["ok"], line


def test_the_gradients_of_the_loss_are_recorded_under_names_that_no_module_has():
    recipe = make_recipe(Plan(split_size=2, spatial_size=0, precision="float64"), "sgd", "none", loss=Weighted())
    (whole,) = make_batches(recipe, seed=0, steps=1)

    def work(world: LoopbackWorld):
        training = RankTraining(world, recipe)
        return record_rank_run(training, [training.cut(whole)])

    _, last = run_ranks(2, work)
    alone = ReferenceTraining(make_net(), Weighted(), recipe.optimiser, torch.float64, recipe.draws)
    alone.step(whole)
    mine, theirs = last.gradients[0]["loss: temperature"], alone.gradients["loss: temperature"]
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    assert theirs.abs() > 1e-6
    assert torch.equal(alone.buffers["loss: shares"].float(), Weighted().shares)
    assert alone.loss.temperature in set(alone.trained)
