"""Reads tables of numbers as a page does."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def unpack_tables(data: bytes) -> Any:
    """Return what `pack_tables` has packed, with flat arrays."""
    start = 8 + int.from_bytes(data[:8], "little")

    def read(table: dict[str, Any]) -> Any:
        if "kind" not in table:
            return table
        return np.frombuffer(data, f"<{table['kind']}", table["count"], start + table["at"])

    return json.loads(data[8:start], object_hook=read)
