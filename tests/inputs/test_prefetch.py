from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from copiers import AsLateAsPossible, AtOnce, Careless, Past
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from worlds import an_epoch, sensors

import shiftmend
from shiftmend.inputs.feed import Feed
from shiftmend.inputs.prefetch import DEPTH, THREAD_NAME, Batch, Rows, make_copier, prefetch
from shiftmend.methods.fr import FR
from shiftmend.utils.tensor_tree import TensorTree

HERE = Path(__file__).parents[1] / "helpers"
WHOLE = torch.arange(90 * 4, dtype=torch.float32).reshape(90, 4)
both = pytest.mark.parametrize("background", [True, False], ids=["background", "in turn"])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> Iterator[None]:
    assert not threads()
    yield
    assert not threads()


def by_index(size: int = 8, whole: Tensor = WHOLE) -> list[Batch]:
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))
    return [(Rows(whole, index), index) for index in order.split(size)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.001)


@pytest.mark.slow
@given(st.integers(1, 90), st.integers(1, 5), st.booleans())
def test_every_batch_arrives_in_order_whole_and_as_it_is(size: int, depth: int, background: bool) -> None:
    """Everything is held to the end, and the device copies as late as it may: no memory is used again too early."""
    device = AsLateAsPossible()
    batches = by_index(size)
    arrived = list(prefetch(iter(batches), device, background, depth))
    device.finish()
    assert len(arrived) == len(batches)
    for (inputs, index), (_, expected) in zip(arrived, batches, strict=True):
        assert torch.equal(index, expected)
        assert torch.equal(inputs, WHOLE[expected])
    assert device.allocations <= 2 * depth  # one for the inputs and one for the index of each


@both
def test_without_waiting_for_copies_memory_would_be_overwritten(background: bool) -> None:
    """The test above can fail."""
    device = Careless()
    arrived = list(prefetch(by_index(), device, background))
    device.finish()
    wrong = [not torch.equal(inputs, WHOLE[index]) for (inputs, _), (_, index) in zip(arrived, by_index(), strict=True)]
    assert any(wrong)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "images": lambda: torch.rand(20, 3, 5, 4),
    "channels last": lambda: torch.rand(20, 3, 5, 4).to(memory_format=torch.channels_last),
    "one channel last": lambda: torch.rand(20, 1, 5, 4).to(memory_format=torch.channels_last),
    "samples last": lambda: torch.rand(3, 5, 4, 20).permute(3, 0, 1, 2),
    "columns": lambda: torch.rand(6, 20).t(),
    "part of each row": lambda: torch.rand(20, 12)[:, ::2],
    "repeated": lambda: torch.rand(20, 1).expand(20, 6),
    "numbers": lambda: torch.rand(20),
    "nothing": lambda: torch.rand(20, 0),
    "bytes": lambda: torch.randint(0, 256, (20, 3, 4), dtype=torch.uint8),
    "booleans": lambda: torch.rand(20, 3) > 0.5,
    "half": lambda: torch.rand(20, 3).half(),
    "double": lambda: torch.rand(20, 3).double(),
    "complex": lambda: torch.rand(20, 3, dtype=torch.complex64),
    "16 bits": lambda: torch.randint(0, 60_000, (20, 3)).to(torch.uint16),
}


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_and_type_are_those_of_a_plain_copy(layout: str, background: bool) -> None:
    """A network may round differently for another layout."""
    whole = LAYOUTS[layout]()
    parts: list[Tensor | slice] = [*torch.randperm(20).split(6), torch.tensor([3]), slice(0, 7), slice(7, 8)]
    rows = [Rows(whole, part) for part in parts]
    expected = [row.read() for row in rows] + [whole[2:9].clone(), whole[5:6].clone()]
    batches: list[Batch] = [(row, None) for row in rows] + [(whole[2:9], None), (whole[5:6], None)]
    for (inputs, beside), plain in zip(prefetch(batches, AtOnce(), background), expected, strict=True):
        assert beside is None
        assert torch.equal(inputs, plain)
        assert (inputs.dtype, inputs.stride()) == (plain.dtype, plain.stride())
        assert not inputs.numel() or inputs.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_the_background_is_ahead_of_the_consumer() -> None:
    device = AsLateAsPossible()
    arriving = prefetch(by_index(), device, background=True, depth=3)
    next(arriving)
    until(lambda: device.sent == 3)  # the one in use, and two ahead that nobody has asked for
    assert device.received == 1
    time.sleep(0.02)
    assert device.sent == 3
    next(arriving)
    until(lambda: device.sent == 4)
    assert all(name.startswith(THREAD_NAME) for name in device.threads)
    arriving.close()


