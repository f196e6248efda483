"""Reads packed tables as a page does."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np


def unpack_tables(data: bytes) -> Any:
    """Return what `pack_tables` has packed, with flat arrays."""
    start = 8 + int.from_bytes(data[:8], "little")

    def read(table: dict[str, Any]) -> Any:
        if "packed" not in table:
            return table
        if table["packed"] == "bytes":
            return data[start + table["at"] :][: table["count"]]
        return np.frombuffer(data, f"<{table['packed']}", table["count"], start + table["at"])

    return json.loads(data[8:start], object_hook=read)


def unpack_part(text: str) -> Any:
    """Return what a saved page contains of one of its parts."""
    return unpack_tables(gzip.decompress(base64.b64decode(text)))
