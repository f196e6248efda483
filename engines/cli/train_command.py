"""The command `train`: its flags, with the predecessor's names and meanings, and the training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from torch import nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.cli.train_images import CROP, check_image_flags, make_datasets
from mpi4dl_nb.engines.comm.device import get_memory_bytes
from mpi4dl_nb.engines.comm.world import World, run_on_all, run_on_first
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.images.augmented import KINDS
from mpi4dl_nb.engines.images.dataset import LabelledImages, check_classes
from mpi4dl_nb.engines.images.examples import FITS
from mpi4dl_nb.engines.images.loader import LoaderOptions
from mpi4dl_nb.engines.inference.evaluation import HeldOutSet, RankEvaluation, evaluate_on_ranks, warn_of_mixing
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.engines.train.checkpoint_load import load
from mpi4dl_nb.engines.train.checkpoint_save import KEEP, CheckpointManager, make_rank_manager
from mpi4dl_nb.engines.train.interrupts import Interrupts
from mpi4dl_nb.engines.train.recipe import Recipe, count_step_images
from mpi4dl_nb.engines.train.train_loop import (
    CollectiveTrainLoop,
    RankTrainLoop,
    count_left_over,
    make_smaller_recipe,
    run,
)
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.training_events import EpochLog, EpochResult, Scores, SkippedImage, StepResult, summarise


def make_train_parser() -> options.FlagParser:
    """Make the parser of the flags of `train`."""
    flags = options.make_parser(
        "Train a classifier or segmentation model with cross-entropy on the ranks; print speed, loss and accuracy.",
        takes_volumes=False,
    )
    flags.set_defaults(model="resnet", batch_size=32, image_size="32", names=None, test=False)
    flags.add_argument("--num-epochs", type=options.parse_positive, default=1)
    flags.add_argument("--max-steps", type=options.parse_positive, help="end an epoch after this number of steps")
    flags.add_argument("--app", default="3", help="1 or medical, 2 or cifar, 3 or synthetic: which images to train on")
    flags.add_argument(
        "--datapath",
        type=Path,
        default=Path("train"),
        help="a .csv table of medical images, a folder with CLASS/IMAGE or CLASS/SLIDE/IMAGE in it, or CIFAR-10",
    )
    flags.add_argument(
        "--within", type=Path, metavar="FOLDER", help="folder that contains a table's files; by default the table's own"
    )
    flags.add_argument(
        "--fit", choices=FITS, default="scale", help="scale medical images to --image-size, or crop and pad them"
    )
    flags.add_argument("--mask-threshold", type=int, help="mask values above this number are class 1, others class 0")
    flags.add_argument(
        "--mask-ignore",
        type=_parse_numbers,
        default=(),
        metavar="N[,N]",
        help="mask values that are no class, such as 255 for void: the loss ignores their pixels",
    )
    flags.add_argument(
        "--augment",
        type=_parse_augmentations,
        default=(),
        help=f"comma-separated: {','.join(KINDS)}, or crop: random parts of medical images, unscaled",
    )
    flags.add_argument("--validate-path", type=Path, help="images of the same kind for evaluation")
    flags.add_argument("--held-out", type=float, help="fraction of the images held out for evaluation, such as 0.2")
    flags.add_argument("--num-workers", type=int, default=0, help="threads of each rank that prefetch images")
    flags.add_argument(
        "--on-bad-image", choices=["raise", "skip"], default="raise", help="end the training, or skip the image"
    )
    flags.add_argument(
        "--drop-last",
        action="store_true",
        help="drop images that do not fill the last step; otherwise that step is smaller",
    )
    flags.add_argument("--log", type=Path, help="a .csv, .json or .jsonl file with one record per epoch")
    flags.add_argument(
        "--save", type=Path, metavar="FOLDER", help="folder for checkpoints; SIGUSR1 saves one and ends the training"
    )
    flags.add_argument(
        "--save-every",
        type=options.parse_positive,
        metavar="STEPS",
        help="steps between two checkpoints; by default one checkpoint per epoch",
    )
    flags.add_argument("--keep", type=options.parse_positive, default=KEEP, help="number of checkpoints to keep")
    resumes = "resume from a checkpoint or a folder's newest; without a value, from --save if it has one"
    flags.add_argument("--resume", nargs="?", const="", metavar="FOLDER", help=resumes)
    flags.add_argument("--enable-master-comm-opt", action="store_true", help="accepted, without effect")
    flags.add_argument("-v", "--verbose", action="store_true", help="print loss and accuracy of every step")
    return flags


def _parse_augmentations(text: str) -> tuple[str, ...]:
    kinds = tuple(filter(None, (kind.strip() for kind in text.split(","))))
    if unknown := [kind for kind in kinds if kind not in (*KINDS, CROP)]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join((*KINDS, CROP))}")
    return kinds


def _parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers between commas, such as 255") from None


def find_resume_path(chosen: argparse.Namespace) -> Path | None:
    """Return the checkpoint, or folder of checkpoints, to resume from; None to start afresh.

    Raises PlanError or CheckpointError.
    """
    if chosen.resume != "":
        return chosen.resume and Path(chosen.resume)
    if not chosen.save:
        raise PlanError("--resume without a folder goes on from that of --save, which is not given. Give one of them.")
    return chosen.save if chosen.save.is_dir() and list_checkpoints(chosen.save) else None


def run_train(world: World, arguments: Sequence[str]) -> None:
    """Train as the flags say, and print the progress. Every rank does the same; only the output of rank 0 is shown."""
    parser = make_train_parser()
    chosen, given = parser.parse_args(arguments), parser.find_given(arguments)
    for flag, name in (("--save-every", "save_every"), ("--keep", "keep")):
        if name in given and chosen.save is None:
            raise PlanError(f"{flag} {getattr(chosen, name)} has no effect without --save FOLDER. Give that as well.")
    check_image_flags(chosen, given)
    feeding = LoaderOptions(chosen.seed, chosen.max_steps, chosen.num_workers, chosen.on_bad_image, chosen.drop_last)
    model, recipe = options.make_recipe(chosen, world.size, world)
    if chosen.enable_master_comm_opt:
        print(
            "--enable-master-comm-opt has no effect: in the predecessor it updated the two copies of GEMS in turn, to "
            "hide their messages. Here both are updated together, at the end of a step, from the whole sum.",
            flush=True,
        )
    images, others = run_on_all(world, lambda: _make_fitting_datasets(chosen, recipe))
    training = run_on_all(world, lambda: RankTraining(world, recipe), PlanError)
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
        run_on_all(world, held_out.check_loss, TraceError)
        if not world.rank:
            warn_of_mixing(model, held_out.forward, len(others), stacklevel=2)
        evaluation = RankEvaluation(world, training, held_out.forward, recipe.step_specs["labels"], held_out.images)
        evaluate = partial(evaluate_on_ranks, world, training, held_out, evaluation)
    # Rank 0 writes the log; if it cannot, all ranks must stop with the same error, and none wait for the others.
    log = run_on_all(world, lambda: EpochLog(chosen.log) if chosen.log and not world.rank else None, PlanError)
    with ExitStack() as stack:
        rank_loop = RankTrainLoop(world, training, recipe.step_specs, images, feeding)
        stack.enter_context(closing(rank_loop))
        if log is not None:
            stack.enter_context(closing(log))
        done, kept = _resume(rank_loop, chosen, given), None
        if chosen.save is not None:
            # Signals are caught only now: before the first step there is nothing to save.
            asked, state = stack.enter_context(Interrupts()), rank_loop.feed.get_state
            kept = make_rank_manager(training, chosen.save, state, chosen.save_every, chosen.keep, asked)
        loop = CollectiveTrainLoop(rank_loop, evaluate or (lambda: None), smaller)
        _run_and_print(loop, max(0, chosen.num_epochs - done), chosen.verbose, log, kept)


def _make_fitting_datasets(chosen: argparse.Namespace, recipe: Recipe) -> tuple[LabelledImages, LabelledImages | None]:
    """Make the training and the held-out images.

    Raises ImageError if their classes are not those of the loss, and PlanError if a step's images fit no memory.
    """
    step_bytes, memory_bytes = recipe.step_specs["images"].bytes, get_memory_bytes()
    if step_bytes > recipe.plan.ranks * memory_bytes:
        raise PlanError(
            f"The images of one step take {format_bytes(step_bytes)}, but a machine like this one has "
            f"{format_bytes(memory_bytes)}, and there are at most {recipe.plan.ranks}. Lower --batch-size or "
            "--image-size."
        )
    images, others = make_datasets(chosen, count_step_images(recipe))
    for dataset in (images, others or images):
        check_classes(dataset, recipe.graph)
    return images, others


def _resume(rank_loop: RankTrainLoop, chosen: argparse.Namespace, given: Collection[str]) -> int:
    """Resume as the flags say, and return the number of epochs already done.

    Raises CheckpointError, or ImageError if the checkpoint's images had another order.
    """
    path = rank_loop.world.all_gather(run_on_all(rank_loop.world, partial(find_resume_path, chosen), PlanError))[0]
    if path is None:
        return 0
    checkpoint = load(rank_loop.training, path)
    for text in checkpoint.passed_over:
        print(text, flush=True)
    print(f"Resumed after {checkpoint.step} steps: {checkpoint.path}", flush=True)
    if "learning_rate" in given:
        print("--learning-rate has no effect: the optimiser goes on with the checkpoint's options.", flush=True)
    if checkpoint.feed is not None:
        with checkpoint.translate_errors():
            rank_loop.feed.resume(checkpoint.feed, anew=True)
        # The seed also determines which images are held out: with another one, they would be trained on.
        if (saved := rank_loop.feed.place.seed) != chosen.seed:
            raise ImageError(
                f"{checkpoint.path} was trained on images chosen and ordered by seed {saved}, but --seed is "
                f"{chosen.seed}. Give --seed {saved}."
            )
        for text in rank_loop.feed.bad:
            print(text, flush=True)
    return rank_loop.feed.place.epoch


def _run_and_print(
    loop: CollectiveTrainLoop, epochs: int, verbose: bool, log: EpochLog | None, kept: CheckpointManager | None
) -> None:
    """Run the training, and print it in the predecessor's format; the last line is JSON."""
    steps: list[StepResult] = []
    last: EpochResult | None = None
    for event in run(loop, epochs):
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
        summary = summarise(steps, last)
        print(f"Mean {summary['images_per_s_mean']} Median {summary['images_per_s_median']}", flush=True)
        print(json.dumps(summary), flush=True)


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
