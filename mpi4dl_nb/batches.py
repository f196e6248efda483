"""The numbers of images in batches, as far as they are known before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from engines.errors import ImageError, PlanError

__all__ = ["Batch", "CachedBatches", "check_batches", "count_images", "find_batch_sizes", "make_repeatable"]

Batch = tuple[Any, Any]


def check_batches(data: object, name: str = "data") -> None:
    """Raise PlanError if `data` cannot be iterated over, such as a function that makes batches."""
    if hasattr(type(data), "__iter__") or hasattr(type(data), "__getitem__"):
        return
    kind = f"{name} is {getattr(data, '__name__', type(data).__name__)!r}, a {type(data).__name__}"
    if callable(data):
        called = f"{getattr(data, '__name__', 'it')}()"
        raise PlanError(f"{kind}, which is no batches by itself. Give what it makes: call it, {called}.")
    raise PlanError(f"{kind}, which cannot be gone through. Give batches (images, labels) in a list or a DataLoader.")


def count_images(batch: Any) -> int:
    """Return the number of images in a batch. Raises ImageError if it is not a pair of images and labels."""
    try:
        images, _ = batch
        return len(images)
    except (TypeError, ValueError) as error:
        raise ImageError(
            f"A batch must be a pair (images, labels), but this is a {type(batch).__name__}: {error}."
        ) from error


def find_batch_sizes(data: Iterable[Batch], full: int) -> Sequence[int] | None:
    """Return the numbers of images in the batches of an epoch; None if they are known only once drawn.

    Known are the sizes of a list, and those of a DataLoader of batch size `full`, the number of images in a step.
    Raises ImageError if a later batch of a list has a wrong size.
    """
    if isinstance(data, list | tuple):
        counts = [count_images(batch) for batch in data]
        if not counts or counts[0] != full:
            return None  # the first step raises the error
        wrong = next((number for number, count in enumerate(counts) if not 0 < count <= full), None)
        if wrong is not None:
            raise ImageError(
                f"Batch {wrong} has {counts[wrong]} images, but a step takes {full}. Give batches of {full} images, or "
                "fewer in the last one."
            )
        return counts
    if not isinstance(data, DataLoader) or data.batch_size != full or isinstance(data.dataset, IterableDataset):
        return None
    try:
        whole, rest = divmod(len(data.sampler), data.batch_size)  # type: ignore[arg-type]
    except TypeError:  # a sampler of unknown length
        return None
    return [data.batch_size] * whole + [rest] * bool(rest and whole and not data.drop_last)


class CachedBatches:
    """Repeatable batches of an iterator: each batch is drawn when it is first needed, and then kept."""

    def __init__(self, drawn: Iterator[Batch]) -> None:
        self._drawn, self._kept = drawn, list[Batch]()

    def __iter__(self) -> Iterator[Batch]:
        yield from self._kept
        for batch in self._drawn:
            self._kept.append(batch)
            yield batch


def make_repeatable(data: Iterable[Batch], epochs: int, steps: int | None, on_failure: str) -> Iterable[Batch]:
    """Return batches that `fit` can iterate over as it needs: an iterator's are kept only if they are needed again.

    Raises PlanError if an iterator that continues from epoch to epoch (`steps`) would have to return to a checkpoint.
    """
    if not isinstance(data, Iterator):
        return data
    if steps is not None and on_failure != "raise":
        raise PlanError(
            f"on_failure={on_failure!r} goes on from checkpoints, where batches are needed again, but with steps= an "
            "iterator gives each of them once. Give a list or a DataLoader, or on_failure='raise'."
        )
    again = (epochs > 1 and steps is None) or on_failure != "raise"
    return CachedBatches(data) if again else data
