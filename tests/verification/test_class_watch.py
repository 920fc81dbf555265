"""The watch over the classes of a stream: sorted and skewed batches are noticed, and mixed ones never are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rehearsed_world import trained

from shiftmend.profiles.profile import Profile
from shiftmend.stats.answers import Answers
from shiftmend.verification.class_watch import CONFIRMED, SORTED, ClassWatch, Glimpse
from shiftmend.verification.harm import OTHER_SHARES


def home(classes: int, answers: bool = True) -> Profile:
    stored = Answers(torch.full((classes,), 1 / classes), torch.tensor([0.9]), 1500)
    return replace(trained()[1], statistics={"answers": stored} if answers else {})


def see(labels: torch.Tensor, classes: int, confidence: float = 0.9) -> Glimpse:
    """Answers with a given mean confidence."""
    shares = torch.bincount(labels, minlength=classes).double() / len(labels)
    return Glimpse(shares, confidence, 0.0, len(labels))


@pytest.mark.parametrize("classes", [2, 4, 10, 100])
@pytest.mark.parametrize("size", [4, 32, 200])
@pytest.mark.parametrize("confidence", [0.9, 0.3])
def test_mixed_batches_of_any_size_may_be_learnt_from(classes: int, size: int, confidence: float) -> None:
    generator = torch.Generator().manual_seed(classes + size)
    watch, doubts = ClassWatch(home(classes), 16), 0
    for _ in range(150):
        batch = see(torch.randint(classes, (size,), generator=generator), classes, confidence)
        doubts += watch.judge(batch) is not None
        watch.add(batch)
    assert doubts == 0


@pytest.mark.parametrize("run", [2, 20])
def test_sorted_batches_are_noticed_behind_any_device_from_the_second_class_on(run: int) -> None:
    watch = ClassWatch(home(10), 16)
    found = []
    for label in range(10):
        for _ in range(run):
            batch = see(torch.full((64,), label), 10, confidence=0.3)
            found.append(watch.judge(batch))
            watch.add(batch)
    assert found[:run] == [None] * run
    assert all(doubt is not None and doubt.reason == SORTED for doubt in found[run:])
    assert found[run] is not None
    assert found[run].learnt_from_few


def test_a_sorted_stretch_after_mixed_batches_takes_nothing_back() -> None:
    generator = torch.Generator().manual_seed(0)
    watch = ClassWatch(home(10), 16)
    for _ in range(20):
        watch.add(see(torch.randint(10, (64,), generator=generator), 10, 0.3))
    doubt = watch.judge(see(torch.full((64,), 3), 10, 0.3))
    assert doubt is not None
    assert not doubt.learnt_from_few


def test_mixed_batches_after_a_sorted_stretch_are_learnt_from_again() -> None:
    generator = torch.Generator().manual_seed(0)
    watch = ClassWatch(home(10), 4)
    for label in range(10):
        watch.add(see(torch.full((64,), label), 10))
    doubts = []
    for _ in range(20):
        batch = see(torch.randint(10, (64,), generator=generator), 10)
        doubts.append(watch.judge(batch))
        watch.add(batch)
    assert doubts[-10:] == [None] * 10


def test_other_classes_than_home_are_noticed_if_the_model_is_certain() -> None:
    labels = torch.arange(64) % 3
    for confidence, expected in ((0.9, OTHER_SHARES), (0.4, None)):
        doubt = ClassWatch(home(10), 16).judge(see(labels, 10, confidence))
        assert (None if doubt is None else doubt.reason) == expected
    assert ClassWatch(home(10, answers=False), 16).judge(see(labels, 10)) is None


def ask(labels: torch.Tensor, confidence: float, agreed: float, certain: float | None) -> Glimpse:
    """Answers of ten classes, of which a second opinion confirms a share."""
    first = see(labels, 10, confidence)
    return replace(first, agreed=agreed * first.shares, certain=certain)


@pytest.mark.parametrize(
    ("agreed", "certain", "expected"), [(0.9, 0.4, CONFIRMED), (0.9, None, CONFIRMED), (0.4, 0.4, None)]
)
def test_other_classes_behind_a_device_are_noticed_if_a_second_opinion_agrees(
    agreed: float, certain: float | None, expected: str | None
) -> None:
    doubt = ClassWatch(home(10), 16).judge(ask(torch.arange(64) % 2, 0.4, agreed, certain))
    assert (None if doubt is None else doubt.reason) == expected


@pytest.mark.parametrize(
    ("agreed", "certain", "expected"),
    [(0.9, 0.9, OTHER_SHARES), (0.3, 0.9, None), (0.3, 0.6, OTHER_SHARES), (0.3, None, OTHER_SHARES)],
)
def test_a_certain_second_opinion_can_contradict_other_classes(
    agreed: float, certain: float | None, expected: str | None
) -> None:
    """Behind some devices, a model is certain of few classes, and finds all of them once its inputs are matched."""
    doubt = ClassWatch(home(10), 16).judge(ask(torch.arange(64) % 2, 0.9, agreed, certain))
    assert (None if doubt is None else doubt.reason) == expected


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_two_opinions_on_mixed_batches_never_pause(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    watch, doubts = ClassWatch(home(classes), 16), 0
    for _ in range(150):
        batch = see(torch.randint(classes, (32,), generator=generator), classes, 0.4)
        batch = replace(batch, agreed=batch.shares, certain=0.4)
        doubts += watch.judge(batch) is not None
        watch.add(batch)
    assert doubts == 0


def test_a_small_skew_shows_over_the_window() -> None:
    """Shares that fifty samples cannot tell from chance."""
    generator = torch.Generator().manual_seed(1)
    shares = torch.tensor([0.22] * 4 + [0.02] * 6)
    watch, found = ClassWatch(home(10), 16), []
    for _ in range(16):
        batch = see(torch.multinomial(shares, 16, replacement=True, generator=generator), 10)
        found.append(watch.judge(batch) is not None)
        watch.add(batch)
    assert not found[0]
    assert found[-1]


def test_logits_become_shares_and_confidence() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
    glimpse = Glimpse.of(logits, 0.1, 4)
    assert glimpse.shares.tolist() == [0.75, 0.25]
    assert glimpse.confidence == pytest.approx(float(torch.tensor([2.0, 0.0]).softmax(0)[0]))
    both = Glimpse.join([glimpse, Glimpse.of(-logits[:1], 0.5, 1)])
    assert both.shares.tolist() == pytest.approx([0.6, 0.4])
    assert both.outside == pytest.approx(0.18)
    assert both.inputs == 5
    assert both.agreed is None


def test_agreed_answers_are_counted_among_all() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
    first = Glimpse.of(logits, 0.0, 4, logits[[0, 0, 0, 1]])
    assert first.agreed is not None
    assert first.agreed.tolist() == [0.5, 0.0]
    assert first.certain == pytest.approx(float(torch.tensor([2.0, 0.0]).softmax(0)[0]))
    second = Glimpse.of(logits[:1], 0.0, 1, logits[:1], may_contradict=False)
    both = Glimpse.join([first, second])
    assert both.agreed is not None
    assert both.agreed.tolist() == pytest.approx([0.6, 0.0])
    assert both.certain is None


def test_what_few_classes_taught_is_taken_back_although_a_second_opinion_paused_first() -> None:
    watch, found = ClassWatch(home(10), 16), []
    for label in (0, 0, 1):
        batch = ask(torch.full((64,), label), 0.4, 0.9, 0.4)
        doubt = watch.judge(batch)
        assert doubt is not None
        found.append((doubt.reason, doubt.learnt_from_few))
        watch.add(batch)
    assert found == [(CONFIRMED, False), (CONFIRMED, False), (CONFIRMED, True)]


@pytest.mark.parametrize(("agreed", "few", "expected"), [(0.5, 3, True), (0.1, 3, False), (1.0, 10, False)])
def test_a_stream_is_suspect_if_a_second_opinion_confirms_a_part(agreed: float, few: int, expected: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    watch = ClassWatch(home(10), 16)
    for number in range(12):
        batch = ask(torch.randint(few, (32,), generator=generator), 0.4, agreed, 0.4)
        assert watch.judge(batch) is None
        assert not (watch.is_suspect and number < 4)  # too few samples
        watch.add(batch)
    assert watch.is_suspect == expected
