"""`python -m tests.images.fuzz --count 20000`: damaged files through the readers; one line of JSON.

Whatever is done to a file, it is read, or an ImageError names it. A crash or a hang ends the process, and the file
`last.json` in the folder says which case it was: `--first CASE --count 1` runs it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import signal
import struct
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from made_slides import tissue, write_ome, write_pages, write_svs

from engines.errors import ImageError
from engines.images.picture import Picture, open_image

SECONDS = 20  # for one case: a hang
MOST_PX = 1 << 20  # that are read of a picture at once
Random = np.random.Generator
Damage = Callable[[bytearray, Random], None]


def files(folder: Path) -> dict[str, bytes]:
    """One small file of each kind, by name."""
    small = tissue(96, 130)
    clear = np.dstack([small, small[..., 0]])
    Image.fromarray(small).save(folder / "a.png")
    Image.fromarray(clear).save(folder / "alpha.png")
    Image.fromarray(small).quantize(16).save(folder / "palette.png")
    Image.fromarray(small).save(folder / "a.jpg")
    Image.fromarray(small).save(folder / "progressive.jpg", progressive=True)
    Image.fromarray(small).convert("1").save(folder / "fax.tif", compression="group4")
    tifffile.imwrite(folder / "plain.tif", small, photometric="rgb", rowsperstrip=16)
    for name in ("lzw", "jpeg", "jpeg2000", "zstd", "packbits"):
        tifffile.imwrite(folder / f"{name}.tif", small, photometric="rgb", tile=(32, 32), compression=name)
    tifffile.imwrite(folder / "predicted.tif", small, photometric="rgb", compression="deflate", predictor=True)
    tifffile.imwrite(folder / "big.tif", small, photometric="rgb", tile=(32, 32), bigtiff=True, byteorder=">")
    write_pages(folder / "pages.tif", small, tile=(32, 32))
    write_ome(folder / "a.ome.tif", small, tile=(32, 32))
    write_svs(folder / "a.svs", tissue(192, 256), tile=32)
    write_svs(folder / "plain.svs", small, tile=32, compression=None)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def flipped(data: bytearray, random: Random) -> None:
    """Some bits, anywhere."""
    for at in random.integers(0, len(data), random.integers(1, 9)):
        data[at] ^= 1 << int(random.integers(8))


def overwritten_near_the_front(data: bytearray, random: Random) -> None:
    """Bytes of the header."""
    for at in random.integers(0, min(len(data), 400), random.integers(1, 6)):
        data[at] = int(random.integers(256))


def cut(data: bytearray, random: Random) -> None:
    """The end is missing."""
    del data[int(random.integers(0, len(data))) :]


def moved(data: bytearray, random: Random) -> None:
    """A piece is missing, or there twice."""
    start, length = int(random.integers(0, len(data))), int(random.integers(1, 200))
    piece = data[start : start + length]
    if random.integers(2):
        del data[start : start + length]
    else:
        data[start:start] = piece


def filled(data: bytearray, random: Random) -> None:
    """A block of one value, as a bad sector leaves it."""
    start, length = int(random.integers(0, len(data))), int(random.integers(1, 400))
    value = int(random.choice([0, 255, 127]))
    data[start : start + length] = bytes([value]) * len(data[start : start + length])


def extreme(data: bytearray, random: Random) -> None:
    """Numbers that are as large, or as small, as can be."""
    for _ in range(int(random.integers(1, 4))):
        size = int(random.choice([2, 4, 8]))
        at = int(random.integers(0, max(1, len(data) - size)))
        value = int(random.choice([0, 1, -1, (1 << 8 * size - 1) - 1, 1 << 8 * size - 4]))
        data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, str(random.choice(["little", "big"])))


def tags(data: bytearray, random: Random) -> None:
    """One field of a TIFF directory: what the parser believes."""
    order, big = ("<" if data[:2] == b"II" else ">"), data[2:4] in (b"+\0", b"\0+")
    if data[:2] not in (b"II", b"MM"):
        return overwritten_near_the_front(data, random)
    (at,) = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
    start = at + (8 if big else 2) + (20 if big else 12) * int(random.integers(count))
    offset, size = (
        ((0, 2), (2, 2), (4, 8), (12, 8))[int(random.integers(4))]
        if big
        else (
            (0, 2),
            (2, 2),
            (4, 4),
            (8, 4),
        )[int(random.integers(4))]
    )
    (old,) = struct.unpack_from(order + {2: "H", 4: "I", 8: "Q"}[size], data, start + offset)
    new = int(random.choice([0, 1, 2, 3, 7, old + 1, max(0, old - 1), old * 16, (1 << 31) - 1, (1 << 8 * size - 1)]))
    struct.pack_into(order + {2: "H", 4: "I", 8: "Q"}[size], data, start + offset, new % (1 << 8 * size))
    return None


def mended(data: bytearray) -> None:
    """The checksums of a PNG file made right again, so that its decoder gets to see the damage."""
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if at + 12 + length > len(data):
            return
        struct.pack_into(">I", data, at + 8 + length, zlib.crc32(data[at + 4 : at + 8 + length]))
        at += 12 + length


DAMAGES: tuple[Damage, ...] = (flipped, overwritten_near_the_front, cut, moved, filled, extreme, tags)


def case(number: int, seed: int, wholes: dict[str, bytes]) -> tuple[str, str, bytes]:
    """File, damage and bytes of one case; the same whatever other cases there are."""
    random = np.random.default_rng([seed, number])
    name, damage = list(wholes)[number % len(wholes)], DAMAGES[int(random.integers(len(DAMAGES)))]
    data = bytearray(wholes[name])
    damage(data, random)
    if name.endswith(".png") and random.integers(2):
        mended(data)
    return name, damage.__name__, bytes(data)


def look(picture: Picture) -> None:
    """Read as a training and a drawing would."""
    for level, size in enumerate(picture.levels):
        rows, cols = min(size.height, MOST_PX // min(size.width, 1024)), min(size.width, 1024)
        picture.read(0, 0, rows, cols, level)
        picture.read(size.height - 5, size.width - 5, 9, 9, level)
    if picture.levels[-1].height * picture.levels[-1].width <= MOST_PX:
        picture.thumbnail(40)


def told(path: Path) -> str:
    """`read`, `refused`, or what should not have happened."""
    try:
        look(open_image(path))
    except ImageError as error:
        if str(path) not in str(error):
            return f"names no file: {error}"
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                return f"asked for more memory than there is: {cause}"
            cause = cause.__cause__
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "read"


def memory(field: str) -> int:
    """Bytes of this process, by the kernel's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> int:
    """Run the cases; 0 where all of them are as they should be."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--count", type=int, default=2000)
    flags.add_argument("--first", type=int, default=0)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--folder", type=Path, default=None, help="for last.json (default: a temporary one)")
    chosen = flags.parse_args()
    logging.disable()  # tifffile logs what it finds, besides raising it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outcomes: Counter[str] = Counter()
    wrong: list[dict[str, object]] = []
    warned: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, kind, *_: warned.update([f"{kind.__name__}: {message}"])
        (source := Path(place) / "whole").mkdir()
        wholes, last = files(source), (chosen.folder or Path(place)) / "last.json"
        for path in source.iterdir():
            look(open_image(path))  # so that everything is imported before memory is measured
        before, resident = memory("VmSize"), memory("VmRSS")
        for number in range(chosen.first, chosen.first + chosen.count):
            name, damage, data = case(number, chosen.seed, wholes)
            last.write_text(json.dumps({"case": number, "seed": chosen.seed, "file": name, "damage": damage}))
            (path := Path(place) / name).write_bytes(data)
            signal.alarm(SECONDS)  # not caught: a decoder that hangs does not come back to Python
            outcome = told(path)
            signal.alarm(0)
            outcomes[outcome if outcome in ("read", "refused") else "wrong"] += 1
            if outcome not in ("read", "refused"):
                wrong.append({"case": number, "file": name, "damage": damage, "outcome": outcome[:300]})
        grown = {"address_bytes": memory("VmPeak") - before, "resident_bytes": memory("VmHWM") - resident}
    line = {"cases": chosen.count, **outcomes, **grown, "warnings": dict(warned), "wrong_cases": wrong[:20]}
    print(json.dumps(line), flush=True)
    return 1 if wrong or warned else 0


if __name__ == "__main__":
    sys.exit(main())
