"""Sampler of the images of each training step; it depends only on the seed, not on plan, ranks or workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engines.images.dataset import shuffle_indices
from engines.spatial.rng import compute_step_seed

__all__ = ["Sample", "Sampler", "SamplerState"]

Sample = tuple[int, int | None]
"""The index of an image and the draw of its augmentation."""

_MOST = 1 << 53


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The position of a training in its images: after `step` steps of an epoch, at `position` in the epoch's order.

    `skipped` are the indices of the images that are left out, in the order in which they were found.
    """

    seed: int
    epoch: int = 0
    step: int = 0
    position: int = 0
    skipped: tuple[int, ...] = ()

    def to_dict(self, images: int) -> dict[str, Any]:
        """Return the state as plain JSON, for a training on a given number of images.

        >>> SamplerState.of(SamplerState(seed=3, epoch=1, step=2, position=4).to_dict(images=9)).step
        2
        """
        return {**asdict(self), "skipped": list(self.skipped), "images": images}

    @classmethod
    def of(cls, state: Any) -> SamplerState:
        """Return the state from the result of `to_dict`. Raises ValueError or TypeError if it is invalid."""
        # The state comes from a checkpoint, and is checked as any file is. A step takes at least one image, so that
        # `step` never exceeds `position`.
        if not isinstance(state, dict) or not isinstance(state.get("skipped"), list):
            raise TypeError("where the training is in its images is no dict with a list of those that are left out")
        numbers = [state.get(name) for name in ("images", "seed", "epoch", "step", "position")]
        if wrong := [number for number in (*numbers, *state["skipped"]) if type(number) is not int]:
            raise TypeError(f"{str(wrong[0])[:20]!r} is no number of an image, epoch or step")
        images, seed, epoch, step, position = numbers
        if not (0 <= step <= position <= images and 0 <= epoch < _MOST and abs(seed) < 1 << 64):
            raise ValueError(f"there is no step {step} at image {position} of {images} in epoch {epoch}")
        skipped = tuple(state["skipped"])
        if len(set(skipped)) != len(skipped) or not all(0 <= each < images for each in skipped):
            raise ValueError(f"some of the images that are left out are none of the {images}")
        return cls(seed, epoch, step, position, skipped)

    @property
    def next_epoch(self) -> SamplerState:
        """The state at the beginning of the next epoch, with the same skipped images."""
        return SamplerState(self.seed, self.epoch + 1, skipped=self.skipped)


class Sampler:
    """Steps of `count` images out of `total`, in epochs of at most `steps` steps.

    The images left over at the end of an epoch form a smaller step, of a multiple of `unit` images; with `drop_last`
    they are dropped until the next epoch. The first step of an epoch is always full.

    >>> order, start = Sampler(total=5, count=2), SamplerState(seed=0)
    >>> [index for index, _ in order.get_samples(start)] == list(shuffle_indices(5, 0, 0))[:2]
    True
    >>> last = order.get_next_state(order.get_next_state(start))
    >>> len(order.get_samples(last)), order.get_samples(order.get_next_state(last))
    (1, None)
    >>> Sampler(total=5, count=2, drop_last=True).get_samples(last) is None
    True
    """

    def __init__(
        self, total: int, count: int, steps: int | None = None, drop_last: bool = False, unit: int = 1
    ) -> None:
        self.total, self.count, self.steps = total, count, steps
        self.drop_last, self.unit = drop_last, unit
        self._made: tuple[tuple[int, int], Sequence[int]] | None = None

    def get_samples(self, place: SamplerState) -> list[Sample] | None:
        """Return the images of the step at `place`, each with its draw, or None if the epoch has no further step.

        An image's draw depends only on seed, epoch and image.
        """
        if (self.steps is not None and place.step >= self.steps) or not (good := self._find_readable(place)):
            return None
        seed = compute_step_seed(place.seed, place.epoch)
        return [(index, compute_step_seed(seed, 1 + index)) for _, index in good]

    def get_next_state(self, place: SamplerState) -> SamplerState:
        """Return the state after the step at `place`."""
        return replace(place, step=place.step + 1, position=self._find_readable(place)[-1][0] + 1)

    def skip_finished_epoch(self, place: SamplerState) -> SamplerState:
        """Return `place`, or the beginning of the next epoch if its epoch has no step left."""
        return place.next_epoch if place.step and self.get_samples(place) is None else place

    def iterate_steps(self, place: SamplerState) -> Iterator[list[Sample]]:
        """Yield the steps from `place` on, epoch after epoch, with the bad images known so far skipped."""
        while True:
            step = self.get_samples(place)
            if step is None and not place.step:
                return
            if step is None:
                place = place.next_epoch
            else:
                yield step
                place = self.get_next_state(place)

    def _find_readable(self, place: SamplerState) -> list[tuple[int, int]]:
        """Return the (position, image) pairs of the next step; empty if too few readable images are left."""
        # An epoch's order is one permutation; a step takes the next `count` images that are not skipped. Steps are not
        # numbered in advance, so that a bad image moves the later ones and leaves no gap:
        #
        #     order      4 0 7 2 9 1 ...   count 2     after 7 has turned out to be bad
        #     steps     |4 0|7 2|9 1|                 |4 0|2 9|1 ...
        #     position   0   2   4   6                 0   2   5
        key = place.seed, place.epoch
        if self._made is None or self._made[0] != key:
            self._made = key, shuffle_indices(self.total, *key)
        order, found = self._made[1], []
        for position in range(place.position, self.total):
            if order[position] not in place.skipped:
                found.append((position, order[position]))
            if len(found) == self.count:
                return found
        return [] if self.drop_last or not place.step else found[: len(found) - len(found) % self.unit]
