"""ICC profiles for tests: of matrices, by imagecodecs, and of tables, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable

import imagecodecs
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

P3 = [0.680, 0.320, 1.0, 0.265, 0.690, 1.0, 0.150, 0.060, 1.0]
ADOBE = [0.640, 0.330, 1.0, 0.210, 0.710, 1.0, 0.150, 0.060, 1.0]
D65 = [0.3127, 0.3290, 1.0]
_TO_XYZ = np.array(
    [[0.4360747, 0.3850649, 0.1430804], [0.2225045, 0.7168786, 0.0606169], [0.0139322, 0.0971045, 0.7141733]]
)
_D50 = np.array([0.9642, 1.0, 0.8249])


def make_rgb_profile(primaries: list[float], gamma: float = 2.2) -> bytes:
    """A profile of three lights."""
    return imagecodecs.cms_profile("rgb", whitepoint=D65, primaries=primaries, gamma=gamma)


def make_table_profile(space: str, show: Callable[[Numbers], Numbers], steps: int) -> bytes:
    """A profile (ICC.1:2001) whose table has `steps` numbers along each channel of a `space`, such as "CMYK".

    `show` maps numbers from 0 to 1, (N, channels), to sRGB from 0 to 1, (N, 3).
    """
    channels = len(space.strip())
    axes = np.meshgrid(*[np.linspace(0, 1, steps)] * channels, indexing="ij")
    lab = _convert_to_lab(show(np.stack(axes, -1).reshape(-1, channels)))
    coded = np.rint(lab * [652.8, 256, 256] + [0, 32768, 32768]).clip(0, 65535).astype(">u2")
    line = np.array([0, 65535], ">u2").tobytes()
    matrix = struct.pack(">9i", *(65536 * (place % 4 == 0) for place in range(9)))
    head = b"mft2\0\0\0\0" + bytes([channels, 3, steps, 0]) + matrix + struct.pack(">2H", 2, 2)
    text = f"made of a table, {space}".encode() + b"\0"
    return _join_profile(
        space,
        {
            b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(79),
            b"cprt": b"text\0\0\0\0none\0",
            b"wtpt": b"XYZ \0\0\0\0" + struct.pack(">3i", *(np.rint(_D50 * 65536).astype(int))),
            b"A2B0": head + line * channels + coded.tobytes() + line * 3,
        },
    )


def _join_profile(space: str, tags: dict[bytes, bytes]) -> bytes:
    at, table, body = 128 + 4 + 12 * len(tags), b"", b""
    for name, data in tags.items():
        table += name + struct.pack(">II", at + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I4sI4s4s4s", at + len(body), b"none", 0x02400000, b"prtr", space.encode().ljust(4), b"Lab ")
    head += struct.pack(">6H", 2026, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    head += struct.pack(">3i", *(np.rint(_D50 * 65536).astype(int)))
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def _convert_to_lab(srgb: Numbers) -> Numbers:
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    scaled = linear @ _TO_XYZ.T / _D50
    root = np.where(scaled > 216 / 24389, np.cbrt(scaled), (24389 / 27 * scaled + 16) / 116)
    return np.stack([116 * root[:, 1] - 16, 500 * (root[:, 0] - root[:, 1]), 200 * (root[:, 1] - root[:, 2])], -1)


def show_inks(inks: Numbers) -> Numbers:
    """Cyan, magenta, yellow and black on white paper."""
    return (1 - inks[:, :3]) * (1 - inks[:, 3:])


def hide_opponents(rgb: Numbers) -> Numbers:
    """Brightness, red against green, blue against green: numbers that are no red, green and blue, as those of XYB."""
    red, green, blue = rgb[..., 0], rgb[..., 1], rgb[..., 2]
    return np.stack([(red + green + blue) / 3, (red - green + 1) / 2, (blue - green + 1) / 2], -1)


def show_opponents(stored: Numbers) -> Numbers:
    """What `hide_opponents` has hidden."""
    red, blue = 2 * stored[:, 1] - 1, 2 * stored[:, 2] - 1  # without green
    green = stored[:, 0] - (red + blue) / 3
    return np.stack([green + red, green, green + blue], -1).clip(0, 1)


INKS = make_table_profile("CMYK", show_inks, 9)
OPPONENTS = make_table_profile("RGB ", show_opponents, 17)
SWAPPED = make_table_profile("RGB ", lambda stored: stored[:, [1, 2, 0]], 17)
DISPLAY_P3 = make_rgb_profile(P3)
ADOBE_RGB = make_rgb_profile(ADOBE)


def convert_by_imagecodecs(stored: NDArray[np.uint8], profile: bytes) -> NDArray[np.uint8]:
    """The same conversion to sRGB by another program: (H, W, channels) -> (H, W, 3)."""
    space = "cmyk" if stored.shape[2] == 4 else "rgb"
    found = imagecodecs.cms_transform(
        stored, profile, imagecodecs.cms_profile("srgb"), colorspace=space, outcolorspace="rgb", intent=1
    )
    return np.asarray(found)
