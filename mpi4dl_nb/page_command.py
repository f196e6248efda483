"""The command `page`: one HTML file with the halos of a model on an image, and more, alive without a kernel."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown, format_bytes
from mpi4dl_nb.engines.images.picture import crop_picture, open_image
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.planning.forecasts import forecast
from mpi4dl_nb.training.training import Training
from mpi4dl_nb.widgets.configurator import Configurator
from mpi4dl_nb.widgets.figure_widget import StillFigure
from mpi4dl_nb.widgets.saved_page import PICTURE_BYTES, save_page
from mpi4dl_nb.widgets.slicer import Slicer
from mpi4dl_nb.widgets.stepper import Stepper
from mpi4dl_nb.widgets.timeline import TimelineView

_WIDGETS = ("slicer", "stepper", "timeline", "configurator")


def make_page_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of `page`."""
    flags = options.make_parser(
        "Save a page of a model on an image that is alive in any browser, without a kernel.", takes_volumes=False
    )
    flags.add_argument("--image", required=True, help="a picture or slide")
    flags.add_argument("--to", required=True, help="the HTML file to write")
    flags.add_argument("--show", default="slicer", help=f"what the page has, in this order: {','.join(_WIDGETS)}")
    flags.add_argument("--machine", default="Summit", help=f"whose times are predicted: {', '.join(MACHINES)}")
    flags.add_argument("--title", default="", help="above the page")
    flags.add_argument("--text", default="", help="below the title; paragraphs are separated by an empty line")
    flags.add_argument(
        "--picture-bytes", type=options.parse_positive, default=PICTURE_BYTES, help="bytes for the image's pixels"
    )
    flags.set_defaults(model="resnet20_v1", image_size="64")
    return flags


def save_requested_page(arguments: Sequence[str]) -> str:
    """Save the page that the flags describe, and return a sentence about it.

    Raises PlanError, TraceError or ImageError.
    """
    chosen = make_page_parser().parse_args(arguments)
    names = [name.strip() for name in chosen.show.split(",")]
    if unknown := [name for name in names if name not in _WIDGETS]:
        raise PlanError(describe_unknown(f"--show {unknown[0]!r} is unknown", unknown[0], _WIDGETS))
    options.parse_image_size(chosen.image_size)
    model, plan = options.build_model(chosen), options.make_plan(chosen)
    with ExitStack() as stack:
        widgets = [stack.enter_context(_open_widget(name, chosen, model, plan)) for name in names]
        path = save_page(widgets, chosen.to, title=chosen.title, text=chosen.text, picture_bytes=chosen.picture_bytes)
    return f"{path}: {format_bytes(path.stat().st_size)}, {', '.join(names)}"


@contextmanager
def _open_widget(name: str, chosen: argparse.Namespace, model: nn.Module, plan: Plan) -> Iterator[StillFigure]:
    match name:
        case "slicer":
            yield Slicer(chosen.image, plan, model)
        case "timeline":
            step = forecast(model, plan, options.get_image_shape(chosen), chosen.machine)
            yield TimelineView(step.timeline, plan)
        case "configurator":
            yield Configurator(model, options.get_image_shape(chosen), plan=plan, machine=chosen.machine)
        case _:
            with _open_stepper(chosen, model, plan) as stepper:
                yield stepper


@contextmanager
def _open_stepper(chosen: argparse.Namespace, model: nn.Module, plan: Plan) -> Iterator[StillFigure]:
    """Record a step on the middle of the image, instruction by instruction. The labels are zeros."""
    count, _, *side = options.get_image_shape(chosen)
    picture = open_image(chosen.image)
    if any(px < wanted for px, wanted in zip(picture.shape(), side, strict=True)):
        raise PlanError(f"--image-size {chosen.image_size} is more than the image has. Give a smaller one.")
    top, left = ((px - wanted) // 2 for px, wanted in zip(picture.shape(), side, strict=True))
    pixels = torch.from_numpy(crop_picture(picture, top, left, *side).read(0, 0, *side)).permute(2, 0, 1) / 255
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(model, plan, cluster, (count, *pixels.shape))
        labels = training.recipe.step_specs["labels"]
        zeros = torch.zeros(labels.shape, dtype=getattr(torch, labels.dtype))
        stepper = Stepper(training, pixels.expand(training.recipe.step_specs["images"].shape), zeros)
        try:
            stepper.record_step()
            yield stepper
        finally:
            stepper.close()
