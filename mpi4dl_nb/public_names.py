"""What completion offers of our objects: short lists of names."""

from __future__ import annotations

__all__ = ["get_public_names"]


def get_public_names(thing: object) -> list[str]:
    """Without what is not for users."""
    return sorted(name for name in object.__dir__(thing) if not name.startswith("_"))