def test_in_turn_nothing_is_read_before_it_is_asked_for() -> None:
    device = AsLateAsPossible()
    read: list[int] = []

    def batches() -> Iterator[Batch]:
        for number, batch in enumerate(by_index()):
            read.append(number)
            yield batch

    for number, _ in enumerate(prefetch(batches(), device, background=False)):
        assert read == list(range(number + 1))
        assert device.sent == number + 1
        assert not threads()
    assert device.threads == {threading.current_thread().name}


@both
def test_the_consumer_thread_runs_through_the_batches(background: bool) -> None:
    """They may draw from the global generator, which is not to be raced with."""
    readers = set()

    def batches() -> Iterator[Batch]:
        for batch in by_index():
            readers.add(threading.get_ident())
            yield batch

    list(prefetch(batches(), AtOnce(), background))
    assert readers == {threading.get_ident()}


@both
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_device_never_holds_more_than_the_depth(depth: int, background: bool) -> None:
    """A host that launches faster than the device computes must not fill it with data that did not fit."""
    device = AsLateAsPossible()
    for _ in prefetch(by_index(4), device, background, depth):
        pass
    assert device.sent == 23
    assert device.most == depth


@both
@pytest.mark.parametrize("bad", [0, 1, 5, 11])
def test_an_error_is_raised_where_its_batch_would_have_been(bad: int, background: bool) -> None:
    batches = by_index()
    batches[bad] = (Rows(WHOLE, torch.tensor([3, 90])), None)
    arrived = []
    with pytest.raises(IndexError, match="out of range"):  # noqa: PT012
        for inputs, _ in prefetch(batches, AtOnce(), background):
            arrived.append(inputs)
    assert len(arrived) == bad
    assert not threads()


@both
def test_an_error_of_the_device_reaches_the_consumer(background: bool) -> None:
    class Full(AtOnce):
        def allocate(self, size: int) -> Tensor:
            raise MemoryError("no pinned memory is left")

    with pytest.raises(MemoryError, match="pinned memory"):
        next(prefetch(by_index(), Full(), background))


@both
def test_an_error_of_the_source_reaches_the_consumer(background: bool) -> None:
    def batches() -> Iterator[Batch]:
        yield from by_index()[:4]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(prefetch(batches(), AtOnce(), background))


class Slow(AtOnce):
    """Has always something under way."""

    def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Past]:
        time.sleep(0.02)
        return super().send(staged)


@pytest.mark.slow
@pytest.mark.parametrize("copier", [AtOnce, AsLateAsPossible, Slow])
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_an_iterator_given_up_leaves_nothing_behind(copier: Callable[[], AtOnce], taken: int) -> None:
    def started() -> Iterator[object]:
        arriving = prefetch(by_index(2), copier(), background=True)
        for _ in range(taken):
            next(arriving)
        return arriving

    started().close()  # type: ignore[attr-defined]
    assert not threads()
    started()  # dropped
    assert not threads()
    with pytest.raises(KeyboardInterrupt):
        started().throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert not threads()
    for number, _ in enumerate(prefetch(by_index(2), copier(), background=True)):
        if number == taken:
            break
    assert not threads()


@pytest.mark.slow
def test_an_iterator_in_a_cycle_is_collected_with_its_thread() -> None:
    cycle: list[object] = [prefetch(by_index(), AtOnce(), background=True)]
    next(cycle[0])  # type: ignore[call-overload]
    cycle.append(cycle)
    assert threads()
    del cycle
    gc.collect()
    assert not threads()


def test_collected_by_its_own_thread_it_does_not_wait_for_itself() -> None:
    holder: list[object] = []
    received = threading.Event()

    class Collecting(AtOnce):
        sent = 0

        def send(self, staged: list[Tensor]) -> tuple[list[Tensor], Past]:
            self.sent += 1
            if self.sent == 2:
                received.wait(20)
                holder.clear()  # the last reference to the iterator
            return super().send(staged)

    holder.append(prefetch(by_index(), Collecting(), background=True))
    next(holder[0])  # type: ignore[call-overload]
    received.set()
    until(lambda: not threads())
    assert not holder


@pytest.mark.slow
def test_a_process_ends_with_an_iterator_half_way() -> None:
    program = (
        "import torch\n"
        "from copiers import AtOnce\n"
        "from shiftmend.inputs.prefetch import Rows, prefetch\n"
        "whole = torch.arange(100)\n"
        "arriving = prefetch(((Rows(whole, i), i) for i in whole.split(3)), AtOnce(), background=True)\n"
        "print(next(arriving)[0].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=HERE)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[0, 1, 2]", "")


