"""Recovery of a `fit` after failures: heal the cluster, and resume the training from its last consistent state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpi4dl_nb.cluster.calibrate_cluster import warn_of_gpus
from mpi4dl_nb.cluster.cluster import HELP
from mpi4dl_nb.engines.compiler.stages import Layer, cut_stages, find_layers
from mpi4dl_nb.engines.errors import CheckpointError, DamagedError, PlanError, RankError
from mpi4dl_nb.engines.formatting import format_count, format_seconds
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.predict.search import generate_plans, search
from mpi4dl_nb.engines.train.checkpoint_owner import check_outline, read_outline
from mpi4dl_nb.engines.train.optimiser_trial import count_states
from mpi4dl_nb.engines.train.train_loop import compute_smallest_step
from mpi4dl_nb.engines.train.training_events import Recovered, StepResult
from mpi4dl_nb.training.loops import BatchLoop, ImageLoop
from mpi4dl_nb.training.training_handle import TrainingHandle

FAILURE_POLICIES = ("raise", "heal", "shrink")
"""Policies for failed ranks: raise the error, restart dead ranks, or continue without them."""

_TRIES = 3  # attempts, if ranks fail again during recovery
_FAILURES = 3  # failures without a further completed step


@dataclass(frozen=True)
class FitPosition:
    """Position of a `fit`: the numbers of `steps` and `epochs` done, and the steps of the current epoch (`begun`).

    `place` is the position of its train loop. `is_over`: at the end of an epoch that has not been reported yet.
    """

    steps: int
    epochs: int
    begun: tuple[StepResult, ...]
    place: Any
    is_over: bool


class FailureRecovery:
    """Recovers a training that saves checkpoints; `renew` restores what else the ranks hold for it.

    `fewer`: continue without the ranks that have died. `mark` is the position to resume from.
    """

    def __init__(self, training: TrainingHandle, fewer: bool, renew: Callable[[], None]) -> None:
        self.training, self.fewer, self.renew = training, fewer, renew
        self.mark = FitPosition(0, 0, (), None, is_over=False)
        self._saved: list[tuple[FitPosition, Path, dict[str, Any]]] = []  # with their outlines, newest last
        self._passed_over: list[str] = []  # damaged checkpoints that the last recovery skipped, with the reasons
        self._failed: list[tuple[int, int | None]] = []  # (steps done, rank) of failures since the last step

    def record_checkpoint(self, mark: FitPosition, path: Path) -> None:
        """Remember a checkpoint that was just saved at the position `mark`, and what tells it from any other."""
        there = [checkpoint for checkpoint in self._saved if checkpoint[1].exists() and checkpoint[1] != path]
        with suppress(CheckpointError):  # one that cannot be read even now is none to go back to
            there.append((mark, path, read_outline(path)))
        self._saved = there

    def heal(self, error: RankError, loop: BatchLoop | ImageLoop, now: FitPosition) -> Recovered:
        """Restore the training on all ranks and reposition its loop. Raises the error if recovery cannot help."""
        start_s = time.perf_counter()
        self._check_repeated(error)
        self._passed_over.clear()
        training = self.training
        # Once for all tries: a checkpoint that the first one has loaded stays the position if its later part fails.
        self.mark = now
        for tried in range(_TRIES):
            try:
                cluster = training.cluster.heal(self.fewer)
                # The ranks keep their state if none died and none was caught within an update. Otherwise weights are
                # lost or inconsistent between ranks, and only a checkpoint has them whole.
                if not training.is_whole():
                    plan = training.plan if cluster.n == training.plan.ranks else choose_plan(training, cluster.n)
                    self._load(plan)
                loop.resume(self.mark.place)
                loop.is_over = self.mark.is_over
                self.renew()
                break
            except RankError as failure:
                if tried + 1 == _TRIES:
                    raise failure from error
        lost = now.steps - self.mark.steps
        again = f"{format_count(lost, 'step')} done again" if lost else "no step is lost"
        why = str(error).removesuffix(HELP).rstrip()
        text = f"Healed in {format_seconds(time.perf_counter() - start_s, 2)}, {again}. What went wrong: {why}"
        return Recovered(" ".join([text, *self._passed_over]), self.mark.steps, self.mark.epochs)

    def _check_repeated(self, error: RankError) -> None:
        """Raise the error if it would recur (a non-finite loss, a failure in the same place), or after a `stop`."""
        if type(error) is not RankError or not self.training.cluster.is_started:
            raise error
        here = self.training.steps, error.rank
        if self._failed and here[0] > max(steps for steps, _ in self._failed):
            self._failed.clear()
        # An error in the model or in an image comes in the same place again, those of a machine do not.
        again = here in self._failed or len(self._failed) + 1 == _FAILURES
        self._failed.append(here)
        if again:
            where = ", ".join(f"rank {rank} after {steps} steps" for steps, rank in self._failed)
            error.add_note(f"It was not healed again, for ranks failed in the same place: {where}.")
            raise error

    def _load(self, plan: Plan) -> None:
        """Load the newest undamaged checkpoint. Raises DamagedError if there is none; other errors are passed on."""
        wrong: list[DamagedError] = []
        for mark, path, outline in reversed(self._saved):
            try:
                if not path.exists():
                    raise DamagedError(f"{path} does not exist any more.")
                check_outline(path, outline)  # under this name there may be another whole checkpoint now
                self.training.load(path, plan)
            except DamagedError as error:
                wrong.append(error)
                continue
            self.mark = mark
            self._passed_over = [f"Passed over: {error}" for error in wrong]
            return
        raise DamagedError("There is no whole checkpoint to go back to.\n" + "\n".join(map(str, wrong)))


def choose_plan(training: TrainingHandle, ranks: int) -> Plan:
    """Return the plan for `ranks` ranks that is predicted to be fastest among those that compute the same as now.

    Such plans have the same numbers of batches and micro-batches, and the same tiles if each tile is normalised by
    itself. Raises PlanError if there is none.
    """
    # The same numbers of batches and micro-batches make the same batch of each optimiser step, summed up in as many
    # parts: losses and weights go on as they would have with all ranks.
    now, batch = training.plan, training.recipe.graph.inputs["images"].shape[0] * training.plan.parts
    layers = find_layers(training.recipe.graph)
    same = {name: getattr(now, name) for name, option in OPTIONS.items() if option.kept}
    able = (
        replace(plan, **same, accumulate=now.batches // plan.batches)
        for plan in generate_plans(ranks, batch, len(training.recipe.graph.inputs["images"].shape) - 2)
        if now.batches % plan.batches == 0 and _normalises_alike(plan, now, layers)
    )
    asked = [
        plan
        for plan in able
        if plan.micro_batches == now.micro_batches
        and all(images % compute_smallest_step(plan) == 0 for images in training.sizes)
    ]
    if not asked:
        raise PlanError(
            f"No plan for {ranks} ranks has {now.batches} batches and {now.micro_batches} micro-batches in a step, as "
            f"this training has. Use on_failure='heal', or make a new Training for {ranks} ranks and load a checkpoint."
        )
    states = count_states(training.recipe.optimiser, training.recipe.parameters)
    machine, get_graph = training.cluster.calibrate(accept_noise=True), training.traces.get_graph
    warn_of_gpus(training.cluster.call, training.recipe.device)
    found = search(ranks, batch, get_graph, machine, machine.get_rank_bytes(ranks), states, asked=asked)
    return found.fitting[0].plan


def _normalises_alike(plan: Plan, now: Plan, layers: Sequence[Layer]) -> bool:
    """Return whether batch norms see the same pixels under both plans, whose `sync_batchnorm` will be that of `now`."""
    if now.sync_batchnorm:
        return True
    if plan.split_size > len(layers) or plan.local_dp != now.local_dp or plan.bidirectional:
        return False

    # The same tiles must cover the same layers. With fused halos, two ranks normalise the pixels that both compute.
    def find_tiled(compared: Plan) -> tuple[object, ...]:
        stages = zip(compared.grids, cut_stages(layers, compared), strict=True)
        return [pair for pair in stages if pair[0].tiles > 1], compared.halo_d2, compared.fused_layers

    return find_tiled(plan) == find_tiled(now)
