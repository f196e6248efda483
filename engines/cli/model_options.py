"""The flags that choose a model: a short name, or any importable callable, and the arguments to call it with."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from engines import models
from engines.errors import PlanError, TraceError

__all__ = ["add_model_flags", "build_model"]

_DEPTH, _CELLS, _FILTERS = 110, 18, 416  # defaults: the predecessor's ResNet and AmoebaNet

Named = tuple[str, dict[str, Any]]
"""PACKAGE.MODULE:CALLABLE, and its keywords, in the JSON form of `--model-args`."""


def add_model_flags(flags: argparse.ArgumentParser) -> None:
    """Add the flags that `build_model` reads."""
    flags.add_argument(
        "--model",
        default="engines.models:resnet110_v2",
        help=f"{', '.join(_SHORT)}, a name in engines.models, or PACKAGE.MODULE:CALLABLE that returns a plain module",
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
        help=f"of a resnet 9n+2 (v2) or 6n+2 (v1), default {_DEPTH}; normal cells of an amoebanet, default {_CELLS}; "
        "given to any other model if it takes num_layers or depth",
    )
    flags.add_argument(
        "--num-filters", type=int, help=f"width of an amoebanet, default {_FILTERS}; likewise if it takes num_filters"
    )


def build_model(options: argparse.Namespace) -> nn.Module:
    """Import the callable and call it, with weights drawn from the seed.

    Raises TraceError if that fails, and PlanError if the flags do not name a model.
    """
    torch.manual_seed(options.seed)
    path, known = _SHORT[options.model](options) if options.model in _SHORT else _resolve_callable(options)
    try:
        told = json.loads(options.model_args)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"--model-args {options.model_args!r} is not JSON ({error}).") from error
    # What `--model-args` says wins over what the other flags imply.
    positional, keywords = _split_arguments(_build_values(told))
    model = _call(path, positional, {**_build_values(known), **keywords})
    if not isinstance(model, nn.Module):
        raise TraceError(f"{path} returned {type(model).__name__}, not a torch.nn.Module.")
    return model


def _resolve_callable(options: argparse.Namespace) -> Named:
    """Return the path of a callable, and the flags' values for which it has parameters."""
    ours = ":" not in options.model and options.model in models.__all__
    path = f"{models.__name__}:{options.model}" if ours else options.model
    told = {"num_classes": options.num_classes, "num_layers": options.num_layers, "depth": options.num_layers}
    told["num_filters"] = options.num_filters
    make, takes = _import_callable(path), ()
    with suppress(TypeError, ValueError):  # some callables written in C have no signature
        takes = tuple(inspect.signature(make).parameters)
    return path, {name: value for name, value in told.items() if value is not None and name in takes}


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
    return f"engines.models:resnet_{version}", {"depth": depth, "num_classes": options.num_classes}


def _resolve_amoebanet(options: argparse.Namespace) -> Named:
    cells = _CELLS if options.num_layers is None else options.num_layers
    filters = _FILTERS if options.num_filters is None else options.num_filters
    if cells < 3 or cells % 3 or filters < 8:
        raise PlanError(
            f"--num-layers {cells} --num-filters {filters}: an amoebanet has three equal groups of normal cells, so a "
            "multiple of 3 layers, and at least 8 filters. Use --num-layers 18 --num-filters 416, for instance."
        )
    sizes = {"num_layers": cells, "num_filters": filters}
    return "engines.models:amoebanetd", {**sizes, "num_classes": options.num_classes}


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
    "unet": lambda options: ("engines.models:UNet", {"num_classes": options.num_classes}),
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
    return _call(path, *_split_arguments(items[path])) if len(items) == 1 and ":" in path else items


def _split_arguments(value: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(value, dict):
        return (), value
    return (value if isinstance(value, list) else [value]), {}


def _call(path: str, positional: Sequence[Any], keywords: dict[str, Any]) -> Any:
    make = _import_callable(path)
    try:
        return make(*positional, **keywords)
    except (Exception, SystemExit) as error:
        raise TraceError(f"{path} failed with {type(error).__name__}: {error}. Check --model-args.") from error


def _import_callable(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        return attrgetter(name)(importlib.import_module(module))  # type: ignore[no-any-return]
    except (Exception, SystemExit) as error:
        raise TraceError(f"{path!r} cannot be imported ({error}). Name it PACKAGE.MODULE:CALLABLE.") from error
