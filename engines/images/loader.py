"""Data loading for training: each rank prefetches only its own pixels of each step, in an order given by the seed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.checks import check_choice, is_integer
from mpi4dl_nb.engines.comm.status_board import get_status_board
from mpi4dl_nb.engines.comm.world import World, all_gather_or_raise, make_released_error
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.images.shard_reader import ReadRequest, Sample, Sampler, SamplerState, ShardReader
from mpi4dl_nb.engines.program.worker import Inputs

_AHEAD = 2  # steps that are prefetched while one is computed
_ON_BAD = ("raise", "skip")
_NAMED = 5  # bad images that an error names


@dataclass(frozen=True)
class LoaderOptions:
    """Options of data loading.

    `seed` gives the order of the images; an epoch has at most `steps` steps. `workers` is the number of prefetching
    threads per rank; with 0 the training thread reads. A bad image ends the training (`on_bad_image="raise"`) or is
    skipped ("skip"). The images left over at the end of an epoch form a smaller step, or are dropped (`drop_last`).
    Raises PlanError if a value is invalid.
    """

    seed: int = 0
    steps: int | None = None
    workers: int = 0
    on_bad_image: str = "raise"
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not is_integer(self.seed) or abs(int(self.seed)) >= 1 << 64:
            raise PlanError(f"seed={self.seed!r} must be a whole number between -2**64 and 2**64, such as 0.")
        object.__setattr__(self, "seed", int(self.seed))  # one of NumPy's would overflow in what is computed from it
        check_choice("on_bad_image", self.on_bad_image, _ON_BAD)
        if not is_integer(self.workers) or self.workers < 0:
            raise PlanError(f"workers={self.workers!r} must be a whole number of threads, or 0 for none.")
        if self.steps is not None and not (is_integer(self.steps) and self.steps >= 1):
            raise PlanError(f"steps={self.steps!r} must be at least 1, or None for whole epochs.")
        if not isinstance(self.drop_last, bool):
            raise PlanError(f"drop_last={self.drop_last!r} must be True or False.")


@dataclass(frozen=True)
class NotReady:
    """The result of `load_next` if the rank is not yet prepared for a step of `images` images."""

    images: int


@dataclass(frozen=True)
class LoadedBatch:
    """This rank's shard of the step at `place`, which has `images` images, and the time waited for it in seconds."""

    place: SamplerState
    parts: Inputs
    wait_s: float
    images: int


@dataclass(frozen=True, slots=True)
class _BadImage:
    """Why an image cannot be read. An `odd` failure is a bug rather than a bad file, and is never skipped."""

    text: str
    odd: bool = False