@both
def test_what_is_no_tensor_of_the_host_is_left_alone(background: bool) -> None:
    elsewhere, sparse = torch.empty(4, device="meta"), torch.eye(4).to_sparse()
    arrived = list(prefetch([(elsewhere, torch.ones(2)), (sparse, None)], AtOnce(), background))
    assert arrived[0][0] is elsewhere
    assert torch.equal(arrived[0][1], torch.ones(2))
    assert arrived[1][0] is sparse


def test_neither_gradients_nor_inference_mode_get_into_a_batch() -> None:
    batches: list[Batch] = [(WHOLE[:4].clone().requires_grad_(), None)] * 6
    arriving = prefetch(batches, AtOnce(), background=False, depth=2)
    with torch.inference_mode():
        arrived = [next(arriving) for _ in range(3)]
    arrived += list(arriving)  # in memory that was first used in inference mode
    assert len(arrived) == 6
    for inputs, _ in arrived:
        assert not inputs.requires_grad
        assert not inputs.is_inference()
        assert torch.equal(inputs, WHOLE[:4])


def test_on_a_cpu_nothing_is_prefetched() -> None:
    assert make_copier(torch.device("cpu")) is None


def on_cuda(test: Callable[..., None]) -> Callable[..., None]:
    needed = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needed(test))  # type: ignore[no-any-return]


CUDA = torch.device("cuda")


class Plain(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.images[number], number


def images(samples: int = 330, side: int = 32) -> Tensor:
    return torch.randint(0, 256, (samples, 3, side, side), dtype=torch.uint8)


IMAGES: dict[str, Callable[[], Tensor]] = {
    "contiguous": images,
    "channels last": lambda: images().to(memory_format=torch.channels_last),
    "float": lambda: images().float(),
}


@on_cuda
@pytest.mark.parametrize("kind", IMAGES)
def test_resident_and_prefetched_epochs_are_equal_bit_by_bit(kind: str) -> None:
    """While the device is kept busy, so that copies run beside the work, and batches are dropped before it is done."""
    data = IMAGES[kind]()
    labels = torch.arange(len(data))
    resident, sent = (
        Feed((data, labels), batch_size=16, device=CUDA, preprocess=lambda x: x / 255, limit=limit)
        for limit in (None, 0)
    )
    assert resident.inputs is not None
    assert sent.inputs is not None
    assert resident.inputs.is_cuda
    assert not sent.inputs.is_cuda
    scale = torch.rand(data[0].shape, device=CUDA)

    def passed(feed: Feed) -> list[Tensor]:
        seen = []
        for number in (1, 2):
            for batch, index in feed.epoch(3, number):
                assert index is not None
                torch.cuda._sleep(2_000_000)  # about a millisecond
                seen += [(batch * scale).sum((1, 2, 3)), index, torch.tensor(batch.stride())]
        for batch in [*feed.batches(), *feed.batches(100), *feed.subset(70, 1), *feed.subset(70, 1, 64)]:
            seen.append(batch)
        for batch, its in feed.labelled_batches():
            torch.cuda._sleep(2_000_000)
            seen += [batch.clone(), its.clone()]
        return [value.cpu() for value in seen]

    expected, found = passed(resident), passed(sent)
    assert len(expected) == len(found) > 80
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), number


@on_cuda
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_streamed_epoch_on_a_gpu_is_that_of_a_cpu(pinned: bool, workers: int) -> None:
    data = images()
    loader = DataLoader(Plain(data), 16, shuffle=True, pin_memory=pinned, num_workers=workers)
    expected, found = (Feed(loader, device=device, resident=False) for device in (torch.device("cpu"), CUDA))
    sums: tuple[list[Tensor], list[Tensor]] = ([], [])
    for feed, seen in zip((expected, found), sums, strict=True):
        for number in (1, 2):
            for batch in an_epoch(feed, 0, number):
                if batch.is_cuda:
                    torch.cuda._sleep(2_000_000)
                seen.append(batch.long().sum((1, 2, 3)))
        for batch, labels in feed.labelled_batches():
            seen += [batch, labels]
    for one, other in zip(*sums, strict=True):
        assert other.is_cuda
        assert torch.equal(one, other.cpu())


@on_cuda
def test_pinned_memory_is_that_of_the_host_whatever_the_default_device_of_torch() -> None:
    torch.set_default_device("cuda")
    try:
        feed = Feed(torch.arange(20.0, device="cpu"), device=CUDA, limit=0, batch_size=8)
        assert torch.cat(list(feed.batches())).tolist() == list(range(20))
    finally:
        torch.set_default_device(None)


