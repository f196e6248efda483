"""What is too small to be put away."""

from __future__ import annotations

__all__ = ["LEAST_BYTES"]

LEAST_BYTES = 1 << 14
