"""What a run keeps of a GPU's memory; how much a cell needed is tested with cells."""

from __future__ import annotations

import gc

import pytest
import torch

from shiftmend.research.bench import cell as memory

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("unused", "given_back"), [(0, 0), (memory.UNUSED, 0), (memory.UNUSED + 1, 1)])
def test_only_much_is_given_back(monkeypatch: pytest.MonkeyPatch, unused: int, given_back: int) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 + unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    memory.give_back(GPU)
    assert len(calls) == given_back
    memory.give_back(torch.device("cpu"))
    assert len(calls) == given_back


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_graphs_that_are_gone_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "UNUSED", 1 << 20)

    def captured() -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            torch.ones(64 << 20, device=GPU).mul(2)
            graph.capture_end()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(GPU)
    for _ in range(3):
        captured()
    gc.collect()
    assert torch.cuda.memory_reserved(GPU) > before + (64 << 20), "or there is no reason to give anything back"
    memory.give_back(GPU)
    assert torch.cuda.memory_reserved(GPU) <= before + (4 << 20)
