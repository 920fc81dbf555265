"""Several cells at once on one GPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from shiftmend.bench.runner import run
from shiftmend.bench.store import Store
from shiftmend.turns import has_turns, others_may_go, taking_turns

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TINY = f"{Path(__file__).parent / 'tiny.py'}:TINY"


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


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("compile", [False, True])
def test_lanes_give_what_one_cell_after_the_other_gives(tmp_path: Path, compile: bool) -> None:
    found = {}
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        run(
            TINY, folder, root=tmp_path, device="cuda", workers=workers, compile=compile and workers > 1, progress=False
        )
        with Store(folder / "results.sqlite", read_only=True) as store:
            found[workers] = {result.cell: result for result in store.results()}
    assert found[1].keys() == found[3].keys()
    for cell, result in found[1].items():
        other = found[3][cell]
        assert result.failed == other.failed
        if result.last is not None and other.last is not None:
            assert other.manifest["lanes"] == 3
            assert other.manifest.get("compile", False) == compile
            assert "warnings" not in other.manifest or not any("captured" in w for w in other.manifest["warnings"])
            assert result.last.accuracy == pytest.approx(other.last.accuracy, abs=0.06)
