"""The command line's flags, with the predecessor's names, and their meaning: a model, a plan, an image size."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn

from mpi4dl_nb.engines import models
from mpi4dl_nb.engines.cli.plan_options import parse_value
from mpi4dl_nb.engines.comm.world import World, run_on_all, run_on_first
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.plan.layout import check_fits
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.recipe import Recipe, Task, warn_of_differences

Number = TypeVar("Number", int, float)

_SIDE = re.compile(r"\d{1,9}", re.ASCII)
OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
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
        chosen = super().parse_args(args, namespace)
        for action in self._actions:
            if action.nargs is None and getattr(chosen, action.dest, None) == []:
                self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return chosen

    def find_given(self, args: Sequence[str]) -> set[str]:
        """Return the names of the values that the arguments set, whether or not they equal the defaults.

        >>> flags = make_parser("Test.")
        >>> flags.find_given(["--seed", "0", "--clip", "1"]) == {"seed", "clip_norm"}
        True
        """
        # argparse sets no default where the namespace has a value already.
        unset = object()
        chosen = super().parse_args(args, argparse.Namespace(**{action.dest: unset for action in self._actions}))
        return {name for name, value in vars(chosen).items() if value is not unset}


def make_bare_parser(description: str) -> FlagParser:
    """Make a parser without flags, whose help lists defaults."""
    return FlagParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)


def make_parser(description: str, iterations: int | None = None, takes_volumes: bool = True) -> FlagParser:
    """Make a parser of the flags that all commands share, and of `--iterations` if it has a default."""
    flags = make_bare_parser(description)
    add_model_flags(flags)
    sizes = "one number, HEIGHTxWIDTH, or DEPTHxHEIGHTxWIDTH" if takes_volumes else "one number, or HEIGHTxWIDTH"
    flags.add_argument("--image-size", default="512", help=f"pixels: {sizes}")
    flags.add_argument("--batch-size", type=int, default=1)
    flags.add_argument("--seed", type=parse_seed, default=0)
    flags.add_argument("--optimiser", choices=sorted(OPTIMISERS), default="sgd")
    flags.add_argument("--learning-rate", type=float, default=0.001)
    flags.add_argument("--clip-norm", type=float, help="upper bound of the norm of all gradients together")
    flags.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    for field in fields(Plan):
        option = OPTIONS[field.name]
        names = [f"--{field.name.replace('_', '-')}", *option.flags]
        keywords: dict[str, Any] = {"dest": field.name, "help": option.help}
        # A switch that is off has no opposite flag; one that is on can be turned off by `--no-NAME`.
        if field.default is False:
            flags.add_argument(*names, action="store_true", **keywords)
        elif field.default is True:
            flags.add_argument(*names, action=argparse.BooleanOptionalAction, default=True, **keywords)
        else:
            flags.add_argument(*names, type=parse_value, default=field.default, **keywords)
    if iterations:
        flags.add_argument("--iterations", type=parse_positive, default=iterations)
    return flags


def parse_positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return _parse_number(int, text, 1, math.inf, "a whole number of at least 1")


def parse_seconds(text: str) -> float:
    """Parse a number of seconds, 0 or more."""
    return _parse_number(float, text, 0, sys.float_info.max, "a number of seconds, 0 or more")


def parse_seed(text: str) -> int:
    """Parse a 64-bit integer, as torch accepts for a seed."""
    return _parse_number(int, text, -(1 << 63), (1 << 63) - 1, "a whole number of 64 bits")


def _parse_number(kind: Callable[[str], Number], text: str, low: float, high: float, expected: str) -> Number:
    # Of a ValueError argparse would show the name of the function, and not its message.
    with suppress(ValueError):
        if low <= (value := kind(text)) <= high:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} must be {expected}.")


def make_plan(options: argparse.Namespace) -> Plan:
    """Make the plan that the flags describe. Raises PlanError."""
    return Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})


def parse_image_size(text: str) -> tuple[int, int]:
    """Parse `512` or `512x768` as (height, width) in pixels. Raises PlanError."""
    sizes = _parse_sizes(text)
    if len(sizes) > 2:
        raise PlanError(f"--image-size {text[:80]!r} is that of a volume, which this command does not take.")
    return sizes[0], sizes[1]


def _parse_sizes(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) > 3 or not all(map(_SIDE.fullmatch, parts)) or not all(map(int, parts)):
        raise PlanError(
            f"--image-size {text[:80]!r} must be one number of pixels, HEIGHTxWIDTH such as 512x768, or of volumes "
            "DEPTHxHEIGHTxWIDTH."
        )
    return tuple(map(int, parts * 2 if len(parts) == 1 else parts))


def get_image_shape(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the shape of a batch, (N, C, H, W) or that of volumes. Raises PlanError."""
    return (options.batch_size, 3, *_parse_sizes(options.image_size))


