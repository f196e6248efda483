"""The size from which on a tensor is offloaded."""

from __future__ import annotations

__all__ = ["LEAST_BYTES"]

LEAST_BYTES = 1 << 14
