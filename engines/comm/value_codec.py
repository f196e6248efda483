"""Python values as bytes with a checksum: unpickling incomplete or undefined bytes could run arbitrary code."""

from __future__ import annotations

import json
import pickle
import zlib
from struct import Struct
from typing import Any

from engines.errors import ReleasedError

__all__ = ["pack_value", "unpack_value"]

_HEAD = Struct("<QI?")  # length and checksum of the body, and whether it is JSON
_SEED = 1  # of checksums, so that all zeros are not a valid value
_PLAIN = (type(None), bool, int, float, str)


def pack_value(value: Any) -> bytearray:
    """Return the value after its length and checksum: as JSON if it is a plain value, else pickled."""
    is_plain = type(value) in _PLAIN
    body = json.dumps(value).encode() if is_plain else pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return bytearray(_HEAD.pack(len(body), zlib.crc32(body, _SEED), is_plain)) + body


def unpack_value(sealed: bytes | bytearray | memoryview) -> Any:
    """Return the value. Raises ReleasedError if the bytes are not those that were sent: a failure has cut them short.

    >>> unpack_value(pack_value("no space left")), unpack_value(pack_value({"rank": 1}))
    ('no space left', {'rank': 1})
    """
    view = memoryview(sealed)
    if len(view) >= _HEAD.size:
        length, checksum, is_plain = _HEAD.unpack_from(view)
        body = view[_HEAD.size :]
        # Nothing is unpickled before both are right: MPI may complete a receive of a failed rank with any bytes.
        if len(body) == length and zlib.crc32(body, _SEED) == checksum:
            return json.loads(bytes(body)) if is_plain else pickle.loads(body)
    raise ReleasedError("released: what another rank has sent did not come whole")
