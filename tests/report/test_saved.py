"""Adaptations in folders: read back as they were, and refused in one sentence where they do not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from report_worlds import assert_refused, mended
from safetensors.torch import save_file
from torch import nn

import shiftmend
from shiftmend import report
from shiftmend.report.saved import load_adaptation


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    mended()[2].save(tmp_path / "mended")
    return tmp_path / "mended"


@pytest.fixture
def folder(sealed: Path) -> Path:
    """A result as earlier versions wrote it, without a seal that would find every change."""
    path = sealed / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in manifest.items() if name not in ("sha256", "files")}))
    return sealed


@pytest.mark.slow
def test_a_changed_digit_is_noticed_and_a_result_of_before_is_marked(sealed: Path) -> None:
    world = mended()[0]
    assert "unsealed" not in load_adaptation(sealed, world.model).manifest
    for name in ("manifest.json", "history.json", "model.safetensors"):
        content = (sealed / name).read_bytes()
        place = max(content.rfind(b"1"), content.rfind(b"2"), content.rfind(b"5"))
        (sealed / name).write_bytes(content[:place] + b"3" + content[place + 1 :])
        assert_refused("damaged", None, None, None, sealed)
        (sealed / name).write_bytes(content)
    load_adaptation(sealed, world.model)
    path = sealed / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"], manifest["files"]
    path.write_text(json.dumps(manifest))
    assert load_adaptation(sealed, world.model).manifest["unsealed"] is True
    found = report.gather(world.model, world.target, mended()[1], sealed)
    assert any("seal" in caution for caution in found.cautions)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500])
def test_json_without_bottom(folder: Path, text: str) -> None:
    for name in ("manifest.json", "history.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_text(text)
        assert_refused("damaged", None, None, None, folder)
        (folder / name).write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1e308, -1e308, 10**400])
def test_numbers_at_the_end_of_the_scale(folder: Path, tmp_path: Path, number: float) -> None:
    world, profile, _ = mended()
    rows = json.loads((folder / "history.json").read_text())
    for row in rows[1:]:
        row["losses"] = dict.fromkeys([*row["losses"], "another"], number)
        row["verification"] = row["seconds"] = row["learning_rate"] = number
    (folder / "history.json").write_text(json.dumps(rows))
    if number == 10**400:
        assert_refused("damaged", None, None, None, folder)
        return
    report.write(report.gather(world.model, world.target, profile, folder), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_a_saved_adaptation_gives_the_page_of_the_one_in_memory(folder: Path) -> None:
    world, profile, result = mended()
    from_disk = report.gather(world.model, world.target, profile, folder)
    in_memory = report.gather(world.model, world.target, profile, result)
    assert from_disk.after == in_memory.after
    assert from_disk.mending is not None
    assert from_disk.mending.file == str(folder / "model.safetensors")
    assert list(from_disk.mending.history) == result.history


def test_adaptations_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    world, profile, result = mended()
    assert_refused("shiftmend.adapt", None, None, None, 3)
    other = shiftmend.Adaptation(nn.Linear(6, 3), result.history, result.manifest)
    assert_refused("other layers", None, None, None, other)
    assert_refused("does not exist", None, None, None, tmp_path / "nowhere")
    for name in ("model.safetensors", "history.json", "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        assert_refused(f"Expected {name}", None, None, None, folder)
        (folder / name).write_bytes(content[: len(content) // 2])
        assert_refused("is damaged", None, None, None, folder)
        (folder / name).write_bytes(content)
    for name, what in (("history.json", "history"), ("manifest.json", "manifest")):
        content = (folder / name).read_bytes()
        for nonsense in ("[]" if name == "manifest.json" else "{}", "3", '[{"epoch": "x"}]', '{"method": {}}'):
            (folder / name).write_text(nonsense)
            assert_refused(what, None, None, None, folder)
        (folder / name).write_bytes(content)
    assert report.gather(world.model, world.target, profile, folder).after is not None
    save_file(nn.Linear(2, 2).state_dict(), folder / "model.safetensors")
    assert_refused("another architecture", None, None, None, folder)
    save_file({name: value.clone() for name, value in world.model.state_dict().items()}, folder / "model.safetensors")
    assert_refused("manifest.json", None, None, None, folder)


def test_a_manifest_or_a_history_that_was_changed_is_refused(folder: Path) -> None:
    for name, what, changes in (
        (
            "manifest.json",
            "manifest",
            [
                {"kept": "best"},
                {"status": 3},
                {"method": {"name": 3}},
                {"selected_epoch": True},
                {"selected_epoch": 99},
                {"selected_epoch": -1},
            ],
        ),
        (
            "history.json",
            "history",
            [
                *({"epoch": 1.0}, {"block": 3}, {"losses": [1.0]}, {"losses": {"features": "low"}}),
                *({"verification": "low"}, {"seconds": []}, {"entropy": {}}, {"a word": "too many"}),
            ],
        ),
    ):
        content = (folder / name).read_text()
        for change in changes:
            data = json.loads(content)
            (data if name == "manifest.json" else data[-1]).update(change)
            (folder / name).write_text(json.dumps(data))
            assert_refused(what, None, None, None, folder)
        (folder / name).write_text(content)
    rows = json.loads((folder / "history.json").read_text())
    # without its rows the model would pass for one that was adapted to nothing, which is judged more mildly
    for some in ([], rows[:-1], rows[1:], [rows[0], *rows[:-1]]):
        (folder / "history.json").write_text(json.dumps(some))
        assert_refused("history.json", None, None, None, folder)


def test_what_came_to_no_number_is_a_number_again_when_it_is_read(tmp_path: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(60, 6)
    profile = shiftmend.profile(model, inputs, progress=False)
    result = shiftmend.adapt(model, inputs, profile, "fr", epochs=1, progress=False)
    last = replace(result.history[-1], signals=result.history[-1].signals | {"entropy": math.nan})
    replace(result, history=[*result.history[:-1], last]).save(tmp_path)
    assert math.isnan(load_adaptation(tmp_path, model).history[-1].signals["entropy"])


def test_a_result_without_estimates_can_still_be_read(folder: Path) -> None:
    world, _, _ = mended()
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in ("estimate", "candidates", "chosen", "calibration"):
        manifest.pop(name, None)
    path.write_text(json.dumps(manifest))
    loaded = load_adaptation(folder, world.model)
    assert (loaded.estimate, loaded.candidates, loaded.reason) == (None, (), "")


def test_estimates_are_read_back_and_refused_if_damaged(folder: Path) -> None:
    world, _, _ = mended()
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    one = {"value": 0.5, "low": 0.4, "high": None, "metric": "accuracy", "reliable": True, "reasons": []}
    row = {"name": "fr", "estimate": one, "signals": {"slices": 0.1}, "seconds": 2.0}
    good = {"estimate": {"before": one, "after": one}, "candidates": [row], "chosen": {"by": "auto", "reason": "so"}}
    path.write_text(json.dumps(manifest | good))
    loaded = load_adaptation(folder, world.model)
    assert loaded.estimate is not None
    assert loaded.estimate.after == shiftmend.Estimate(0.5, 0.4, None, "accuracy")
    assert loaded.candidates[0].estimate == loaded.estimate.after
    assert (loaded.candidates[0].seconds, loaded.reason) == (2.0, "so")
    for bad in (
        *({"estimate": 3}, {"estimate": {"after": {}}}, {"estimate": {"after": one | {"value": "high"}}}),
        *({"estimate": {"after": one | {"value": "NaN"}}}, {"candidates": [3]}, {"candidates": [{"name": "fr"}]}),
        *({"calibration": {"temperature": 0}}, {"calibration": {"temperature": "warm"}}, {"chosen": "fr"}),
    ):
        path.write_text(json.dumps(manifest | bad))
        assert_refused("estimates", None, None, None, folder)
