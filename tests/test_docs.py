"""The documentation's examples run as written, and its links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shiftmend
from worlds import sensors

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_readme_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = sensors()
    names = {
        "model": world.model,
        "source_loader": DataLoader(TensorDataset(world.source), batch_size=200),
        "target_loader": DataLoader(TensorDataset(world.target, world.labels), batch_size=200),
    }
    home, away = code_blocks(ROOT / "README.md")
    exec(home, dict(names))
    exec(away, after := dict(names))
    assert "before  not restored" in capsys.readouterr().out
    assert (tmp_path / "mended/manifest.json").exists()
    assert world.accuracy(after["mended"]) > 0.95 > world.accuracy(world.model)


def test_the_profile_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    merging, by_hand = code_blocks(ROOT / "docs/profiles.md")[-2:]
    world = sensors()
    exec(
        merging, {"shiftmend": shiftmend, "model": world.model, "hospital_a": world.source, "hospital_b": world.target}
    )
    loader = [torch.randn(64, 8) for _ in range(3)]
    names = {"nn": nn, "torch": torch, "shiftmend": shiftmend, "loader": loader, "x": loader[0] + 1}
    exec(by_hand, names | {"backbone": nn.Linear(8, 512), "head": nn.Linear(512, 2)})


def test_the_methods_page_runs_as_written() -> None:
    calls, selection, online, _, history = code_blocks(ROOT / "docs/methods.md")  # torchrun's is in test_torchrun.py
    world = sensors()
    made = world.profile()
    assert calls.count("shiftmend.adapt(") == 4
    quick = re.sub(r"epochs=\d+", "epochs=1", re.sub(r"epochs_per_block=\d+", "epochs_per_block=1", calls))
    quick = quick.replace('method="fr", align', 'method="fr", epochs=1, align')
    quick = quick.replace('method="fr", divergence', 'method="fr", epochs=1, divergence')
    names = {"shiftmend": shiftmend, "model": world.model, "target": world.target, "profile": made}
    exec(quick, names)
    exec(selection, names)
    exec(online, names | {"batches": world.target.split(100)})
    exec(history, {"result": shiftmend.adapt(world.model, world.target, made, "fr", epochs=1, progress=False)})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("name", ["histograms", "stats_layer", "metrics"])
def test_docstring_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"shiftmend.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_methods_table_names_every_method() -> None:
    page = (ROOT / "docs/methods.md").read_text()
    for name in shiftmend.methods.METHODS:
        assert f"| `{name}` |" in page
