"""The command `train`: a training on images, told as it goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import nn

from engines import options, train_options
from engines.checkpoint.interrupts import Interrupts
from engines.checkpoint.keeper import Keeper, keeper_of_ranks
from engines.checkpoint.load import load
from engines.comm.together import run_on_first, run_on_all
from engines.comm.world import World
from engines.errors import PlanError
from engines.evaluation import HeldOut, RankEvaluation, evaluate_on_ranks
from engines.images.feed import Feeding
from engines.log import EpochLog
from engines.metrics import Scores
from engines.partial import left_over, smaller
from engines.report import Epoch, LeftOut, Told, summary
from engines.traces import Traces
from engines.train import RankCourse, Ranks, run
from engines.training import RankTraining, Recipe, images_per_step

__all__ = ["train_command"]


def train_command(world: World, arguments: Sequence[str]) -> bool:
    """Train as the flags say; every rank does the same, and what is printed is one rank's to show."""
    chosen = train_options.train_parser().parse_args(arguments)
    feeding = Feeding(chosen.seed, chosen.max_steps, chosen.num_workers, chosen.on_bad_image, chosen.drop_last)
    model, recipe = options.recipe(chosen, world.size, world)
    for text in train_options.without_effect(chosen):
        print(text, flush=True)
    images, others = run_on_all(world, lambda: train_options.applications(chosen, images_per_step(recipe)))
    training = RankTraining(world, recipe)
    loss = nn.CrossEntropyLoss()
    smaller = _smaller(world, recipe, Traces(model, options.image_shape(chosen), loss, device=chosen.device))
    if rest := run_on_all(world, lambda: left_over(len(images), recipe, feeding.steps, feeding.drop_last), PlanError):
        training.add_size(smaller(rest))
    held_out = None if others is None else HeldOut(model, loss, recipe, others, chosen.on_bad_image)
    evaluate = _evaluation(world, training, held_out) if held_out else lambda: None
    log = run_on_all(world, lambda: EpochLog(chosen.log) if chosen.log and not world.rank else None, PlanError)
    with RankCourse(world, training, recipe.step_specs, images, feeding) as course, log or nullcontext():
        done = _resume(course, chosen)
        with _kept(course, chosen) as kept:
            _tell(Ranks(course, evaluate, smaller), max(0, chosen.num_epochs - done), chosen.verbose, log, kept)
    return True


def _smaller(world: World, recipe: Recipe, traces: Traces) -> Callable[[int], Recipe]:
    """What makes the recipe of a step of fewer images; one rank traces the model for all. Collective."""
    return lambda images: run_on_first(world, lambda: smaller(recipe, traces, images))


def _evaluation(world: World, training: RankTraining, held_out: HeldOut) -> Callable[[], Scores]:
    """What judges the training after each epoch."""
    labels = training.recipe.step_specs["labels"]
    evaluation = RankEvaluation(world, training, held_out.forward, labels, held_out.images)
    return partial(evaluate_on_ranks, world, training, held_out, evaluation)


@contextmanager
def _kept(course: RankCourse, chosen: argparse.Namespace) -> Iterator[Keeper | None]:
    """What saves the training as the flags say, and when this process is asked to end; None where nothing does."""
    if chosen.save is None:
        yield None
        return
    with Interrupts() as asked:
        yield keeper_of_ranks(course.training, chosen.save, course.feed.state, chosen.save_every, chosen.keep, asked)


def _resume(course: RankCourse, chosen: argparse.Namespace) -> int:
    """Go on as the flags say; how many epochs are done already. Raises CheckpointError, ImageError."""
    path = course.world.all_gather(run_on_all(course.world, partial(train_options.resumed, chosen), PlanError))[0]
    if path is None:
        return 0
    checkpoint = load(course.training, path)
    for text in checkpoint.passed_over:
        print(text, flush=True)
    print(f"Resumed after {checkpoint.step} steps: {checkpoint.path}", flush=True)
    if checkpoint.feed is not None:
        with checkpoint.reading():
            course.feed.resume(checkpoint.feed, anew=True)
    return course.feed.place.epoch


def _tell(course: Ranks, epochs: int, verbose: bool, log: EpochLog | None, kept: Keeper | None) -> None:
    """Go through the training, and print it in the predecessor's words; the last line is JSON."""
    steps: list[Told] = []
    last: Epoch | None = None
    for event in run(course, epochs):
        print(_line(event, verbose), flush=True)
        match event:
            case Told():
                steps.append(event)
                if kept:
                    kept.after_step()
            case Epoch():
                last = event
                if log is not None:
                    log.add(event.record)
                if kept:
                    kept.after_epoch()
    if kept:
        kept.after_all()
    if not steps:
        print("No steps are left to do: all epochs are done.", flush=True)
    if last is not None:
        line = summary(steps, last)
        print(f"Mean {line['images_per_s_mean']} Median {line['images_per_s_median']}", flush=True)
        print(json.dumps(line), flush=True)


def _line(event: LeftOut | Told | Epoch, verbose: bool) -> str:
    match event:
        case LeftOut():
            return f"Left out from now on: {event.text}"
        case Told():
            line = f"Epoch: {event.epoch} images per sec:{event.images_per_s:.4f} Time:{event.seconds:.4f}"
            more = f"\nStep: {event.step}, loss: {event.loss:.6f}, accuracy: {event.accuracy}"
            return line + more * verbose
        case Epoch():
            return str(event)
