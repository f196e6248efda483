"""The command `predict`: predict a region of a picture tile by tile, on all ranks."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.world import World, run_on_all
from mpi4dl_nb.engines.errors import CheckpointError, ImageError, PlanError
from mpi4dl_nb.engines.graph.output_meaning import ACTIVATIONS, OutputMeaning, choose_kind, choose_meaning, read_meaning
from mpi4dl_nb.engines.images.picture import open_image
from mpi4dl_nb.engines.inference.class_map import name_classes
from mpi4dl_nb.engines.inference.pyramid_sink import make_pyramid
from mpi4dl_nb.engines.inference.rank_predictor import make_padded_region, prepare_region
from mpi4dl_nb.engines.inference.tile_stitcher import KINDS, Shape, TileSink
from mpi4dl_nb.engines.inference.tiled_predictor import PredictionRequest, TiledPrediction, TiledPredictor
from mpi4dl_nb.engines.plan import PRECISIONS
from mpi4dl_nb.engines.train.checkpoint_reader import Checkpoint, get_tensor_file

# Load trained weights into a plain model from a safetensors file with its own names, or from a checkpoint.


def load_weights(model: nn.Module, path: Path) -> OutputMeaning:
    """Load a model's weights and buffers from a file, a checkpoint, or the newest intact one in a folder of them.

    Return what the loss of the checkpoint takes the outputs for, which a file of weights alone does not tell. Raises
    CheckpointError if they cannot be read or belong to another model; the model is then unchanged.
    """
    file, meaning = path, OutputMeaning.UNKNOWN
    if path.is_dir():
        checkpoint = Checkpoint.open(path, only=[get_tensor_file("model")])
        checkpoint.warn_of_passed_over(stacklevel=2)
        file, meaning = checkpoint.path / get_tensor_file("model"), read_meaning(checkpoint.manifest.get("outputs"))
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: no weights can be read from it ({error}). Give a safetensors file.") from error
    # All names and shapes are compared first: `load_state_dict` would copy what fits before it raises.
    ours, theirs = ({name: tuple(t.shape) for name, t in state.items()} for state in (model.state_dict(), weights))
    wrong = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if wrong:
        differences = ", ".join(
            f"{name} {theirs.get(name, 'missing')} instead of {ours.get(name, 'none')}" for name in wrong[:3]
        )
        raise CheckpointError(
            f"{file}: these are the weights of another model: of {len(ours)} tensors {len(wrong)} do not fit, such as "
            f"{differences}. Give the model (--model-args, --num-classes) that it was saved from."
        )
    model.load_state_dict(weights)
    return meaning


def make_predict_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of `predict`."""
    flags = options.make_bare_parser(
        "Classify or segment a region of a picture of any size, tile after tile, in bounded memory."
    )
    options.add_model_flags(flags)
    flags.add_argument("--weights", help="a checkpoint, a folder of them, or a safetensors file")
    flags.add_argument("--image", required=True, help="a picture or slide; every rank opens it")
    flags.add_argument("--region", help="y0,x0,height,width in pixels of the level; default: all of it")
    flags.add_argument("--level", type=int, default=0, help="0 is the finest")
    flags.add_argument("--to", help="the pyramidal TIFF to write; required if the model predicts per pixel")
    flags.add_argument("--kind", choices=KINDS, help="what is stored; default: classes, or the scores of a regression")
    flags.add_argument(
        "--activation",
        choices=[activation or "none" for activation in ACTIVATIONS],
        help="softmax: one class out of several; sigmoid: a map for each label; none: amounts; default: as the loss of "
        "the checkpoint says",
    )
    flags.add_argument("--class-names", help="comma-separated, written into the file of the prediction")
    flags.add_argument("--memory-mb", type=options.parse_positive, default=1000, help="memory limit of each rank")
    flags.add_argument("--tile-px", type=options.parse_positive, help="side of the tiles, regardless of --memory-mb")
    flags.add_argument("--precision", "--dtype", choices=PRECISIONS, default="float32")
    flags.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    flags.add_argument(
        "--seed", type=options.parse_seed, default=0, help="seed of the random weights used without --weights"
    )
    return flags


def predict(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run the prediction that the flags describe; return its line of JSON, the same on every rank.

    Raises ImageError, PlanError, TraceError or CheckpointError.
    """
    chosen = make_predict_parser().parse_args(arguments)
    model = run_on_all(world, lambda: options.build_model(chosen), PlanError)
    meaning = OutputMeaning.UNKNOWN
    if chosen.weights is not None:
        meaning = run_on_all(world, lambda: load_weights(model, Path(chosen.weights)), CheckpointError)
    if chosen.activation is not None:
        meaning = choose_meaning(None if chosen.activation == "none" else chosen.activation)
    kind = choose_kind(chosen.kind, meaning)
    box = None
    if chosen.region is not None:
        parts = chosen.region.split(",")
        if len(parts) != 4 or not all(re.fullmatch(r"-?[0-9]{1,15}", part.strip()) for part in parts):
            raise PlanError(
                f"--region {chosen.region[:80]!r} must be four whole numbers of pixels: y0,x0,height,width."
            )
        box = tuple(map(int, parts))
    region = run_on_all(world, lambda: make_padded_region(open_image(chosen.image), box, chosen.level))
    recipe, region = prepare_region(model, region, chosen.precision, chosen.device)
    ask = PredictionRequest(
        region, kind, meaning, chosen.memory_mb * 10**6, chosen.tile_px, needs_pixels=chosen.to is not None
    )
    channels = recipe.graph.specs[recipe.graph.prediction].shape[1:2]
    names = name_classes(kind, meaning, math.prod(channels), chosen.class_names and chosen.class_names.split(","))
    output_px = recipe.graph.specs[recipe.graph.prediction].shape[2:]

    def make_sink(shape: Shape, dtype: np.dtype[Any]) -> TileSink:
        if chosen.to is None:
            raise ImageError(
                f"The model answers for each of {shape[0]} x {shape[1]} px. Say which file that is to go to, "
                "such as --to prediction.tif."
            )
        return make_pyramid(Path(chosen.to), region, kind, output_px, names, shape, dtype)

    sweep = TiledPredictor(world, recipe, ask, make_sink)
    if chosen.weights is None and not world.rank:
        print(
            f"Without --weights, the model keeps the weights that it was made with: random ones, of --seed "
            f"{chosen.seed}, if it does not load its own.",
            file=sys.stderr,
            flush=True,
        )
    with tqdm(total=sweep.rounds, unit="round", disable=world.rank > 0 or not os.isatty(2)) as bar:
        return make_line(sweep.run(bar.update), ask)


def make_line(swept: TiledPrediction, ask: PredictionRequest) -> dict[str, object]:
    """Return a prediction as one line of JSON data."""
    height, width = ask.region.picture_px
    answer = swept.answer.tolist() if hasattr(swept.answer, "tolist") else swept.answer
    return {
        "answer": answer,
        "kind": ask.kind,
        "per_pixel": swept.per_pixel,
        "height_px": height,
        "width_px": width,
        "tiles": swept.tiles,
        "tile_px": list(swept.tile_px),
        "walks": swept.walks,
        "overhead": swept.overhead,
        "seconds": round(swept.seconds, 2),
        "px_per_s": round(height * width / swept.seconds),
        "memory_mb": ask.memory_bytes // 10**6,
        "peak_bytes": list(swept.peak_bytes),
    }
