"""What a cell does and reports, against the same done by hand."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_worlds import BENCHMARK, SETTINGS, cell, drawn, load_target
from torch import Tensor, nn

import shiftmend
from shiftmend.adaptation import run as adapting
from shiftmend.adaptation import stream as streams
from shiftmend.errors import DataError
from shiftmend.evaluation.evaluate import Scorer
from shiftmend.inputs.feed import Feed
from shiftmend.methods import METHODS
from shiftmend.profiles.profile import Profile
from shiftmend.research.bench import cell as cell_module
from shiftmend.research.bench.benchmark import (
    REHEARSED_ROWS,
    SIGNALS,
    Benchmark,
    Outcome,
    Rehearsed,
    Result,
    Setting,
    Target,
)
from shiftmend.research.bench.cell import ScoredAdaptation, collect_warnings, labels_of, run_cell, take_site
from shiftmend.research.bench.plan import plan
from shiftmend.research.bench.resources import Resources
from shiftmend.research.bench.store import Store
from shiftmend.research.datasets.partitions import halves
from shiftmend.verification import signals

HOME: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for all: the source models are trained once."""
    HOME[:] = [tmp_path_factory.mktemp("bench")]
    usual.cache_clear()
    yield
    HOME.clear()


def shop(**changes: Any) -> Resources:
    return Resources(replace(BENCHMARK, **changes), HOME[0], None, "cpu")


def run(method: str, shift: str = "dim", protocol: str = "offline", seed: int = 1, **named: Any) -> Result:
    changes = {name: named.pop(name) for name in list(named) if hasattr(BENCHMARK, name)}
    result = run_cell(shop(**changes), cell(method, shift, protocol, seed, **changes), **named)
    assert result.failed == (result.last is None)
    return result


def done(*given: Any, **named: Any) -> Result:
    result = run(*given, **named)
    assert result.error is None
    return result


@functools.cache
def usual(method: str, shift: str = "dim", protocol: str = "offline", seed: int = 1) -> Result:
    """What several tests look at, run once."""
    return done(method, shift, protocol, seed)


def with_labels(labels: Tensor, shift: str = "dim") -> Any:
    """`load_target` with other labels on the images that are scored."""
    target = load_target(shift, None)
    seen, clean = (replace(images, labels=labels) for images in (target.score, target.clean))
    return lambda *_: Target(seen if target.adapt is target.score else target.adapt, seen, clean)


def by_hand(method: str, shift: str = "dim", seed: int = 1, source: str = "plain", **named: Any) -> Any:
    """`shiftmend.adapt` as a user would call it."""
    place, target = shop(), load_target(shift, None)
    options = named.pop("options", dict(SETTINGS[method].options))
    return shiftmend.adapt(
        place.model(source, seed)[0],
        named.pop("data", target.adapt.images),
        place.profile(source, seed, 0.01),
        method,
        batch_size=named.pop("batch_size", 32),
        seed=seed,
        preprocess=BENCHMARK.preprocess,
        progress=False,
        **options,
        **named,
    )


# ---- scores written out, in float64


def logits_of(model: nn.Module, images: Tensor) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(BENCHMARK.preprocess(images)).double().numpy()


def scores(logits: np.ndarray, labels: Tensor | np.ndarray) -> dict[str, float]:
    labels = np.asarray(labels)
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    p = shifted / shifted.sum(1, keepdims=True)
    confidence, hit = p.max(1), logits.argmax(1) == labels
    gaps = []
    for low in range(10):
        inside = (confidence > low / 10) & (confidence <= (low + 1) / 10)
        if inside.any():
            gaps.append((inside.mean(), abs(hit[inside].mean() - confidence[inside].mean())))
    return {
        "accuracy": hit.mean(),
        "ece": sum(share * gap for share, gap in gaps),
        "mce": max(gap for _, gap in gaps),
        "nll": -np.log(p[np.arange(len(labels)), labels]).mean(),
        "brier": ((p - np.eye(p.shape[1])[labels]) ** 2).sum(1).mean(),
    }


def agree(outcome: Any, logits: np.ndarray, labels: Any, tolerance: float = 1e-6) -> None:
    for name, value in scores(logits, labels).items():
        assert getattr(outcome, name) == pytest.approx(value, abs=tolerance), name


# ---- offline


@pytest.mark.slow
@pytest.mark.parametrize("method", ["source-only", "adabn", "shot", "fr", "bufr"])
@pytest.mark.parametrize("protocol", ["offline", "sparse"])
def test_the_end_of_a_run_is_what_adapt_gives(method: str, protocol: str) -> None:
    result, target = usual(method, "dim", protocol), load_target("dim", None)
    expected = by_hand(method, source=SETTINGS[method].source)
    assert result.epochs == result.last.epoch == expected.history[-1].epoch
    assert result.manifest["adapted_weights"] == expected.manifest["adapted_weights"]
    agree(result.last, logits_of(expected.model, target.score.images), target.score.labels)


