"""Sizes of profiles, models and data: do they hold for real files, and do they not depend on values?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import shiftmend
from shiftmend.research.bench.profile_sizes import Sizes, make_table, measure, write_page
from shiftmend.research.bench.recipes import build_untrained
from shiftmend.research.bench.rendering import render
from shiftmend.research.bench.resources import get_source_model
from shiftmend.research.bench.suite import find

HEADER = 64
"""Bytes by which headers may differ, where numbers are written out."""


@pytest.mark.slow
def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    found = measure("digits")
    model = build_untrained(find("digits").sources["plain"], seed=5).eval()
    inputs = torch.randn(300, 3, 28, 28, generator=torch.Generator().manual_seed(3)) * 40
    for kind, size in (("marginal", found.profile), ("full", found.full)):
        shiftmend.profile(model, inputs, gaussian=kind, device="cpu").save(tmp_path / kind)  # type: ignore[arg-type]
        assert abs((tmp_path / kind).stat().st_size - size) <= HEADER
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model")
    assert (tmp_path / "model").stat().st_size == found.model
    assert found.counts == 4 * 10 * (16 + 10)  # float32, bins, features and logits
    assert (found.files, found.pixels, found.trained) == (None, 900 * 28 * 28, False)


@pytest.mark.slow
def test_the_file_of_a_trained_model_is_taken_where_there_is_one(tmp_path: Path) -> None:
    benchmark = find("digits")
    recipe = benchmark.sources["plain"]
    images = benchmark.load_source("plain", None).train
    assert measure("digits", tmp_path).trained is False
    quick = type(recipe)(**{**recipe.__dict__, "epochs": 1})
    _, other = get_source_model(tmp_path, quick, 1, images, benchmark.preprocess, device="cpu")
    assert measure("digits", tmp_path).trained is False  # of another recipe
    content = safetensors.torch.load_file(other)
    metadata = {"recipe": json.dumps(recipe.facts())}
    safetensors.torch.save_file(content, other.with_name("a.safetensors"), metadata)
    (tmp_path / "sources" / "0.safetensors").write_bytes(b"damaged")
    found = measure("digits", tmp_path)
    assert found.trained is True
    assert found.model == other.with_name("a.safetensors").stat().st_size


@pytest.mark.slow
def test_files_of_the_source_are_counted(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte.gz").write_bytes(b"x" * 700)
    (raw / "train-labels-idx1-ubyte.gz").write_bytes(b"x" * 50)
    (raw / "t10k-images-idx3-ubyte.gz").write_bytes(b"x" * 9000)
    assert measure("mnist-c", root=raw.parents[1]).files == 750
    (raw / "train-images-idx3-ubyte").write_bytes(b"x" * 4000)  # unpacked beside them, as torchvision leaves them
    (raw / "train-labels-idx1-ubyte").write_bytes(b"x" * 60)
    assert measure("mnist-c", root=raw.parents[1]).files == 750
    for file in raw.glob("*.gz"):
        file.unlink()
    assert measure("mnist-c", root=raw.parents[1]).files == 4060


def test_the_table_stands_beside_the_paper() -> None:
    sizes = [
        Sizes("mnist-c", 5520, 16912, 49432, 4_789_504, 11_009_000, 42_336_000, trained=False, remark="fewer of them"),
        Sizes("visda-c", 82_400, 139_920, 8_524_464, 170_577_864, None, None, trained=True),
    ]
    rows = [line for line in render(make_table(sizes), "markdown").splitlines() if line.startswith("| mnist-c")]
    assert rows == ["| mnist-c | 0.017 | 0.049 | 0.006 | 4.790 | 11.009 | 42.336 | 0.004 | 0.9 | 33 |"]
    text = write_page(sizes)
    assert "that of visda-c, has 140 kB, 0.082 % of its model" in text
    assert "of trained models for visda-c, else of untrained ones" in text
    assert "\n- mnist-c: fewer of them\n" in text
    assert "| visda-c | 0.140 | 8.524 | 0.082 | 170.578 | – | – | 0.5 | 173 | 7885 |" in text


@pytest.mark.slow
def test_imagenet_has_a_network_and_no_data() -> None:
    found = measure("imagenet")
    # Features and logits of a ResNet-101 with 10 bins of 4 bytes each.
    assert found.counts == (2048 + 1000) * 10 * 4
    assert (found.files, found.pixels, found.trained) == (None, None, False)
    (row,) = [line for line in render(make_table([found]), "markdown").splitlines() if line.startswith("| imagenet")]
    assert row.endswith("| – | – | 0.5 | 173 | 138000 |")


@pytest.mark.slow
def test_the_networks_of_the_paper_are_as_large_as_it_says() -> None:
    """ResNet-18 has 49 and ResNet-101 173 megabytes there; bin counts of 8 bins in place of our 10."""
    found = measure("cifar-100-c")
    assert found.model / 1e6 == pytest.approx(49, rel=0.1)
    assert 0.8 * found.counts / 1e6 == pytest.approx(0.02, abs=0.005)
