"""What a study is given: a machine, or the name of one that is known."""

from __future__ import annotations

from engines.predict.machine import Machine
from engines.predict.machines import machine

__all__ = ["given"]


def given(asked: Machine | str) -> Machine:
    """The machine itself. Raises PlanError for a name that is not known, with those that are.

    >>> given("Summit").name
    'Summit'
    """
    return machine(asked) if isinstance(asked, str) else asked
