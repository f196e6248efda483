"""What a user has added to the operator table, on its way to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.spatial.kernels import Kernel, get_kernels, register_kernel
from engines.spatial.operator_table import Rule, get_rules, register_rule

__all__ = ["UserOps", "is_user_defined"]


def is_user_defined(function: Callable[..., Any]) -> bool:
    """Whether a function is a user's, and not of this package. A class method is whose its class is."""
    owner = getattr(function, "__self__", None)
    home = getattr(owner if isinstance(owner, type) else function, "__module__", None) or "__main__"
    return home != "builtins" and not home.startswith(("engines.", "torch."))


@dataclass(frozen=True)
class UserOps:
    """What a user has added to the table and to the kernels, to be carried to the ranks by value."""

    rules: tuple[tuple[str, Rule, dict[str, Any]], ...] = ()
    kernels: tuple[tuple[str, Kernel], ...] = ()

    @classmethod
    def snapshot(cls) -> UserOps:
        """All so far."""
        return cls(
            tuple((name, *what) for name, what in get_rules().items() if is_user_defined(what[0])),
            tuple((name, function) for name, function in get_kernels().items() if is_user_defined(function)),
        )

    def register(self) -> None:
        """Make them this process's own."""
        for name, rule, how in self.rules:
            register_rule(name, **how)(rule)
        for name, function in self.kernels:
            register_kernel(name)(function)