class RankLoader:
    """Loads one rank's shards of the steps of a training, `count` images each; every rank has its own loader.

    The order depends only on seed and epoch, and an image's augmentation draw only on seed, epoch and image: neither
    depends on plan, ranks or workers. A step takes the next `count` images that are not skipped. The images left over
    at the end of an epoch form a smaller step, of a multiple of `unit` images, unless `feeding.drop_last` is set. An
    image that turns out to be bad when its step needs it is skipped by all ranks, in this epoch and all later ones, as
    if it were not in the order.

    `is_ready(images)` returns whether the rank can run a step of that many images.
    """

    def __init__(
        self,
        world: World,
        own: ShardReader,
        count: int,
        feeding: LoaderOptions | None = None,
        unit: int = 1,
        is_ready: Callable[[int], bool] = lambda images: True,
    ) -> None:
        self.world, self.own, self.count, self.is_ready = world, own, count, is_ready
        self.feeding = feeding or LoaderOptions()
        self.order = Sampler(len(own.images), count, self.feeding.steps, self.feeding.drop_last, unit)
        self.place = SamplerState(self.feeding.seed)
        self._next = self.place
        self.bad: list[str] = []  # for each skipped image, its name and the reason
        self._reading: dict[ReadRequest, Future[Tensor]] = {}
        workers, output = self.feeding.workers, get_status_board().output

        def begin_worker() -> None:
            torch.set_num_threads(1)  # otherwise each worker would start as many threads as the training
            get_status_board().output = output  # that of the worker's rank

        self._pool = ThreadPoolExecutor(workers, "feed", begin_worker) if workers else None
        if (total := len(own.images)) < count:
            raise ImageError(f"There are {total} images, but a step takes {count}. Use smaller batches, or add images.")

    # ---- state

    def get_state(self) -> dict[str, Any]:
        """Return, as plain JSON, where the training continues after the last step that `advance` marked as done."""
        return self.place.to_dict(len(self.own.images))

    def resume(self, state: Mapping[str, Any], anew: bool = False) -> None:
        """Continue from `state` with the same images, draws and order as without the interruption.

        With `anew`, an epoch with no step left is skipped: a caller that starts here would get an empty epoch. Images
        that were left out then stay so, and are named again. Raises ImageError if the number of images differs.
        """
        if state["images"] != len(self.own.images):
            raise ImageError(
                f"The training that is to go on had {state['images']} images, but there are {len(self.own.images)}. "
                "Give it the same images, or begin a new one."
            )
        sampler_state = SamplerState.of(state)
        self.place = self.order.skip_finished_epoch(sampler_state) if anew else sampler_state
        if anew:
            self.bad = [
                f"{self.own.images.name(index)}: left out before, as unreadable" for index in sampler_state.skipped
            ]

    def advance(self) -> None:
        """Mark the loaded step as done. Until then, `get_state` still refers to it, so that a restart repeats it."""
        self.place = self._next

    # ---- steps

    def load_next(self) -> LoadedBatch | NotReady | None:
        """Return this rank's shard of the next step, or None at the end of an epoch, after moving to the next one.

        Returns NotReady for a smaller step that the ranks must be prepared for first; the call can then be repeated.
        Collective. Raises ImageError, on every rank, if an image cannot be read or too few are left for one step.
        """
        start_s = time.perf_counter()
        waited_s = 0.0
        while (coming := self.order.get_step(self.place)) is not None:
            step, then = coming
            if not self.is_ready(len(step)):
                return NotReady(len(step))
            # All ranks exchange their bad images before any of them uses the step. Every rank then raises, or skips the
            # same images and tries again, so that the ranks never disagree on the images of a step. Image 7 is bad in a
            # region that only rank 1 reads:
            #
            #     rank 0   read 3 7   {}        \                skip 7, read 3 9   {}  \
            #                                    all-gather {7}                         all-gather {}   use 3 9
            #     rank 1   read 3 7   {7: why}  /                skip 7, read 3 9   {}  /
            pieces, own_bad, causes = self._read(step, then)
            waited_s += time.perf_counter() - start_s
            all_bad = all_gather_or_raise(self.world, own_bad, self._make_error(own_bad, causes))
            # Reversed: where several ranks found an image bad, all of them keep the text of the lowest rank.
            bad = {index: why for rank in reversed(all_bad) for index, why in rank.items()}
            if not bad:
                self._next = then
                for piece in pieces:
                    self._reading.pop(piece, None)
                return LoadedBatch(self.place, self.own.assemble(step, pieces.__getitem__), waited_s, len(step))
            if failure := self._make_error(bad, causes):
                raise failure
            self.bad += [bad[index].text for index in sorted(bad)]
            self.place = replace(self.place, skipped=(*self.place.skipped, *sorted(bad)))
            start_s = time.perf_counter()
        # The first step of an epoch is always full. If there is none, too few readable images are left, and the next
        # epoch would have none either.
        if not self.place.step:
            some = "".join(f"\n{text}" for text in self.bad[:_NAMED])
            raise ImageError(
                f"{len(self.place.skipped)} of {len(self.own.images)} images cannot be read, and the others are not "
                f"enough for a step of {self.count}. Mend them, or lower the batch size.{some}"
            )
        self.place = self.place.next_epoch
        return None

    # ---- reading

    def _read(
        self, step: Sequence[Sample], then: SamplerState
    ) -> tuple[dict[ReadRequest, Tensor], dict[int, _BadImage], dict[int, Exception]]:
        """Return the pieces of a step, and of the images that this rank cannot read the reasons and the exceptions."""
        wanted = list(self.own.make_read_requests(step))
        if self._pool is not None:
            # The workers get the pieces of this step and of the next ones. A step of a size that the rank is not
            # prepared for is left out: its pieces are not known yet.
            coming = (step for step, _ in zip(self.order.iterate_steps(then), range(_AHEAD), strict=False))
            known = (step for step in coming if self.is_ready(len(step)))
            pieces = dict.fromkeys([*wanted, *(piece for step in known for piece in self.own.make_read_requests(step))])
            # Pieces become obsolete when a bad image is skipped, which shifts all later steps.
            for piece in self._reading.keys() - pieces.keys():
                self._reading.pop(piece).cancel()
            for piece in pieces:
                if piece not in self._reading:
                    self._reading[piece] = self._pool.submit(self.own.fetch, piece)
        tensors: dict[ReadRequest, Tensor] = {}
        bad: dict[int, _BadImage] = {}
        causes: dict[int, Exception] = {}
        for piece in wanted:
            if piece.index in bad:  # an image has several pieces; one that failed is enough
                continue
            try:
                tensors[piece] = self.own.fetch(piece) if self._pool is None else self._reading[piece].result()
            except Exception as error:
                # Raised only after the exchange: a rank that left here would leave the others in the all-gather.
                odd = not isinstance(error, ImageError | OSError)
                text = describe_read_error(self.own.images.name(piece.index), error, odd)
                bad[piece.index], causes[piece.index] = _BadImage(text, odd), error
        return tensors, bad, causes

    def _make_error(self, bad: Mapping[int, _BadImage], causes: Mapping[int, Exception]) -> ImageError | None:
        """Return the error to raise for bad images, or None if they are skipped.

        Only a rank that read the image itself has the original exception as the error's cause.
        """
        if not bad:
            return None
        first = next((index for index, why in bad.items() if why.odd), min(bad))
        if self.feeding.on_bad_image != "raise" and not bad[first].odd:
            return None
        failure = ImageError(bad[first].text)
        failure.__cause__ = causes.get(first) or make_released_error()
        return failure

    def close(self) -> None:
        """Shut down the workers; pieces that are being read are finished first."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._reading.clear()


def describe_read_error(name: str, error: Exception, odd: bool = False) -> str:
    """Return why an image cannot be read; its name is prepended unless the error already contains it."""
    text = str(error) or type(error).__name__
    text = f"{type(error).__name__}: {text}" if odd else text
    return text if name in text else f"{name}: {text}"
