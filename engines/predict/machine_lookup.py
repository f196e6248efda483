"""Resolves the machine argument of a study: a machine, or the name of a known one."""

from __future__ import annotations

from engines.predict.machine import Machine
from engines.predict.machines import get_machine

__all__ = ["resolve_machine"]


def resolve_machine(asked: Machine | str) -> Machine:
    """Return the machine. Raises PlanError, listing the known names, for an unknown name.

    >>> resolve_machine("Summit").name
    'Summit'
    """
    return get_machine(asked) if isinstance(asked, str) else asked