@pytest.mark.slow
def test_adapting_helps_here() -> None:
    """Else all these figures might be of the model as it came."""
    before, after = usual("source-only"), usual("adabn")
    assert before.epochs == 0
    assert before.last == before.best == before.selected
    assert after.last.accuracy > before.last.accuracy + 0.2


@pytest.mark.slow
def test_best_and_last_against_the_history_of_all_epochs() -> None:
    result, target = usual("fr", "inverse"), load_target("inverse", None)
    seen: dict[int, dict[str, float]] = {}
    by_hand(
        "fr",
        "inverse",
        on_epoch=lambda model, row: seen.update(
            {row.epoch: scores(logits_of(model, target.score.images), target.score.labels)}
        ),
    )
    assert [row["epoch"] for row in result.history] == list(seen) == list(range(7))
    for row in result.history:
        assert row["accuracy"] == pytest.approx(seen[row["epoch"]]["accuracy"])
        assert row["ece"] == pytest.approx(seen[row["epoch"]]["ece"], abs=1e-6)
    highest = max(seen, key=lambda epoch: (seen[epoch]["accuracy"], -epoch))
    assert result.best.epoch == highest
    assert result.best.accuracy == pytest.approx(seen[highest]["accuracy"])
    assert result.last.epoch == 6
    assert all(result.best.accuracy >= outcome.accuracy for outcome in (result.last, result.selected))


def test_of_equals_the_first_is_best() -> None:
    run = ScoredAdaptation.__new__(ScoredAdaptation)
    accuracies = {6: 0.9, 0: 0.5, 4: 0.9, 2: 0.7}  # a selected epoch is scored after those behind it
    run.outcomes = {epoch: Outcome(epoch, value, 0.0, 0.0, 0.0, 0.0) for epoch, value in accuracies.items()}
    assert run.best.epoch == 4


