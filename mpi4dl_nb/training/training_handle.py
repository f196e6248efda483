"""Access to a training that the ranks of a cluster hold: create, step, save and load it."""

from __future__ import annotations

import statistics
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpi4dl_nb.cluster.cluster import Cluster, get_public_names
from mpi4dl_nb.engines.compiler.labels import format_causes
from mpi4dl_nb.engines.compiler.trace_cache import Loss, TraceCache
from mpi4dl_nb.engines.compiler.whole_loss import WHOLE_BATCH, describe_step_loss, warn_of_mean
from mpi4dl_nb.engines.errors import LossError, LostTrainingError, RankError, make_absolute
from mpi4dl_nb.engines.formatting import format_bytes, format_html_table
from mpi4dl_nb.engines.graph.model_graph import TensorSpec, find_updated_buffers, to_user_name
from mpi4dl_nb.engines.graph.model_state import ModelState
from mpi4dl_nb.engines.graph.python_values import TracedValues
from mpi4dl_nb.engines.inference.evaluation import collect_state_dict
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import check_fits
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.program.update import Scheduler
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.engines.train.checkpoint_load import open_checkpoint
from mpi4dl_nb.engines.train.checkpoint_save import KEEP
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.recipe import Task, count_step_images, sgd, warn_of_differences
from mpi4dl_nb.engines.train.step_report import StepReport
from mpi4dl_nb.engines.train.train_loop import RankStepStats, make_smaller_recipe, merge_stats
from mpi4dl_nb.engines.train.training import cut_inputs
from mpi4dl_nb.status_line import LATER_S, show_status
from mpi4dl_nb.training.batches import check_order, prepare_batch

_FOR_LOOPS = {
    *("check_unchanged", "explain_failure", "feed_state", "identity", "is_whole"),
    *("make_ready", "record_step", "take", "task", "traces"),
}
"""Names that the completion in a notebook does not offer: loops, predictions and debugged steps use them."""


