"""The notebook's handle on a training that runs on the ranks of a cluster."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpi4dl_nb.cluster.calibrate_cluster import warn_of_gpus
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.memory import show_memory
from mpi4dl_nb.draw.timeline import show_timeline
from mpi4dl_nb.engines.checks import check_choice, is_integer
from mpi4dl_nb.engines.compiler.steps import label_steps
from mpi4dl_nb.engines.errors import ImageError, Mpi4dlError, PlanError, RankError, TraceError, VerifyError
from mpi4dl_nb.engines.graph.default_type import use_default_type
from mpi4dl_nb.engines.images.dataset import LabelledImages
from mpi4dl_nb.engines.images.loader import LoaderOptions
from mpi4dl_nb.engines.inference.tiled_predictor import TiledPrediction
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import Forecast, forecast
from mpi4dl_nb.engines.program.timeline import Timeline
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.engines.train.checkpoint_save import KEEP
from mpi4dl_nb.engines.train.history import History
from mpi4dl_nb.engines.train.optimiser_trial import count_states
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.step_report import build_timeline
from mpi4dl_nb.engines.train.training import cut_inputs
from mpi4dl_nb.engines.train.training_events import Scores
from mpi4dl_nb.engines.train.verify import (
    STEPS,
    VerifyResult,
    check_reference,
    compare_records,
    make_batches,
    with_small_loss_scale,
)
from mpi4dl_nb.status_line import LATER_S, StatusLine, show_status
from mpi4dl_nb.training.batches import Batch, check_batches, copy_batch, count_images, make_repeatable, prepare_batch
from mpi4dl_nb.training.fit_run import CheckpointOptions, FitCallback, check_callback, fit
from mpi4dl_nb.training.loops import BatchLoop, ImageLoop, choose_resume_state, is_images
from mpi4dl_nb.training.prediction import Evaluator, predict_batch, predict_picture
from mpi4dl_nb.training.progress import ProgressBar
from mpi4dl_nb.training.recovery import FAILURE_POLICIES, FailureRecovery
from mpi4dl_nb.training.step_debugger import StepDebugger
from mpi4dl_nb.training.training_handle import TrainingHandle


@dataclass(frozen=True, repr=False)
class StepTimeline(Timeline):
    """Events of a step that was run under a plan; a notebook displays them as a chart."""

    plan: Plan
    recipe: Recipe = field(repr=False, compare=False)

    @cached_property
    def layers(self) -> Mapping[str, str]:
        """The module or layer of each instruction, by its name."""
        labels = (label for program in self.recipe.programs for label in label_steps(self.recipe.graph, program))
        return {label.step.instruction.name: label.where for label in labels}

    def _repr_html_(self) -> str:
        return show_timeline(self, self.plan)._repr_html_()


class Training(TrainingHandle):
    """Distributed training of a model on a cluster under a plan.

    `image_shape` is (N, C, H, W) of one batch; a step takes `plan.batches` batches as one tensor. `loss(output,
    labels)` defaults to cross-entropy. It gets all that the model returns, and of several tensors the `logits` alone
    only if it cannot take the whole; a warning says so. If the loss is a sum or a mean over the batch, whatever labels
    the mean counts (`ignore_index`, class weights, masks), the loss of a step is that of the whole batch. For any other
    loss, such as Dice over the batch, a step with several micro-batches computes the mean of the losses of the
    micro-batches, and a warning says so. Labels are class indices, (N,) or (N, H, W), unless `labels` is an example
    tensor of one batch of labels, such as `torch.zeros(4, 1, 32, 32)` (only its shape and dtype are used), or a
    `TensorSpec(shape, dtype)`. The model is only read: its weights are the initial ones, and `state_dict()` returns the
    trained ones. Numbers and flags that the model or the loss read must stay as they are: a step after a change is
    refused. `clip_norm` bounds the norm of all gradients together. `scheduler` is a function of the optimiser that
    returns a scheduler, which steps once after each update, such as `partial(torch.optim.lr_scheduler.StepLR,
    step_size=10)`.

    `optimiser` is a function of the parameters that returns an optimiser, such as `partial(torch.optim.Adam, lr=1e-3)`.
    The function gets all parameters of the model (and of the loss if it is a module), in order; if its first argument
    is called `named_parameters`, it gets (name, parameter) pairs as from `model.named_parameters()`. The function can
    therefore form groups by name, position or shape, and the groups mean the same on every rank as in one process. It
    must use the parameters that it gets. A parameter in no group must be frozen with `requires_grad_(False)`, in the
    function or in the model.

    Warns if the plan's precision differs from that of the model (`model.double()`). Raises PlanError, TraceError or
    ImageError before any rank is changed.

    >>> import torch
    >>> from mpi4dl_nb import Cluster, Plan, Training, resnet20_v1
    >>> plan = Plan(split_size=2, num_spatial_parts=4)
    >>> with Cluster(plan.ranks, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32))
    ...     loss = training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     print(training.verify()["ok"])
    True
    """

    predicted: TiledPrediction | None = None
    """The last prediction of a picture, with its costs."""
    monitor: FitCallback | None = None
    """The default callback of `fit`, which displays its progress."""

    def stepping(self, images: Any, labels: Any) -> StepDebugger:
        """Return a debugger for one training step on a batch: `for event in training.stepping(images, labels): ...`.

        See `mpi4dl_nb.training.step_debugger.StepDebugger`. Raises ImageError for a wrong shape or label.
        """
        self.check_unchanged()
        # A copy: the debugger begins the step again after the caller may have drawn the next batch into this memory.
        return StepDebugger(self, prepare_batch(self.recipe, *copy_batch((images, labels))))

    def fit(
        self,
        data: LabelledImages | Iterable[Batch],
        epochs: int = 1,
        progress: bool = True,
        *,
        held_out: LabelledImages | None = None,
        log: str | PathLike[str] | None = None,
        seed: int | None = None,
        steps: int | None = None,
        workers: int = 2,
        on_bad_image: str = "raise",
        go_on: bool = True,
        save: str | PathLike[str] | None = None,
        save_every: int | None = None,
        keep: int = KEEP,
        monitor: FitCallback | None = None,
        on_failure: str = "raise",
        drop_last: bool = False,
    ) -> History:
        """Train for `epochs` epochs, showing a progress bar with loss and images per second, and one line per epoch.

        `monitor=Monitor()` replaces the bar by a richer display, with a button that stops after the current step.

        `data` is batches of images and labels, or images that each rank reads by itself, its own pixels only, such as a
        folder of pictures. Such images are shuffled by `seed` (0) alone and prefetched by `workers` threads on each
        rank; a bad image ends the training, or is left out (`on_bad_image="skip"`). An epoch has at most `steps` steps.
        Batches are drawn one at a time. With `steps`, a generator may be endless: each epoch continues where the
        previous one ended. Without `steps`, copies of an iterator's batches are kept if there are several epochs, or if
        failures are to be healed, so that they can be repeated. An iterator that starts anew by itself after its end
        gives each epoch other batches, as in a plain loop. Of a list or a DataLoader nothing is kept.

        As with `torch.utils.data.DataLoader`, images that do not fill the last step of an epoch are trained in a
        smaller step, unless `drop_last=True`: then smaller batches are left out, and left-over images wait for another
        epoch. The smaller step has as many micro-batches as the others, with fewer images each; its loss is the mean
        over its images, and the optimiser and scheduler step as always. If the plan cannot divide the left-over images,
        this is refused before the first step, provided that their number is known then (images, lists, a DataLoader).
        If bad images were left out, as many of the remaining images are trained as the plan can divide. A smaller batch
        before any full one is an error.

        After an interruption, `fit` on images that ranks read resumes where it stopped, also in the middle of an epoch,
        unless `go_on=False`; batches are drawn from the first one again. `epochs` counts the epochs still to come,
        including the rest of a started one: if 2 of 60 are done and the third has started, 58 are left. A checkpoint of
        an epoch's last step resumes with the next epoch.

        An interrupt (SIGINT) stops the training after the current step, or abandons that step if it takes long;
        completed steps are kept. A second interrupt abandons the step at once.

        `held_out` images are evaluated after each epoch. `log` is a .csv, .json or .jsonl file, which gets one record
        per epoch; if TensorBoard is installed, the folder `NAME.tensorboard` gets the same records.

        Checkpoints are written to the folder `save` after every `save_every` steps, or after each epoch; the last
        `keep` remain. An interrupt is then raised as StoppedError once everything is saved. SIGTERM and SIGUSR1, by
        which batch systems announce the end of a job, are handled then too: the training is saved, and the process ends
        as the signal demands.

        If a rank fails, dies or hangs, `on_failure="heal"` restarts the dead ranks and resumes by itself, from the last
        checkpoint if the state of the ranks is lost; `"shrink"` continues without the dead ranks, under the fastest
        plan for the remaining ones that computes the same. To resume from a checkpoint, batches must come in the same
        order again. A failure that occurs twice on the same rank in the same step is raised, and so is the third
        failure without a further completed step. Raises ImageError, on all ranks, if an image cannot be read,
        LossError, RankError or PlanError.
        """
        images = data if is_images(data) else None
        batches = check_batches(data) if images is None else ()
        if isinstance(epochs, bool) or not is_integer(epochs) or epochs < 0:
            raise PlanError(f"epochs={epochs!r} must be a whole number of epochs still to come.")
        check_choice("on_failure", on_failure, FAILURE_POLICIES)
        if on_failure != "raise" and save is None:
            raise PlanError(f"on_failure={on_failure!r} goes on from checkpoints. Say where they go: save=FOLDER.")
        if save is None and (save_every is not None or keep != KEEP):
            raise PlanError("save_every= and keep= have no effect without checkpoints. Say where they go: save=FOLDER.")
        if held_out is not None and not is_images(held_out):
            raise PlanError(
                f"held_out is a {type(held_out).__name__}, but must be images that ranks read by themselves, such as a "
                "folder of pictures. Judge other batches with predict()."
            )
        self.check_unchanged()
        feeding = LoaderOptions(seed or 0, steps, workers, on_bad_image, drop_last)
        saving = CheckpointOptions(save, save_every, keep)
        state = None if images is None or not go_on else choose_resume_state(self.feed_state, images, seed)
        monitor = monitor or self.monitor
        check_callback(monitor)
        watchers: list[FitCallback] = [ProgressBar(progress and monitor is None), *([monitor] if monitor else [])]
        with nullcontext() if held_out is None else closing(Evaluator(self, held_out, on_bad_image)) as judge:

            def evaluate() -> Scores | None:
                return judge.compute_scores(self._get_tensors) if judge else None

            renew = judge.begin if judge else lambda: None
            healing = None if on_failure == "raise" else FailureRecovery(self, on_failure == "shrink", renew)
            if images is not None:
                return fit(ImageLoop(self, images, feeding, state, evaluate), epochs, log, saving, watchers, healing)
            kept = make_repeatable(batches, epochs, steps, on_failure)
            return fit(BatchLoop(self, kept, evaluate, steps, drop_last), epochs, log, saving, watchers, healing)

    @torch.inference_mode(False)  # the one process computes here, wherever a cell has switched gradients off
    @torch.enable_grad()
    def verify(self, data: Iterable[Batch] | None = None, seed: int = 0, precision: str = "float64") -> VerifyResult:
        """Compare three optimiser steps on the ranks, from the model's initial weights, with one process in float64.

        The steps use random batches, or the batches of `data`. In a `precision` other than float64, the ranks may
        deviate four times as far as one process in that precision. This training itself is not changed. `ok` requires
        every loss, gradient, weight and buffer to agree to 1e-10 of its own size, or as closely as one process agrees
        with itself after its weights and images have changed by one unit in the last place; otherwise `why` names what
        differs, and the reason. `ok` is also False if a weight does not move although its gradient and its learning
        rate are not zero. What cannot be computed in float64, such as class weights of float32, is compared in float32,
        and `why` says so. The result is a dict, shown as one sentence above its numbers. Raises VerifyError if the
        model cannot be trained in one process.
        """
        start_s = time.perf_counter()
        self.check_unchanged()
        if data is not None:
            check_batches(data)
            # Copies: a second comparison takes the same batches, and a generator may give all in one buffer.
            data = [copy.deepcopy(batch) for batch in islice(data, STEPS)]
        # One process computes in the modes in which the model was when the ranks got it.
        modes = self.traces.get_state().apply_modes(self.model, self.loss)
        with modes, show_status("Comparing with one process: preparing ...", LATER_S) as line:
            comparison = self._compare_in_best_type(data, seed, precision, line)
        return VerifyResult(comparison, seconds=round(time.perf_counter() - start_s, 2))

    def _compare_in_best_type(
        self, data: Iterable[Batch] | None, seed: int, precision: str, line: StatusLine
    ) -> VerifyResult:
        """Compare in `precision`; in float32, and say so in `why`, if what is computed cannot follow to float64."""
        current = torch.get_default_dtype()
        # From the sharpest comparison to the one that always exists, each with the type of constants without one:
        #
        #     float64, float64    class weights such as torch.tensor([1.0, 3.0]) follow the model to float64
        #     float64, float32    a loss that casts to float32 itself, as prediction.float(), meets such weights
        #     float32, float32    as the user's own loop: what is cast to float32 meets weights of the model
        ways = [(precision, current)]
        if precision == "float64" != self.plan.held_in:
            ways = [("float64", torch.float64), ("float64", current), ("float32", current)]
        failed: list[Mpi4dlError] = []
        for kind, default in ways:
            try:
                with use_default_type(default) if default is not current else nullcontext():
                    comparison = self._compare_with_reference(data, seed, kind, line)
            except (TraceError, VerifyError) as error:
                failed.append(error)
                continue
            if kind == precision:
                return comparison
            said = (
                "The model or its loss cannot be computed in float64, so that ranks and one process are compared in "
                f"float32, as near as its rounding allows. In float64: {failed[0]}"
            )
            return VerifyResult(comparison, why=" ".join(filter(None, (comparison.get("why", ""), said))))
        raise failed[0]

    def _compare_with_reference(
        self, data: Iterable[Batch] | None, seed: int, precision: str, line: StatusLine
    ) -> VerifyResult:
        """Train on the ranks and in one process, and compare the records; `line` says which of them is at work."""
        # The ranks run the same plan as here, but in float64, in which a wrong halo or a sum that counts a pixel twice
        # cannot hide behind rounding.
        try:
            recipe = with_small_loss_scale(self.task.prepare(replace(self.plan, precision=precision)))
        except TraceError:  # a model that cannot be converted: one process names the user's line
            check_reference(self.recipe, self.model, self.loss, make_batches(self.recipe, seed, steps=1))
            raise
        whole = make_batches(recipe, seed) if data is None else []
        for batch in () if data is None else data:
            count_images(batch)  # raises ImageError unless it is a pair
            whole.append(prepare_batch(recipe, *copy_batch(batch)))
        if not whole:
            raise ImageError("verify was given no batch. Give it at least one, or leave data out.")
        parts = ([cut_inputs(program, batch) for batch in whole] for program in recipe.programs)
        work = list(zip(map(recipe.restrict_to_rank, recipe.programs), parts, strict=True))
        line.update(f"Comparing with one process: {len(whole)} steps on {self.cluster.n} ranks ...")
        try:
            records = self.cluster.call(rank_functions.record_reference, per_rank=work)
        except RankError as error:
            if error.remote_traceback:  # the same may be wrong with the model in one process, which is easier to mend
                check_reference(recipe, self.model, self.loss, whole[:1])
            raise
        line.update(f"Comparing with one process: the same {len(whole)} steps in this process ...")
        return compare_records(recipe, self.model, self.loss, whole, records)

    def predict(
        self,
        source: Any,
        to: str | Path | None = None,
        region: Sequence[int] | None = None,
        level: int = 0,
        kind: str | None = None,
        memory_mb: int = 1000,
        progress: bool = True,
        activation: str | None = "auto",
        class_names: Sequence[str] | None = None,
    ) -> Any:
        """Predict with the current weights, in evaluation mode.

        For a batch of any N (N, C, H, W), of volumes (N, C, D, H, W) or signals (N, C, L) if the model takes these:
        return the tensor `model.eval()(batch)`, computed under the plan. A model that computes with several images at
        once, as with the mean of a batch, gives that only for as many images as a micro-batch has; of other numbers it
        warns.

        For a picture of any size (a path, an (H, W, C) array, ...) or a `region` (y0, x0, height, width) of one `level`
        of it: predict tile by tile on all ranks, none of which uses more than `memory_mb` megabytes, but for the array
        that is returned if `to` names no file. A pixel's byte x is passed to the model as (x / 255 - 0.5) / 0.5, as for
        images that ranks read in training. `kind` is `classes`, `probabilities` or `scores`; by default classes, or the
        scores of a regression. If the model predicts per pixel, the result is an array (H, W) or (H, W, K), or the path
        of the pyramidal TIFF `to`, in the size of the model's output (some models make sides even); otherwise it is a
        class, or a tensor (K,). `predicted` holds its costs.

        What the K channels mean follows from the traced loss. With cross-entropy, one class is right: probabilities are
        the softmax, and there is one map of classes. With binary cross-entropy, each channel is a label of its own:
        probabilities are sigmoids, and there are K maps of 0 and 1. `activation` (`softmax`, `sigmoid`, or None for
        outputs that stay as they are) says it instead of the loss, and must where the loss does not tell.

        A file of classes has a palette and `class_names` (by default their numbers), so that any viewer shows it in
        colours. Its numbers are the classes; a small one may be a PNG. `show_prediction` draws it over the slide.

        Raises ImageError, PlanError or TraceError, before any rank is called if that is possible.
        """
        batch = self.recipe.graph.inputs["images"].shape
        if isinstance(source, torch.Tensor | np.ndarray) and source.ndim == len(batch):
            changed = {"to": to, "region": region, "level": level or None, "kind": kind, "class_names": class_names}
            asked = {name: value is not None for name, value in changed.items()} | {"activation": activation != "auto"}
            if unread := [f"{name}=" for name, is_given in asked.items() if is_given]:
                raise PlanError(
                    f"{', '.join(unread)} has no effect for a batch, of which all scores are returned. Leave it out, "
                    "or give a picture: a path, or an (H, W, 3) array of bytes."
                )
            return predict_batch(self, source)
        settings = region, level, kind, memory_mb, progress, activation, class_names
        self.predicted = done = predict_picture(self, source, to, *settings)
        return done.answer

    def forecast(self) -> Forecast:
        """Predict the cost of a step on this cluster from the compiled programs. Calibrates the cluster first, once.

        Warns if the ranks compute on GPUs: a calibration measures CPUs.

        Its `timeline` can be drawn next to that of a step: `show_timeline(measured, plan, forecast.timeline)`.
        """
        states = count_states(self.recipe.optimiser, self.recipe.parameters)
        machine = self.cluster.calibrate()
        warn_of_gpus(self.cluster.call, self.recipe.device)
        with show_status(f"Compiling and simulating {self.plan.summary} ...", LATER_S):
            return forecast(self.recipe.graph, self.plan, machine, states)

    def memory(self, rank: int | None = None) -> Drawing:
        """Draw the predicted memory of each rank in a step by kind, and its peak on one `rank` (None: the fullest).

        The limit of a rank is drawn if the cluster was calibrated. Raises PlanError if there is no such rank.
        """
        states, machine = count_states(self.recipe.optimiser, self.recipe.parameters), self.cluster.machine
        return show_memory(self.plan, self.recipe.graph, machine=machine, rank=rank, optimiser_states=states)

    def timeline(self) -> StepTimeline:
        """Return what each rank did when in the last step, shown as a chart.

        Raises PlanError before the first step, and after `load` before the next one.
        """
        if not self.reports:
            raise PlanError(
                "timeline() shows the last step, but none was run yet, or since load(). Call step() or fit() first."
            )
        return StepTimeline(build_timeline(self.reports).events, self.reported.plan, self.reported)
