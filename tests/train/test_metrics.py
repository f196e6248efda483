"""What is counted of predictions, and what becomes of the counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning
from mpi4dl_nb.engines.train.training_events import Counts, count_predictions


def count_by_hand(scores: Tensor, labels: Tensor, classes: int) -> list[tuple[int, ...]]:
    guess = scores.argmax(1).flatten().tolist()
    pairs = [(g, t) for g, t in zip(guess, labels.flatten().tolist(), strict=True) if 0 <= t < classes]
    return [
        tuple(sum(g == t == c for g, t in pairs) for c in range(classes)),
        tuple(sum(g == c for g, _ in pairs) for c in range(classes)),
        tuple(sum(t == c for _, t in pairs) for c in range(classes)),
    ]


@pytest.mark.parametrize("shape", [(7,), (2, 5, 6)])
@pytest.mark.parametrize("classes", [2, 4])
def test_counts_are_those_of_a_loop(shape: tuple[int, ...], classes: int):
    """What a loss leaves out (-100, 255) is not judged."""
    torch.manual_seed(0)
    scores = torch.randn(shape[0], classes, *shape[1:])
    labels = torch.randint(classes, shape)
    labels.view(-1)[:2] = torch.tensor([-100, 255])
    found = count_predictions(scores, labels)
    assert [found.right, found.predicted, found.true] == count_by_hand(scores, labels, classes)
    assert found.pixels == (len(shape) > 1)
    assert found.accuracy == sum(found.right) / (labels.numel() - 2)


def test_labels_may_have_a_channel_and_be_no_whole_numbers():
    scores, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    assert count_predictions(scores, labels[:, None].float()) == count_predictions(scores, labels)


def test_one_score_is_for_the_second_of_two_classes():
    scores = torch.tensor([[[[-1.0, 2.0], [3.0, -4.0]]]])
    labels = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])
    assert count_predictions(scores, labels, OutputMeaning.LABELS) == Counts((2, 1), (2, 2), (3, 1), True)


def test_a_probability_is_compared_with_one_half():
    shares = torch.tensor([[[[0.1, 0.7], [0.6, 0.4]]]])
    labels = torch.tensor([[[0, 1], [0, 0]]])
    assert count_predictions(shares, labels, OutputMeaning.SHARES) == Counts((2, 1), (2, 2), (3, 1), True)


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4, 6)])
def test_each_label_is_present_or_absent_by_itself(shape: tuple[int, ...]):
    scores, labels = torch.randn(shape), torch.randint(2, shape)
    found, guess = count_predictions(scores, labels.float(), OutputMeaning.LABELS), scores.sigmoid() > 0.5
    right = [int(((guess == state) & (labels == state)).sum()) for state in (False, True)]
    assert found.right == tuple(right)
    assert found.true == (int((labels == 0).sum()), int(labels.sum()))
    assert found.predicted == (int((~guess).sum()), int(guess.sum()))
    assert found.pixels == (len(shape) > 2)


@pytest.mark.parametrize("meaning", [OutputMeaning.AMOUNTS, OutputMeaning.UNKNOWN], ids=lambda each: each.name)
def test_outputs_that_stand_for_no_classes_are_not_judged(meaning: OutputMeaning):
    assert count_predictions(torch.randn(4, 3), torch.randint(3, (4,)), meaning) == Counts()


@pytest.mark.parametrize(("scores", "labels"), [((2, 3), (2, 3)), ((2, 3, 4, 4), (2,)), ((), ()), ((6,), (6,))])
def test_what_does_not_belong_together_is_not_judged(scores: tuple[int, ...], labels: tuple[int, ...]):
    found = count_predictions(torch.zeros(scores), torch.zeros(labels))
    assert (found, found.accuracy, found.dice) == (Counts(), None, None)


def test_parts_add_up_to_the_whole():
    scores, labels = torch.randn(3, 4, 6, 8), torch.randint(4, (3, 6, 8))
    tiles = [(slice(None), slice(0, 2)), (slice(None), slice(2, 6))]
    parts = [count_predictions(scores[:, :, rows], labels[:, rows]) for _, rows in tiles]
    assert sum([Counts(), *parts], Counts()) == count_predictions(scores, labels)


def test_dice_of_two_classes_is_that_of_the_second():
    """Else the background, which is most of an image, would hide that nothing was found."""
    assert Counts((90, 0), (100, 0), (90, 10)).dice == 0
    assert Counts((80, 5), (85, 15), (90, 10)).dice == pytest.approx(2 * 5 / 25)


def test_dice_of_more_classes_is_the_mean_over_those_that_occur():
    assert Counts((4, 1, 0), (5, 1, 0), (4, 2, 0)).dice == pytest.approx((8 / 9 + 2 / 3) / 2)
    assert Counts((4, 0), (4, 0), (4, 0)).dice is None
