"""A training in stages, and a checkpoint of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpi4dl_nb.engines.train.recipe import Recipe
from tests.train.trainings import PLANS, make_data, make_recipe, run_on_ranks


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return make_recipe(PLANS["stages"])


@pytest.fixture(scope="module")
def stored(recipe: Recipe, tmp_path_factory) -> Path:
    return run_on_ranks(recipe, make_data(recipe, 1), into=tmp_path_factory.mktemp("stored")).saved
