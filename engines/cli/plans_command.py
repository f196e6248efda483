"""The command `plans`: predict all plans for some ranks of a known machine, and print the best, by speed or memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice

from torch import nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.predict.explain import explain
from mpi4dl_nb.engines.predict.forecast import ORDERS
from mpi4dl_nb.engines.predict.machines import MACHINES, resolve_machine
from mpi4dl_nb.engines.predict.search import search
from mpi4dl_nb.engines.train.optimiser_trial import count_optimiser_states


def run_plans(arguments: Sequence[str]) -> int:
    """Print the best plans, one line of JSON each, and what is predicted of each kind of parallelism.

    Raises PlanError if no plan can run or fits, and TraceError if the model cannot be traced.
    """
    flags = options.make_bare_parser("Predict all plans for some ranks of a machine, and print the best.")
    options.add_model_flags(flags)
    flags.add_argument("--image-size", default="512", help="pixels: one number, or HEIGHTxWIDTH")
    flags.add_argument("--batch-size", type=options.parse_positive, default=1, help="images of one replica")
    flags.add_argument("--seed", type=options.parse_seed, default=0)
    flags.add_argument("--ranks", type=options.parse_positive, default=4)
    flags.add_argument("--machine", default="DGX A100", help=f"one of {', '.join(MACHINES)}")
    flags.add_argument("--by", choices=ORDERS, default="speed", help="the best plan has most speed, or least memory")
    flags.add_argument("--memory-mb", type=options.parse_positive, help="memory that a rank may use (default: all)")
    flags.add_argument("--top", type=options.parse_positive, default=5, help="number of plans to print")
    flags.add_argument("--optimiser", choices=sorted(options.OPTIMISERS), default="sgd")
    chosen = flags.parse_args(arguments)
    machine, model, loss = resolve_machine(chosen.machine), options.build_model(chosen), nn.CrossEntropyLoss()
    states = count_optimiser_states(options.OPTIMISERS[chosen.optimiser], model, loss)
    rank_bytes = chosen.memory_mb << 20 if chosen.memory_mb else machine.get_rank_bytes(chosen.ranks)
    graph_of = TraceCache(model, options.get_image_shape(chosen), loss).get_graph
    forecasts = search(chosen.ranks, chosen.batch_size, graph_of, machine, rank_bytes, states, by=chosen.by)
    for forecast in islice(forecasts.fitting, chosen.top):
        numbers = {"images_per_s": forecast.images_per_s, "step_s": forecast.seconds, "peak_bytes": forecast.peak_bytes}
        print(json.dumps({"plan": forecast.plan.summary, **numbers}), flush=True)
    print(explain((*forecasts.fitting, *forecasts.too_large), forecasts.refused, rank_bytes, by=chosen.by))
    return 0
