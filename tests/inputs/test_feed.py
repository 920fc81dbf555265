from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from copiers import AsLateAsPossible, AtOnce
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from worlds import an_epoch

from shiftmend.distributed import collectives as distributed
from shiftmend.errors import DataError
from shiftmend.inputs import batching
from shiftmend.inputs import feed as feeds
from shiftmend.inputs.batching import BatchCollector
from shiftmend.inputs.feed import Feed
from shiftmend.inputs.images import Split
from shiftmend.inputs.sources import DEFAULT_BATCH_SIZE
from shiftmend.utils import devices
from shiftmend.utils.gpu_sharing import share_gpu

INPUTS = torch.arange(70 * 3, dtype=torch.float32).reshape(70, 3)
LABELS = -1 - torch.arange(70)  # no input is negative: a label that leaks is seen at once


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, inputs: Tensor = INPUTS, labels: Tensor = LABELS) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """Has no length, but an end."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(INPUTS[i], LABELS[i]) for i in range(len(INPUTS))])


class Sizeless(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return INPUTS[index]


class Table:
    """As pandas has it: going through it gives the names of its columns."""

    def __iter__(self) -> Iterator[str]:
        return iter(["height", "width"])

    def to_numpy(self) -> Any:
        return INPUTS.numpy()


LABELLED: dict[str, Callable[[], Any]] = {
    "(tensor, tensor)": lambda: (INPUTS, LABELS),
    "(array, array)": lambda: (INPUTS.numpy(), LABELS.numpy()),
    "(array, list)": lambda: (INPUTS.numpy(), LABELS.tolist()),
    "TensorDataset": lambda: TensorDataset(INPUTS, LABELS),
    "Dataset": Pairs,
    "IterableDataset": Endless,
    "DataLoader": lambda: DataLoader(Pairs(), batch_size=16),
    "list of pairs": lambda: list(zip(INPUTS.split(16), LABELS.split(16), strict=True)),
    "list of lists": lambda: [[a, b] for a, b in zip(INPUTS.split(16), LABELS.split(16), strict=True)],
    "list of array pairs": lambda: [
        (a.numpy(), b.numpy()) for a, b in zip(INPUTS.split(16), LABELS.split(16), strict=True)
    ],
    "by names": lambda: {"label": LABELS, "image": INPUTS},
    "list by names": lambda: [
        {"index": torch.arange(len(a)), "labels": b, "pixel_values": a, "file": ["a name"] * len(a)}
        for a, b in zip(INPUTS.split(16), LABELS.split(16), strict=True)
    ],
    "list of arrays by names": lambda: [
        {"image": a.numpy(), "label": b.numpy()} for a, b in zip(INPUTS.split(16), LABELS.split(16), strict=True)
    ],
    "list of triples": lambda: [
        (a, b, "meta") for a, b in zip(INPUTS.split(16), LABELS.split(16), strict=True)
    ],
}  # fmt: skip
UNLABELLED: dict[str, Callable[[], Any]] = {
    "tensor": lambda: INPUTS,
    "array": lambda: INPUTS.numpy(),
    "flipped array": lambda: INPUTS.numpy()[::-1].copy()[::-1],
    "(tensor,)": lambda: (INPUTS,),
    "(tensor, None)": lambda: (INPUTS, None),
    "TensorDataset of one": lambda: TensorDataset(INPUTS),
    "list of batches": lambda: list(INPUTS.split(16)),
    "list of arrays": lambda: [part.numpy() for part in INPUTS.split(16)],
    "list of (batch, names)": lambda: [(part, ["a name"] * len(part)) for part in INPUTS.split(16)],
    "list of (batch, array of names)": lambda: [(part, np.array(["a name"] * len(part))) for part in INPUTS.split(16)],
    "list by names alone": lambda: [{"image": part, "label": ["a name"] * len(part)} for part in INPUTS.split(16)],
    "list with an empty batch": lambda: [INPUTS[:0], *INPUTS.split(16), INPUTS[:0]],
}
WAYS = LABELLED | UNLABELLED
ROOM = {"resident": {}, "streamed": {"limit": 0}, "not resident": {"resident": False}}


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_every_input_once_in_order(way: str, room: str) -> None:
    feed = Feed(WAYS[way](), **ROOM[room])
    batches = list(feed.batches())
    assert all(isinstance(batch, Tensor) for batch in batches)
    assert torch.equal(torch.cat(batches), INPUTS)
    assert feed.samples == 70
    assert torch.equal(torch.cat(list(feed.batches())), INPUTS)  # again, as often as one likes
    assert torch.equal(feed.first(5), INPUTS[:5])


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("way", LABELLED)
def test_labels_come_with_their_inputs_and_nowhere_else(way: str, room: str) -> None:
    feed = Feed(LABELLED[way](), **ROOM[room])
    inputs, labels = zip(*feed.labelled_batches(), strict=True)
    assert torch.equal(torch.cat(inputs), INPUTS)
    assert torch.equal(torch.cat(labels), LABELS)
    for batch in [*feed.batches(), *an_epoch(feed, 0, 1), *feed.subset(20, 0), feed.first(8)]:
        assert isinstance(batch, Tensor)
        assert batch.shape[1:] == (3,)
        assert bool((batch >= 0).all())


@pytest.mark.parametrize("way", UNLABELLED)
def test_missing_labels_are_missed_only_by_the_evaluator(way: str) -> None:
    feed = Feed(UNLABELLED[way](), what="target data")
    with pytest.raises(DataError, match=r"target data.*labels"):
        list(feed.labelled_batches())


class Uneven(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 4 + index % 2)


class Pictures(Uneven):
    def __getitem__(self, index: int) -> Any:
        return Image.new("L", (4, 4)), index


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((INPUTS[i : i + 9] for i in range(0, 70, 9)), r"generator.*only once"),
        (iter(INPUTS.split(9)), "run through only once"),
        (3, "got an int"),
        ("folder/images", r"got a str\..*image_folder\(folder\)\.images"),
        (None, "got None"),
        (nn.Sequential(nn.Linear(3, 3)), "got a Sequential"),
        (Table(), r"Table\..*to_numpy"),
        (Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), None, "scans"), r"Split\..*images"),
        (Sizeless(), "a Dataset with __len__"),
        ((1,), r"tensor.*got int"),
        (([[1.0, 2.0]], [0]), r"tensor.*got list"),
        ([[1.0, 2.0], [3.0, 4.0]], r"A list holds batches"),
        ([INPUTS, LABELS], r"different shapes.*tuple"),
        (torch.tensor(3.0), "single number"),
        (np.array(3.0), "single number"),
        ((INPUTS, LABELS[:-1]), r"70 inputs.*69 labels"),
        ((INPUTS, torch.tensor(1)), r"70 inputs.*1 label"),
        (np.array([None, "a"], dtype=object), "array of object"),
        (np.ma.masked_less(np.arange(6.0).reshape(3, 2), 1), r"masked values.*filled\(\.\.\.\)"),
        ([np.ma.masked_less(np.arange(6.0).reshape(3, 2), 1)], r"masked values.*filled"),
        ((INPUTS, np.array(["cat", "dog"] * 35)), "no tensor can hold"),
        (["a", "b"], "got str"),
        ([{"image": INPUTS, "label": LABELS, "target": LABELS}], r"'label'.*'target'"),
        ([torch.tensor(1.0)], "got Tensor"),
        (INPUTS[:0], "is empty"),
        (np.zeros((0, 3)), "is empty"),
        ((INPUTS[:0], LABELS[:0]), "is empty"),
        ([], "is empty"),
        ([INPUTS[:0]], "is empty"),
        (TensorDataset(INPUTS[:0]), "is empty"),
        (Pairs(INPUTS[:0]), "is empty"),
        (DataLoader(Pairs(INPUTS[:5]), batch_size=10, drop_last=True), "is empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_data_is_refused(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Feed(source, what="target data")
    assert "target data" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [Uneven(), DataLoader(Uneven(), num_workers=1, batch_size=4), Pictures(), DataLoader(Pictures(), num_workers=1)],
)
def test_samples_that_make_no_batch_get_a_note_with_what_to_do(source: Any) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        Feed(source, what="target data")
    notes = " ".join(caught.value.__notes__)
    assert "target data" in notes
    assert "collate_fn" in notes


@pytest.mark.slow
@pytest.mark.parametrize("source", [[], [INPUTS[:0]], DataLoader(Pairs(INPUTS[:5]), batch_size=10, drop_last=True)])
@pytest.mark.parametrize("use", [
    lambda feed: list(feed.batches()), lambda feed: list(an_epoch(feed, 0, 1)), lambda feed: feed.first(2),
    lambda feed: list(feed.labelled_batches()), lambda feed: list(feed.subset(5, 0)), lambda feed: feed.samples,
])  # fmt: skip
def test_an_empty_stream_is_noticed_whatever_is_asked_first(source: Any, use: Callable[[Feed], Any]) -> None:
    with pytest.raises(DataError, match="is empty"):
        use(Feed(source, resident=False))


def test_what_can_be_run_through_only_once_is_not_called_empty() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = iter(INPUTS.split(10))

        def __iter__(self) -> Iterator[torch.Tensor]:
            return self.batches

    feed = Feed(Once(), resident=False)
    assert len(torch.cat(list(feed.batches()))) == len(INPUTS)
    with pytest.raises(DataError, match=r"later pass.*begin anew"):
        feed.first(2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_numbers_that_are_none_are_refused(bad: float, dtype: torch.dtype) -> None:
    inputs = torch.zeros(40, 3, 2, 2, dtype=dtype)
    inputs[7, 0, 1, 1] = inputs[7, 1, 0, 0] = inputs[31, 2, 0, 0] = bad
    for source in (inputs, inputs.numpy(), (inputs, LABELS[:40]), TensorDataset(inputs)):
        with pytest.raises(DataError, match=r"infinity.*sample 7"):
            Feed(source)
    with pytest.raises(DataError, match="first in sample 31 "):
        Feed(list(torch.cat([inputs[:7], inputs[:1], inputs[8:]]).split(8)))
    with pytest.raises(DataError, match="first in sample 7 "):
        list(Feed(list(inputs.split(8)), limit=0).batches())
    with pytest.raises(DataError, match="first in sample 1 "):
        Feed(torch.tensor([1.0, bad], dtype=dtype))
    with pytest.raises(DataError, match=r"NaN or infinity.*Remove"):  # which of the Dataset, is not known
        Feed(DataLoader(TensorDataset(inputs), shuffle=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float16], ids=str)
def test_inputs_stay_of_the_type_they_came_in(dtype: torch.dtype) -> None:
    inputs = torch.ones(9, 2).to(dtype)
    for source in (inputs, inputs.numpy(), list(inputs.split(4))):
        assert next(Feed(source).batches()).dtype == dtype


def test_batches_with_other_axes_and_what_may_be_labels_are_refused() -> None:
    for pair in ([torch.zeros(4, 3), torch.zeros(4, 2)], [INPUTS, LABELS]):  # a list where a tuple was meant
        with pytest.raises(DataError, match=r"different shapes.*tuple"):
            Feed(pair)
    with pytest.raises(DataError, match=r"different shapes(?!.*tuple)"):  # no inputs and labels
        Feed(DataLoader([torch.zeros(4, 3), torch.zeros(4)], batch_size=None))


def test_batches_of_other_sizes_are_streamed_since_each_may_be_padded_to_its_longest_sample() -> None:
    batches = [torch.zeros(4, 2, 5), torch.ones(3, 2, 7), torch.zeros(1, 2, 7)]
    feed = Feed(DataLoader(batches, batch_size=None))
    assert not feed.resident
    assert [batch.shape for batch in feed.batches()] == [(4, 2, 5), (4, 2, 7)]  # a lone one joins those of its size
    assert [sample.shape for sample in feed.examples(2)] == [(2, 2, 5), (2, 2, 7)]
    assert feed.samples == 8
    gathered = BatchCollector()
    for batch in batches:
        gathered.add(batch, None)
    assert sum(map(len, gathered.inputs)) == 1  # what cannot be one tensor is not kept in memory


def test_small_batches_in_the_middle_of_a_stream_are_trained_on() -> None:
    """A sampler that fills batches up to a number of tokens gives few long samples, anywhere."""
    batches = [torch.zeros(12, 5), torch.zeros(3, 20), torch.zeros(1, 60), torch.zeros(6, 10), torch.zeros(2, 30)]
    feed = Feed(DataLoader(batches, batch_size=None, shuffle=False))
    assert [len(batch) for batch in an_epoch(feed, 0, 1)] == [12, 3, 6]


@pytest.mark.parametrize("size", [0, -3, True])
@pytest.mark.parametrize("way", ["tensor", "Dataset", "list of batches"])
def test_impossible_batch_sizes_are_refused(size: int, way: str) -> None:
    with pytest.raises(DataError, match=r"batch size.*whole number"):
        Feed(WAYS[way](), batch_size=size)


def test_a_loader_and_another_batch_size_contradict_each_other() -> None:
    loader = DataLoader(Pairs(), batch_size=16)
    with pytest.raises(DataError, match=r"batch_size=32.*16"):
        Feed(loader, batch_size=32)
    assert Feed(loader, batch_size=16).batch_size == Feed(loader).batch_size == 16
    ready = DataLoader(list(INPUTS.split(7)), batch_size=None)  # which cuts nothing
    assert [len(batch) for batch, _ in Feed(ready, batch_size=32).epoch(0, 1)] == [32, 32]


@pytest.mark.parametrize("room", ROOM)
def test_a_sampler_of_batches_and_a_batch_size_contradict_each_other_wherever_the_data_lies(room: str) -> None:
    """Kept data would be cut to that size, while a stream gives the sampler's batches, whatever was asked for."""
    usual = DataLoader(Pairs(), batch_sampler=BatchSampler(range(70), 16, drop_last=False))
    with pytest.raises(DataError, match=r"batch_size=32.*16"):
        Feed(usual, batch_size=32, **ROOM[room])
    assert Feed(usual, batch_size=16, **ROOM[room]).batch_size == Feed(usual, **ROOM[room]).batch_size == 16
    own = DataLoader(Pairs(), batch_sampler=[[0, 1, 2], [5]])
    with pytest.raises(DataError, match=r"batch_size=3.*batch_sampler"):
        Feed(own, batch_size=3, **ROOM[room])


