"""`mpiexec -n N python -m mpi4py -m tests.judged LOSS FLAGS`: the command `verify`, with a loss of `monai.losses`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence

from torch import nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.mpi import MpiWorld
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.verify import verify
from tests.stock import LOSSES


def prepare_with_monai_loss(name: str, flags: Sequence[str]) -> tuple[nn.Module, nn.Module, Recipe]:
    """The model, the loss, and what every rank has to know."""
    from monai import losses

    chosen = options.make_parser("").parse_args(flags)
    model, loss = options.build_model(chosen), getattr(losses, name)(**LOSSES[name])
    shape = (chosen.batch_size, 3, *options.parse_image_size(chosen.image_size))
    labels = TensorSpec((shape[0], 1, *shape[2:]), "int64")
    plan, moves = options.make_plan(chosen), options.choose_optimiser(chosen)
    return model, loss, prepare(model, plan, shape, loss, moves, labels=labels, device=chosen.device)


def main(arguments: Sequence[str]) -> int:
    """One line of JSON, as `verify` writes it."""
    warnings.simplefilter("ignore")
    model, loss, recipe = prepare_with_monai_loss(*arguments[:1], arguments[1:])
    world = MpiWorld()
    line = verify(world, recipe, model, loss, seed=0)
    if world.rank == 0:
        print(json.dumps(line))
    return int(not line["ok"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
