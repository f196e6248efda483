"""What is done to files: to bytes of any kind, to TIFF directories, to JSON."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from tests.fuzz.judge import Random

Damage = Callable[[bytearray, Random], None]


def toggle_bits(data: bytearray, random: Random) -> None:
    """Some bits, anywhere."""
    for at in random.integers(0, len(data), random.integers(1, 9)):
        data[at] ^= 1 << int(random.integers(8))


def write_near_the_front(data: bytearray, random: Random) -> None:
    """Bytes of the header."""
    for at in random.integers(0, min(len(data), 400), random.integers(1, 6)):
        data[at] = int(random.integers(256))


def cut(data: bytearray, random: Random) -> None:
    """The end is missing."""
    del data[int(random.integers(0, len(data))) :]


def remove_or_repeat(data: bytearray, random: Random) -> None:
    """A piece is missing, or there twice."""
    start, length = int(random.integers(0, len(data))), int(random.integers(1, 200))
    piece = data[start : start + length]
    if random.integers(2):
        del data[start : start + length]
    else:
        data[start:start] = piece


def fill_block(data: bytearray, random: Random) -> None:
    """A block of one value, as a bad sector leaves it."""
    start, length = int(random.integers(0, len(data))), int(random.integers(1, 400))
    value = int(random.choice([0, 255, 127]))
    data[start : start + length] = bytes([value]) * len(data[start : start + length])


def write_extremes(data: bytearray, random: Random) -> None:
    """Numbers that are as large, or as small, as can be."""
    for _ in range(int(random.integers(1, 4))):
        size = int(random.choice([2, 4, 8]))
        at = int(random.integers(0, max(1, len(data) - size)))
        value = int(random.choice([0, 1, -1, (1 << 8 * size - 1) - 1, 1 << 8 * size - 4]))
        data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, str(random.choice(["little", "big"])))


def replace_tag(data: bytearray, random: Random) -> None:
    """One field of a TIFF directory: what the parser believes."""
    if data[:2] not in (b"II", b"MM"):
        return write_near_the_front(data, random)
    order, big = ("<" if data[:2] == b"II" else ">"), data[2:4] in (b"+\0", b"\0+")
    (at,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
    start = at + (8 if big else 2) + (20 if big else 12) * int(random.integers(count))
    fields = ((0, 2), (2, 2), (4, 8), (12, 8)) if big else ((0, 2), (2, 2), (4, 4), (8, 4))
    offset, size = fields[int(random.integers(4))]
    form = order + {2: "H", 4: "I", 8: "Q"}[size]
    (old,) = struct.unpack_from(form, data, start + offset)
    new = int(random.choice([0, 1, 2, 3, 7, old + 1, max(0, old - 1), old * 16, (1 << 31) - 1, (1 << 8 * size - 1)]))
    struct.pack_into(form, data, start + offset, new % (1 << 8 * size))
    return None


def update_png_sums(data: bytearray) -> None:
    """The checksums of a PNG file made right again, so that its decoder gets to see the damage."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if at + 12 + length > len(data):
            return
        struct.pack_into(">I", data, at + 8 + length, zlib.crc32(data[at + 4 : at + 8 + length]))
        at += 12 + length


DAMAGES: tuple[Damage, ...] = (toggle_bits, write_near_the_front, cut, remove_or_repeat, fill_block, write_extremes)


def make_damaged_bytes(data: bytes, random: Random, damages: Sequence[Damage] = DAMAGES) -> tuple[str, bytes]:
    """The name of a damage, and the bytes it leaves of `data`."""
    if not data:
        return "empty", data
    damage, left = damages[int(random.integers(len(damages)))], bytearray(data)
    damage(left, random)
    return damage.__name__, bytes(left)


# ---- JSON

_VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 3, 255, 1 << 20, 1 << 31, 1 << 53, 1 << 70, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "0", "..", "../..", "/", "/dev/zero", "a" * 5000, "\0", "é\ud800", [], {}, [[]], [{}], [1] * 2000,
)  # fmt: skip


def make_damaged_json(data: bytes, random: Random, values: Sequence[Any] = ()) -> tuple[str, bytes]:
    """One to three of its values are others, or missing, or doubled; or it is no JSON any more.

    `values` are some more to put in, such as paths that lead out of a folder.
    """
    if not random.integers(8):
        return make_damaged_bytes(data, random)
    document = [json.loads(data)]
    for _ in range(int(random.integers(1, 4))):
        places = list(_walk_places(document))
        if not places:
            break
        holder, key = places[int(random.integers(len(places)))]
        _damage_value(holder, key, random, (*_VALUES, *values))
    if not random.integers(40):
        return "deep", b"[" * 100_000
    return "json", json.dumps(document[0] if document else None).encode()


def _damage_value(holder: Any, key: Any, random: Random, values: Sequence[Any]) -> None:
    way, old = int(random.integers(6)), holder[key]
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif way == 2 and isinstance(old, list) and old:
        old.extend(old[: 1 + int(random.integers(3))])
    elif way == 3 and isinstance(old, int):
        holder[key] = int(old) * int(random.choice([-1, 2, 1 << 16, 1 << 30])) + int(random.integers(-1, 2))
    else:
        holder[key] = deepcopy(values[int(random.integers(len(values)))])


def _walk_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value of a document, as what holds it and its key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _walk_places(value[key])
