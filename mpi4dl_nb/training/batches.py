"""Convert a batch to what a step takes, or raise an error that explains what is wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Number
from os import PathLike
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from mpi4dl_nb.engines.compiler.labels import find_invalid_labels
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.graph.model_inputs import describe_value, format_packing
from mpi4dl_nb.engines.images.dataset import cast_numbers, make_tensor
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import Recipe


def check_order(plan: object, cluster: object) -> None:
    """Raise PlanError if the plan or the cluster of a Training are something else, as by another order of arguments."""
    wrong = []
    if not isinstance(plan, Plan):
        wrong.append(f"plan is a {type(plan).__name__}, not a Plan")
    if not all(hasattr(cluster, name) for name in ("n", "call")):
        wrong.append(f"cluster is a {type(cluster).__name__}, not a started Cluster")
    if wrong:
        raise PlanError(
            f"Training(model, plan, cluster, image_shape) takes these in this order, but {', and '.join(wrong)}. "
            "Give Plan(...), and Cluster(plan.ranks).start()."
        )


def prepare_batch(recipe: Recipe, images: Any, labels: Any) -> dict[str, Tensor]:
    """Return images and labels as tensors of the recipe's dtypes.

    Raises ImageError for a wrong shape, for numbers of another kind (`cast_numbers`), or for a label beyond the classes
    of the loss.
    """
    whole, batches = {}, recipe.plan.batches
    for name, values in (("images", images), ("labels", labels)):
        spec, tensor = recipe.step_specs[name], _to_tensor(name, values)
        if name == "images" and tuple(tensor.shape) == spec.shape[1:]:
            raise ImageError(
                f"images have shape {tuple(tensor.shape)}, which is one image, but a step takes {spec.shape[0]}: "
                f"{spec.shape}. Stack images, or wrap a Dataset: DataLoader(dataset, batch_size={spec.shape[0]})."
            )
        if tuple(tensor.shape) != spec.shape:
            several = f" ({batches} batches make a step of this plan)" if batches > 1 else ""
            # An image_shape is that of one batch, but what is given is a step.
            count, *rest = tensor.shape or (0,)
            fits = tensor.dim() == 4 and tensor.numel() and not count % batches
            image_shape = f"image_shape={(count // batches, *rest)}" if fits else "another image_shape"
            other = "labels=EXAMPLE, a tensor like the labels of a batch" if name == "labels" else image_shape
            raise ImageError(
                f"{name} have shape {tuple(tensor.shape)} but the training was made for {spec.shape}{several}. "
                f"Change the batch, or make a Training with {other}."
            )
        whole[name] = cast_numbers(name, tensor, spec)
    # An index beyond the classes must not reach a GPU: the assertion in its kernel leaves the process without that GPU.
    for numbers, wrong in find_invalid_labels(recipe.graph, whole["labels"]):
        ignores = "" if numbers.ignored is None else f" and ignores {numbers.ignored}"
        raise ImageError(
            f"A label is {int(wrong.max())}, but the loss takes numbers of {numbers.classes} classes (0 to "
            f"{numbers.classes - 1}){ignores}. Change the labels, the loss's ignore_index, or the model's num_classes."
        )
    return whole


def _to_tensor(name: str, values: Any) -> Tensor:
    """Return what was given as images or labels as a tensor. Raises ImageError if it is none and no array."""
    try:
        return make_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "Give a tensor or an array of numbers."
        if values is None:
            remedy = "A step takes images and their labels, and the loss both a prediction and labels."
        elif name == "labels" and (packing := format_packing(values)):
            remedy = packing.strip()
        elif isinstance(values, Mapping):
            remedy = f"Give the tensor in it, such as batch[{next(iter(values), name)!r}]."
        elif isinstance(values, str | PathLike):
            remedy = "Files are read by folder_images and table_images, for fit, and by open_image."
        elif isinstance(values, list | tuple) and any(isinstance(part, Tensor) for part in values):
            channels = "; several images of one sample are channels of one image: torch.cat(images, 1)"
            remedy = f"Make one of them: torch.stack({name}) or torch.cat({name}){channels * (name == 'images')}."
        raise ImageError(f"{name} are {describe_value(values)}, and no tensor. {remedy}") from error


# The numbers of images in batches, as far as they are known before the first step.


Batch = tuple[Any, Any]


def check_batches(data: Any) -> Iterable[Batch]:
    """Return `data`. Raises PlanError if it is no batches: a tensor, or cannot be iterated over, such as a function."""
    if isinstance(data, Tensor | Mapping):
        raise PlanError(
            f"data is a {type(data).__name__}, but must be batches: pairs (images, labels) in a list or a "
            "DataLoader, such as fit([(images, labels)])."
        )
    if hasattr(type(data), "__iter__") or hasattr(type(data), "__getitem__"):
        return data
    kind = f"data is {getattr(data, '__name__', type(data).__name__)!r}, a {type(data).__name__}"
    if callable(data):
        called = f"{getattr(data, '__name__', 'it')}()"
        raise PlanError(f"{kind}, which is no batches by itself. Give what it makes: call it, {called}.")
    raise PlanError(f"{kind}, which cannot be gone through. Give batches (images, labels) in a list or a DataLoader.")


def count_images(batch: Any) -> int:
    """Return the number of images in a batch. Raises ImageError if it is not a pair of images and labels."""
    try:
        if isinstance(batch, Mapping):
            keys = ", ".join(map(repr, batch))
            raise ValueError(f"its keys are {keys}. Make pairs: ((batch[...], batch[...]) for batch in data)")
        if isinstance(batch, Tensor | str):
            raise ValueError("put images and their labels into a tuple; of a single batch, fit([(images, labels)])")
        if isinstance(batch, tuple | list) and len(batch) > 2:
            raise ValueError(
                f"of {len(batch)} values. Several images of one sample are channels of one: "
                "((torch.cat([a, b], 1), labels) for a, b, labels in data); leave out what the loss does not take"
            )
        images, _ = batch
        return len(images)
    except (TypeError, ValueError) as error:
        kind = type(batch).__name__
        raise ImageError(f"A batch must be a pair (images, labels), but this is a {kind}: {error}.") from error


def get_length(data: Any) -> int | None:
    """Return the length of `data`; None if it has none. A DataLoader of a stream has a `__len__` that only raises."""
    try:
        return len(data)
    except TypeError:
        return None


def find_batch_sizes(data: Batches, full: int) -> Sequence[int] | None:
    """Return the numbers of images in the batches of an epoch; None if they are known only once drawn.

    Known are the sizes of a list, and those of a DataLoader of batch size `full`, the number of images in a step.
    Raises ImageError if a later batch of a list has a wrong size.
    """
    if isinstance(data, list | tuple):
        counts = [count_images(batch) for batch in data]
        if not counts or counts[0] != full:
            return None  # the first step raises the error
        wrong = next((index for index, count in enumerate(counts) if not 0 < count <= full), None)
        if wrong is not None:
            raise ImageError(
                f"Batch {wrong} has {counts[wrong]} images, but a step takes {full}. Give batches of {full} images, or "
                "fewer in the last one."
            )
        return counts
    if not isinstance(data, DataLoader) or data.batch_size != full or isinstance(data.dataset, IterableDataset):
        return None
    if (images := get_length(data.sampler)) is None:
        return None
    whole, rest = divmod(images, data.batch_size)
    return [data.batch_size] * whole + [rest] * bool(rest and whole and not data.drop_last)


def copy_batch(given: Any) -> Any:
    """Return a copy of a batch, in host memory, that does not change if whoever gave it writes the next one over it.

    Copied are tensors, arrays, and what dicts, lists and tuples hold of them. Raises ImageError for what has no copy.

    >>> images, labels = torch.zeros(2), {"classes": np.zeros(2)}
    >>> kept = copy_batch((images, labels))
    >>> images[:], labels["classes"][:] = 1, 1
    >>> kept[0].tolist(), kept[1]["classes"].tolist()
    ([0.0, 0.0], [0.0, 0.0])
    """
    match given:
        case None | str() | bytes() | Number():
            return given
        case Tensor():
            return given.detach().to("cpu", copy=True)
        case np.ndarray():
            return given.copy()
        case Mapping():
            return {name: copy_batch(value) for name, value in given.items()}
        case tuple() if hasattr(given, "_make"):  # a named tuple
            return type(given)(*map(copy_batch, given))
        case list() | tuple():
            return (list if isinstance(given, list) else tuple)(map(copy_batch, given))
    try:
        return copy.deepcopy(given)
    except Exception as error:
        raise ImageError(
            f"A batch has a {type(given).__name__}, which cannot be copied ({type(error).__name__}: {error}), but is "
            "needed again after the next batch is drawn. Give tensors or arrays, or a list or a DataLoader of batches."
        ) from error


class CachedBatches:
    """Repeatable batches of an iterator: each batch is drawn when it is first needed, and a copy of it is kept.

    In a later epoch, an iterator that starts anew after its end (DALI's) gives other batches, as in a plain loop. Any
    other iterator gives nothing more, and the batches of the first epoch are repeated.
    """

    def __init__(self, drawn: Iterator[Batch]) -> None:
        self._drawn, self._kept = drawn, list[Batch]()
        self._epoch, self._has_ended = 0, False  # of the batches that are kept

    def iterate_epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch. Raises PlanError if the iterator has begun another epoch since then."""
        if epoch > self._epoch and self._has_ended:
            for first in self._drawn:
                self._epoch, self._has_ended, self._kept = epoch, False, [copy_batch(first)]
                break
        elif epoch < self._epoch:
            raise PlanError(
                f"Batches of epoch {epoch} are needed again, but their iterator gives other ones in each epoch and has "
                f"begun epoch {self._epoch}. Load the last checkpoint, or give a list or a DataLoader."
            )
        yield from self._kept
        # Always a copy: nothing tells whether an iterator gives each batch in memory of its own, or all of them in one
        # buffer (pinned memory, DALI), or in turn in several. The original is released, so that a copy takes time, but
        # no more memory: 25 MB take 30 ms on a busy core.
        for batch in () if self._has_ended else self._drawn:
            kept = copy_batch(batch)
            self._kept.append(kept)
            yield kept
        self._has_ended = True


Batches = Iterable[Batch] | CachedBatches


def make_repeatable(data: Iterable[Batch], epochs: int, steps: int | None, on_failure: str) -> Batches:
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
