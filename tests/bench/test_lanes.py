"""Several cells at once on one GPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shiftmend.bench.cells import Cell, Result
from shiftmend.bench.runner import run
from shiftmend.bench.store import Store
from shiftmend.turns import has_turns, others_may_go, taking_turns

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TINY = Path(__file__).with_name("tiny.py")


def test_threads_run_one_at_a_time_but_where_they_wait() -> None:
    lock = threading.Lock()
    inside, most, waiting, most_waiting = [0], [0], [0], [0]
    counting = threading.Lock()

    def count(now: list[int], most_seen: list[int], by: int) -> None:
        with counting:
            now[0] += by
            most_seen[0] = max(most_seen[0], now[0])

    def lane() -> None:
        with taking_turns(lock):
            assert has_turns()
            for _ in range(5):
                count(inside, most, 1)
                time.sleep(0.001)
                count(inside, most, -1)
                with others_may_go():
                    count(waiting, most_waiting, 1)
                    time.sleep(0.02)
                    count(waiting, most_waiting, -1)
        assert not has_turns()

    threads = [threading.Thread(target=lane) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert most_waiting[0] > 1
    assert not lock.locked()


def test_without_lanes_nothing_is_given_up() -> None:
    assert not has_turns()
    with others_may_go():
        assert not has_turns()


def _found(benchmark: str, folder: Path, root: Path, **options: Any) -> dict[Cell, Result]:
    run(f"{TINY}:{benchmark}", folder, root=root, device="cuda", progress=False, **options)
    with Store(folder / "results.sqlite", read_only=True) as store:
        return {result.cell: result for result in store.results()}


@pytest.mark.gpu
@gpu
def test_lanes_give_what_one_cell_after_the_other_gives(tmp_path: Path) -> None:
    alone = _found("TINY", tmp_path / "alone", tmp_path, workers=1)
    together = _found("TINY", tmp_path / "together", tmp_path, workers=3)
    assert alone.keys() == together.keys()
    for cell, result in alone.items():
        other = together[cell]
        assert result.failed == other.failed
        if result.last is not None and other.last is not None:
            assert other.manifest["lanes"] == 3
            assert result.last.accuracy == pytest.approx(other.last.accuracy, abs=0.06)


@pytest.mark.gpu
@gpu
def test_compiled_lanes_give_what_others_give(tmp_path: Path) -> None:
    plain = _found("GENTLE", tmp_path / "plain", tmp_path, workers=1, shifts=["noisy"])
    compiled = _found("GENTLE", tmp_path / "compiled", tmp_path, workers=3, shifts=["noisy"], compile=True)
    assert plain.keys() == compiled.keys()
    assert not any(result.failed for result in (*plain.values(), *compiled.values()))
    for cell, result in plain.items():
        other = compiled[cell]
        assert other.manifest["compile"]
        assert not any("captured" in warning for warning in other.manifest.get("warnings", ()))
        assert result.last is not None
        assert other.last is not None
        assert result.last.accuracy == pytest.approx(other.last.accuracy, abs=0.06)
        assert result.signals["slices"] == pytest.approx(other.signals["slices"], rel=0.05)
