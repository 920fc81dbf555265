from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shiftmend.errors import DataError
from shiftmend.research.datasets.partitions import balanced, emnist_source, few_shot, fractions, held_out

LABEL_LISTS = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def test_mnist_is_divided_into_54000_and_6000() -> None:
    train, validation = held_out(60_000)
    assert (len(train), len(validation)) == (54_000, 6_000)
    assert torch.cat([train, validation]).sort().values.equal(torch.arange(60_000))
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(12345))
    assert validation.equal(order[:6_000].sort().values)  # other digits would make results incomparable
    assert not train.equal(held_out(60_000, seed=1)[0])


@pytest.mark.slow
@given(st.integers(2, 300), st.data())
def test_holding_out_partitions(count: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, count - 1))
    train, validation = held_out(count, size, seed=3)
    assert len(validation) == size
    assert sorted(train.tolist() + validation.tolist()) == list(range(count))


def test_emnist_takes_the_first_and_the_last_of_each_class() -> None:
    labels = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1, 1])
    train, validation = emnist_source(labels, train=2, validation=1)
    assert train.tolist() == [0, 1, 2, 3]
    assert validation is not None
    assert validation.tolist() == [6, 8]


def test_emnist_with_nothing_to_spare_has_no_validation() -> None:
    labels = torch.arange(47).repeat_interleave(20)
    train, validation = emnist_source(labels, train=20, validation=4)
    assert len(train) == 940
    assert validation is None
    with pytest.raises(DataError, match=r"21.*20.*class 0"):
        emnist_source(labels, train=21)
    assert emnist_source(labels, train=10, validation=0)[1] is None
    with pytest.raises(DataError, match=r"20.*19.*class 3"):
        emnist_source(labels[torch.arange(940) != 79], train=20)


def test_emnist_defaults_are_those_of_the_paper() -> None:
    labels = torch.arange(3).repeat(2_400)
    train, validation = emnist_source(labels)
    assert validation is not None
    assert (len(train), len(validation)) == (6_000, 1_200)
    assert not set(train.tolist()) & set(validation.tolist())


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(18_800, [15_040, 1_880, 1_880]), (10_000, [8_000, 1_000, 1_000]), (129_838, [103_870, 12_983, 12_985])],
)
def test_eighty_ten_ten(count: int, sizes: list[int]) -> None:
    parts = fractions(count, seed=5)
    assert [len(part) for part in parts] == sizes
    assert torch.cat(parts).sort().values.equal(torch.arange(count))


@pytest.mark.parametrize("parts", [(), (1.1, -0.1), (0.5, 0.4)])
def test_fractions_have_to_add_up(parts: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="add up to 1"):
        fractions(100, parts)


def test_parts_that_would_be_empty() -> None:
    assert [len(part) for part in fractions(10)] == [8, 1, 1]
    with pytest.raises(DataError, match="would be empty"):
        fractions(5)
    for size in (0, 10):
        with pytest.raises(DataError, match="hold out"):
            held_out(10, size)


@pytest.mark.slow
@given(LABEL_LISTS, st.integers(0, 2**31))
def test_few_shot_draws_so_many_of_each_class(values: list[int], seed: int) -> None:
    labels = torch.tensor(values)
    fewest = min(Counter(values).values())
    chosen = few_shot(labels, fewest, seed)
    assert len(set(chosen.tolist())) == len(chosen)
    assert Counter(labels[chosen].tolist()) == dict.fromkeys(set(values), fewest)
    assert chosen.equal(few_shot(labels, fewest, seed))
    with pytest.raises(DataError, match="Ask for less"):
        few_shot(labels, fewest + 1, seed)


@pytest.mark.slow
@given(LABEL_LISTS, st.integers(1, 20), st.integers(0, 2**31))
def test_balanced_repeats_no_sample_needlessly(values: list[int], per_class: int, seed: int) -> None:
    labels = torch.tensor(values)
    chosen = balanced(labels, per_class, seed)
    assert Counter(labels[chosen].tolist()) == dict.fromkeys(set(values), per_class)
    times = Counter(chosen.tolist())
    for label in set(values):
        counts = [times[index] for index, value in enumerate(values) if value == label]
        assert max(counts) - min(counts) <= 1
    assert chosen.equal(balanced(labels, per_class, seed))


def test_the_seed_alone_decides_and_is_0_if_none_is_given() -> None:
    labels = torch.zeros(100, dtype=torch.int64)
    for drawn, again, other in (
        (few_shot(labels, 10), few_shot(labels, 10, 0), few_shot(labels, 10, 1)),
        (balanced(labels, 10), balanced(labels, 10, 0), balanced(labels, 10, 1)),
        (fractions(100)[2], fractions(100, seed=0)[2], fractions(100, seed=1)[2]),
    ):
        assert drawn.equal(again)
        assert not drawn.equal(other)


def test_nonsense_is_refused() -> None:
    for function in (few_shot, balanced):
        with pytest.raises(DataError, match="at least one sample"):
            function(torch.zeros(3, dtype=torch.int64), 0)
        for labels in (torch.zeros(0, dtype=torch.int64), torch.eye(3, dtype=torch.int64)):
            with pytest.raises(DataError, match=r"vector.*label"):
                function(labels, 1)
        with pytest.raises(DataError, match="label -1"):
            function(torch.tensor([0, -1, 1]), 1)
