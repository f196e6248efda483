"""Functions that the notebook calls on its ranks: trainings, predictions, debugged steps, calibrations, timed steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mpi4dl_nb.engines.comm.device import choose_device, has_own_memory
from mpi4dl_nb.engines.comm.streams import measure_seconds
from mpi4dl_nb.engines.compiler.labels import NonFiniteCause
from mpi4dl_nb.engines.errors import LostTrainingError, PlanError
from mpi4dl_nb.engines.graph.default_type import use_default_type_of
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.images.dataset import LabelledImages
from mpi4dl_nb.engines.images.loader import LoaderOptions, NotReady
from mpi4dl_nb.engines.inference.evaluation import RankEvaluation
from mpi4dl_nb.engines.inference.rank_predictor import RankPrediction, RankPredictor
from mpi4dl_nb.engines.inference.tile_stitcher import MakeSink
from mpi4dl_nb.engines.inference.tiled_predictor import PredictionRequest, TiledPredictor
from mpi4dl_nb.engines.predict.calibrate import Calibration
from mpi4dl_nb.engines.predict.calibrate import measure_load as measure_foreign_load
from mpi4dl_nb.engines.predict.calibration_runs import CalibrationRecipes
from mpi4dl_nb.engines.predict.kernel_effects import LiveBytes
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.server.rank_server import RankServer, allow_during_step
from mpi4dl_nb.engines.train import checkpoint_load, checkpoint_save
from mpi4dl_nb.engines.train.debug_step import RankStepper, StepState
from mpi4dl_nb.engines.train.oracle import TrainingRecord
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.step_report import StepReport
from mpi4dl_nb.engines.train.train_loop import RankStepStats, RankTrainLoop, run_step
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import record_rank_run

# Each function takes the rank's own RankServer first, which keeps trainings, train loops and predictions by the names
# that the notebook gave them. `steps` is the notebook's count of updates: a rank that has done more or fewer refuses.
# The ranks import this file, and so nothing of the notebook's side:
#
#     notebook: cluster.call(rank_functions.step, name, ...) ── pickled by its name ──> rank: step(host, name, ...)


def get_training(host: RankServer, name: str, steps: int | None = None) -> RankTraining:
    """Return a rank's training by name.

    Raises LostTrainingError if there is none, or if it has not done exactly `steps` steps.

    If a step fails during the update, some ranks may have changed their weights and others not.
    """
    trainings = host.get_kept(RankTraining)
    if name not in trainings:
        raise LostTrainingError(
            "The ranks do not hold this training any more: it was closed, or the ranks were restarted. Call load() "
            "with a checkpoint of it, or make a new Training."
        )
    training = trainings[name]
    if steps not in (None, training.updates):
        raise LostTrainingError(
            f"The training was stopped while ranks changed their weights: after {steps} steps, rank {host.world.rank} "
            + ("has loaded a part of them" if training.updates < 0 else f"has done so {training.updates} times")
            + ". Load a checkpoint, or make a new Training."
        )
    return training


def create(host: RankServer, name: str, freed: Sequence[str], identity: str, recipe: Recipe) -> None:
    """Create a training, whose checkpoints have the id `identity`; those whose names are `freed` are dropped before."""
    for other in freed:
        drop(host, other)
    training = host.get_kept(RankTraining)[name] = RankTraining(host.world, recipe)
    training.identity = identity


def add_size(host: RankServer, name: str, recipe: Recipe) -> None:
    get_training(host, name).add_size(recipe)


def get_updates(host: RankServer, name: str) -> int | None:
    """Return the number of updates of a training; None if this rank does not hold it."""
    training = host.get_kept(RankTraining).get(name)
    return None if training is None else training.updates


def step(host: RankServer, name: str, images: int, steps: int, inputs: Inputs) -> tuple[StepReport, RankStepStats]:
    return run_step(get_training(host, name, steps), inputs, images)


def find_causes(host: RankServer, name: str) -> list[NonFiniteCause]:
    """Return the causes of a non-finite loss in images, labels and weights. Collective."""
    training = host.get_kept(RankTraining).get(name)
    return training.find_causes() if training else []


def record_reference(host: RankServer, recipe: Recipe, parts: list[Inputs]) -> TrainingRecord:
    with use_default_type_of(recipe.graph):
        return record_rank_run(RankTraining(host.world, recipe), parts)


@allow_during_step
def get_tensors(host: RankServer, name: str, steps: int) -> dict[str, dict[str, Tensor]]:
    return get_training(host, name, steps).copy_tensors()


def save(host: RankServer, name: str, folder: Path, feed: Any, keep: int, steps: int) -> Path:
    training = get_training(host, name, steps)
    training.abort_step()
    return checkpoint_save.save(training, folder, feed, keep)


def load(host: RankServer, name: str, path: Path) -> None:
    checkpoint_load.load(get_training(host, name), path)


def drop(host: RankServer, name: str) -> None:
    end_loop(host, name)
    host.get_kept(RankTraining).pop(name, None)


# ---- train loops over images that the ranks read


@dataclass(frozen=True)
class LoopReply:
    """Reply of a rank to a step: `stats` is None at the end of an epoch, and NotReady if no step was run."""

    stats: RankStepStats | NotReady | None
    report: StepReport | None
    state: Mapping[str, Any]
    bad: tuple[str, ...]


def begin_loop(
    host: RankServer,
    name: str,
    specs: Mapping[str, TensorSpec],
    images: LabelledImages,
    feeding: LoaderOptions,
    state: Mapping[str, Any] | None,
    anew: bool,
) -> Mapping[str, Any]:
    """Start a loader on a rank, and return the position in the images."""
    end_loop(host, name)
    loop = RankTrainLoop(host.world, get_training(host, name), specs, images, feeding)
    host.get_kept(RankTrainLoop)[name] = loop
    if state is not None:
        loop.feed.resume(state, anew)
    return loop.feed.get_state()


def step_loop(host: RankServer, name: str, steps: int) -> LoopReply:
    get_training(host, name, steps)
    loop = host.get_kept(RankTrainLoop)[name]
    stats = loop.step()
    return LoopReply(stats, loop.report, loop.feed.get_state(), tuple(loop.feed.bad))


def end_loop(host: RankServer, name: str) -> int:
    """End the loader workers of a training, if it has any, and return its number of updates."""
    if (loop := host.get_kept(RankTrainLoop).pop(name, None)) is not None:
        loop.close()
    return loop.training.updates if loop else 0


# ---- predictions with the current weights of a training


def begin_evaluation(
    host: RankServer, training: str, steps: int, name: str, recipe: Recipe, labels: TensorSpec, images: LabelledImages
) -> None:
    trained = get_training(host, training, steps)
    host.get_kept(RankPrediction)[name] = RankEvaluation(host.world, trained, recipe, labels, images)


def begin_prediction(host: RankServer, training: str, steps: int, name: str, recipe: Recipe) -> None:
    host.get_kept(RankPrediction)[name] = RankPredictor(host.world, recipe, get_training(host, training, steps).held)


def begin_tiled_prediction(
    host: RankServer, training: str, steps: int, name: str, recipe: Recipe, request: PredictionRequest, sink: MakeSink
) -> int:
    """Prepare the prediction of a picture, and return its number of rounds."""
    weights = get_training(host, training, steps).held
    prediction = TiledPredictor(host.world, recipe, request, sink, weights)
    host.get_kept(RankPrediction)[name] = prediction
    return prediction.rounds


def call_prediction(host: RankServer, name: str, what: str, *args: Any) -> Any:
    """Call a method of a prediction or an evaluation. Raises PlanError if the rank does not hold it."""
    predictions = host.get_kept(RankPrediction)
    if name not in predictions:
        raise PlanError(
            "The ranks do not hold this prediction any more: it has ended, or the ranks were restarted. Begin it anew."
        )
    return getattr(predictions[name], what)(*args)


def drop_prediction(host: RankServer, name: str) -> None:
    """Free what a prediction or an evaluation holds on this rank."""
    if (prediction := host.get_kept(RankPrediction).pop(name, None)) is not None:
        prediction.close()


# ---- debugged steps


def begin_debug_step(host: RankServer, name: str, steps: int, images: int, number: str, inputs: Inputs) -> StepState:
    host.paused = stepper = RankStepper(get_training(host, name, steps), inputs, images, number)
    return stepper.standing


@allow_during_step
def call_debug_step(host: RankServer, number: str, what: str, *args: Any) -> tuple[Any] | None:
    """Call a method of the stepper with that number; return None if that step was abandoned."""
    return (getattr(host.paused, what)(*args),) if _is_paused(host, number) else None


@allow_during_step
def abort_debug_step(host: RankServer, number: str) -> None:
    """Abort the debugged step with that number, if the ranks have not left it for other work yet. Collective."""
    if _is_paused(host, number):
        host.abort_debug_step()


def _is_paused(host: RankServer, number: str) -> bool:
    return isinstance(host.paused, RankStepper) and host.paused.number == number


# ---- calibrations, of which a rank holds the state from one part to the next


def measure_load(host: RankServer) -> float:
    return measure_foreign_load(host.world)


def start_calibration(host: RankServer, recipes: CalibrationRecipes, quick: bool) -> None:
    host.get_kept(Calibration)[""] = Calibration(host.world, recipes, quick)


def run_calibration_part(host: RankServer) -> Machine | None:
    calibration = host.get_kept(Calibration).get("")
    return None if calibration is None else calibration.run_part()


def discard_calibration(host: RankServer) -> None:
    host.get_kept(Calibration).clear()


@allow_during_step
def find_gpu(host: RankServer, device: str) -> str:
    """Return the GPU that a training with this `device` takes on this rank; empty if it takes the CPU."""
    chosen = choose_device(device, host.world.rank)
    return str(chosen) if has_own_memory(chosen) else ""


# ---- measurements of a plan


def time_step(host: RankServer, name: str, inputs: Inputs) -> float:
    """Return the seconds of a step on this rank."""
    training = host.get_kept(RankTraining)[name]
    training.step(inputs)  # fills the caches that the other plans have evicted
    host.world.barrier()
    return measure_seconds(partial(training.step, inputs), training.device)


def measure_bytes(host: RankServer, name: str, inputs: Inputs) -> int:
    """Return the peak bytes of tensors in a step of a newly created training, so that all of them are counted.

    Segments are not compiled here: allocations inside a compiled function cannot be counted.
    """
    before = host.get_kept(RankTraining).pop(name)
    plan = replace(before.recipe.plan, compile_segments=False)
    recipe = replace(before.recipe, plan=plan, state={name: tensor.detach() for name, tensor in before.held.items()})
    del before  # frees all of it but its weights, from which the new one begins
    with LiveBytes() as live:
        training = host.get_kept(RankTraining)[name] = RankTraining(host.world, recipe)
        for _ in range(2):
            training.step(inputs)
        live.reset_peak()
        training.step(inputs)
    return live.peak
