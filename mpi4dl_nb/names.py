"""What completion offers of our objects: short lists of names."""

from __future__ import annotations

__all__ = ["public_names"]


def public_names(thing: object) -> list[str]:
    """Without what is not for users."""
    return sorted(name for name in object.__dir__(thing) if not name.startswith("_"))
