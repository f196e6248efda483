"""Held-out images: slides are never on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.augmented import Augmented
from mpi4dl_nb.engines.images.dataset import Subset, SyntheticImages, split_indices

IMAGES = st.lists(st.tuples(st.sampled_from("abcdefghijkl"), st.integers(0, 2)), min_size=1, max_size=60)


@pytest.mark.nightly
@settings(max_examples=300)
@given(IMAGES, st.floats(0.01, 0.99), st.integers(0, 9), st.randoms())
def test_no_slide_is_on_both_sides_and_the_order_does_not_matter(images, share: float, seed: int, random):
    slides, labels = [slide for slide, _ in images], [label for _, label in images]
    kinds = [frozenset(label for slide, label in images if slide == name) for name in set(slides)]
    if len(set(kinds)) == len(kinds):
        with pytest.raises(ImageError, match=f"of {len(kinds)} slides, no two of them of the same classes"):
            split_indices(slides, labels, share, seed)
        return
    train, judge = split_indices(slides, labels, share, seed)
    assert sorted(train + judge) == list(range(len(images)))
    assert train == sorted(train)
    assert train
    assert judge
    held = {slides[index] for index in judge}
    assert not held & {slides[index] for index in train}
    order = random.sample(range(len(images)), len(images))
    _, other = split_indices([slides[index] for index in order], [labels[index] for index in order], share, seed)
    assert {slides[order[index]] for index in other} == held


def test_each_class_gives_its_share():
    slides = [f"slide {number // 2}" for number in range(80)]
    labels = [number // 20 for number in range(80)]
    train, judge = split_indices(slides, labels, 0.3, seed=1)
    assert [sum(labels[index] == label for index in judge) for label in range(4)] == [6, 6, 6, 6]
    assert split_indices(slides, labels, 0.3, seed=1) == (train, judge)
    assert split_indices(slides, labels, 0.3, seed=2) != (train, judge)


@pytest.mark.parametrize("share", [0, 1, -0.2, 1.5])
def test_a_share_is_between_nothing_and_everything(share: float):
    with pytest.raises(ImageError, match=f"held_out={share} must be a share"):
        split_indices(["a", "b"], None, share)


def test_one_slide_alone_cannot_be_held_out():
    with pytest.raises(ImageError, match=r"1 slides, .* none can be held out"):
        split_indices(["a", "a"], None, 0.5)


def test_parts_of_images_are_those_images():
    images, whole = SyntheticImages(20, (5, 6), 2, seed=3), Tile.whole(5, 6)
    train, judge = images.split(0.25, seed=4)
    assert len(train) + len(judge) == 20
    assert 4 <= len(judge) <= 6
    assert not {train.name(i) for i in range(len(train))} & {judge.name(i) for i in range(len(judge))}
    for index, number in enumerate(judge.numbers):
        assert (judge.name(index), judge.label(index)) == (images.name(number), images.label(number))
        assert (judge.slide(index), judge.shape(index)) == (images.slide(number), (5, 6))
        assert (judge.part(index, whole) == images.part(number, whole)).all()
        assert (judge.mask(index, whole) == images.mask(number, whole)).all()


def test_parts_of_images_are_split_and_named_as_they_are():
    images = SyntheticImages(20, (5, 6), 2, seed=3)
    images.names = ("ill", "well")
    train, judge = Augmented(images.split(0.25, seed=4)[0]).split(0.5)
    assert train.names == judge.names == ("ill", "well")
    assert len(train) + len(judge) == len(images.split(0.25, seed=4)[0])


def test_there_must_be_such_images():
    with pytest.raises(ImageError, match="no image 7 among 5: they go from 0 to 4"):
        Subset(SyntheticImages(5, (5, 6), 2), [0, 7])