def preferred(rows: list[dict[str, Any]], entropy: bool) -> int:
    """The rule of docs/methods.md again: slices within a tenth of the lowest so far tie, and then entropy decides."""
    kept, lowest = rows[0], rows[0]["verification"]
    for row in rows[1:]:
        lowest = min(lowest, row["verification"])
        good, still_good = row["verification"] <= 1.1 * lowest, kept["verification"] <= 1.1 * lowest
        name = "entropy" if entropy else "verification"
        if good and (not still_good or row[name] < kept[name]):
            kept = row
    return int(kept["epoch"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fr", "tent", "adabn"])
@pytest.mark.parametrize("protocol", ["offline", "sparse"])
def test_the_selected_epoch_is_that_of_adapt_whatever_is_scored(method: str, protocol: str) -> None:
    for shift in ("dim", "inverse"):
        result, target = usual(method, shift, protocol), load_target(shift, None)
        kept = by_hand(method, shift, keep="selected")
        assert result.selected.epoch == kept.selected == preferred(list(result.history), method != "tent")
        agree(result.selected, logits_of(kept.model, target.score.images), target.score.labels)


@pytest.mark.slow
def test_selection_does_not_look_at_labels() -> None:
    normal = usual("fr", "inverse", "sparse")
    other = torch.randint(3, (100,), generator=torch.Generator().manual_seed(8))
    scrambled = done("fr", "inverse", "sparse", load_target=with_labels(other, "inverse"))
    assert scrambled.last.accuracy != normal.last.accuracy
    assert scrambled.selected.epoch == normal.selected.epoch
    for name in ("signals", "alignment_loss", "restoration_distance"):
        assert getattr(scrambled, name) == getattr(normal, name)
    assert scrambled.manifest["adapted_weights"] == normal.manifest["adapted_weights"]


@pytest.mark.slow
def test_sparse_scores_still_have_first_last_and_selected() -> None:
    unscored = False
    always = {"fr": {0, 4, 6}, "adabn": {0, 2}, "bufr": {0, 4, 8}, "source-only": {0}}
    for method, epochs in always.items():
        result = usual(method, "dim", "sparse")
        scored = {row["epoch"] for row in result.history if "accuracy" in row}
        assert scored == epochs | {result.selected.epoch}
        assert result.best.epoch in scored
    for method, shift in itertools.product(("fr", "bufr"), ("dim", "inverse")):
        sparse, full = usual(method, shift, "sparse"), usual(method, shift)
        for one, other in ((sparse.selected, full.selected), (sparse.last, full.last)):
            assert asdict(one) == pytest.approx(asdict(other), rel=1e-5)  # scored in another layout of memory
        assert sparse.signals == pytest.approx(full.signals, rel=1e-5)  # of the last epoch, not of the selected one
        assert sparse.alignment_loss == pytest.approx(full.alignment_loss, rel=1e-5)
        assert sparse.restoration_distance == pytest.approx(full.restoration_distance, rel=1e-5)
        unscored |= sparse.selected.epoch not in always[method]
    assert unscored, "no choice fell on an epoch whose state had to be held until the end"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fr", "target-supervised"])
def test_the_same_cell_has_the_same_result_whatever_was_drawn_before(method: str) -> None:
    first = usual(method)
    state = torch.manual_seed(77).get_state()
    again = done(method)
    assert (again.last, again.signals) == (first.last, first.signals)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_seeds_lead_to_other_models() -> None:
    first, other = usual("fr"), usual("fr", seed=2)
    assert first.manifest["source_weights"] != other.manifest["source_weights"]
    assert other.manifest["seed"] == 2


# ---- what is adapted to, and what is scored


@dataclass
class Spy:
    adapted: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    scored: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen, adapt, score = Spy(), shiftmend.adapt, Scorer.__call__

    def watched_adapt(model: nn.Module, data: Tensor, *given: Any, **named: Any) -> Any:
        seen.adapted.append(data)
        seen.labels += [named["labels"]] if "labels" in named else []
        return adapt(model, data, *given, **named)

    def watched_score(scorer: Scorer) -> Any:
        labels = torch.cat([labels for _, labels in scorer.feed.labelled_batches()])
        assert scorer.feed.inputs is not None
        seen.scored.append((scorer.feed.inputs, labels))
        return score(scorer)

    monkeypatch.setattr(shiftmend, "adapt", watched_adapt)
    monkeypatch.setattr(Scorer, "__call__", watched_score)
    return seen


def places(some: Tensor, everything: Tensor) -> list[int]:
    """Where images are in a set; each is there once."""
    same = (some.flatten(1)[:, None] == everything.flatten(1)[None]).all(2)
    assert (same.sum(1) == 1).all()
    return same.int().argmax(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shift", ["dim", "apart"])
def test_few_shots_are_drawn_by_class_and_everything_is_scored(spy: Spy, shift: str) -> None:
    target = load_target(shift, None)
    chosen = {}
    for seed in (1, 2):
        result = done("fr", shift, "few-shot-5", seed)
        index = places(spy.adapted[-1], target.adapt.images)
        assert len(set(index)) == 15
        assert target.adapt.labels[index].bincount().tolist() == [5, 5, 5]
        assert result.manifest["target"]["samples"] == 15
        images, labels = spy.scored[-1]
        assert torch.equal(images, target.score.images)
        assert torch.equal(labels, target.score.labels)
        chosen[seed] = sorted(index)
    assert chosen[1] != chosen[2]
    done("adabn", shift, "few-shot-5", 1)
    assert sorted(places(spy.adapted[-1], target.adapt.images)) == chosen[1]  # all methods get the same


@pytest.mark.slow
def test_supervised_trains_on_the_first_part_and_is_scored_on_the_last(spy: Spy) -> None:
    target = load_target("dim", None)
    done("target-supervised")
    trained, scored = (places(images, target.score.images) for images in (spy.adapted[0], spy.scored[0][0]))
    assert (len(trained), len(scored)) == (80, 10)
    assert not set(trained) & set(scored)
    assert torch.equal(spy.labels[0], target.adapt.labels[trained])
    assert torch.equal(spy.scored[0][1], target.score.labels[scored])


@pytest.mark.slow
def test_supervised_never_sees_a_label_that_is_scored(spy: Spy) -> None:
    normal, target = done("target-supervised"), load_target("dim", None)
    scored = places(spy.scored[0][0], target.score.images)
    other = target.score.labels.clone()
    other[scored] = (other[scored] + 1) % 3
    wrong = done("target-supervised", load_target=with_labels(other))
    assert wrong.manifest["adapted_weights"] == normal.manifest["adapted_weights"]
    assert wrong.last.accuracy < normal.last.accuracy
    elsewhere = target.score.labels.clone()
    rest = sorted(set(range(100)) - set(scored))
    elsewhere[rest] = (elsewhere[rest] + 1) % 3
    assert (
        done("target-supervised", load_target=with_labels(elsewhere)).manifest["adapted_weights"]
        != (normal.manifest["adapted_weights"])
    )


@pytest.mark.slow
def test_supervised_few_shots_are_drawn_from_the_first_part(spy: Spy) -> None:
    target = load_target("dim", None)
    done("target-supervised", protocol="few-shot-5")
    trained, scored = (places(images, target.score.images) for images in (spy.adapted[0], spy.scored[0][0]))
    assert (len(trained), len(scored)) == (15, 10)
    assert not set(trained) & set(scored)


@pytest.mark.slow
def test_supervised_with_two_sets_uses_both_whole(spy: Spy) -> None:
    done("target-supervised", "apart", "apart")
    assert (len(spy.adapted[0]), len(spy.scored[0][0])) == (130, 100)


@pytest.mark.slow
def test_supervised_is_never_scored_on_what_it_was_trained_with() -> None:
    for shift, protocol in (("dim", "apart"), ("apart", "offline")):
        error = run("target-supervised", shift, protocol).error
        assert "supervised_parts" in error, error
        assert done("fr", shift, protocol).last is not None


# ---- signals and distance


@pytest.mark.slow
def test_signals_are_those_of_the_end_on_the_data_adapted_to() -> None:
    for shift in ("dim", "apart"):
        result, expected, place = usual("fr", shift), by_hand("fr", shift), shop()
        feed = Feed(
            load_target(shift, None).adapt.images,
            batch_size=32,
            device=torch.device("cpu"),
            preprocess=BENCHMARK.preprocess,
        )
        seen = signals.observe(expected.model, feed, place.profile("plain", 1, 0.01))
        assert set(result.signals) == set(SIGNALS)
        assert result.signals["slices"] == pytest.approx(seen.verification.divergence)
        assert result.signals["marginals"] == result.alignment_loss == pytest.approx(seen.get("marginals"))
        assert result.signals["entropy"] == pytest.approx(seen.get("entropy"))
        p = torch.softmax(torch.from_numpy(logits_of(expected.model, load_target(shift, None).adapt.images)), 1)
        assert result.signals["confidence"] == pytest.approx(float(p.amax(1).mean()), abs=1e-6)


def features(model: nn.Module, images: Tensor) -> np.ndarray:
    caught: list[Tensor] = []
    handle = model.linear.register_forward_hook(lambda module, given, result: caught.append(result))
    logits_of(model, images)
    handle.remove()
    return caught[0].detach().double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["source-only", "fr"])
def test_restoration_is_the_mean_absolute_difference_of_features(method: str) -> None:
    result, target = usual(method), load_target("dim", None)
    source, adapted = shop().model("plain", 1)[0], by_hand(method).model
    difference = np.abs(features(source, target.clean.images) - features(adapted, target.score.images))
    assert difference.shape == (100, 8)
    assert result.restoration_distance == pytest.approx(difference.mean(), rel=1e-5)


@pytest.mark.slow
def test_restoration_needs_the_same_images_one_by_one() -> None:
    whole = load_target("dim", None)
    without = lambda *_: Target(whole.adapt, whole.score)  # noqa: E731
    assert done("adabn", load_target=without).restoration_distance is None
    shuffled = whole.clean.take(torch.randperm(100, generator=torch.Generator().manual_seed(0)))
    for clean in (shuffled, whole.clean.take(torch.arange(99))):
        broken = lambda *_, clean=clean: Target(whole.adapt, whole.score, clean)  # noqa: E731
        assert "the clean version of away, dim" in run("adabn", load_target=broken).error


def test_the_source_model_on_clean_images() -> None:
    result, away = done("source-only", "clean"), load_target("clean", None).score
    agree(result.last, logits_of(shop().model("plain", 1)[0], away.images), away.labels)
    assert result.restoration_distance == 0


# ---- online


def online_by_hand(rate: float | None, momentum: float = 0.9) -> list[np.ndarray]:
    """Each batch: predicted with its own statistics; then TENT's step, if there is a rate."""
    model = copy.deepcopy(shop().model("plain", 1)[0]).eval()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
    weights = [parameter for norm in norms for parameter in (norm.weight, norm.bias)]
    velocity = [torch.zeros_like(weight) for weight in weights]
    predictions = []
    for batch in load_target("dim", None).score.images.split(30):
        logits = model(BENCHMARK.preprocess(batch))
        predictions.append(logits.detach().double().numpy())
        if rate is None:
            continue
        p = logits.softmax(1)
        loss = -(p * (p + 1e-5).log()).sum(1).mean()
        slopes = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, speed, slope in zip(weights, velocity, slopes, strict=True):
                speed.mul_(momentum).add_(slope)
                weight.sub_(rate * speed)
    return predictions


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rate"), [("adabn", None), ("tent", 0.05)])
def test_every_batch_is_predicted_before_it_is_learnt_from(method: str, rate: float | None) -> None:
    result, target = done(method, protocol="online"), load_target("dim", None)
    parts = online_by_hand(rate)
    assert [len(part) for part in parts] == [30, 30, 30, 10]
    agree(result.last, np.concatenate(parts), target.score.labels, 1e-5)
    eces = [scores(part, labels)["ece"] for part, labels in zip(parts, target.score.labels.split(30), strict=True)]
    assert result.ece_per_batch == pytest.approx(np.mean(eces), abs=1e-5)
    assert result.ece_per_batch != pytest.approx(result.last.ece, abs=1e-3)
    assert result.last == result.best == result.selected
    assert (result.epochs, result.last.epoch, result.manifest["steps"]) == (1, 1, 4)
    if rate is not None:  # the order matters: had it been predicted afterwards, the figures would be others
        assert usual("adabn", protocol="online").last.nll != pytest.approx(result.last.nll, abs=1e-4)


@pytest.mark.slow
def test_online_keeps_the_order_of_the_files_and_a_soft_profile() -> None:
    normal = usual("fr", protocol="online")
    assert normal.manifest["protocol"] == {
        "kind": "online",
        "batch_size": 30,
        "temperature": 0.05,
        "score_every": 1,
    }
    assert normal.manifest["method"]["learning_rate"] == 0.1
    whole = load_target("dim", None)
    turned = torch.arange(99, -1, -1)
    backwards = Target(whole.adapt.take(turned), whole.score.take(turned), whole.clean.take(turned))
    assert done("fr", protocol="online", load_target=lambda *_: backwards).last.nll != normal.last.nll
    assert set(normal.signals) == set(SIGNALS)
    assert normal.restoration_distance > 0
    assert len(normal.manifest["target"]["sha256"]) == 64


@pytest.mark.slow
def test_source_only_online_is_the_model_as_it_came() -> None:
    assert usual("source-only", protocol="online").last.accuracy == usual("source-only").last.accuracy


def test_a_batch_that_is_not_learnt_from_is_on_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A method whose every step is rolled back would else pass for one that works."""
    monkeypatch.setattr(streams, "is_finite", lambda *_: False)
    logger = logging.getLogger("shiftmend")
    before = logger.level, logger.propagate, list(logger.handlers)
    result = done("fr", protocol="online")
    assert len(result.manifest["warnings"]) == 1
    assert "it was not learnt from" in result.manifest["warnings"][0]
    assert capsys.readouterr() == ("", "")
    assert (logger.level, logger.propagate, logger.handlers) == before


# ---- several learning rates


@pytest.mark.slow
def test_rates_are_compared_without_labels() -> None:
    rates = [0.05, 0.5, 3e38]
    result = done("fr", rates=rates)
    options = {"epochs": 6, "learning_rate": rates}
    expected = by_hand("fr", options=options, keep="selected")
    assert result.manifest["method"]["learning_rate"] == expected.manifest["method"]["learning_rate"] == 0.05
    assert result.manifest["learning_rate_chosen"] == "by the verification slices"
    tried = result.manifest["learning_rates_tried"]
    assert [entry["learning_rate"] for entry in tried] == rates
    assert "Lower the learning rate" in tried[2]["failed"]
    assert "failed" not in tried[0]
    for entry, theirs in zip(tried, expected.manifest["learning_rates_tried"], strict=True):
        assert {key: entry.get(key) for key in theirs if key != "failed"} == {
            key: value for key, value in theirs.items() if key != "failed"
        }
    agree(
        result.selected,
        logits_of(expected.model, load_target("dim", None).score.images),
        load_target("dim", None).score.labels,
    )
    other = done("fr", rates=rates, load_target=with_labels((load_target("dim", None).score.labels + 1) % 3))
    assert other.manifest["method"]["learning_rate"] == 0.05
    assert other.selected.epoch == result.selected.epoch
    assert other.selected.accuracy < result.selected.accuracy


@pytest.mark.slow
def test_best_of_several_rates_is_an_oracle_over_all_of_them() -> None:
    rates = [0.05, 0.001]
    alone = [done("fr", rates=[rate]) for rate in rates]
    both = done("fr", rates=rates)
    assert both.best.accuracy == max(result.best.accuracy for result in alone)
    chosen = both.manifest["method"]["learning_rate"]
    assert both.last == alone[rates.index(chosen)].last
    assert [row["learning_rate"] for row in both.history[1:]] == [chosen] * 6
    oracle = both.manifest["learning_rate_of_best"]
    assert alone[rates.index(oracle)].best == both.best
    assert both.best.accuracy >= both.selected.accuracy


@pytest.mark.slow
def test_one_rate_is_like_the_setting_with_that_rate() -> None:
    assert done("fr", rates=[0.05]).last == usual("fr").last
    assert done("adabn", rates=[0.3]).manifest.get("learning_rates_tried") is None


@pytest.mark.slow
def test_if_all_rates_fail_the_cell_does() -> None:
    result = run("fr", rates=[2e38, 3e38])
    assert result.error.startswith("Expected a result with one of the learning rates [2e+38, 3e+38]")


@pytest.mark.slow
def test_online_rates_are_searched_as_in_the_paper_and_chosen_without_labels() -> None:
    rates = [0.0001, 0.05, 0.5]
    single = {rate: done("fr", protocol="online", rates=[rate]) for rate in rates}
    searched = done("fr", protocol="online", rates=rates)
    closest = min(single.values(), key=lambda result: result.signals["slices"])
    most_accurate = max(single.values(), key=lambda result: result.last.accuracy)
    assert searched.last == searched.selected == closest.last
    assert searched.best == most_accurate.last
    tried = {row["learning_rate"]: row["last"]["accuracy"] for row in searched.manifest["learning_rates_tried"]}
    assert tried == {rate: result.last.accuracy for rate, result in single.items()}
    scrambled = (load_target("dim", None).score.labels + 1) % 3
    other = done("fr", protocol="online", rates=rates, load_target=with_labels(scrambled))
    assert other.manifest["method"]["learning_rate"] == searched.manifest["method"]["learning_rate"]
    failed = run("fr", protocol="online", rates=[2e38, 3e38])
    assert failed.error is None or "one of the learning rates" in failed.error


# ---- failures


@pytest.mark.slow
def test_an_error_becomes_a_failed_result(tmp_path: Path) -> None:
    def absent(*_: Any) -> Target:
        raise DataError("/data/x.npy is missing:\n  fetch it")

    def broken(*_: Any) -> Target:
        raise ValueError("odd\nnumber")

    def silent(*_: Any) -> Target:
        raise RuntimeError

    with Store(tmp_path / "results.sqlite") as store:
        for load, message in (
            (absent, "/data/x.npy is missing: fetch it"),
            (broken, "ValueError: odd number"),
            (silent, "RuntimeError: no message"),
        ):
            result = run("fr", load_target=load)
            assert result.error == message
            assert result.failed
            assert (result.last, result.best, result.selected, result.history) == (None, None, None, ())
            assert result.manifest["protocol"]["kind"] == "offline"
            assert result.manifest["cell"]["shift"] == "dim"
            assert result.manifest["method"] == {"name": "fr", "epochs": 6, "learning_rate": 0.05}
            assert "torch" in result.manifest["environment"]
            assert result.seconds >= 0
            assert store.record(result)
        assert store.results()[0].error == "RuntimeError: no message"
        assert store.record(usual("fr"))
        assert store.cells() == {cell("fr")}


def test_a_rate_that_diverges_fails_with_a_sentence() -> None:
    table = dict(BENCHMARK.settings) | {"offline": {"fr": Setting("fr", {"epochs": 2, "learning_rate": 3e38})}}
    assert "Lower the learning rate" in run("fr", settings=table).error


def test_images_without_labels_cannot_be_scored() -> None:
    unlabelled = replace(drawn(40, 9, "secret"), labels=None)
    error = run("fr", load_target=lambda *_: Target(unlabelled, unlabelled)).error
    assert "Expected labels in" in error
    assert (
        "a label for each image of secret"
        in run("fr", "dim", "few-shot-5", load_target=lambda *_: Target(*[unlabelled] * 2)).error
    )


# ---- interrupts


@pytest.mark.slow
def test_an_interrupted_adaptation_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    score, calls = Scorer.__call__, []

    def interrupted(scorer: Scorer) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(scorer)

    monkeypatch.setattr(Scorer, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("fr")
    assert len(calls) == 3


@pytest.mark.slow
def test_nor_is_one_interrupted_while_it_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """`adapt` then returns the whole run, without its last verification."""
    observe = adapting.observe

    def interrupted(*given: Any) -> Any:
        if len(given) == 4 and run_is_over:
            raise KeyboardInterrupt
        return observe(*given)

    run_is_over: list[int] = []
    monkeypatch.setattr(adapting, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("fr", tick=lambda epochs, total: run_is_over.append(1) if epochs == total else None)
    assert run_is_over


# ---- what is written down


def leaves(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        for entry in value.values():
            yield from leaves(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from leaves(entry)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "protocol"),
    [("target-supervised", "offline"), ("bufr", "offline"), ("fr", "few-shot-5"), ("fr", "online")],
)
def test_the_manifest_says_how_and_holds_no_labels(method: str, protocol: str, tmp_path: Path) -> None:
    result = usual(method, protocol=protocol)
    manifest = result.manifest
    assert manifest["protocol"] == BENCHMARK.protocols[protocol].facts()
    assert manifest["source"]["recipe"] == BENCHMARK.sources["plain"].facts()
    assert (HOME[0] / "sources" / manifest["source"]["file"]).is_file()
    assert manifest["data"] == {"adapted_to": "away, dim", "scored_on": "away, dim"}
    assert manifest["cell"] == asdict(result.cell)
    assert manifest["origin"] == result.origin == "own"
    assert manifest["method"]["name"] == method
    assert manifest["seed"] == 1
    assert {"shiftmend", "torch", "python", "device", "platform"} <= set(manifest["environment"])
    assert not [leaf for leaf in leaves(manifest) if isinstance(leaf, Tensor | np.ndarray)]
    # the longest are the bins of a reliability diagram: there are more labels than that
    assert max(len(leaf) for leaf in leaves(manifest) if isinstance(leaf, list | tuple)) <= 10
    with Store(tmp_path / "results.sqlite") as store:
        assert store.record(result)
        (back,) = store.results()
    assert back.manifest == json.loads(json.dumps(manifest))
    assert back.last == result.last
    assert back.signals == result.signals


@pytest.mark.slow
def test_what_is_unlike_the_published_source_images_is_written_down() -> None:
    assert "remark" not in usual("adabn").manifest["source"]
    result = done("adabn", source_remark=lambda root: f"of our own, under {root}")
    assert result.manifest["source"]["remark"] == "of our own, under None"


@pytest.mark.slow
def test_time_and_memory_are_the_cells_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ballast: list[np.ndarray] = []

    def slow(shift: str, root: Path | None) -> Target:
        import time

        time.sleep(1.0)
        ballast.append(np.ones((300, 1 << 17)))  # 300 MiB, gone before the cell itself begins
        ballast.clear()
        return load_target(shift, root)

    result = done("source-only", load_target=slow)
    assert 0 < result.seconds < 1.0
    assert result.finished.endswith("Z")
    assert result.peak_memory > 50 << 20
    if Path("/proc/self/clear_refs").exists():
        small, large = result.peak_memory, np.ones((300, 1 << 17))
        assert done("source-only").peak_memory > small + (200 << 20)
        assert large.all()


@pytest.mark.slow
def test_ticks_count_to_the_end() -> None:
    for method, protocol, expected in (
        ("fr", "offline", [(n, 6) for n in range(7)]),
        ("adabn", "offline", [(n, 2) for n in range(3)]),
        ("bufr", "offline", [(n, 0) for n in range(9)]),  # how many there will be is not known
        ("fr", "online", [(n, 4) for n in range(1, 5)]),
    ):
        ticks: list[tuple[int, int]] = []
        done(method, protocol=protocol, tick=lambda *at, ticks=ticks: ticks.append(at))
        assert ticks == expected, (method, protocol)
    ticks = []
    done("fr", rates=[0.1, 0.2], tick=lambda *at: ticks.append(at))
    assert ticks == [*((n, 12) for n in range(7)), *((n, 12) for n in range(6, 13))]


@pytest.mark.slow
def test_every_method_runs_offline_and_those_that_can_online() -> None:
    quick = {"epochs": 1, "epochs_per_block": 1, "refine_epochs": 1, "learning_rate": 0.001}
    rated = {
        name: {option.name: quick[option.name] for option in fields(method) if option.name in quick}
        for name, method in METHODS.items()
        if not method.frees_shares  # Benchmarks profile and do not rehearse.
    }
    settings = {name: Setting(name, options) for name, options in rated.items()}
    streams = {
        name: Setting(name, {key: value for key, value in options.items() if key == "learning_rate"})
        for name, options in rated.items()
        if METHODS[name].online
    }
    benchmark: Benchmark = replace(
        BENCHMARK, settings=dict(BENCHMARK.settings) | {"offline": settings, "online": streams}
    )
    place = Resources(benchmark, HOME[0], None, "cpu")
    for protocol in ("offline", "online"):
        for one in plan(benchmark, protocol, shifts=["inverse"], seeds=[1]):
            result = run_cell(place, one)
            assert result.error is None, (one, result.error)
            assert 0 <= result.last.accuracy <= 1
            assert set(result.signals) == set(SIGNALS)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["offline", "online"])
def test_a_reliability_diagram_of_the_last_state_is_on_record(protocol: str) -> None:
    result = done("fr", protocol=protocol)
    bins = result.manifest["reliability"]
    total = sum(part["count"] for part in bins)
    gaps = [part["count"] * abs(part["accuracy"] - part["confidence"]) for part in bins if part["count"]]
    assert len(bins) == 10
    assert sum(gaps) / total == pytest.approx(result.last.ece, abs=1e-6)


# ---- What a run keeps of a GPU's memory; how much a cell needed is tested with cells

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("unused", "given_back"), [(0, 0), (cell_module.MAX_UNUSED_BYTES, 0), (cell_module.MAX_UNUSED_BYTES + 1, 1)]
)
def test_only_much_is_given_back(monkeypatch: pytest.MonkeyPatch, unused: int, given_back: int) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 + unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    cell_module.release_unused_memory(GPU)
    assert len(calls) == given_back
    cell_module.release_unused_memory(torch.device("cpu"))
    assert len(calls) == given_back


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_graphs_that_are_gone_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "MAX_UNUSED_BYTES", 1 << 20)

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
    cell_module.release_unused_memory(GPU)
    assert torch.cuda.memory_reserved(GPU) <= before + (4 << 20)


# ---- What is warned of while a cell runs is kept and not said


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What a handler of the caller's hears; afterwards the library's logger is as it was."""
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, handler = logging.getLogger("shiftmend"), Heard()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    yield heard
    logger.removeHandler(handler)
    logger.setLevel(before[0])
    logger.propagate = before[1]


def warn(number: int) -> None:
    logging.getLogger("shiftmend.adaptation.stream").warning("batch %d went wrong", number)


def test_warnings_are_kept_each_kind_once_and_said_again_when_the_last_has_left(
    said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("shiftmend").setLevel(logging.ERROR)  # what a caller does not want to hear is kept all the same
    for _ in range(2):
        with collect_warnings() as outer:
            with collect_warnings() as inner:
                warn(1)
            warn(2)
            logging.getLogger("shiftmend").warning("another kind")
        assert (outer, inner) == (["batch 1 went wrong", "another kind"], ["batch 1 went wrong"])
    assert (said, caplog.text) == ([], "")
    assert logging.getLogger("shiftmend").level == logging.ERROR
    logging.getLogger("shiftmend").setLevel(logging.WARNING)
    warn(3)
    assert said == ["batch 3 went wrong"]
    assert "batch 3 went wrong" in caplog.text


def test_another_thread_s_warnings_are_not_this_cell_s() -> None:
    with collect_warnings() as own:
        thread = threading.Thread(target=warn, args=(1,))
        thread.start()
        thread.join()
    assert own == []


# ---- with a rehearsal


@pytest.mark.slow
def test_rehearsed_rows_have_an_estimate_beside_the_truth() -> None:
    protocol = Rehearsed(batch_size=32, candidates=("match-moments", "adabn"), simulated_shifts=5)
    rows = {name: REHEARSED_ROWS[name] for name in ("source-only", "adabn", "auto")}
    changes: dict[str, Any] = {"protocols": {"rehearsed": protocol}, "settings": {"rehearsed": rows}}
    found = {name: done(name, "dim", "rehearsed", **changes) for name in rows}
    test, target = shop().source("plain").test, load_target("dim", None)
    home, site = halves(labels_of(test))
    assert not set(home.tolist()) & set(site.tolist())
    images, labels = target.score.images[site], target.score.labels[site]
    untouched = found["source-only"]
    expected = scores(logits_of(shop().model("plain", 1)[0], images), labels)
    assert untouched.last.accuracy == pytest.approx(expected["accuracy"])
    for name, result in found.items():
        assert result.manifest["target"]["samples"] == len(site)
        assert result.manifest["estimate"]["after"]["metric"] == "accuracy", name
    # The rehearsal is read from its file the next time, and `auto` chose among its candidates.
    (file,) = (HOME[0] / "profiles").glob("*-rehearsed-*.safetensors")
    assert set(Profile.load(file).rehearsal.candidates) == {"source-only", "match-moments", "adabn"}
    assert {one["name"] for one in found["auto"].manifest["candidates"]} <= {"source-only", "match-moments", "adabn"}


def test_a_site_has_no_image_of_home() -> None:
    test, target = drawn(100, 2, "away"), load_target("dim", None)
    site = halves(labels_of(test))[1]
    assert torch.equal(take_site(target, test).adapt.images, target.score.images[site])
    # Another set is the site as a whole; one of the same length in an unknown order may be that of home.
    assert take_site(replace(target, clean=None), drawn(60, 5, "other")).score is target.score
    with pytest.raises(DataError, match="order"):
        take_site(replace(target, clean=None), test)
