"""Checks of what users pass: an annotation is a wish, and what arrives may be anything."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TypeGuard


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
