"""The table of MPI4DL's commands: each row asks for the ranks that it names, and runs with a small model."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from mpi4dl_nb.engines.bench.halo import make_halo_case, make_halo_parser, make_halo_runner
from mpi4dl_nb.engines.cli import options, train_command
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.images.loader import LoaderOptions
from mpi4dl_nb.engines.train.recipe import Recipe, count_step_images
from mpi4dl_nb.engines.train.train_loop import CollectiveTrainLoop, RankTrainLoop, run
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.training_events import StepResult

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-mpi4dl.md"
ROW = re.compile(
    r"^\| `benchmark_(\w+)\.py (--[^`]+)` \| `-n (\d+)`, `(train|bench halo) ?(--[^`]+)?`, the same flags", re.MULTILINE
)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))
TRAININGS = [(name, f"{flags} {more}", int(ranks)) for name, flags, ranks, command, more in ROWS if command == "train"]
SMALL = {"resnet": "--num-layers 20", "amoebanet": "--num-layers 6 --num-filters 16"}


def test_every_kind_of_the_predecessors_benchmarks_is_there():
    assert {name for name, *_ in ROWS} == {
        "amoebanet_sp", "resnet_sp", "resnet_lp", "amoebanet_lp", "amoebanet_gems_master", "resnet_gems_master",
        "amoebanet_gems_master_with_sp", "sp_halo_exchange",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "ranks"), TRAININGS)
def test_a_row_needs_the_ranks_that_it_names(name: str, flags: str, ranks: int):
    assert options.make_plan(train_command.make_train_parser().parse_args(flags.split())).ranks == ranks


def run_epoch(world: World, recipe: Recipe, images: SyntheticImages) -> list[StepResult]:
    """One epoch."""
    course = RankTrainLoop(world, RankTraining(world, recipe), recipe.step_specs, images, LoaderOptions())
    with closing(course):
        return [event for event in run(CollectiveTrainLoop(course)) if isinstance(event, StepResult)]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "flags", "ranks"), TRAININGS)
def test_a_row_runs_with_a_small_model(name: str, flags: str, ranks: int):
    small = f"{SMALL[name.split('_', maxsplit=1)[0]]} --image-size 64 --batch-size 2"
    chosen = train_command.make_train_parser().parse_args(f"{flags} {small}".split())
    _, recipe = options.make_recipe(chosen, ranks)
    images = SyntheticImages(count_step_images(recipe), (64, 64), chosen.num_classes)
    (told,) = run_ranks(ranks, lambda world: run_epoch(world, recipe, images))[0]
    assert told.images == 2 * recipe.plan.batches
    assert told.loss > 0


def test_the_halo_benchmark_takes_the_predecessors_flags():
    (flags,) = [flags for name, flags, *_ in ROWS if name == "sp_halo_exchange"]
    case = make_halo_case(make_halo_parser().parse_args(flags.split()))
    assert (case.plan.ranks, case.image_shape[-2:]) == (4, (32, 32))
    assert all(runner.exchange.sends for runner, _ in run_ranks(4, lambda world: make_halo_runner(case, world)))
