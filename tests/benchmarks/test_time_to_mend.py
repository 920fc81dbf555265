"""The scripts that start from a benchmark's source models: rows, deadlines, figures beside targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bench_models
import refining
import shiftmend
import time_to_mend
from bench_models import Deadline, Given, RowFile
from shiftmend.engine import schedule
from shiftmend.engine.history import Epoch
from shiftmend.research.bench.benchmark import Cell, Outcome, Result, Target
from time_to_mend import KEY, Table, Wishes

MANIFEST = {"benchmark": "digits"}


def row(shift: str, seed: int, method: str, way: str, accuracy: float, **more: Any) -> dict[str, Any]:
    key = dict(zip(KEY, ("emnist-da", shift, seed, method, way), strict=True))
    return key | {"accuracy": accuracy, "ece": 0.1, "manifest": "m"} | more


def auto(shift: str, seed: int, accuracy: float, method: str = "bufr", **more: Any) -> dict[str, Any]:
    costs = {"steps": 100, "steps_until_kept": 60, "seconds": 2.0, "seconds_until_kept": 1.0}
    return row(shift, seed, method, "auto", accuracy, **costs, seconds_outside_rounds=0.3, **more)


def test_rows_are_written_at_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.json"
    file = RowFile(path, KEY)
    key = ("digits", "stripe", 1, "bufr", "auto")
    assert not file.has(*key)
    file.add(key, {"accuracy": 0.5}, MANIFEST)
    again = RowFile(path, KEY)
    assert again.has(*key)
    found = again.find(*key)
    assert found is not None
    assert again.manifests[found["manifest"]] == MANIFEST
    again.add(("digits", "stripe", 2, "bufr", "auto"), {"accuracy": 0.6}, MANIFEST | {"more": 1})
    assert len(json.loads(path.read_text())["manifests"]) == 2
    assert [one["seed"] for one in RowFile(path, KEY).rows] == [1, 2]


def test_a_task_begins_only_if_one_like_the_longest_would_fit() -> None:
    now = 0.0
    deadline = Deadline(10.0, lambda: now)
    assert deadline.allows()
    now = 6.0
    deadline.done()
    assert not deadline.allows()
    assert (deadline.longest, deadline.skipped) == (6.0, 1)
    now = 4.0
    assert deadline.allows()
    deadline.begin()
    now = 5.0
    deadline.done()
    assert deadline.longest == 6.0
    assert Deadline(None).allows()


def test_what_is_timed_comes_first_and_what_takes_longest_last() -> None:
    ways = [way for *_, way in Wishes(("bufr",), ("a", "b"), (1,), ("adabn", "published", "oracle", "auto")).tasks()]
    assert ways == ["adabn", "auto"] * 2 + ["oracle"] * 2 + ["published"] * 2


def test_steps_are_those_of_the_history_or_whole_epochs() -> None:
    assert time_to_mend.count_steps(Epoch(3, "a", 0.1, {}, 0.0, steps=50), 7) == 50
    assert time_to_mend.count_steps(Epoch(3, "a", 0.1, {}, 0.0), 7) == 21
    history = [Epoch(n, block, 0.1, {}, 0.5, steps=10 * n) for n, block in enumerate(["", "a", "a", "b"])]
    stages = time_to_mend.describe_stages(history, 7)
    assert [(one["stage"], one["steps"], one["seconds"]) for one in stages] == [("a", 20, 1.0), ("b", 10, 0.5)]


def test_targets_that_were_not_measured_are_not_called_met() -> None:
    findings = time_to_mend.find_targets({})
    assert len(findings) == 9
    assert {finding.met for finding in findings} == {None}
    assert {finding.measured for finding in findings} == {"not measured"}


def found(rows: list[dict[str, Any]], what: str) -> time_to_mend.Finding:
    findings = time_to_mend.find_targets({"emnist-da": Table("emnist-da", rows)})
    (match,) = [one for one in findings if what in one.what and one.measured != "not measured"]
    return match


@pytest.mark.parametrize(("accuracy", "met"), [(0.86, True), (0.85, True), (0.849, False)])
def test_accuracy_is_compared_in_pairs(accuracy: float, met: bool) -> None:
    rows = [auto("sky", seed, accuracy + 0.01 * seed) for seed in (1, 2)]
    rows += [row("sky", seed, "bufr", "published", 0.85 + 0.01 * seed, steps=400, accuracy_best=0.9) for seed in (1, 2)]
    rows.append(auto("bricks", 1, 0.1))  # Nothing to pair it with.
    finding = found(rows, "accuracy less")
    assert finding.met is met
    assert finding.measured.startswith(f"{100 * (accuracy - 0.85):+.2f} (")
    assert "2 runs" in finding.measured
    assert found(rows, "steps as a share").measured.startswith("0.25 (until the kept state 0.15")
    assert found(rows, "steps as a share").met


def test_seconds_beside_other_processes_do_not_count() -> None:
    slow = auto("sky", 2, 0.8) | {"seconds": 9.0, "beside_others": True}
    finding = found([auto("sky", 1, 0.8), slow], "from arrays")
    assert (finding.met, finding.measured) == (True, "median 2.00, longest 2.00 (1 run)")
    published = row("sky", 1, "bufr", "published", 0.8, steps=400)
    assert "2 runs" in found([auto("sky", 1, 0.8), slow, published], "steps as a share").measured


def test_means_are_over_seeds_that_have_the_same_shifts() -> None:
    rows = [
        auto("sky", 1, 0.8),
        auto("bricks", 1, 0.6),
        auto("sky", 2, 0.9),
        auto("bricks", 2, 0.7),
        auto("sky", 3, 1.0),
    ]
    table = Table("emnist-da", rows)
    assert table.group_seeds("bufr") == [[1, 2], [3]]
    assert table.keep([1, 2]).values(None, "bufr", "auto", "accuracy") == [0.8, 0.6, 0.9, 0.7]


def test_a_single_shift_below_adabn_misses_the_target() -> None:
    rows = [auto(shift, 1, 0.8, "fr") for shift in ("sky", "bricks")]
    rows += [row(shift, 1, "adabn", "adabn", value) for shift, value in (("sky", 0.7), ("bricks", 0.85))]
    finding = found(rows, "below AdaBN")
    assert (finding.met, finding.measured) == (False, "1 of 2, worst bricks -5.0 points")
    assert found(rows[:1], "mean accuracy").met
    assert found(rows[:3], "below AdaBN").met


def test_the_longest_run_decides_about_seconds() -> None:
    rows = [auto("sky", 1, 0.8), auto("sky", 2, 0.8) | {"seconds": 3.0}]
    finding = found(rows, "from arrays")
    assert (finding.met, finding.measured) == (False, "median 2.50, longest 3.00 (2 runs, 1 longer)")
    assert found(rows[:1], "from arrays").met
    assert found(rows[:1], "outside rounds").measured == "0.15 (1 run)"


def cell(seed: int, weights: str) -> Result:
    outcomes = {name: Outcome(4, 0.8, 0.1, 0.1, 0.1, 0.1) for name in ("last", "best", "selected")}
    facts = {"source_weights": weights, "target": {"samples": 100}, "batch_size": 30, "method": {"name": "bufr"}}
    place = Cell("digits", "offline", "bufr", "stripe", seed, "")
    return Result(place, "own", **outcomes, epochs=8, manifest=facts)  # type: ignore[arg-type]


def test_stored_cells_count_only_if_their_source_model_has_equal_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    given: Any = SimpleNamespace(
        benchmark=SimpleNamespace(name="digits", shifts=("stripe",)),
        resources=SimpleNamespace(root=None),
        model=lambda seed: model,
    )
    results = [cell(1, shiftmend.profiles.fingerprints.weights(model)), cell(2, "others")]
    monkeypatch.setattr(time_to_mend, "read", lambda *_, **__: SimpleNamespace(results=results))
    rows = time_to_mend.find_stored(given, Path("store"), ["bufr"], [1, 2])
    assert list(rows) == [("digits", "stripe", 1, "bufr", "published")]
    (only,) = rows.values()
    assert (only["steps"], only["steps_until_best"]) == (24, 12)
    assert "1 cells" in capsys.readouterr().out


def test_a_missing_source_model_is_not_trained_by_surprise(tmp_path: Path) -> None:
    given = bench_models.open_benchmark("digits", tmp_path, None, "cpu")
    with pytest.raises(SystemExit, match="--train"):
        given.model(123)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Given:
    """Some of the digits, with a source model that was hardly trained, so that tests take seconds."""
    plain, home = bench_models.find("digits"), tmp_path_factory.mktemp("bench")
    some = plain.load_target("stripe", None).adapt.take(torch.arange(256))
    short = replace(
        plain,
        sources={"plain": replace(plain.sources["plain"], options={"classes": 10, "width": 2}, epochs=1)},
        load_target=lambda shift, root: Target(some, some),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bench_models, "find", lambda name: short)
        given = bench_models.open_benchmark("digits", home, None, "cpu", targets=home / "targets", may_train=True)
        given.target("stripe")
    return given


@pytest.mark.slow
def test_auto_and_its_oracle_are_measured_on_digits(
    quick: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "ROUND_STEPS", 2)
    monkeypatch.setattr(schedule, "WINDOW", 4)
    file = RowFile(tmp_path / "rows.json", KEY)
    wishes = Wishes(("fr",), ("stripe",), (123,), ("adabn", "auto", "oracle"))
    time_to_mend.measure_all(quick, wishes, file, Deadline(None))
    adabn, timed, oracle = file.rows
    assert (adabn["way"], timed["way"], oracle["way"]) == ("adabn", "auto", "oracle")
    assert 0 <= timed["steps_until_kept"] <= timed["steps"] == sum(one["steps"] for one in timed["stages"])
    assert 0 <= timed["seconds_until_kept"] <= timed["seconds"] - timed["seconds_outside_rounds"] + 1e-3
    assert oracle["curve"][-1]["steps"] == timed["steps"] > 0
    assert oracle["accuracy"] >= oracle["kept_accuracy"] == pytest.approx(timed["accuracy"], abs=1e-6)
    manifest = file.manifests[timed["manifest"]]
    assert len(manifest["source_models"]["123"]["weights_sha256"]) == 64
    time_to_mend.measure_all(quick, wishes, file, Deadline(None))
    assert len(file.rows) == 3, "what is there is not measured again"
    page = time_to_mend.write_page(file)
    assert "| **mean** | " in page
    assert manifest["source_models"]["123"]["weights_sha256"][:12] in page
    assert "Targets" not in page


@pytest.mark.slow
def test_each_refinement_starts_from_the_same_restored_state(quick: Given, tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.json", refining.KEY)
    variants = ("im+fr", "im+anchored", "pulled")
    wishes = refining.Wishes(("stripe",), (123,), variants, (1e-3,), {"epochs_per_block": 1})
    refining.measure_all(quick, wishes, file, Deadline(None))
    assert [row["variant"] for row in file.rows] == [refining.NOTHING, *variants]
    first = {json.dumps({name: row["epochs"][0][name] for name in ("accuracy", "slices")}) for row in file.rows}
    assert len(first) == 1
    shown = refining.tabulate(file.rows, "digits")
    assert shown.count("\n") == 2 + 4 * len(variants)


def test_anchors_are_the_moments_of_the_models_own_answers() -> None:
    torch.manual_seed(0)
    features, logits = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 2)
    tracker = refining.AnchorTracker()
    for part in (slice(0, 20), slice(20, 50)):
        seen: Any = SimpleNamespace(activations={"features": features[part], "logits": logits[part]})
        tracker.update(seen)
    anchors, own = tracker.result(), logits.argmax(1)
    means = torch.stack([features[own == c].mean(0) for c in (0, 1)])
    torch.testing.assert_close(anchors.means, means.float())
    torch.testing.assert_close(anchors.variance, (features - means[own]).square().mean(0).float())
    torch.testing.assert_close(anchors.shares, own.bincount() / 50)
    assert anchors.nearest(means.float()).tolist() == [0, 1]


def test_the_fitted_temperature_makes_confidence_equal_to_accuracy() -> None:
    logits = 5 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    temperature = refining.fit_temperature(logits, 0.6)
    assert float(torch.softmax(logits / temperature, 1).amax(1).mean()) == pytest.approx(0.6, abs=1e-3)
