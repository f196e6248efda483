"""Values as bytes that are known to be whole before they are unpickled: undefined bytes could run anything."""

from __future__ import annotations

import pickle
import zlib
from struct import Struct
from typing import Any

from engines.errors import ReleasedError

__all__ = ["seal", "unseal"]

_HEAD = Struct("<QI")  # length and checksum of what follows
_SEED = 1  # of checksums: nothing but zeros is no value


def seal(value: Any) -> bytearray:
    """The pickled value, behind its length and checksum."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return bytearray(_HEAD.pack(len(body), zlib.crc32(body, _SEED))) + body


def unseal(sealed: bytes | bytearray | memoryview) -> Any:
    """The value. Raises ReleasedError where these are not the bytes that were sent: a failure has cut them short.

    >>> unseal(seal({"rank": 1}))
    {'rank': 1}
    """
    view = memoryview(sealed)
    if len(view) >= _HEAD.size:
        length, checksum = _HEAD.unpack_from(view)
        body = view[_HEAD.size :]
        if len(body) == length and zlib.crc32(body, _SEED) == checksum:
            return pickle.loads(body)
    raise ReleasedError("released: what another rank has sent did not come whole")
