"""The command line's flags, with the predecessor's names, and their meaning: a model, a plan, an image size."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn

from engines.bench.halo_case import HaloCase
from engines.cli.model_options import add_model_flags, build_model
from engines.cli.plan_options import parse_value
from engines.comm.collective_errors import run_on_first
from engines.comm.world import World
from engines.errors import PlanError
from engines.plan import OPTIONS, Plan
from engines.spatial.layout import check_fits
from engines.train.training import Optimiser, Recipe, describe_precision_change, prepare, trace_model

__all__ = [
    "FlagParser",
    "add_model_flags",
    "build_model",
    "choose_optimiser",
    "make_allreduce_parser",
    "make_halo_case",
    "make_halo_parser",
    "make_parser",
    "make_plan",
    "make_recipe",
    "make_throughput_parser",
    "make_throughput_recipe",
    "parse_image_size",
    "parse_positive",
    "parse_seconds",
    "parse_seed",
]

_SIDE = re.compile(r"\d{1,9}", re.ASCII)
_OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises PlanError with one sentence, as the rest of the project, and does not print."""

    def error(self, message: str) -> Any:
        raise PlanError(f"{message[0].upper()}{message[1:].rstrip('.')}. See --help.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the flags, and reject `--model=--`, of which argparse up to Python 3.12 makes an empty list."""
        found = super().parse_args(args, namespace)
        for action in self._actions:
            if action.nargs is None and getattr(found, action.dest, None) == []:
                self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return found


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make a parser of the flags that all commands share."""
    flags = FlagParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_model_flags(flags)
    flags.add_argument("--image-size", default="512", help="pixels: one number, or HEIGHTxWIDTH")
    flags.add_argument("--batch-size", type=int, default=1)
    flags.add_argument("--seed", type=parse_seed, default=0)
    flags.add_argument("--optimiser", choices=sorted(_OPTIMISERS), default="sgd")
    flags.add_argument("--learning-rate", type=float, default=0.001)
    flags.add_argument("--clip-norm", type=float, default=None, help="bound of the norm of all gradients together")
    flags.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    for field in fields(Plan):
        option = OPTIONS[field.name]
        names = [f"--{field.name.replace('_', '-')}", *option.flags]
        told: dict[str, Any] = {"dest": field.name, "help": option.help}
        # A switch that is off has no opposite flag; one that is on can be turned off by `--no-NAME`.
        if field.default is False:
            flags.add_argument(*names, action="store_true", **told)
        elif field.default is True:
            flags.add_argument(*names, action=argparse.BooleanOptionalAction, default=True, **told)
        else:
            flags.add_argument(*names, type=parse_value, default=field.default, **told)
    return flags


def make_halo_parser() -> argparse.ArgumentParser:
    """Make a parser of the halo benchmark's flags, with the predecessor's names."""
    flags = FlagParser(
        description="Time a halo exchange, there and back, against the same by hand in mpi4py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("--image-size", default="1024", help="pixels: one number, or HEIGHTxWIDTH")
    flags.add_argument(
        "--num-spatial-parts", type=parse_value, default=None, help=f"{OPTIONS['num_spatial_parts'].help} (4)"
    )
    flags.add_argument("--slice-method", type=parse_value, default="square", help=OPTIONS["slice_method"].help)
    counts = {"batch-size": 1, "halo-len": 3, "in-channels": 1, "out-channels": 256, "warmup": 10, "iterations": 100}
    for name, default in counts.items():
        flags.add_argument(f"--{name}", type=parse_positive, default=default)
    flags.add_argument("--dtype", "--precision", default="float32", choices=["float32", "float64"])
    flags.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    flags.add_argument("--with-compute", action="store_true", help="time the convolution that reads the halo as well")
    flags.add_argument("--validate", action="store_true", help="check windows and gradients, exactly")
    return flags


def make_halo_case(options: argparse.Namespace) -> HaloCase:
    """Make the case that the flags of the halo benchmark describe. Raises PlanError."""
    tiles = {"num_spatial_parts": options.num_spatial_parts, "slice_method": options.slice_method}
    wanted = Plan(split_size=1, precision=options.dtype, **tiles)
    shape = (options.batch_size, options.in_channels, *parse_image_size(options.image_size))
    channels, halo_px = options.out_channels, options.halo_len
    return HaloCase(plan=wanted, image_shape=shape, out_channels=channels, halo_px=halo_px, device=options.device)


def parse_positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1.")
    return int(text)


def parse_seconds(text: str) -> float:
    """Parse a number of seconds, 0 or more."""
    if not 0 <= (found := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more.")
    return found


def parse_seed(text: str) -> int:
    """Parse a 64-bit integer."""
    if (found := int(text)) not in range(-(1 << 63), 1 << 63):  # the seeds that torch accepts
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 64 bits.")
    return found


def make_plan(options: argparse.Namespace) -> Plan:
    """Make the plan that the flags describe. Raises PlanError."""
    return Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})


def parse_image_size(text: str) -> tuple[int, int]:
    """Parse `512` or `512x768` as (height, width) in pixels. Raises PlanError."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(map(_SIDE.fullmatch, parts)) or not all(map(int, parts)):
        raise PlanError(f"--image-size {text[:80]!r} must be one number of pixels, or HEIGHTxWIDTH such as 512x768.")
    return int(parts[0]), int(parts[-1])


def get_image_shape(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Return the shape (N, C, H, W) of a batch. Raises PlanError."""
    return (options.batch_size, 3, *parse_image_size(options.image_size))


def choose_optimiser(options: argparse.Namespace) -> Optimiser:
    """Return the function from parameters to the optimiser that the flags choose."""
    return partial(_OPTIMISERS[options.optimiser], lr=options.learning_rate)


def make_recipe(options: argparse.Namespace, ranks: int, world: World | None = None) -> tuple[nn.Module, Recipe]:
    """Make the model and its recipe, and check the plan against the number of ranks.

    If all ranks of a `world` call this, rank 0 traces the model for all: a trace takes seconds of a core. Collective
    then.
    """
    wanted = make_plan(options)
    check_fits(wanted, ranks)
    model, loss = build_model(options), nn.CrossEntropyLoss()
    shape = get_image_shape(options)
    device, clip_norm, moves = options.device, options.clip_norm, choose_optimiser(options)
    trace = partial(trace_model, model, wanted, shape, loss, device=device)
    if (changed := describe_precision_change(model, loss, wanted)) and (world is None or world.rank == 0):
        warnings.warn(changed, stacklevel=2)
    # Every rank has built the model itself, from the same seed; only the trace is shared.
    graph = run_on_first(world, trace) if world else trace()
    return model, prepare(model, wanted, shape, loss, moves, device=device, clip_norm=clip_norm, graph=graph)


# Flags of the throughput and all-reduce benchmarks.


def make_throughput_parser() -> argparse.ArgumentParser:
    """Return the parser of `bench throughput`, with the flag names of common synthetic benchmarks."""
    flags = make_parser("Time training steps on random images, each rank a replica of the whole model.")
    flags.set_defaults(
        model="resnet50", image_size="224", num_classes=1000, batch_size=32, split_size=1, spatial_size=0
    )
    flags.set_defaults(data_parallel=None)
    flags.add_argument("--warmup", type=parse_positive, default=10, help="steps before anything is timed")
    flags.add_argument("--num-iters", type=parse_positive, default=10)
    flags.add_argument("--num-batches-per-iter", type=parse_positive, default=10)
    return flags


def make_throughput_recipe(chosen: argparse.Namespace, ranks: int, world: World | None = None) -> Recipe:
    """Return the recipe, with as many replicas as the ranks allow unless the flags set it. Raises PlanError."""
    if chosen.data_parallel is None:
        chosen.data_parallel = 1
        chosen.data_parallel = max(1, ranks // make_plan(chosen).ranks)
    return make_recipe(chosen, ranks, world)[1]


def make_allreduce_parser() -> argparse.ArgumentParser:
    """Return the parser of `bench allreduce`."""
    flags = FlagParser(
        description="Time sums over all ranks against raw MPI_Allreduce and gloo.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument("--max-bytes", type=parse_positive, default=1 << 28, help="the largest sum; each 4 x the last")
    flags.add_argument("--iterations", type=parse_positive, default=30)
    return flags
