"""Colours that are not those of sRGB: by an ICC profile, or by the chunks of a PNG file.

Stored numbers that are red, green and blue, or grey, are given as they are stored, whatever their colour space:
networks are trained on them, and scanners and cameras attach profiles that few programs apply. A warning says once that
a profile is not applied. Numbers that are not red, green and blue (printing inks, XYB) mean nothing without their
profile: they are converted to sRGB, by Pillow's `ImageCms` by relative colorimetry without compensation for the black
point (which lcms, for other intents, looks for where the numbers are 0: that is no black in XYB).
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms

from mpi4dl_nb.engines.errors import ImageError

UNSEEN_LEVELS = 10  # of 255: smaller differences, such as those of a gamma of 2.2, are no other colours
_NEUTRAL_LEVELS = 64  # by which the channels of a grey may differ: the white of a scanner is not quite white
_SHADES = np.linspace(0, 255, 9).astype(np.uint8)  # along each channel, that are compared with sRGB
_MOST_BYTES = 1 << 24  # of a profile: those of printers have about 2 MB
_SPACES = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}  # the colour space of a profile for each mode of Pillow

Transform = ImageCms.ImageCmsTransform


@dataclass(frozen=True)
class ProfileEffect:
    """What a profile does to the colours of a mode.

    `name` is its own description. `changes` says whether sRGB shows other colours, and `transform` converts numbers
    that are not red, green and blue, or grey, to sRGB; None if they are.
    """

    name: str
    changes: bool
    transform: Transform | None


_EFFECTS: dict[tuple[bytes, str], ProfileEffect | None] = {}
_SAID: set[object] = set()
_LOCK = threading.Lock()


def find_conversion(path: Path, profile: bytes | None, mode: str) -> Transform | None:
    """Return the conversion to sRGB of a file whose stored numbers are no colours without it, else None.

    `mode` is Pillow's: RGB, L or CMYK. Warns, once for each profile in a process, of a profile that changes colours and
    is not applied.
    """
    effect = find_effect(profile, mode)
    if effect is not None and effect.changes and effect.transform is None:
        warn_of_colours(path, f"its colour profile {effect.name!r}")
    return effect.transform if effect else None


def check_stored_colours(path: Path, profile: bytes | None, mode: str) -> None:
    """Check the profile of a file that is read in tiles, whose numbers are not converted.

    Warns as `find_conversion`. Raises ImageError if the numbers are no colours without their profile.
    """
    find_conversion(path, profile, mode)
    effect = find_effect(profile, mode)
    if effect is not None and effect.transform is not None:
        raise ImageError(
            f"{path} holds numbers that are red, green and blue only by its colour profile {effect.name!r}. "
            "Convert it to sRGB and save it again."
        )


def warn_of_colours(path: Path, what: str) -> None:
    """Warn that stored numbers have other colours than those of sRGB; once for each cause in a process."""
    with _LOCK:
        is_new = what not in _SAID
        _SAID.add(what)
    if is_new:
        warnings.warn(
            f"{path}: {what} says that its numbers have other colours than those of sRGB. It is not applied: the "
            "numbers are used as they are stored, which is right if all images of a model have this profile. Otherwise "
            "convert the files to sRGB first: ImageCms.profileToProfile(image, ImageCms.ImageCmsProfile("
            "io.BytesIO(image.info['icc_profile'])), ImageCms.createProfile('sRGB')), with Pillow's ImageCms. "
            "(This is said once for each profile.)",
            stacklevel=2,
        )


def find_effect(profile: bytes | None, mode: str) -> ProfileEffect | None:
    """Return what a profile does to colours of a mode; None without a profile, or for one that is of no use for them.

    A profile that is damaged, or for another kind of colours, is none: programs pass over it.
    """
    if not profile or len(profile) > _MOST_BYTES or mode not in _SPACES:
        return None
    key = hashlib.sha256(profile).digest(), mode
    if key not in _EFFECTS:  # two threads may do it at once, with the same result
        _EFFECTS[key] = _examine(profile, mode)
    return _EFFECTS[key]


def _examine(profile: bytes, mode: str) -> ProfileEffect | None:
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        if source.profile.xcolor_space.strip() != _SPACES[mode]:
            return None
        transform = ImageCms.buildTransform(
            source, ImageCms.createProfile("sRGB"), mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC
        )
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return None
    name = " ".join(str(source.profile.profile_description or "without a name").split())[:80]
    if mode == "CMYK":
        return ProfileEffect(name, True, transform)
    stored = np.arange(256, dtype=np.uint8)[None]
    if mode == "RGB":
        stored = np.stack(np.meshgrid(_SHADES, _SHADES, _SHADES), -1).reshape(1, -1, 3)
    shown = np.asarray(transform.apply(Image.fromarray(stored)), np.int64)
    changes = bool(np.abs(shown - np.atleast_3d(stored)).max() > UNSEEN_LEVELS)
    is_colour = mode == "L" or _are_red_green_blue(transform)
    return ProfileEffect(name, changes, None if is_colour else transform)


def _are_red_green_blue(transform: Transform) -> bool:
    """Return whether the three channels are a red, a green and a blue: as lights, they add up to greys.

    In any such space each channel alone shows mostly its own colour, and equal channels show a grey, brighter with
    larger numbers.
    """
    greys = np.repeat(_SHADES[:, None], 3, 1)
    lights = np.eye(3, dtype=np.uint8) * 255
    shown = np.asarray(transform.apply(Image.fromarray(np.concatenate([greys, lights])[None])), np.int64)[0]
    of_greys, of_lights = shown[: len(greys)], shown[len(greys) :]
    neutral = np.ptp(of_greys, axis=1).max() <= _NEUTRAL_LEVELS
    brighter = (np.diff(of_greys.sum(1)) >= 0).all()
    return bool(neutral and brighter and (of_lights.argmax(1) == np.arange(3)).all())
