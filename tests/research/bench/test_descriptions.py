"""A benchmark in plain values."""

from __future__ import annotations

import json

import pytest

from shiftmend.research.bench.plan import defaults, describe
from shiftmend.research.bench.suite import BENCHMARKS, find


@pytest.mark.parametrize("name", BENCHMARKS)
def test_everything_that_decides_a_number_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHIFTMEND_DATA", raising=False)
    benchmark = find(name)
    facts = json.loads(json.dumps(describe(benchmark)))
    assert list(facts["shifts"]) == list(benchmark.shifts)
    assert set(facts["shifts"].values()) <= {"published", "rebuilt", "regenerated", "own"}
    assert set(facts["sources"]) == set(benchmark.sources)
    assert {protocol: list(rows) for protocol, rows in facts["settings"].items()} == {
        protocol: list(rows) for protocol, rows in benchmark.settings.items()
    }
    for protocol, rows in facts["settings"].items():
        for row in rows.values():
            given = row["options"] | row["defaults"]
            assert ("epochs" in given or "epochs_per_block" in given) == (
                protocol != "online" and row["method"] not in ("source-only", "adabn")
            )


def test_defaults_are_those_of_the_method_that_a_setting_leaves() -> None:
    digits = find("digits")
    offline, online = digits.protocols["offline"], digits.protocols["online"]
    assert defaults(digits.settings["offline"]["bnm-im"], offline) == {"weight": 10.0}
    assert defaults(digits.settings["offline"]["adabn"], offline) == {"passes": 2}
    assert defaults(digits.settings["online"]["adabn"], online) == {}
    assert "labels" not in defaults(digits.settings["offline"]["target-supervised"], offline)
