"""Split into training and held-out images by slide, so that no slide is used for both training and evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from engines.errors import ImageError
from engines.images.dataset import shuffle_indices

__all__ = ["split_indices"]


def split_indices(
    slides: Sequence[str], labels: Sequence[Hashable] | None = None, held_out: float = 0.2, seed: int = 0
) -> tuple[list[int], list[int]]:
    """Return the indices of the training images and of the held-out images; about a `held_out` share of the slides.

    Image i belongs to slide `slides[i]` and class `labels[i]`. All images of a slide are on the same side, so that no
    slide is used for both training and evaluation. The split is stratified: the same share of the slides with the same
    set of classes is held out, at least one of two or more. The same slides, labels and seed give the same sides, in
    any order of the images. Raises ImageError if a side would be empty.

    >>> split_indices(["a", "a", "b", "c"], held_out=0.3)
    ([0, 1, 2], [3])
    """
    if not 0 < held_out < 1:
        raise ImageError(f"held_out={held_out} must be a share of the slides, between 0 and 1.")
    classes: dict[str, set[str]] = defaultdict(set)
    for slide, label in zip(slides, labels or [None] * len(slides), strict=True):
        classes[slide].add(str(label))
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for slide in sorted(classes):
        alike[tuple(sorted(classes[slide]))].append(slide)
    # Everything is sorted before it is shuffled, so that the order in which files were listed makes no difference.
    judged: set[str] = set()
    for number, (_, group) in enumerate(sorted(alike.items())):
        count = min(max(round(held_out * len(group)), 1), len(group) - 1)
        judged |= {group[place] for place in shuffle_indices(len(group), seed, number)[:count]}
    if not judged:
        raise ImageError(
            f"The images are of {len(classes)} slides, no two of them of the same classes, so none can be held out. "
            "Add slides, or name the slides of the images where their files are not one slide each."
        )
    sides = [[index for index, slide in enumerate(slides) if (slide in judged) == side] for side in (False, True)]
    return sides[0], sides[1]
