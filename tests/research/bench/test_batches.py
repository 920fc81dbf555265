"""The batches of a training: whole, drawn from the generator given, and labels with their own images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from data_layouts import write_png

from shiftmend.inputs.images import Split
from shiftmend.research.bench.training import batches_of
from shiftmend.research.datasets.streamed import ImageFiles

COUNT, SIZE = 11, 4
LABELS = torch.arange(COUNT) % 5
HERE = torch.device("cpu")


def test_images_in_memory_come_in_the_generators_order() -> None:
    images = torch.arange(COUNT, dtype=torch.uint8).view(COUNT, 1, 1, 1)
    batches = batches_of(Split(images, LABELS, "few"), SIZE, HERE, torch.Generator().manual_seed(3), None)
    draws = torch.Generator().manual_seed(3)
    for _ in range(2):
        order = torch.randperm(COUNT, generator=draws)
        torch.manual_seed(0)  # which must not matter
        given = list(batches())
        assert [batch.flatten().tolist() for batch, _ in given] == [order[:4].tolist(), order[4:8].tolist()]
        assert [labels.tolist() for _, labels in given] == [LABELS[order[:4]].tolist(), LABELS[order[4:8]].tolist()]


def test_files_come_in_whole_batches_and_in_another_order_each_time(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(COUNT)]
    for number, name in enumerate(names):
        write_png(tmp_path / name, np.full((2, 3, 3), number, np.uint8))
    files = ImageFiles(tmp_path, names, LABELS, "few", tuple("abcde"))
    orders = []
    for seed in (3, 3, 4):
        batches = batches_of(files, SIZE, HERE, torch.Generator().manual_seed(seed), 0)
        for _ in range(2):
            given = list(batches())
            assert [len(batch) for batch, _ in given] == [SIZE, SIZE]
            seen = torch.cat([batch[:, 0, 0, 0] for batch, _ in given]).long()
            assert len(seen.unique()) == 2 * SIZE
            assert torch.equal(torch.cat([labels for _, labels in given]), LABELS[seen])
            orders.append(seen.tolist())
    assert orders[:2] == orders[2:4]
    assert len({tuple(order) for order in orders}) == 4
