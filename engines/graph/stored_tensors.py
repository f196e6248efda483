"""Tensors that forward stores on the model: a loss that reads them there reads those of another run, or none.

A trace runs a copy of the model, and ranks run its operators only. The user's own model, to which a loss may have a
reference, keeps what it held before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from mpi4dl_nb.engines.errors import TraceError

_READS = (
    "abs add and bool call complex contains delitem divmod enter eq float floordiv ge getitem gt index int invert iter "
    "le len lt matmul mod mul ne neg next or pos pow radd rand rdivmod reversed rfloordiv rlshift rmatmul rmod rmul "
    "ror round rpow rrshift rshift rsub rtruediv rxor setitem sub truediv xor lshift array"
)


class _RefusedTensor:
    """Takes the place of a stored tensor: whatever is done with it raises TraceError."""

    def __init__(self, name: str) -> None:
        vars(self)["name"] = name

    def refuse(self, *_: Any, **__: Any) -> Any:
        reason = "the loss reads it there, where it is that of an earlier run or a first value"
        raise TraceError(format_stored_error(vars(self)["name"], reason))

    __getattr__ = __setattr__ = refuse
    __hash__ = None  # type: ignore[assignment]
    __class__ = property(refuse)  # read by isinstance(model.kl, Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a torch function of it. Called by torch."""
        values = [*args, *(kwargs or {}).values()]
        arguments = [argument for item in values for argument in (item if isinstance(item, list | tuple) else [item])]
        next(argument for argument in arguments if type(argument) is cls).refuse()


for _name in _READS.split():
    setattr(_RefusedTensor, f"__{_name}__", _RefusedTensor.refuse)


@contextmanager
def refuse_stored_tensors(stored: Collection[str], modules: Mapping[str, Collection[nn.Module]]) -> Iterator[None]:
    """Within the context, a use of an attribute in `stored` raises TraceError.

    `modules` holds, by path in the model, the user's own modules and copies of them that the loss may read.
    """
    places = []
    for name in stored:
        path, _, key = name.rpartition(".")
        places += [(vars(module), key, name) for module in modules.get(path, ())]
    before = [(owner, key, key in owner, owner.get(key)) for owner, key, _ in places]
    for owner, key, name in places:
        owner[key] = _RefusedTensor(name)
    try:
        yield
    finally:
        for owner, key, held, value in before:
            if held:
                owner[key] = value
            else:
                owner.pop(key, None)


def find_readable_modules(model: nn.Module, loss: object, loss_copy: object) -> dict[str, list[nn.Module]]:
    """Return the modules of a model, and those of their copies that are parts of a loss, by their path in the model."""
    modules = {path: [module] for path, module in model.named_modules()}
    if isinstance(loss, nn.Module) and isinstance(loss_copy, nn.Module):
        paths = {id(module): path for path, module in model.named_modules()}
        for (_, part), (_, twin) in zip(loss.named_modules(), loss_copy.named_modules(), strict=True):
            if id(part) in paths:
                modules[paths[id(part)]].append(twin)
    return modules


def format_stored_error(name: str, reason: str) -> str:
    return (
        f"forward stores a tensor in the model's attribute {name}, and {reason}: a loss gets only the labels and what "
        f"the model returns, and ranks have no such attribute. Return the tensor too (return logits, self.{name}), "
        "with a loss of both: loss=lambda answer, y: ..."
    )
