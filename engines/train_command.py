"""The command `train`: train on images, and print the progress."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from torch import nn

from engines import options, train_options
from engines.checkpoint.interrupts import Interrupts
from engines.checkpoint.load import load
from engines.checkpoint.manager import CheckpointManager, make_rank_manager
from engines.comm.collective_errors import run_on_all, run_on_first
from engines.comm.world import World
from engines.epoch_log import EpochLog
from engines.errors import PlanError
from engines.evaluation import HeldOutSet, RankEvaluation, evaluate_on_ranks
from engines.images.loader import LoaderOptions
from engines.last_step import count_left_over, make_smaller_recipe
from engines.metrics import Scores
from engines.trace_cache import TraceCache
from engines.train_loop import CollectiveTrainLoop, RankTrainLoop, run
from engines.training import RankTraining, Recipe, count_step_images
from engines.training_events import EpochResult, SkippedImage, StepResult, summarise

__all__ = ["run_train"]


def run_train(world: World, arguments: Sequence[str]) -> bool:
    """Train as the flags say. Every rank does the same; only the output of rank 0 is shown."""
    chosen = train_options.make_train_parser().parse_args(arguments)
    feeding = LoaderOptions(chosen.seed, chosen.max_steps, chosen.num_workers, chosen.on_bad_image, chosen.drop_last)
    model, recipe = options.make_recipe(chosen, world.size, world)
    for text in train_options.describe_ineffective(chosen):
        print(text, flush=True)
    images, others = run_on_all(world, lambda: train_options.make_datasets(chosen, count_step_images(recipe)))
    training = RankTraining(world, recipe)
    loss = nn.CrossEntropyLoss()
    traces = TraceCache(model, options.get_image_shape(chosen), loss, device=chosen.device)

    def smaller(images: int) -> Recipe:  # collective: rank 0 traces the model for all
        return run_on_first(world, lambda: make_smaller_recipe(recipe, traces, images))

    # Before the first step: a plan that cannot divide the last step of an epoch should not fail an hour later.
    if rest := run_on_all(
        world, lambda: count_left_over(len(images), recipe, feeding.steps, feeding.drop_last), PlanError
    ):
        training.add_size(smaller(rest))
    evaluate: Callable[[], Scores | None] | None = None
    if others is not None:
        held_out = HeldOutSet(model, loss, recipe, others, chosen.on_bad_image)
        evaluation = RankEvaluation(world, training, held_out.forward, recipe.step_specs["labels"], held_out.images)
        evaluate = partial(evaluate_on_ranks, world, training, held_out, evaluation)
    # Rank 0 writes the log; if it cannot, all ranks must stop with the same error, and none wait for the others.
    log = run_on_all(world, lambda: EpochLog(chosen.log) if chosen.log and not world.rank else None, PlanError)
    with RankTrainLoop(world, training, recipe.step_specs, images, feeding) as course, ExitStack() as stack:
        if log is not None:
            stack.enter_context(log)
        done, kept = _resume(course, chosen), None
        if chosen.save is not None:
            # Signals are caught only now: before the first step there is nothing to save.
            asked, state = stack.enter_context(Interrupts()), course.feed.get_state
            kept = make_rank_manager(training, chosen.save, state, chosen.save_every, chosen.keep, asked)
        loop = CollectiveTrainLoop(course, evaluate or (lambda: None), smaller)
        _run_and_print(loop, max(0, chosen.num_epochs - done), chosen.verbose, log, kept)
    return True


def _resume(course: RankTrainLoop, chosen: argparse.Namespace) -> int:
    """Resume as the flags say, and return the number of epochs already done. Raises CheckpointError or ImageError."""
    path = course.world.all_gather(
        run_on_all(course.world, partial(train_options.find_resume_path, chosen), PlanError)
    )[0]
    if path is None:
        return 0
    checkpoint = load(course.training, path)
    for text in checkpoint.passed_over:
        print(text, flush=True)
    print(f"Resumed after {checkpoint.step} steps: {checkpoint.path}", flush=True)
    if checkpoint.feed is not None:
        with checkpoint.translate_errors():
            course.feed.resume(checkpoint.feed, anew=True)
    return course.feed.place.epoch


def _run_and_print(
    course: CollectiveTrainLoop, epochs: int, verbose: bool, log: EpochLog | None, kept: CheckpointManager | None
) -> None:
    """Run the training, and print it in the predecessor's format; the last line is JSON."""
    steps: list[StepResult] = []
    last: EpochResult | None = None
    for event in run(course, epochs):
        print(_format_event(event, verbose), flush=True)
        match event:
            case StepResult():
                steps.append(event)
                if kept:
                    kept.save_after_step()
            case EpochResult():
                last = event
                if log is not None:
                    log.add(event.record)
                if kept:
                    kept.save_after_epoch()
    if kept:
        kept.save_at_end()
    if not steps:
        print("No steps are left to do: all epochs are done.", flush=True)
    if last is not None:
        line = summarise(steps, last)
        print(f"Mean {line['images_per_s_mean']} Median {line['images_per_s_median']}", flush=True)
        print(json.dumps(line), flush=True)


def _format_event(event: SkippedImage | StepResult | EpochResult, verbose: bool) -> str:
    match event:
        case SkippedImage():
            return f"Left out from now on: {event.text}"
        case StepResult():
            line = f"Epoch: {event.epoch} images per sec:{event.images_per_s:.4f} Time:{event.seconds:.4f}"
            more = f"\nStep: {event.step}, loss: {event.loss:.6f}, accuracy: {event.accuracy}"
            return line + more * verbose
        case EpochResult():
            return str(event)