def test_the_default_batch_size() -> None:
    assert Feed(torch.zeros(1000, 1)).batch_size == DEFAULT_BATCH_SIZE
    assert [len(batch) for batch in Feed(torch.zeros(600, 1)).batches()] == [256, 256, 88]


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize(("samples", "size", "sizes"), [
    (70, 16, [16, 16, 16, 16, 6]), (64, 16, [16] * 4), (5, 16, [5]), (1, 1, [1]), (70, 70, [70]), (70, 71, [70])
])  # fmt: skip
def test_sizes_of_batches(samples: int, size: int, sizes: list[int], room: str) -> None:
    feed = Feed(Pairs(INPUTS[:samples]), batch_size=size, **ROOM[room])
    assert [len(batch) for batch in feed.batches()] == sizes
    assert [len(inputs) for inputs, _ in feed.labelled_batches()] == sizes


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 70), st.integers(-(2**62), 2**62), st.integers(0, 5000))
def test_an_epoch_is_whole_batches_of_distinct_samples(samples: int, size: int, seed: int, number: int) -> None:
    feed = Feed(torch.arange(samples), batch_size=size)
    batches = list(an_epoch(feed, seed, number))
    expected = min(size, samples)
    assert {len(batch) for batch in batches} == {expected}
    seen = torch.cat(batches).tolist()
    assert len(seen) == len(set(seen)) == samples - samples % expected