def choose_optimiser(options: argparse.Namespace) -> Optimiser:
    """Return the function from parameters to the optimiser that the flags choose."""
    return partial(OPTIMISERS[options.optimiser], lr=options.learning_rate)


def make_recipe(options: argparse.Namespace, ranks: int, world: World | None = None) -> tuple[nn.Module, Recipe]:
    """Make the model and its recipe, and check the plan against the number of ranks.

    If all ranks of a `world` call this, rank 0 traces the model for all: a trace takes seconds of a core. Collective
    then.
    """
    wanted = make_plan(options)
    check_fits(wanted, ranks)
    # A model may fail on one rank only, by a file that its host does not have: then all ranks raise the error.
    model = run_on_all(world, lambda: build_model(options), PlanError) if world else build_model(options)
    loss = nn.CrossEntropyLoss()
    shape = get_image_shape(options)
    moves, clip_norm = choose_optimiser(options), options.clip_norm
    task = Task.of(model, shape, loss, moves, device=options.device, clip_norm=clip_norm)
    # Every rank has built the model itself, from the same seed; only the trace is shared.
    graph = run_on_first(world, lambda: task.traces.get_graph(wanted)) if world else None
    recipe = replace(task.prepare(wanted, graph))  # without the programs of all ranks, which no rank needs any more
    if world is None or world.rank == 0:
        warn_of_differences(model, loss, recipe, stacklevel=2)
    return model, recipe


# A model: a short name, or any importable callable, and the arguments to call it with.

_DEPTH, _CELLS, _FILTERS = 110, 18, 416  # defaults: the predecessor's ResNet and AmoebaNet

Named = tuple[str, dict[str, Any]]
"""PACKAGE.MODULE:CALLABLE, and its keywords, in the JSON form of `--model-args`."""


def add_model_flags(flags: argparse.ArgumentParser) -> None:
    """Add the flags that `build_model` reads."""
    flags.add_argument(
        "--model",
        default="mpi4dl_nb:resnet110_v2",
        help=f"{', '.join((*_SHORT, *models.__all__))}, or PACKAGE.MODULE:CALLABLE that returns a plain module",
    )
    flags.add_argument(
        "--model-args",
        default="{}",
        help="JSON: an object of keywords, or a list of arguments; "
        'an object {"PACKAGE.MODULE:CALLABLE": its arguments} in it is what that call returns',
    )
    flags.add_argument("--num-classes", type=int, default=10, help="given to the model if it takes num_classes")
    flags.add_argument(
        "--num-layers",
        type=int,
        help=f"of a resnet 9n+2 (v2) or 6n+2 (v1; v2 if both), default {_DEPTH}; normal cells of an amoebanet, "
        f"default {_CELLS}; given to any other model if it takes num_layers or depth",
    )
    flags.add_argument(
        "--num-filters", type=int, help=f"width of an amoebanet, default {_FILTERS}; likewise if it takes num_filters"
    )


def build_model(options: argparse.Namespace) -> nn.Module:
    """Import the callable and call it, with weights drawn from the seed.

    Raises TraceError if that fails, and PlanError if the flags do not name a model.
    """
    torch.manual_seed(options.seed)
    if options.model in _SHORT:
        path, known = _SHORT[options.model](options)
    else:  # any callable gets the flags' values for which it has parameters
        ours = ":" not in options.model and options.model in models.__all__
        path = f"{models.__name__}:{options.model}" if ours else options.model
        sizes = {
            "num_classes": options.num_classes,
            "num_layers": options.num_layers,
            "depth": options.num_layers,
            "num_filters": options.num_filters,
        }
        make = _import_callable(path)
        takes: tuple[str, ...] = ()
        with suppress(TypeError, ValueError):  # some callables written in C have no signature
            takes = tuple(inspect.signature(make).parameters)
        known = {name: value for name, value in sizes.items() if value is not None and name in takes}
    for flag, value, names in (
        ("--num-layers", options.num_layers, ("num_layers", "depth")),
        ("--num-filters", options.num_filters, ("num_filters",)),
    ):
        # A resnet of the predecessor's commands is given the width of the amoebanet as well.
        if value is not None and not any(name in known for name in names) and options.model != "resnet":
            raise PlanError(
                f"{flag} {value} has no effect: {path} takes no {' or '.join(names)}. Leave it out or use --model-args."
            )
    try:
        arguments = json.loads(options.model_args)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--model-args {options.model_args!r} is not JSON ({error}).") from error
    model = _call(path, _build_values(arguments), _build_values(known))
    if not isinstance(model, nn.Module):
        raise TraceError(f"{path} returned {type(model).__name__}, not a torch.nn.Module.")
    return model


