"""Tables for a page: JSON with arrays and bytes, which follow the text. `page/shared/tables.js` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNED = 8  # bytes: a page can only use numbers whose place is a multiple of their size


def pack_tables(tables: Any) -> bytes:
    """Return lists and dicts of arrays, of bytes, and of what JSON knows, as bytes.

    They begin with the length of a JSON text in 8 bytes. In that text an array is its kind of numbers (f4, f8, i4 or
    u1, little-endian), how many there are, and where they begin behind the text; its rows follow each other. Raises
    ValueError for a number outside arrays that is infinite.

    >>> pack_tables({"rows": np.array([[1, 2], [3, 4]], "u1")})[8:]
    b'{"rows": {"packed": "u1", "count": 4, "at": 0}} \\x01\\x02\\x03\\x04'
    """
    numbers = bytearray()

    def place(array: NDArray[Any] | bytes) -> dict[str, Any]:
        numbers.extend(bytes(-len(numbers) % ALIGNED))
        start = len(numbers)
        if isinstance(array, bytes):
            numbers.extend(array)
            return {"packed": "bytes", "count": len(array), "at": start}
        numbers.extend(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return {"packed": array.dtype.str[1:], "count": array.size, "at": start}

    text = json.dumps(tables, default=place, allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(ALIGNED, "little") + text + bytes(numbers)


def pack_columns(kinds: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Return rows column by column, as bytes; `kinds` has the kind of numbers of each column by its name."""
    columns = zip(kinds.items(), zip(*rows, strict=True), strict=True)
    return pack_tables({name: np.array(column, kind) for (name, kind), column in columns})
