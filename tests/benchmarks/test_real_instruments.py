"""The page of real instruments: paired differences, what is asked of `auto`, and estimates beside the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("scipy")

import real_instruments as script


def rows(data: str, auto: list[float], untouched: list[float], matched: list[float]) -> list[dict[str, Any]]:
    found = []
    for seed, scores in enumerate(zip(auto, untouched, matched, strict=True)):
        key = {"data": data, "home": "a", "site": "b", "seed": seed}
        others = dict.fromkeys(script.MATCHERS, scores[2])
        found.append(key | {"part": "alone", "scores": {"source-only": scores[1]} | others})
        told = {"value": 0.5, "low": 0.4, "high": 0.6, "reliable": seed == 0, "reasons": []}
        facts = {"before": told, "after": told, "true_before": 0.5, "true_after": 0.4, "chosen": "fr"}
        found.append(key | {"part": "auto", "scores": {"auto": scores[0]}} | facts)
    return found


def test_differences_are_paired_over_seeds() -> None:
    cells = script.gather(rows("twin-gas", [0.9, 0.8, 0.7], [0.5, 0.5, 0.3], [0.6, 0.6, 0.6]), "twin-gas")["a", "b"]
    found = script.compare(cells, "auto", "untouched")
    differences = np.array([0.4, 0.3, 0.4])
    assert found == pytest.approx((differences.mean(), differences.std(ddof=1) / np.sqrt(3), 3))
    assert script.compare(cells, "auto", "pds") is None


@pytest.mark.parametrize(("data", "better", "worse"), [("twin-gas", 0.9, 0.5), ("tablets", 4.0, 8.0)])
def test_harm_and_a_better_matcher_are_said(data: str, better: float, worse: float) -> None:
    good = " ".join(script.judge_auto(rows(data, [better] * 2, [worse] * 2, [better] * 2), data))
    assert "in 0 of 1 directions." in good
    assert "by more than 2 % in 0 of 1." in good
    harmful = " ".join(script.judge_auto(rows(data, [worse] * 2, [better] * 2, [better] * 2), data))
    assert "in 1 of 1 directions: a to b" in harmful
    assert "by more than 2 % in 1 of 1: a to b" in harmful


def test_estimates_stand_beside_the_truth() -> None:
    before, after, chosen = script.judge_estimates(rows("tablets", [4.0] * 2, [8.0] * 2, [5.0] * 2), "tablets")
    assert "1 of 2 times; off by 0.0 % of the error" in before
    assert "off by 25.0 % of the error on average; 1 of 1 intervals contain the truth" in after
    assert chosen == "`auto` took: fr 2."


def test_the_page_shows_what_was_measured_and_nothing_else() -> None:
    cells = rows("twin-gas", [0.9] * 2, [0.5] * 2, [0.6] * 2)
    for row in cells:
        row["scores"] |= dict.fromkeys(script.UNSUPERVISED, 0.6) if row["part"] == "alone" else {}
    page = script.write_page(cells, "A note.")
    assert "Met: 90.0, match-mean 60.0, mean of 2 cells" in page
    assert "A note." in page
    assert "## twin-gas" in page
    assert "## phone-watch" not in page
    assert "| auto | 90.0 | 90.0 | +40.0 ± 0.0 | 2 | 2, 0 |" in page


def test_targets_are_met_missed_or_not_measured() -> None:
    assert all("Not measured" in one for one in list(script.list_targets([]))[:3])
    cells = rows("tablets", [4.2] * 2, [8.0] * 2, [5.0] * 2)
    for row in cells:
        row |= {"home": "1", "site": "2"}
        row["scores"] |= {"at home": 4.0, "target-supervised": 3.9} if row["part"] == "alone" else {}
    first = next(iter(script.list_targets(cells)))
    assert "Met: 4.20, mean of 2 cells" in first


def test_the_preprocessing_of_the_field() -> None:
    spectra = np.random.default_rng(0).random((3, 40)).cumsum(1)
    plain = script.preprocess_spectra(spectra, "snv")
    np.testing.assert_allclose([plain.mean(1), plain.std(1)], [np.zeros(3), np.ones(3)], atol=1e-6)
    slope = script.preprocess_spectra(np.arange(40.0)[None] * 2, "derivative")
    np.testing.assert_allclose(slope, 2, rtol=1e-5)