def _resolve_resnet(options: argparse.Namespace) -> Named:
    """Choose v2 if it exists at that depth, as in the predecessor's benchmarks, else v1.

    Raises PlanError if neither does.
    """
    depth = _DEPTH if options.num_layers is None else options.num_layers
    version = next((name for name, step in (("v2", 9), ("v1", 6)) if depth > step and depth % step == 2), None)
    if version is None:
        raise PlanError(
            f"--num-layers {depth}: a resnet has 9n+2 layers (v2) or 6n+2 (v1) with n >= 1. "
            "Use 20, 56 or 110, for instance."
        )
    return f"mpi4dl_nb.engines.models:resnet_{version}", {"depth": depth, "num_classes": options.num_classes}


def _resolve_amoebanet(options: argparse.Namespace) -> Named:
    cells = _CELLS if options.num_layers is None else options.num_layers
    filters = _FILTERS if options.num_filters is None else options.num_filters
    if cells < 3 or cells % 3 or filters < 8:
        raise PlanError(
            f"--num-layers {cells} --num-filters {filters}: an amoebanet has three equal groups of normal cells, so a "
            "multiple of 3 layers, and at least 8 filters. Use --num-layers 18 --num-filters 416, for instance."
        )
    sizes = {"num_layers": cells, "num_filters": filters}
    return "mpi4dl_nb:amoebanetd", {**sizes, "num_classes": options.num_classes}


def _resolve_unet(options: argparse.Namespace) -> Named:
    sizes = {} if options.num_layers is None else {"depth": options.num_layers}
    return "mpi4dl_nb:UNet", {**sizes, "num_classes": options.num_classes}


def _resolve_resnet50(options: argparse.Namespace) -> Named:
    """Choose the ResNet-50 of MONAI or transformers, whichever is installed. Raises PlanError if neither is."""
    if find_spec("monai"):
        stem = {"spatial_dims": 2, "n_input_channels": 3, "conv1_t_stride": 2}
        return "monai.networks.nets:resnet50", {**stem, "num_classes": options.num_classes}
    if find_spec("transformers"):
        config = {"transformers:ResNetConfig": {"num_labels": options.num_classes}}
        return "transformers:ResNetForImageClassification", {"config": config}
    raise PlanError(
        "--model resnet50 comes from another package, and neither MONAI nor transformers is installed: "
        f"pip install 'monai>=1.5,<2', or use one of our own, such as {', '.join(models.__all__)}."
    )


_SHORT: dict[str, Callable[[argparse.Namespace], Named]] = {
    "resnet": _resolve_resnet,
    "amoebanet": _resolve_amoebanet,
    "unet": _resolve_unet,
    "resnet50": _resolve_resnet50,
}


def _build_values(value: Any) -> Any:
    """Replace each JSON object with the single key `PACKAGE.MODULE:CALLABLE` by the result of that call."""
    if isinstance(value, list):
        return [_build_values(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: _build_values(item) for key, item in value.items()}
    path = next(iter(items), "")
    return _call(path, items[path], {}) if len(items) == 1 and ":" in path else items


def _call(path: str, value: Any, known: Mapping[str, Any]) -> Any:
    """Call with an object's keywords, a list's arguments, or one argument; keywords of the object win over `known`."""
    make = _import_callable(path)
    try:
        if isinstance(value, dict):
            return make(**{**known, **value})
        return make(*(value if isinstance(value, list) else [value]), **known)
    except (Exception, SystemExit) as error:
        raise TraceError(f"{path} failed with {type(error).__name__}: {error}. Check --model-args.") from error


def _import_callable(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise TraceError(f"{path!r} cannot be imported ({error}). Name it PACKAGE.MODULE:CALLABLE.") from error
