"""The notebook's handle on a training that runs on a cluster's ranks."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from engines.bench.verify import STEPS, compare_records, make_batches, with_small_loss_scale
from engines.checkpoint.load import open_checkpoint
from engines.checkpoint.save import KEEP
from engines.errors import ImageError, PlanError
from engines.evaluation import collect_state_dict
from engines.html_table import format_html_table
from engines.images.dataset import LabelledImages
from engines.images.loader import LoaderOptions
from engines.inference.tiled_predictor import TiledPrediction
from engines.last_step import make_smaller_recipe
from engines.layer.graph import TensorSpec
from engines.layout import check_fits
from engines.loss.loss_description import WHOLE_BATCH, describe_step_loss, warn_of_mean
from engines.metrics import Scores
from engines.optimiser_trial import count_states
from engines.plan import Plan
from engines.predict.forecast import Forecast, forecast
from engines.program.compile import compile_plan
from engines.program.timeline import Timeline
from engines.program.update import Scheduler
from engines.trace_cache import TraceCache
from engines.train_loop import RankStepStats, merge_stats
from engines.training import (
    Loss,
    Optimiser,
    Recipe,
    StepReport,
    count_step_images,
    cut_inputs,
    describe_precision_change,
    prepare,
    sgd,
)
from engines.working_folder import make_absolute
from mpi4dl_nb import remote_functions
from mpi4dl_nb.batch import prepare_batch
from mpi4dl_nb.batches import check_batches, make_repeatable
from mpi4dl_nb.describe_training import StepTimeline, describe_training
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.memory import show_memory
from mpi4dl_nb.evaluator import Evaluator
from mpi4dl_nb.explain_loss import explain_loss
from mpi4dl_nb.fit_run import CheckpointOptions, FitCallback, History, fit
from mpi4dl_nb.loops import Batch, BatchLoop, ImageLoop, choose_resume_state, get_rank_training, is_images
from mpi4dl_nb.prediction import drop, is_batch, predict_batch, predict_picture
from mpi4dl_nb.progress_bar import ProgressBar
from mpi4dl_nb.public_names import get_public_names
from mpi4dl_nb.recovery import FAILURE_POLICIES, FailureRecovery
from mpi4dl_nb.step_debugger import StepDebugger

if TYPE_CHECKING:
    from mpi4dl_nb.cluster import Cluster

__all__ = ["History", "Training"]


class Training:
    """A model, trained on a cluster by a plan.

    `image_shape` is (N, C, H, W) of a batch; a step takes `plan.batches` of them as one tensor.
    `loss(prediction, labels)` is cross-entropy unless given. A step's loss is that of the whole batch where the loss is
    a sum or a mean over it, whatever labels the mean counts (`ignore_index`, class weights, masks). Of any other loss,
    such as Dice over the batch, a step with several micro-batches computes the mean of their own losses, and a warning
    says so. Labels are class numbers, (N,) or (N, H, W), unless `labels` is an example tensor of those of a batch, such
    as `torch.zeros(4, 1, 32, 32)` (only its shape and type matter), or a `TensorSpec(shape, dtype)`. The model
    itself is only read: its weights are the first ones, and `state_dict()` gives the trained ones. `clip_norm`
    bounds the norm of all gradients together; `scheduler` makes of an optimiser what steps once after each update, such
    as `partial(torch.optim.lr_scheduler.StepLR, step_size=10)`.

    `optimiser` is a function of parameters, such as `partial(torch.optim.Adam, lr=1e-3)`. It is given all parameters
    of the model (and of a loss that is a module), in their order; or, if its first argument is called
    `named_parameters`, (name, parameter) pairs, as `model.named_parameters()` has them. So it can form groups by name,
    position or shape, and means on every rank what it means in one process. It must use the parameters that it is
    given. One that is in no group must be frozen with `requires_grad_(False)`, in the function or in the model.

    Warns where the plan's precision changes that of the model (`model.double()`).
    Raises PlanError, TraceError or ImageError before any rank is touched.

    >>> import torch
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Training
    >>> plan = Plan(split_size=2, num_spatial_parts=4)
    >>> with Cluster(plan.ranks, backend="loopback") as cluster:
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32))
    ...     loss = training.step(torch.randn(2, 3, 32, 32), torch.tensor([3, 7]))
    ...     print(training.verify()["ok"])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        cluster: Cluster,
        image_shape: Sequence[int],
        loss: Loss | None = None,
        optimiser: Optimiser = sgd,
        labels: TensorSpec | Tensor | None = None,
        device: str = "auto",
        clip_norm: float | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        check_fits(plan, cluster.n)
        self.model, self.plan, self.cluster = model, plan, cluster
        self.loss = loss or nn.CrossEntropyLoss()
        self.traces = TraceCache(model, image_shape, self.loss, labels, device)
        self._prepare: Callable[[Plan], Recipe] = lambda plan: prepare(
            model, plan, image_shape, self.loss, optimiser, labels, device, clip_norm, scheduler,
            self.traces.get_graph(plan),
        )  # fmt: skip
        self.recipe = self._prepare(plan)
        warn_of_mean(self.recipe.graph, plan, stacklevel=2)
        if changed := describe_precision_change(model, self.loss, plan):
            warnings.warn(changed, stacklevel=2)
        self.programs = compile_plan(self.recipe.graph, plan)
        self.name = uuid.uuid4().hex
        self.steps = 0
        self.predicted: TiledPrediction | None = None
        self.reports: list[StepReport] = []
        self.monitor: FitCallback | None = None  # what shows `fit` as it goes
        self.feed_state: Mapping[str, Any] | None = None  # where `fit` goes on in the images
        self._create()

    def _create(self) -> None:
        self._sizes = {count_step_images(self.recipe): (self.recipe, self.programs)}
        own = [(self.recipe.restrict_to_rank(program),) for program in self.programs]
        self.cluster.call(remote_functions.create, self.name, per_rank=own)

    def step(self, images: Any, labels: Any) -> float:
        """One training step on a batch; the loss before it.

        `images` is (N, C, H, W), `labels` what the loss takes; each rank is sent its own pixels only.
        Raises ImageError for a wrong shape or label, LossError for a loss that is not finite, with the cause, and
        RankError where a rank fails; no weight has changed then, unless it failed while it changed them, of which the
        next step tells.
        """
        return merge_stats(self.take(images, labels)).loss

    def take(self, images: Any, labels: Any, count: int | None = None) -> list[RankStepStats]:
        """One training step on a batch, as `step` does; what each rank knows of it.

        `count` images are fewer than usual: the ranks were made ready for them.
        """
        recipe, programs = self._sizes[count or count_step_images(self.recipe)]
        whole = prepare_batch(recipe, images, labels)
        parts = [(cut_inputs(program, whole),) for program in programs]
        with explain_loss(self.cluster, self.name):
            answers = self.cluster.call(
                remote_functions.step, self.name, len(whole["images"]), self.steps, per_rank=parts
            )
        self.heard([report for report, _ in answers])
        return [heard for _, heard in answers]

    def stepping(self, images: Any, labels: Any) -> StepDebugger:
        """One training step on a batch, walked: `for event in training.stepping(images, labels): ...`.

        See `mpi4dl_nb.step_debugger.StepDebugger`. Raises ImageError for a wrong shape or label.
        """
        return StepDebugger(self, self._prepare_batch(images, labels))

    def make_ready(self, images: int) -> None:
        """Have the ranks made ready for steps of fewer images, as the last one of an epoch may be.

        Raises PlanError or TraceError, before any rank is asked, where the plan or the model cannot take so few.
        """
        if images not in self._sizes:
            recipe = make_smaller_recipe(self.recipe, self.traces, images)
            programs = compile_plan(recipe.graph, recipe.plan)
            self.cluster.call(remote_functions.add_size, self.name, recipe)
            self._sizes[images] = recipe, programs

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of images in a step that the ranks are ready for."""
        return tuple(self._sizes)

    def heard(self, reports: list[StepReport]) -> None:
        """A step is done, of which the ranks tell this."""
        self.reports, self.steps = reports, self.steps + 1

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
        """Train for `epochs` epochs, with a bar that shows loss and images per second, and a line for each epoch.

        Or with a `Monitor()`, which shows more, and has a button that ends it when the step under way is done.

        `data` is batches of images and labels, or images that each rank reads by itself, its own pixels only, such
        as a folder of pictures: these go in an order that follows from `seed` (0) alone, read ahead by `workers`
        threads of each rank; a bad image ends the training, or is left out (`on_bad_image="skip"`). An epoch has at
        most `steps` steps. Batches are drawn one by one. A generator may be endless with `steps`: each epoch goes on
        where the last one has ended. Without `steps` several epochs keep its batches, to go through them again.

        As with `torch.utils.data.DataLoader`, images that do not fill the last step of an epoch are trained in a
        smaller one, unless `drop_last=True`, which leaves smaller batches out, and has images wait for another epoch.
        The smaller step has as many micro-batches as every other, with fewer images each; its loss is the mean over
        its images, and optimiser and scheduler step as always. A plan that cannot divide the images is refused before
        the first step, as far as they are counted then (images, lists, a DataLoader); where bad images were left out,
        as many are trained as it can divide. A smaller batch that comes before any full one is an error.

        After a break it goes on where it was, in the middle of an epoch too, unless
        `go_on=False`. `epochs` are those still to come, the rest of one that has begun among them: where 2 of 60 are
        done and the third has begun, 58 are left. A checkpoint of an epoch's last step goes on with the next epoch.

        An interrupt ends it when the step under way is done, or given up where that takes long; what it has learned is
        kept. A second one gives it up at once.

        `held_out` images are judged after each epoch. `log` is a .csv, .json or .jsonl file, which gets a record for
        each epoch; where TensorBoard is installed, so does the folder `NAME.tensorboard`.

        Checkpoints go into the folder `save` after every `save_every` steps, or after each epoch, of which the last
        `keep` stay; an interrupt is then raised as StoppedError, once all is saved. SIGTERM and SIGUSR1, by which batch
        systems announce an end, are then heard too: it is saved, and the process ends as they ask.

        Where a rank fails, dies or hangs, `on_failure="heal"` starts dead ones anew and goes on by itself, from the
        last checkpoint if what they held is lost; `"shrink"` goes on without them, under the fastest plan for those
        that are left which computes the same. From a checkpoint batches must come in the same order again. What fails
        twice on the same rank in the same step is raised, and so is the third failure without a step more than before.
        Raises ImageError, on all ranks, where an image cannot be read, LossError, RankError or PlanError.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, Integral) or epochs < 0:
            raise PlanError(f"epochs={epochs!r} must be a whole number of epochs still to come.")
        if on_failure not in FAILURE_POLICIES:
            raise PlanError(f"on_failure={on_failure!r} must be one of {', '.join(map(repr, FAILURE_POLICIES))}.")
        if on_failure != "raise" and save is None:
            raise PlanError(f"on_failure={on_failure!r} goes on from checkpoints. Say where they go: save=FOLDER.")
        if not is_images(data):
            check_batches(data)
        if held_out is not None and not is_images(held_out):
            raise PlanError(
                f"held_out is a {type(held_out).__name__}, but must be images that ranks read by themselves, such as a "
                "folder of pictures. Judge other batches with predict()."
            )
        feeding = LoaderOptions(seed or 0, steps, workers, on_bad_image, drop_last)
        saving = CheckpointOptions(save, save_every, keep)
        state = choose_resume_state(self.feed_state, data, seed) if go_on and is_images(data) else None
        monitor = monitor or self.monitor
        watchers: list[FitCallback] = [ProgressBar(progress and monitor is None), *([monitor] if monitor else [])]
        with nullcontext() if held_out is None else closing(Evaluator(self, held_out, on_bad_image)) as judge:

            def evaluate() -> Scores | None:
                return judge and judge.compute_scores(
                    lambda: self.cluster.call(remote_functions.get_tensors, self.name, self.steps)
                )

            renew = judge.begin if judge else lambda: None
            healing = None if on_failure == "raise" else FailureRecovery(self, on_failure == "shrink", renew)
            if not is_images(data):
                data = make_repeatable(data, epochs, steps, on_failure)
                return fit(BatchLoop(self, data, evaluate, steps, drop_last), epochs, log, saving, watchers, healing)
            return fit(ImageLoop(self, data, feeding, state, evaluate), epochs, log, saving, watchers, healing)

    def verify(
        self, data: Iterable[Batch] | None = None, seed: int = 0, precision: str = "float64"
    ) -> dict[str, object]:
        """Three optimiser steps from the model's own weights, ranks against one process in float64.

        On random batches, or those of `data`. In another `precision` than float64 ranks may be as far off as such a
        process, four times. This training itself is not touched. `ok` wants every loss, gradient, weight and buffer to
        agree to 1e-10 of its own size, or as closely as one process agrees with itself after its weights and images
        have changed by one unit in the last place; `why` then names what differs, and the reason. It is False, too,
        where a weight does not move although its gradient and its learning rate are not zero.
        """
        start_s = time.perf_counter()
        if data is not None:
            check_batches(data)
        recipe = with_small_loss_scale(self._prepare(replace(self.plan, precision=precision)))
        whole = (
            make_batches(recipe, seed)
            if data is None
            else [prepare_batch(recipe, *batch) for batch in islice(data, STEPS)]
        )
        if not whole:
            raise ImageError("verify was given no batch. Give it at least one, or leave data out.")
        work = [
            (recipe.restrict_to_rank(program), [cut_inputs(program, batch) for batch in whole])
            for program in compile_plan(recipe.graph, recipe.plan)
        ]
        records = self.cluster.call(remote_functions.record_reference, per_rank=work)
        line = compare_records(recipe, self.model, self.loss, whole, records)
        return {**line, "seconds": round(time.perf_counter() - start_s, 2)}

    def predict(
        self, source: Any, to: str | Path | None = None, region: Sequence[int] | None = None, level: int = 0,
        kind: str = "classes", memory_mb: int = 1000, progress: bool = True,
    ) -> Any:  # fmt: skip
        """What the model says with the weights as they are now, in evaluation mode.

        Of a batch (N, C, H, W), of any N: the tensor `model.eval()(batch)`, computed under the plan.

        Of a picture of any size (a path, an (H, W, C) array, ...) or a `region` (y0, x0, height, width) of one `level`
        of it: tile after tile on all ranks, none of which takes more than `memory_mb` megabytes. A pixel's byte x is
        (x / 255 - 0.5) / 0.5 for the model, as for images that ranks read in training. `kind` is `classes`,
        `probabilities` or `scores`. Where the model answers for each pixel it is an array (H, W) or (H, W, K), or the
        path of the pyramidal TIFF `to`, of the model's own size (some make sides even); otherwise a class, or a tensor
        (K,). `predicted` has its costs.

        Raises ImageError, PlanError or TraceError, before any rank is touched where that is possible.
        """
        if is_batch(source):
            return predict_batch(self, source, get_rank_training)
        self.predicted = predict_picture(self, source, get_rank_training, to, region, level, kind, memory_mb, progress)
        return self.predicted.answer

    def forecast(self) -> Forecast:
        """What a step should cost on this cluster, predicted from the programs; it is calibrated first, once.

        Its `timeline` can be drawn beside that of a step: `show_timeline(measured, plan, forecast.timeline)`.
        """
        states = count_states(self.recipe.optimiser, self.recipe.parameters)
        return forecast(self.recipe.graph, self.plan, self.cluster.calibrate(), states)

    def memory(self, rank: int | None = None) -> Drawing:
        """What each rank holds in a step by kind, predicted; and when that is most on one (None: the fullest) `rank`.

        A rank's limit is drawn where the cluster was calibrated. Raises PlanError where there is no such rank.
        """
        states, machine = count_states(self.recipe.optimiser, self.recipe.parameters), self.cluster.machine
        return show_memory(self.plan, self.recipe.graph, machine=machine, rank=rank, optimiser_states=states)

    def timeline(self) -> StepTimeline:
        """What each rank did when in the last step, shown as a chart. Raises PlanError before the first one."""
        if not self.reports:
            raise PlanError("timeline() shows the last step, but none was run yet. Call step() or fit() first.")
        return StepTimeline(Timeline.of(report.events for report in self.reports).events, self.plan)

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights and buffers by the plain model's names, for `model.load_state_dict`."""
        return collect_state_dict(self.recipe, self.cluster.call(remote_functions.get_tensors, self.name, self.steps))

    def loss_state_dict(self) -> dict[str, Tensor]:
        """Those of a loss that is a module, for `loss.load_state_dict`; empty where it has none."""
        return collect_state_dict(
            self.recipe, self.cluster.call(remote_functions.get_tensors, self.name, self.steps), "loss"
        )

    def save(self, folder: str | PathLike[str], keep: int = KEEP) -> Path:
        """Write a checkpoint into `folder`, of which it keeps the last `keep`; where it is.

        The weights are in `model.safetensors` there, for `model.load_state_dict(safetensors.torch.load_file(...))`.
        Raises CheckpointError; the training can go on then, and the checkpoints before are as they were.
        """
        folder = make_absolute(folder)
        return self.cluster.call(remote_functions.save, self.name, folder, self.feed_state, keep, self.steps)[0]

    def load(self, path: str | PathLike[str], plan: Plan | None = None) -> int:
        """Go on from a checkpoint, or the newest whole one of a folder, saved under any plan; the steps it had done.

        Of newer ones in the folder that are damaged a warning tells. Where memory, file handles or permission are
        wanting, that is raised (UnreadableError), and no older one is taken.
        `fit` goes on where it was in its images. So does a training that ranks have lost, since one has died: after
        `cluster.heal()`, or after `cluster.heal(fewer=True)` under another `plan` that has as many ranks as are left.
        Raises CheckpointError before any rank has changed, and PlanError.
        """
        plan = plan or self.plan
        check_fits(plan, self.cluster.n)
        recipe = self.recipe if plan == self.plan else self._prepare(plan)
        found = open_checkpoint(make_absolute(path), recipe)
        found.warn_of_passed_over(stacklevel=2)
        if recipe is not self.recipe or not all(self.cluster.call(remote_functions.has_training, self.name)):
            warn_of_mean(recipe.graph, plan, stacklevel=2)
            self.plan, self.recipe, self.programs = plan, recipe, compile_plan(recipe.graph, plan)
            self._create()
        self.cluster.call(remote_functions.load, self.name, found.path)
        self.feed_state, self.steps = found.feed, found.step
        return found.step

    def close(self) -> None:
        """Free the ranks' memory."""
        self.cluster.call(drop, self.name)
        self.cluster.call(remote_functions.drop, self.name)

    def _prepare_batch(self, images: Any, labels: Any) -> dict[str, Tensor]:
        return prepare_batch(self.recipe, images, labels)

    def __repr__(self) -> str:
        spec = self.recipe.step_specs["images"]
        loss = describe_step_loss(self.recipe.graph, self.plan)
        other = "" if loss == WHOLE_BATCH else f"; loss: {loss}"
        return f"Training({type(self.model).__name__}, images {spec.shape}, {self.plan.summary}{other})"

    def _repr_html_(self) -> str:
        return format_html_table("Training", describe_training(self))

    def __dir__(self) -> list[str]:
        return get_public_names(self)
