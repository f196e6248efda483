"""Users' additions to the operator table, in a form that is sent to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.spatial.kernels import Kernel, get_kernels, register_kernel
from engines.spatial.operator_table import Rule, get_rules, register_rule

__all__ = ["UserOps", "is_user_defined"]


def is_user_defined(function: Callable[..., Any]) -> bool:
    """Return whether a function is a user's, not this package's or torch's; a class method is judged by its class."""
    owner = getattr(function, "__self__", None)
    home = getattr(owner if isinstance(owner, type) else function, "__module__", None) or "__main__"
    return home != "builtins" and not home.startswith(("engines.", "torch."))


@dataclass(frozen=True)
class UserOps:
    """Users' rules and kernels, sent to the ranks by value."""

    rules: tuple[tuple[str, Rule, dict[str, Any]], ...] = ()
    kernels: tuple[tuple[str, Kernel], ...] = ()

    @classmethod
    def snapshot(cls) -> UserOps:
        """Return all that are registered so far."""
        return cls(
            tuple((name, *what) for name, what in get_rules().items() if is_user_defined(what[0])),
            tuple((name, function) for name, function in get_kernels().items() if is_user_defined(function)),
        )

    def register(self) -> None:
        """Register the rules and kernels in this process."""
        for name, rule, how in self.rules:
            register_rule(name, **how)(rule)
        for name, function in self.kernels:
            register_kernel(name)(function)
