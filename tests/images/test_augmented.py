"""Augmentation: the same for all tiles of an image, for masks as for pixels, and all of it from the draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Grid, Tile
from mpi4dl_nb.engines.images.augmented import KINDS, Augmented, restain
from mpi4dl_nb.engines.images.dataset import LabelledImages, SyntheticImages
from mpi4dl_nb.engines.images.sample_data import compute_dab, immunohistochemistry
from tests.sampling import set_trials

SIDES = st.integers(1, 40)


@set_trials(200)
@given(st.tuples(SIDES, SIDES), st.sets(st.sampled_from(KINDS)), st.booleans(), st.integers(-(2**63), 2**64), st.data())
def test_parts_of_any_grid_make_the_whole(source: tuple[int, int], kinds: set[str], crops: bool, draw: int, data):
    size = tuple(data.draw(st.integers(1, side)) for side in source) if crops else None
    images = Augmented(SyntheticImages(2, source, 5), sorted(kinds), size, stain=0.3, light=0.3)
    shape = images.shape(1)
    whole = Tile.whole(*shape)
    pixels, mask = images.part(1, whole, draw), images.mask(1, whole, draw)
    assert pixels.shape == (3, *shape)
    assert mask.shape == shape
    grid = Grid(*(data.draw(st.integers(1, min(4, side))) for side in shape))
    for tile in grid.cut(*shape):
        part = images.part(1, tile, draw)
        assert part.is_contiguous()
        assert torch.equal(part, pixels[(slice(None), *tile.to_slices(whole))])
        assert torch.equal(images.mask(1, tile, draw), mask[tile.to_slices(whole)])


class Places(LabelledImages):
    """Images whose pixels, and masks, tell where they are."""

    classes = 10**6

    def __init__(self, height: int, width: int) -> None:
        self.size = height, width

    def __len__(self) -> int:
        return 1

    def name(self, index: int) -> str:
        return "places"

    def shape(self, index: int) -> tuple[int, int]:
        return self.size

    def part(self, index: int, tile: Tile, draw: int | None = None) -> torch.Tensor:
        return self.mask(index, tile).div(self.size[0] * self.size[1]).expand(3, -1, -1)

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> torch.Tensor:
        places = torch.arange(self.size[0] * self.size[1]).view(self.size)
        return places[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]

    def label(self, index: int) -> int:
        return 0


def collect_poses(kinds: tuple[str, ...], shape: tuple[int, int], size: tuple[int, int] | None = None) -> set[bytes]:
    """All that 300 draws make of an image."""
    images = Augmented(Places(*shape), kinds, size)
    made = set()
    for draw in range(300):
        mask = images.mask(0, Tile.whole(*images.shape(0)), draw)
        pixels = images.part(0, Tile.whole(*images.shape(0)), draw)
        assert torch.equal(pixels[1], mask.div(shape[0] * shape[1]))
        made.add(mask.numpy().tobytes())
    return made


def list_symmetries(turns: range, mirrors: tuple[tuple[int, ...], ...], shape: tuple[int, int]) -> set[bytes]:
    whole = np.arange(shape[0] * shape[1]).reshape(shape)
    return {np.rot90(np.flip(whole, mirror), turn).tobytes() for turn in turns for mirror in mirrors}


FOURTHS, HALVES, NONE = range(4), range(0, 4, 2), range(1)
ALL_MIRRORS = ((), (0,), (1,), (0, 1))
SYMMETRIES = {
    "turned, square": (("rotate",), (5, 5), list_symmetries(FOURTHS, ((),), (5, 5)), 4),
    "turned": (("rotate",), (4, 6), list_symmetries(HALVES, ((),), (4, 6)), 2),
    "mirrored": (("flip",), (4, 6), list_symmetries(NONE, ALL_MIRRORS, (4, 6)), 4),
    "both, square": (("flip", "rotate"), (5, 5), list_symmetries(FOURTHS, ALL_MIRRORS, (5, 5)), 8),
    "neither": ((), (4, 6), list_symmetries(NONE, ((),), (4, 6)), 1),
}


@pytest.mark.parametrize(("kinds", "shape", "expected", "count"), SYMMETRIES.values(), ids=SYMMETRIES)
def test_every_symmetry_that_was_asked_for_is_made_and_no_other(kinds, shape, expected, count):
    assert collect_poses(kinds, shape) == expected
    assert len(expected) == count


class Standardised(Places):
    """Pixels that a user has normalised otherwise: from 0 to 3."""

    def part(self, index: int, tile: Tile, draw: int | None = None) -> torch.Tensor:
        return super().part(index, tile, draw) * 3


def test_only_colours_are_bounded():
    source, whole = Standardised(4, 4), Tile.whole(4, 4)
    mirrored = Augmented(source, ("flip",)).part(0, whole, 3)
    assert torch.equal(mirrored.flatten().sort().values, source.part(0, whole).flatten().sort().values)
    for kind in ("stain", "brightness", "contrast"):
        with pytest.raises(
            ImageError, match=rf"places has pixels up to 2\.8125, but {kind} changes those from -1 to 1"
        ):
            Augmented(source, ("flip", kind)).part(0, whole, 3)


def test_every_crop_is_made():
    assert len(collect_poses((), (5, 6), (3, 4))) == 9
    whole = np.arange(30).reshape(5, 6)
    assert collect_poses((), (5, 6), (3, 4)) == {
        whole[y : y + 3, x : x + 4].tobytes() for y in range(3) for x in range(3)
    }
    assert (
        len(collect_poses(("rotate",), (5, 5), (2, 5))) == 4 * 4
    )  # lying and standing, each at four places, both ways up


def test_without_a_draw_images_are_as_they_are_and_crops_are_middles():
    source, whole = SyntheticImages(2, (9, 12), 3), Tile.whole(9, 12)
    plain = Augmented(source, KINDS)
    assert torch.equal(plain.part(1, whole), source.part(1, whole))
    assert torch.equal(plain.mask(1, whole), source.mask(1, whole))
    crops = Augmented(source, KINDS, (3, 4))
    assert torch.equal(crops.part(1, Tile.whole(3, 4)), source.part(1, whole)[:, 3:6, 4:8])
    assert [crops.label(0), crops.name(1), crops.slide(1), len(crops)] == [
        source.label(0),
        source.name(1),
        source.slide(1),
        2,
    ]


def test_what_is_larger_than_an_image_is_no_crop_of_it():
    images = Augmented(SyntheticImages(1, (9, 12), 3), (), (9, 13))
    with pytest.raises(ImageError, match=r"random image 0 has 9 x 12 pixels, of which no 9 x 13 can be cropped"):
        images.part(0, Tile.whole(1, 1), 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kinds": ["flip", "spin"]}, "no augmentation 'spin'. Choose among flip"),
        ({"stain": 1.5}, "stain=1.5 .* shares"),
    ],
)
def test_what_cannot_be_augmented_is_said(arguments, said):
    with pytest.raises(ImageError, match=said):
        Augmented(SyntheticImages(1, (9, 12), 3), **arguments)


# ---- colours


def test_stains_that_do_not_change_leave_every_colour_as_it_is():
    image = np.random.default_rng(0).integers(0, 256, (3, 200, 200), dtype=np.uint8)
    assert np.array_equal(restain(image, [1, 1, 1], [0, 0, 0]), image)


def test_half_as_much_dab_is_half_the_density_and_haematoxylin_stays():
    tissue = immunohistochemistry()[100:300, 100:300]
    paler = restain(tissue.transpose(2, 0, 1), [1, 1, 0.5], [0, 0, 0]).transpose(1, 2, 0)
    brown = compute_dab(tissue) > 0.05
    assert np.median(compute_dab(paler)[brown] / compute_dab(tissue)[brown]) == pytest.approx(0.5, abs=0.03)
    darker = restain(tissue.transpose(2, 0, 1), [1, 1, 1], [0.2, 0, 0])
    assert (darker <= tissue.transpose(2, 0, 1)).all()
    assert darker.mean() < tissue.mean() - 10


@pytest.mark.parametrize("kind", ["stain", "brightness", "contrast"])
def test_colours_change_with_the_draw_and_within_bounds(kind: str):
    images, whole = Augmented(SyntheticImages(1, (30, 30), 3), (kind,)), Tile.whole(30, 30)
    made = [images.part(0, whole, draw) for draw in range(8)]
    assert max(part.abs().max() for part in made) <= 1
    assert len({part.numpy().tobytes() for part in made}) == 8
    assert torch.equal(made[3], images.part(0, whole, 3))
    assert all(0 < (part - images.part(0, whole)).abs().mean() < 0.3 for part in made)
    assert torch.equal(images.mask(0, whole, 5), images.images.mask(0, whole))
