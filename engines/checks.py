"""Checks of what users pass: an annotation is a wish, and what arrives may be anything."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard

from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError
from mpi4dl_nb.engines.formatting import describe_unknown


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, of Python or NumPy.

    >>> is_integer(3), is_integer(3.0), is_integer(True)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, of Python or NumPy.

    >>> is_number(3), is_number(0.5), is_number(None)
    (True, True, False)
    """
    return isinstance(value, Real)


def check_choice(name: str, value: object, choices: Iterable[str], error: type[Mpi4dlError] = PlanError) -> None:
    """Raise `error` unless the argument `name` is one of the choices."""
    if value not in tuple(choices):
        raise error(describe_unknown(f"{name}={value!r} is unknown", value, choices))
