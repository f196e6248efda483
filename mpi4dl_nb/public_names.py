"""Names that completion offers for the public objects."""

from __future__ import annotations

__all__ = ["get_public_names"]


def get_public_names(thing: object) -> list[str]:
    """Return the sorted names of an object without private ones."""
    return sorted(name for name in object.__dir__(thing) if not name.startswith("_"))