def test_an_epoch_depends_on_seed_and_number_only() -> None:
    def epoch(feed: Feed, seed: int, number: int) -> list[int]:
        return torch.cat(list(an_epoch(feed, seed, number))).tolist()

    feed = Feed(torch.arange(1000), batch_size=100)
    first = epoch(feed, 3, 5)
    torch.manual_seed(99)
    assert epoch(feed, 3, 5) == first
    assert epoch(Feed(torch.arange(1000), batch_size=100), 3, 5) == first
    orders = {tuple(epoch(feed, seed, number)) for seed in range(5) for number in range(5)}
    assert len(orders) == 25
    assert first != sorted(first)


def test_each_epoch_leaves_others_out() -> None:
    feed = Feed(torch.arange(70), batch_size=64)
    left_out = [set(range(70)) - set(torch.cat(list(an_epoch(feed, 0, number))).tolist()) for number in range(40)]
    assert all(len(rest) == 6 for rest in left_out)
    assert len(set.union(*left_out)) > 60


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 70), st.integers(-(2**62), 2**62), st.integers(0, 5000))
def test_an_index_says_which_samples_a_batch_holds(samples: int, size: int, seed: int, number: int) -> None:
    inputs = 7 * torch.arange(samples) + 3
    feed = Feed(inputs, batch_size=size, preprocess=lambda batch: -batch)
    pairs = list(feed.epoch(seed, number))
    for batch, index in pairs:
        assert index is not None
        assert torch.equal(batch, -inputs[index])
    assert all(torch.equal(a, b) for a, (b, _) in zip(an_epoch(feed, seed, number), pairs, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_every_resident_way_has_the_same_index_and_a_stream_has_none(way: str) -> None:
    expected = [index for _, index in Feed(INPUTS, batch_size=16).epoch(3, 1)]
    size = None if way == "DataLoader" else 16  # which brings its own, the same
    feed = Feed(WAYS[way](), batch_size=size, resident=True)
    for (batch, index), other in zip(feed.epoch(3, 1), expected, strict=True):
        assert torch.equal(index, other)
        assert torch.equal(batch, INPUTS[index])
    streamed = list(Feed(WAYS[way](), batch_size=size, resident=False).epoch(3, 1))
    if Feed(WAYS[way](), batch_size=size, resident=False).resident:
        assert all(torch.equal(index, other) for (_, index), other in zip(streamed, expected, strict=True))
    else:
        assert [index for _, index in streamed] == [None] * len(streamed)


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("way", WAYS)
def test_the_global_generator_is_left_alone(way: str, room: str) -> None:
    feed = Feed(WAYS[way](), **ROOM[room])
    before = torch.get_rng_state()
    for _ in [*an_epoch(feed, 0, 1), *feed.batches(), *feed.subset(10, 0), feed.first(3), feed.samples]:
        assert torch.equal(torch.get_rng_state(), before)
    unfinished = an_epoch(feed, 0, 2)
    next(unfinished)
    assert torch.equal(torch.get_rng_state(), before)  # also between batches, where a model may draw


@pytest.mark.parametrize("room", ROOM)
def test_a_shuffling_loader_is_put_in_an_order_by_the_seed(room: str) -> None:
    def orders(start: int) -> list[list[float]]:
        torch.manual_seed(start)
        feed = Feed(DataLoader(Pairs(), batch_size=10, shuffle=True), **ROOM[room])
        assert torch.equal(torch.cat(list(feed.batches())), torch.cat(list(feed.batches())))
        assert torch.equal(torch.cat(list(feed.subset(25, 3))), torch.cat(list(feed.subset(25, 3))))
        return [
            torch.cat(list(an_epoch(feed, seed, number)))[:, 0].tolist() for seed, number in ((0, 1), (0, 2), (1, 1))
        ]

    first, second, other = orders(1)
    assert sorted(first) == sorted(second) == sorted(other) == INPUTS[:, 0].tolist()
    assert first != second != other != first
    assert orders(2) == [first, second, other]  # whatever the global generator was at


def test_reading_a_shuffling_loader_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    Feed(DataLoader(Pairs(), batch_size=10, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_is_drawn_anew_in_each_epoch_if_data_is_streamed() -> None:
    class Noisy(Pairs):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.inputs[index] + torch.rand(3), self.labels[index]

    streamed, kept = Feed(Noisy(), batch_size=70, resident=False), Feed(Noisy(), batch_size=70)
    first, again, second = (next(an_epoch(streamed, 0, number)) for number in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(first.floor().sort(0).values, INPUTS)
    first, second = (next(an_epoch(kept, 0, number)).sort(0).values for number in (1, 2))
    assert torch.equal(first, second)


def test_a_failing_loader_fails_with_its_own_error_and_leaves_the_generator_alone() -> None:
    class Broken(Pairs):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            torch.rand(1)
            if index == 50:
                raise OSError("the file of sample 50 is gone")
            return super().__getitem__(index)

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="sample 50"):
        Feed(Broken(), batch_size=8)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("sizes", [[20, 20, 20, 10], [20, 20, 20], [20, 20, 20, 9], [3], [20, 30, 20]])
def test_a_streamed_epoch_leaves_out_a_small_last_batch_only(sizes: list[int]) -> None:
    """The size of batches is what the list has, not the default of 256."""
    parts = list(torch.arange(sum(sizes)).split(sizes))
    kept = [size for size in sizes if size * 2 >= sizes[0]]
    assert [len(batch) for batch in an_epoch(Feed(parts, limit=0), 0, 1)] == kept


@pytest.mark.parametrize(("sizes", "kept"), [([1, 4, 1, 3], [4, 3]), ([1, 1, 1], [1, 1, 1]), ([1], [1])])
def test_a_streamed_epoch_leaves_out_lone_samples_unless_there_are_no_others(sizes: list[int], kept: list[int]) -> None:
    parts = [torch.zeros(size, 2 + size) for size in sizes]
    assert [len(batch) for batch in an_epoch(Feed(parts, limit=0), 0, 1)] == kept


def test_a_streamed_loader_with_its_own_sampler_gives_all_its_batches() -> None:
    sampler = BatchSampler(range(70), 10, drop_last=False)
    feed = Feed(DataLoader(Pairs(), batch_sampler=sampler), resident=False)
    assert torch.equal(torch.cat(list(an_epoch(feed, 0, 1))), INPUTS)


def test_a_sampler_behind_a_sampler_of_batches_is_not_overlooked() -> None:
    """Beside a `batch_sampler` torch gives every loader a sampler in order, which is never asked."""
    generator = torch.Generator()
    drawn = RandomSampler(Pairs(), num_samples=45, generator=generator)
    feed = Feed(DataLoader(Pairs(), batch_sampler=BatchSampler(drawn, 10, drop_last=True)), resident=False)
    assert not feed.keeps_order
    assert not feed.never_shuffles
    assert feed.samples == len(torch.cat(list(feed.batches()))) == 40
    assert torch.equal(torch.cat(list(feed.batches())), torch.cat(list(feed.batches())))
    plain = Feed(DataLoader(Pairs(), batch_sampler=BatchSampler(SequentialSampler(Pairs()), 10, False)), resident=False)
    assert plain.keeps_order
    assert plain.never_shuffles


@pytest.mark.parametrize("way", WAYS)
def test_the_limit_decides_where_data_stays_and_nothing_else(way: str) -> None:
    kept, streamed = Feed(WAYS[way](), limit=INPUTS.numel() * 4), Feed(WAYS[way](), limit=INPUTS.numel() * 4 - 1)
    assert kept.resident
    assert kept.inputs is not None
    whole = isinstance(WAYS[way](), Tensor | np.ndarray | tuple | dict | TensorDataset)
    assert streamed.resident is whole  # what lies in memory already is not read again
    assert torch.equal(torch.cat(list(kept.batches())), torch.cat(list(streamed.batches())))


def test_a_streamed_source_is_really_streamed() -> None:
    class Counting(Pairs):
        reads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.reads += 1
            return super().__getitem__(index)

    data = Counting()
    feed = Feed(data, batch_size=10, resident=False)
    assert data.reads == 0
    assert feed.epoch_batch_size == 10
    assert Feed(data, resident=False).epoch_batch_size == len(data)
    feed.first(2)
    assert data.reads == 10
    list(feed.subset(15, 0))
    assert data.reads == 30
    list(feed.batches())
    list(feed.batches())
    assert data.reads == 170
    resident = Counting()
    feed = Feed(resident, batch_size=10)
    for number in range(3):
        list(an_epoch(feed, 0, number))
    assert resident.reads == 70


def test_a_subset_is_the_same_each_time_and_spread_over_everything() -> None:
    feed = Feed(torch.arange(1000), batch_size=64)
    chosen = torch.cat(list(feed.subset(100, 7))).tolist()
    assert len(set(chosen)) == 100
    assert chosen == sorted(chosen)
    assert chosen == torch.cat(list(feed.subset(100, 7))).tolist()
    assert chosen != torch.cat(list(feed.subset(100, 8))).tolist()
    assert min(chosen) < 100 < 900 < max(chosen)
    assert [len(batch) for batch in feed.subset(100, 7)] == [64, 36]
    assert [len(batch) for batch in feed.subset(129, 7)] == [64, 65]  # none is alone
    assert [len(batch) for batch in feed.subset(129, 7, at_least=100)] == [100, 29]
    for count in (1000, 2000):
        assert torch.equal(torch.cat(list(feed.subset(count, 7))), torch.arange(1000))


def test_a_subset_of_a_stream_is_its_beginning() -> None:
    feed = Feed(list(INPUTS.split(16)), limit=0)
    assert torch.equal(torch.cat(list(feed.subset(20, 7))), INPUTS[:20])
    assert torch.equal(torch.cat(list(feed.subset(16, 7))), INPUTS[:16])
    assert torch.equal(torch.cat(list(feed.subset(17, 7))), INPUTS[:16])  # none is alone
    assert torch.equal(torch.cat(list(feed.subset(500, 7))), INPUTS)
    shuffled = Feed(TensorDataset(INPUTS), batch_size=16, limit=0)
    for found in (torch.cat(list(shuffled.subset(20, 7))), torch.cat(list(an_epoch(shuffled, 7, 0)))):
        assert not torch.equal(found, INPUTS[: len(found)])


@pytest.mark.parametrize(("values", "samples"), [(1 << 10, 128), (1 << 18, 32), (1 << 20, 16)])
def test_a_gpu_takes_several_batches_of_small_samples_at_once(values: int, samples: int) -> None:
    feed = Feed(torch.zeros(2, values, dtype=torch.uint8), batch_size=16)
    assert feed.inference_batch_size == 16
    feed.device = torch.device("cuda")
    assert feed.inference_batch_size == samples


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("way", ["(tensor, tensor)", "DataLoader", "list of pairs"])
def test_preprocessing_is_applied_everywhere_once(way: str, room: str) -> None:
    feed = Feed(LABELLED[way](), preprocess=lambda batch: batch / 2 + 1, **ROOM[room])
    expected = INPUTS / 2 + 1
    for _ in range(2):
        assert torch.equal(torch.cat(list(feed.batches())), expected)
        assert torch.equal(torch.cat([inputs for inputs, _ in feed.labelled_batches()]), expected)
        assert torch.equal(feed.first(4), expected[:4])
        for batch in [*an_epoch(feed, 0, 1), *feed.subset(5, 0)]:
            assert {tuple(row) for row in batch.tolist()} <= {tuple(row) for row in expected.tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("way", WAYS)
def test_work_in_place_changes_neither_the_feed_nor_the_callers_data(way: str, room: str) -> None:
    """A first layer or a preprocessing may overwrite its input; the second pass must not see that."""
    source = WAYS[way]()
    feed = Feed(source, preprocess=lambda batch: batch.mul_(2), **ROOM[room])
    reference = INPUTS.clone()
    try:
        for _ in range(2):
            for batch in [
                *feed.batches(),
                feed.first(9),
                *an_epoch(feed, 0, 1),
                *feed.subset(9, 0),
                *feed.subset(99, 0),
            ]:
                batch.add_(1000)
        assert torch.equal(INPUTS, reference)
        assert torch.equal(torch.cat(list(feed.batches())), reference * 2)
    finally:
        INPUTS.copy_(reference)


@pytest.mark.parametrize("room", ROOM)
def test_inputs_need_no_gradient(room: str) -> None:
    inputs = INPUTS.clone().requires_grad_()
    for source in (inputs, list(inputs.split(16))):
        assert not any(batch.requires_grad for batch in Feed(source, **ROOM[room]).batches())


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, labels = super().__getitem__(index)
        return 2 * inputs, labels


@pytest.mark.parametrize("room", ROOM)
def test_a_dataset_is_asked_for_its_samples_also_if_it_holds_tensors(room: str) -> None:
    feed = Feed(Doubled(INPUTS, LABELS), **ROOM[room])
    assert torch.equal(torch.cat(list(feed.batches())), 2 * INPUTS)


def everything(feed: Feed) -> list[Tensor | None]:
    """All that a feed gives, in all its ways."""
    found: list[Tensor | None] = [feed.first(7)]
    for number in (1, 2):
        found += [part for pair in feed.epoch(3, number) for part in pair]
        found += an_epoch(feed, 3, number)
    found += [*feed.batches(), *feed.batches(30), *feed.subset(25, 1), *feed.subset(25, 1, 20), *feed.subset(99, 1)]
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    def equal(a: Tensor | None, b: Tensor | None) -> bool:
        return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))

    return len(one) == len(other) and all(map(equal, one, other))


@pytest.mark.slow
@pytest.mark.parametrize("room", ["streamed", "not resident"])
@pytest.mark.parametrize("way", WAYS)
def test_prefetching_changes_nothing_that_a_feed_gives(way: str, room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def passed() -> list[Any]:
        size = None if way == "DataLoader" else 16
        feed = Feed(WAYS[way](), batch_size=size, preprocess=lambda batch: batch / 2, **ROOM[room])
        found = everything(feed)
        return found + [part for pair in feed.labelled_batches() for part in pair] if way in LABELLED else found

    expected = passed()
    used: list[AtOnce] = []

    def make_copier(device: torch.device) -> AtOnce:
        used.append(AtOnce())
        return used[-1]

    monkeypatch.setattr(feeds, "make_copier", make_copier)
    assert same(passed(), expected)
    assert len(used) >= 9  # once for each pass


def test_prefetching_leaves_random_draws_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a loader, those of the consumer between batches, and those of other libraries' generators."""

    class Noisy(Pairs):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.inputs[index] + torch.rand(3) + np.random.rand(), self.labels[index]  # noqa: NPY002

    def passed() -> list[Any]:
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        drawn: list[Any] = []
        feed = Feed(DataLoader(Noisy(), batch_size=10, shuffle=True), resident=False)
        for number in (1, 2):
            for batch in an_epoch(feed, 0, number):
                drawn += [batch, torch.rand(2), torch.tensor(np.random.rand())]  # noqa: NPY002
                if number == 1 and len(drawn) == 9:
                    break  # given up half-way: nothing more has been read than was asked for
        return drawn

    expected = passed()
    monkeypatch.setattr(feeds, "make_copier", lambda device: AtOnce())
    assert same(passed(), expected)


def test_a_prefetched_stream_reads_no_more_than_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Pairs):
        reads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.reads += 1
            return super().__getitem__(index)

    monkeypatch.setattr(feeds, "make_copier", lambda device: AtOnce())
    data = Counting()
    feed = Feed(data, batch_size=10, resident=False)
    list(feed.subset(15, 0))
    assert data.reads == 20
    next(feed.batches())
    assert data.reads == 40  # one batch ahead: it may be a lone sample that has to join


def test_only_what_lies_in_memory_is_gathered_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by a thread that takes turns on the device: the background would be out of turn."""
    device = AsLateAsPossible()
    monkeypatch.setattr(feeds, "make_copier", lambda _: device)

    def by(source: Any) -> set[bool]:
        device.threads.clear()
        for _ in an_epoch(Feed(source, batch_size=10, resident=False), 0, 1):
            pass
        return {name == threading.current_thread().name for name in device.threads}

    assert by(INPUTS) == {False}
    assert by(Pairs()) == by(list(INPUTS.split(10))) == {True}
    with share_gpu(threading.Lock()):
        assert by(INPUTS) == {True}


@pytest.mark.parametrize("bad", [RuntimeError("the preprocessing failed"), KeyboardInterrupt()])
def test_an_interrupted_pass_leaves_no_thread(bad: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "make_copier", lambda device: AtOnce())
    before = threading.active_count()
    seen: list[int] = []

    def preprocess(batch: Tensor) -> Tensor:
        seen.append(threading.active_count())
        if len(seen) == 3:
            raise bad
        return batch

    feed = Feed(INPUTS, batch_size=4, preprocess=preprocess, resident=False)
    with pytest.raises(type(bad)) as caught:
        list(an_epoch(feed, 0, 1))
    assert caught.value is bad  # whose traceback still holds the frames of the feed
    assert seen == [before + 1] * 3
    assert threading.active_count() == before


@pytest.mark.parametrize("way", ["(tensor, tensor)", "DataLoader"])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("size", [10, 16, 23])
def test_processes_share_prefetched_batches_as_they_share_others(
    size: int, processes: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 leaves a last batch of one, which is too small to be shared and joins the one before."""
    source = (INPUTS, LABELS) if way == "(tensor, tensor)" else DataLoader(Pairs(), batch_size=size)
    feed = Feed(source, batch_size=size, resident=False)
    monkeypatch.setattr(distributed, "is_distributed", lambda: True)
    monkeypatch.setattr(distributed, "world_size", lambda: processes)
    passes: list[Callable[[], list[Tensor]]] = [
        lambda: list(feed.batches()),
        lambda: list(feed.subset(24, 0)),
        lambda: list(an_epoch(feed, 0, 1)),
    ]
    for one_pass in passes:
        shares = []
        for own in range(processes):
            monkeypatch.setattr(distributed, "rank", lambda own=own: own)
            monkeypatch.setattr(feeds, "make_copier", lambda device: None)
            expected = one_pass()
            monkeypatch.setattr(feeds, "make_copier", lambda device: AtOnce())
            assert same(one_pass(), expected)
            shares.append(expected)
        rows = torch.cat([batch for share in shares for batch in share])[:, 0]
        assert len(rows.unique()) == len(rows) > 20
        assert len({len(share) for share in shares}) == 1
        if one_pass is passes[0]:
            assert len(rows) == len(INPUTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_too_large_for_the_device_goes_there_by_batches() -> None:
    place = torch.device("cuda")
    for limit, kept in ((None, "cuda"), (0, "cpu")):
        feed = Feed((INPUTS, LABELS), device=place, limit=limit, batch_size=16)
        assert feed.inputs is not None
        assert feed.inputs.device.type == kept
        for batch in [*feed.batches(), *an_epoch(feed, 0, 1), *feed.subset(9, 0), feed.first(2)]:
            assert batch.device.type == "cuda"
        assert torch.equal(torch.cat(list(feed.batches())).cpu(), INPUTS)
        inputs, labels = next(feed.labelled_batches())
        assert inputs.device.type == labels.device.type == "cuda"


@pytest.mark.parametrize("collate", [None, lambda batch: torch.stack(batch)])
def test_a_loader_that_hands_out_its_own_memory_is_not_changed(collate: Any) -> None:
    """Without automatic batching a loader gives what the data set holds."""
    whole = torch.full((4, 2, 3), 100.0)
    loader = DataLoader(list(whole), batch_size=None if collate is None else 2, collate_fn=collate)
    feed = Feed(loader, resident=False, preprocess=lambda batch: batch.div_(2))
    for _ in range(3):
        assert all((batch == 50).all() for batch in feed.batches())
    assert (whole == 100).all()


@pytest.mark.parametrize("resident", [True, False])
def test_a_loader_that_fills_the_same_memory_again_gives_what_it_gave(resident: bool) -> None:
    class Reused:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            inputs, labels = torch.empty(10, 3), torch.empty(10, dtype=torch.long)
            for start in range(0, 70, 10):
                yield inputs.copy_(INPUTS[start : start + 10]), labels.copy_(LABELS[start : start + 10])

    seen = list(Feed(Reused(), resident=resident).labelled_batches())
    assert torch.equal(torch.cat([inputs for inputs, _ in seen]), INPUTS)
    assert torch.equal(torch.cat([labels for _, labels in seen]), LABELS)


def test_a_lone_sample_at_the_end_of_a_stream_joins_the_batch_before_it() -> None:
    def sizes(size: int, count: int = 70) -> list[list[int]]:
        feed = Feed(DataLoader(Pairs(INPUTS[:count], LABELS[:count]), batch_size=size), resident=False)
        seen = list(feed.labelled_batches())
        assert torch.equal(torch.cat([inputs for inputs, _ in seen]), INPUTS[:count])
        assert torch.equal(torch.cat([labels for _, labels in seen]), LABELS[:count])
        passes = (feed.batches(), (inputs for inputs, _ in seen), feed.subset(500, 7))
        return [[len(batch) for batch in one] for one in passes]

    assert sizes(23) == [[23, 23, 24]] * 3
    assert sizes(69) == [[70]] * 3
    assert sizes(22) == [[22, 22, 22, 4]] * 3
    assert sizes(1, 3) == [[1, 1, 1]] * 3
    unlike = Feed([INPUTS[:4], INPUTS[:1, :2]], resident=False)
    assert [batch.shape for batch in unlike.batches()] == [(4, 3), (1, 2)]


def test_what_comes_beside_the_inputs_may_differ_from_batch_to_batch() -> None:
    boxes = [(INPUTS[:2], torch.zeros(2, 5, 4)), (INPUTS[2:4], torch.zeros(2, 3, 4))]
    feed = Feed(boxes)
    assert torch.equal(torch.cat(list(feed.batches())), INPUTS[:4])
    with pytest.raises(DataError, match=r"Expected labels in"):
        next(feed.labelled_batches())


def test_a_tuple_of_batches_is_no_pair_of_inputs_and_labels() -> None:
    batches = ((INPUTS[:40], LABELS[:40]), (INPUTS[40:], LABELS[40:]))
    feed = Feed(batches)
    assert torch.equal(torch.cat(list(feed.batches())), INPUTS)
    assert torch.equal(torch.cat([labels for _, labels in feed.labelled_batches()]), LABELS)


@pytest.mark.parametrize(
    ("preprocess", "sentence"),
    [
        (lambda inputs: None, "preprocess.*got None"),
        (lambda inputs: inputs.numpy(), r"preprocess.*ndarray"),
        (lambda inputs: inputs[0], r"preprocess.*tensor \[3\]"),
        (lambda inputs: inputs.sum(), r"preprocess.*tensor \[\]"),
    ],
)
def test_preprocessing_gives_as_many_samples_as_it_got(preprocess: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Feed(INPUTS, preprocess=preprocess).first(5)


def test_what_is_no_function_does_not_preprocess() -> None:
    with pytest.raises(DataError, match=r"preprocess.*got 3"):
        Feed(INPUTS, preprocess=3)  # type: ignore[arg-type]


def test_arrays_of_the_other_byte_order_are_read() -> None:
    stored = INPUTS.numpy().astype(">f4")
    for source in (stored, [stored], (stored, LABELS.numpy().astype(">i4"))):
        assert torch.equal(torch.cat(list(Feed(source).batches())), INPUTS)


def test_fractions_of_numpy_become_those_of_networks_also_by_batches() -> None:
    stored = INPUTS.numpy().astype(np.float64)
    for source in (stored, [stored[:40], stored[40:]], [(stored, LABELS)]):
        assert [batch.dtype for batch in Feed(source).batches()] == [torch.float32]


@pytest.mark.slow
def test_a_file_mapped_for_reading_is_fed_without_a_warning(tmp_path) -> None:  # type: ignore[no-untyped-def]
    np.save(tmp_path / "inputs.npy", INPUTS.numpy())
    script = """
import sys, warnings, numpy, torch
from shiftmend.inputs.feed import Feed
warnings.simplefilter("error")
feed = Feed(numpy.load(sys.argv[1], mmap_mode="r"))
for batch in feed.batches():
    batch.zero_()
print(float(feed.first(1).abs().sum()) > 0)
"""  # torch warns once in the life of a process
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path / "inputs.npy")], capture_output=True, text=True)
    assert ran.stdout == "True\n", ran.stderr


class Reads(Pairs):
    """Knows how often a sample was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return super().__getitem__(index)


def test_the_check_for_numbers_looks_at_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    isfinite = torch.isfinite

    def look(values: Tensor) -> Tensor:
        seen.append(values.numel())
        return isfinite(values)

    monkeypatch.setitem(devices.VALUES_PER_PART, "cpu", 30)
    monkeypatch.setattr(torch, "isfinite", look)
    Feed(INPUTS)
    assert max(seen) == 30
    assert sum(seen) == INPUTS.numel()
    bad = INPUTS.clone()
    bad[[68, 69], 1] = float("nan")
    with pytest.raises(DataError, match="first in sample 68 "):
        Feed(bad)


def test_what_is_known_to_be_too_large_is_not_read_to_find_out() -> None:
    data = Reads()
    feed = Feed(DataLoader(data, batch_size=10), limit=69 * 12)
    assert (feed.resident, data.asked) == (False, 10)


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"batch_size": 16}, 70),
        ({"batch_size": 16, "drop_last": True}, 64),
        ({"batch_size": 16, "shuffle": True}, 70),
        ({"batch_size": 16, "sampler": SubsetRandomSampler(range(20))}, 20),
        ({"batch_sampler": [[0, 1, 2], [5]]}, 4),
        ({"batch_size": 16, "collate_fn": lambda rows: torch.stack([row for row, _ in rows[1:]])}, 65),
        ({"batch_size": None}, 70),
    ],
    ids=["plain", "last dropped", "shuffled", "subset", "own batches", "own collation", "no batches"],
)
def test_a_streamed_loader_is_read_to_be_counted_only_where_it_does_not_know(
    options: dict[str, Any], samples: int
) -> None:
    data = Reads()
    if options == {"batch_size": None}:
        data.inputs = INPUTS.unsqueeze(1)
    feed = Feed(DataLoader(data, **options), resident=False)
    known = "batch_sampler" not in options and "collate_fn" not in options and options["batch_size"] is not None
    assert feed.samples == samples
    assert (data.asked == 0) == known


def test_a_whole_pass_has_counted_the_samples() -> None:
    data = Endless()
    feed = Feed(data, batch_size=16, resident=False)
    list(feed.batches())
    data.__class__ = Pairs  # type: ignore[assignment]  # cannot be read any more
    assert feed.samples == 70


def test_a_loader_is_started_once_for_its_first_samples() -> None:
    data = Reads()
    feed = Feed(DataLoader(data, batch_size=10), resident=False)
    for count in (2, 64, 1):
        first = feed.first(count)
        assert torch.equal(first, INPUTS[: min(count, 10)])
        first.zero_()
    assert data.asked == 10
    assert torch.equal(Feed(DataLoader(data, batch_size=70), resident=False).first(66), INPUTS[:66])


@pytest.mark.parametrize("block", [1, 300, 1 << 26])
def test_batches_are_given_up_as_they_are_put_together(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "BLOCK_BYTES", block)
    gathered = BatchCollector()
    for part in (INPUTS[:16].double(), *INPUTS[16:].split(10)):
        gathered.add(part, None)
    del part
    held = [weakref.ref(part) for part in gathered.inputs]
    assert len(held) == {1: 7, 300: 5, 1 << 26: 7}[block]
    left: list[int] = []

    class Watched(Tensor):
        def __setitem__(self, where: Any, value: Any) -> None:
            super().__setitem__(where, value)
            left.append(sum(ref() is not None for ref in held[1:]))

    gathered.inputs[0] = gathered.inputs[0].as_subclass(Watched)
    whole, _ = gathered.concatenate()
    assert left == [*range(len(held) - 1, 0, -1), 0]
    assert torch.equal(whole.as_subclass(Tensor), INPUTS.double())


@pytest.mark.parametrize("block", [1, 1 << 26])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_batches_that_are_put_together_keep_their_memory_format(
    form: torch.memory_format, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "BLOCK_BYTES", block)
    images = torch.rand(10, 3, 4, 5).to(memory_format=form)
    feed = Feed([*images[:9].split(4), images[9:].double()])
    for found in (feed.inputs, *feed.batches(), *feed.epoch(0, 0)):
        inputs = found[0] if isinstance(found, tuple) else found
        assert inputs is not None
        assert inputs.is_contiguous(memory_format=form)
    assert feed.inputs is not None
    assert torch.equal(feed.inputs, images.double())


def test_batches_that_lie_in_memory_otherwise_are_put_together_as_they_are() -> None:
    rows = torch.rand(6, 4, 5)
    for batch in (rows.transpose(1, 2), rows[:, ::2], rows[:, :1].expand(6, 3, 5), rows.permute(1, 2, 0), rows[:, :0]):
        assert torch.equal(Feed([batch, batch]).inputs, torch.cat([batch, batch]))


@pytest.mark.parametrize("steps", [1, 3, 7, 20])
def test_rounds_of_so_many_steps_start_with_the_order_of_the_epoch_and_go_on_with_others(steps: int) -> None:
    feed = Feed(torch.arange(70).float().unsqueeze(1), batch_size=10)
    batches = [inputs.flatten().tolist() for inputs, _ in feed.epoch(3, 2, steps)]
    assert [len(batch) for batch in batches] == [10] * steps
    whole = [inputs.flatten().tolist() for inputs, _ in feed.epoch(3, 2)]
    assert batches[:7] == whole[:steps]
    for start in range(0, steps - 6, 7):  # Every run through the data has each sample once, in an order of its own.
        assert sorted(itertools.chain(*batches[start : start + 7])) == list(range(70))
    assert steps <= 7 or batches[7:14] != batches[:7]
    assert batches == [inputs.flatten().tolist() for inputs, _ in feed.epoch(3, 2, steps)]


@pytest.mark.parametrize("steps", [2, 7, 15])
def test_rounds_of_a_stream_have_so_many_steps_too(steps: int) -> None:
    data = TensorDataset(torch.arange(70).float().unsqueeze(1))
    feed = Feed(DataLoader(data, batch_size=10, shuffle=True), resident=False)
    assert feed.steps_per_epoch == 7
    batches = [inputs.flatten().tolist() for inputs, _ in feed.epoch(3, 2, steps)]
    assert len(batches) == steps
    assert batches == [inputs.flatten().tolist() for inputs, _ in feed.epoch(3, 2, steps)]
    assert steps < 14 or sorted(itertools.chain(*batches[7:14])) == list(range(70))


def test_the_epochs_of_a_stream_in_a_fixed_order_or_of_unknown_length_are_not_cut() -> None:
    data = TensorDataset(torch.arange(70).float().unsqueeze(1))
    assert Feed(DataLoader(data, batch_size=10), resident=False).steps_per_epoch is None
    assert Feed(torch.zeros(75, 1), batch_size=10).steps_per_epoch == 7
    assert Feed(torch.zeros(5, 1), batch_size=10).steps_per_epoch == 1


def test_an_error_of_the_users_own_says_where_it_was_raised() -> None:
    class Broken(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from torch.zeros(5, 3)
            raise KeyError("sample 5")

    with pytest.raises(KeyError) as caught:
        Feed(Broken(), batch_size=2, what="target data")
    assert any("target data" in note and "batch 2" in note for note in caught.value.__notes__)


def test_data_without_end_gets_a_word(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            while True:
                yield torch.zeros(3)

    monkeypatch.setattr("shiftmend.inputs.feed.SECONDS_TO_WARN", 0.0)
    feed = Feed(Endless(), batch_size=2, limit=100, what="target data")
    batches = feed.batches()
    for _ in range(5):
        next(batches)
    assert "no known length" in caplog.text


def test_numbers_that_would_become_others_are_refused() -> None:
    labels = np.array([0, 2**63], np.uint64)
    with pytest.raises(DataError, match="below"):
        Feed((np.zeros((2, 3), np.float32), labels))
    feed = Feed((np.zeros((2, 3), np.float32), np.array([0, 1], np.uint64)))
    assert feed.labels is not None
    assert feed.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="float32"):
        Feed(np.array([[1.0, 1e39]]))
