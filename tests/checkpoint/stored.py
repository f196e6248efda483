"""A training in stages, and a checkpoint of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpi4dl_nb.engines.train.recipe import Recipe
from tests.checkpoint.trainings import PLANS, data, on_ranks, recipe_of


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return recipe_of(PLANS["stages"])


@pytest.fixture(scope="module")
def stored(recipe: Recipe, tmp_path_factory) -> Path:
    return on_ranks(recipe, data(recipe, 1), into=tmp_path_factory.mktemp("stored")).saved
