"""What a study is given: a machine, or the name of one that is known."""

from __future__ import annotations

from engines.predict.machine import Machine
from engines.predict.machines import get_machine

__all__ = ["resolve_machine"]


def resolve_machine(asked: Machine | str) -> Machine:
    """The machine itself. Raises PlanError for a name that is not known, with those that are.

    >>> resolve_machine("Summit").name
    'Summit'
    """
    return get_machine(asked) if isinstance(asked, str) else asked