@on_cuda
def test_adapting_on_prefetched_data_is_adapting_on_resident_data() -> None:
    world = sensors()
    profile = world.profile()
    expected, found = (
        shiftmend.adapt(
            world.model, world.target, profile, "fr", epochs=3, learning_rate=0.1, batch_size=100, device="cuda",
            capture=False, resident=resident, progress=False,
        )
        for resident in (True, False)
    )  # fmt: skip
    assert [row.losses for row in found.history] == [row.losses for row in expected.history]
    for name, value in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name


@on_cuda
@pytest.mark.parametrize("source", ["tensor", "loader"])
def test_a_prefetched_epoch_never_makes_the_device_wait_for_the_host(source: str) -> None:
    world = sensors()
    data = world.target if source == "tensor" else DataLoader(Plain(world.target), 100, shuffle=True)
    ran: list[int] = []

    class Strict(FR):
        def objective(self, profile, device):  # type: ignore[no-untyped-def]
            losses = super().objective(profile, device)

            def watched(activations):  # type: ignore[no-untyped-def]
                ran.append(1)
                torch.cuda.set_sync_debug_mode("error")  # from the first batch of the epoch on
                return losses(activations)

            return watched

    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            shiftmend.adapt(
                world.model, data, world.profile(), Strict(epochs=1, learning_rate=0.1), device="cuda",
                batch_size=100, resident=False, progress=False,
            )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(ran) == 6  # the first wait is the one reading of the losses, when all batches have run


@on_cuda
@pytest.mark.parametrize("source", ["tensor", "loader"])
def test_a_device_that_is_behind_is_not_filled(source: str) -> None:
    """The host launches all steps at once; the data of the whole epoch must not pile up on the device."""
    data = images(64 * 40, 64)
    feed = Feed(data if source == "tensor" else DataLoader(Plain(data), 64), device=CUDA, batch_size=64, resident=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = torch.zeros((), device=CUDA)
    for batch in an_epoch(feed, 0, 1):
        torch.cuda._sleep(10_000_000)
        total += batch[:, 0, 0, 0].sum()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < (DEPTH + 3) * data[:64].numel()
    assert int(total) == int(data[:, 0, 0, 0].sum())


@on_cuda
def test_copies_overlap_with_the_work() -> None:
    """Timed by the device itself: the copy of a batch begins before the work on the one before has ended."""
    data = images(64 * 6, 224)
    feed = Feed(data, device=CUDA, batch_size=64, resident=False)
    list(an_epoch(feed, 0, 0))  # allocates
    torch.cuda.synchronize()
    ends = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in an_epoch(feed, 0, 1):
            torch.cuda._sleep(40_000_000)  # some 20 ms
            ends.append(1)
        torch.cuda.synchronize()
    events = [(event.name, event.time_range) for event in recorded.events()]
    copies = sorted(span.start for name, span in events if "HtoD" in name and span.elapsed_us() > 100)
    work = sorted((span.start, span.end) for name, span in events if "spin" in name)
    assert len(ends) == len(work) == 6
    assert len(copies) >= 6
    assert sum(any(start < copy < end for start, end in work) for copy in copies) >= 3


@on_cuda
def test_a_pass_given_up_on_a_gpu_leaves_nothing_behind() -> None:
    model = nn.Conv2d(3, 8, 3).to(CUDA)
    feed = Feed(images(), device=CUDA, batch_size=16, preprocess=lambda x: x / 255, resident=False)
    for number in range(20):
        for batch in an_epoch(feed, 0, number):
            model(batch)
            break
        assert not threads()
    assert len(list(an_epoch(feed, 0, 0))) == 330 // 16


@both
def test_several_inputs_arrive_together(background: bool) -> None:
    device = AsLateAsPossible()
    tree = TensorTree({"wide": WHOLE, "narrow": torch.arange(90)})
    parts = torch.randperm(90, generator=torch.Generator().manual_seed(1)).split(8)
    streamed: list[Batch] = [(tree[index], None) for index in parts]
    for batches in ([(Rows(tree, index), index) for index in parts], streamed):
        arrived = list(prefetch(batches, device, background))
        device.finish()
        for (inputs, _), index in zip(arrived, parts, strict=True):
            assert isinstance(inputs, TensorTree)
            assert torch.equal(inputs.value["wide"], WHOLE[index])  # type: ignore[call-overload]
            assert torch.equal(inputs.value["narrow"], index)  # type: ignore[call-overload]