class TrainingHandle:
    """What the loops, predictions and debugged steps of a `Training` use of it: its state, and the calls of its ranks.

    The ranks hold the training under its `name`. `steps` counts its updates; whatever sends or changes it holds
    `cluster.turn`. `reports` are those of the last step since `load`, which ran the programs of the recipe `reported`.
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
        check_order(plan, cluster)
        check_fits(plan, cluster.n)
        self.model, self.plan, self.cluster = model, plan, cluster
        self.loss = loss or nn.CrossEntropyLoss()
        state = ModelState.of(model, self.loss)  # a user may call model.eval() for a prediction of one's own
        self.task = Task.of(model, image_shape, self.loss, optimiser, labels, device, clip_norm, scheduler, state)
        with show_status(f"Tracing {type(model).__name__} ...", LATER_S) as line:
            self.traces.get_graph(plan)
            line.update(f"Compiling {plan.summary} ...")
            self.recipe = self.task.prepare(plan)
        self.plan = self.recipe.plan
        warn_of_differences(model, self.loss, self.recipe, stacklevel=2)
        self.name = uuid.uuid4().hex
        self.identity = self.name  # in checkpoints; `load` takes over that of the checkpoint
        self.steps = 0
        self.reports: list[StepReport] = []
        self.reported = self.recipe
        self.saved: Path | None = None  # the last checkpoint that was written or loaded
        self.feed_state: Mapping[str, Any] | None = None  # position in the images from which `fit` resumes
        # A cell that runs again makes another training, with which the ranks free the old one if nothing refers to it.
        weakref.finalize(self, cluster.freed.append, self.name).atexit = False
        self._create()
        graph = self.recipe.graph
        updated = {to_user_name(name) for node in graph.nodes for name in find_updated_buffers(graph, node)}
        self._traced = TracedValues(model, self.loss, updated, self.traces.kept_outside)

    @property
    def traces(self) -> TraceCache:
        """The traces of the model."""
        return self.task.traces

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of all ranks for a step."""
        return self.recipe.programs

    def check_unchanged(self) -> None:
        """Raise PlanError if a value of the model or the loss that the trace has taken was changed since then."""
        self._traced.check()

    def _create(self) -> None:
        # Programs have a fixed batch size: `make_ready` adds those of smaller steps, by their numbers of images.
        self._sizes = {count_step_images(self.recipe): self.recipe}
        recipes = [(self.recipe.restrict_to_rank(program),) for program in self.programs]
        with self.cluster.turn:
            freed = tuple(self.cluster.freed)
            self.cluster.call(rank_functions.create, self.name, freed, self.identity, per_rank=recipes)
            del self.cluster.freed[: len(freed)]

    def step(self, images: Any, labels: Any) -> float:
        """Run one training step on a batch and return the loss before the update.

        `images` is (N, C, H, W), and `labels` is what the loss takes; each rank receives only its own pixels. Raises
        ImageError for a wrong shape or label, LossError with its cause if the loss is not finite, and RankError if a
        rank fails. No weight has changed then, unless the rank failed during the update: in that case the next step
        raises an error that says so.
        """
        return merge_stats(self.take(images, labels)).loss

    def take(self, images: Any, labels: Any, count: int | None = None) -> list[RankStepStats]:
        """Run one training step on a batch, as `step` does, and return the statistics of each rank.

        `count` is the number of images if it is smaller than usual; `make_ready` must have prepared the ranks for it.
        """
        # The notebook has the whole batch, and a rank gets what its program reads. Each rank returns its report with
        # the losses it computed (possibly none); `merge_stats` averages them by micro-batch.
        #
        #     images (N, C, H, W) ── cut_inputs ──> rank 0: tile 0 of each image ──> report, statistics
        #                                      └──> rank 1: tile 1               ──> report, statistics
        #
        # Pixels beside a tile are not sent: ranks exchange them layer by layer.
        self.check_unchanged()
        recipe = self._sizes[count or count_step_images(self.recipe)]
        whole = prepare_batch(recipe, images, labels)
        parts, size = [(cut_inputs(program, whole),) for program in recipe.programs], len(whole["images"])
        with self.cluster.turn, self.explain_failure():
            answers = self.cluster.call(rank_functions.step, self.name, size, self.steps, per_rank=parts)
            self.record_step([report for report, _ in answers], size)
        return [stats for _, stats in answers]

    @contextmanager
    def explain_failure(self) -> Iterator[None]:
        """Raise the errors of this context with what is known of them.

        That is the cause of a LossError, which the ranks find in images, labels and weights, and if the ranks have lost
        the training, the call that continues from its last checkpoint.
        """
        try:
            yield
        except LossError as error:
            words = ""
            with suppress(RankError):
                words = format_causes(dict(enumerate(self.cluster.call(rank_functions.find_causes, self.name))))
            if words:
                raise error.with_cause(words) from None
            raise
        except (RankError, LostTrainingError) as error:
            if self.saved and (self.cluster.dead or isinstance(error, LostTrainingError)):
                first = "After heal() on the cluster, c" if self.cluster.dead else "C"
                error.add_note(f"{first}ontinue from the last checkpoint: training.load({str(self.saved)!r})")
            raise

    def make_ready(self, images: int) -> None:
        """Prepare the ranks for steps of fewer images, such as the last step of an epoch.

        Raises PlanError or TraceError, before any rank is called, if the plan or the model cannot take so few images.
        """
        if images not in self._sizes:
            recipe = make_smaller_recipe(self.recipe, self.traces, images)
            self.cluster.call(rank_functions.add_size, self.name, recipe)
            self._sizes[images] = recipe

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of images per step that the ranks are prepared for."""
        return tuple(self._sizes)

    def record_step(self, reports: list[StepReport], images: int) -> None:
        """Record a completed step of so many images, and the reports of its ranks."""
        # A smaller step may have other instructions: with `fused_layers="auto"`, other layers are fused.
        self.reports, self.reported, self.steps = reports, self._sizes[images], self.steps + 1

    def is_whole(self) -> bool:
        """Return whether all ranks hold the training, with exactly as many updates as the notebook has counted."""
        with self.cluster.turn:
            return set(self.cluster.call(rank_functions.get_updates, self.name)) == {self.steps}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained weights and buffers by the names of the plain model, for `model.load_state_dict`."""
        self._traced.warns_of_weights = False
        return collect_state_dict(self.recipe, self._get_tensors())

    def loss_state_dict(self) -> dict[str, Tensor]:
        """Return the state of a loss that is a module, for `loss.load_state_dict`; empty if it has none."""
        self._traced.checks_buffers = False
        return collect_state_dict(self.recipe, self._get_tensors(), "loss")

    def _get_tensors(self) -> list[dict[str, dict[str, Tensor]]]:
        with self.cluster.turn, self.explain_failure():
            return self.cluster.call(rank_functions.get_tensors, self.name, self.steps)

    def save(self, folder: str | PathLike[str], keep: int = KEEP) -> Path:
        """Write a checkpoint into `folder`, and return its path. The last `keep` of this training remain there.

        A training and those that have loaded a checkpoint of it count as one; checkpoints of other trainings stay.
        The weights are stored in its `model.safetensors`, for
        `model.load_state_dict(safetensors.torch.load_file(...))`. Raises CheckpointError; the training can continue
        then, and earlier checkpoints are unchanged.
        """
        folder = make_absolute(folder)
        with self.cluster.turn, self.explain_failure():
            state = self.feed_state, keep, self.steps
            self.saved = self.cluster.call(rank_functions.save, self.name, folder, *state)[0]
        return self.saved

    def load(self, path: str | PathLike[str], plan: Plan | None = None) -> int:
        """Resume from a checkpoint, or from the newest whole one in a folder, and return its number of steps.

        Of a folder, the checkpoints of this training count, or else those of the only other training that has saved
        into it; from several other trainings, choose a checkpoint by its name. Warns of newer checkpoints in the folder
        that are damaged or of others. The checkpoint may have been saved under any plan.
        Raises UnreadableError if memory, file handles or permissions are lacking; no older checkpoint is used then.
        `fit` resumes at the stored position in its images. If the ranks have lost the training because one died, it is
        created again: after `cluster.heal()`, or after `cluster.heal(fewer=True)` under another `plan` with as many
        ranks as are left. Raises PlanError, and CheckpointError before any rank has changed; only a training that was
        created again is then one without a step.
        """
        plan = (plan or self.plan).fit(self.traces.image_shape[2:])
        check_fits(plan, self.cluster.n)
        recipe = self.recipe if plan == self.plan else self.task.prepare(plan)
        checkpoint = open_checkpoint(make_absolute(path), recipe, self.identity)
        checkpoint.warn_of_passed_over(stacklevel=2)
        with self.cluster.turn:
            self.reports = []
            # For another plan, or if a rank has lost the training, all ranks make it anew: no rank can do so alone.
            if recipe is not self.recipe or None in self.cluster.call(rank_functions.get_updates, self.name):
                warn_of_mean(recipe.graph, plan, stacklevel=2)
                self.plan, self.recipe = plan, recipe
                self._create()
                self.feed_state, self.steps = None, 0
            self.cluster.call(rank_functions.load, self.name, checkpoint.path)
            self.feed_state, self.steps, self.saved = checkpoint.feed, checkpoint.step, checkpoint.path
            self.identity = checkpoint.identity
        return checkpoint.step

    def close(self) -> None:
        """Free the memory that the ranks hold for this training."""
        self.cluster.call(rank_functions.drop, self.name)

    def __repr__(self) -> str:
        spec = self.recipe.step_specs["images"]
        loss = describe_step_loss(self.recipe.graph, self.plan)
        other = "" if loss == WHOLE_BATCH else f"; loss: {loss}"
        return f"Training({type(self.model).__name__}, images {spec.shape}, {self.plan.summary}{other})"

    def _repr_html_(self) -> str:
        return format_html_table("Training", describe_training(self))

    def __dir__(self) -> list[str]:
        return [name for name in get_public_names(self) if name not in _FOR_LOOPS]


def describe_training(training: TrainingHandle) -> dict[str, object]:
    """Return the model and the plan of a training, its progress, and the memory of the ranks."""
    facts = {
        "Model": type(training.model).__name__,
        "Images of a step": " × ".join(map(str, training.recipe.step_specs["images"].shape)),
        "Plan": training.plan.summary,
        "Loss of a step": describe_step_loss(training.recipe.graph, training.plan),
        "Cluster": f"{training.cluster.n} ranks, {training.cluster.state}",
        "Steps": training.steps,
    }
    losses = {micro_batch: loss for report in training.reports for micro_batch, loss in report.losses.items()}
    if losses:
        facts["Last loss"] = f"{statistics.fmean(losses.values()):.6g}"
        memory = [report.memory_bytes for report in training.reports]
        of_each = ", ".join(map(format_bytes, memory))
        facts["Memory"] = f"{format_bytes(memory[0])}, all ranks" if training.cluster.is_one_process else of_each
    return facts
