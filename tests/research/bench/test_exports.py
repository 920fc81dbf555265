from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shiftmend.errors import DataError
from shiftmend.research.bench.benchmark import SIGNALS, Cell, Outcome, Result
from shiftmend.research.bench.store import COLUMNS, flatten, to_csv, to_json, unflatten

CELL = Cell("emnist-da", "offline", "bufr", "sky", 123, "a1b2")
DONE = Result(
    CELL,
    "published",
    last=Outcome(150, 0.8, 0.05, 0.1, 0.7, 0.3),
    best=Outcome(140, 0.81, 0.04, 0.11, 0.69, 0.29),
    selected=None,
    signals={"slices": 0.01, "entropy": 0.4},
    restoration_distance=1.25,
    alignment_loss=0.5,
    ece_per_batch=None,
    epochs=150,
    seconds=12.5,
    peak_memory=2**40,
    history=({"epoch": 0, "loss": 3.5}, {"epoch": 1, "loss": math.inf, "why": 'a "quoted", line\nand another'}),
    manifest={"rate": 0.01, "parts": [0.8, 0.1, 0.1], "source": {"epochs": 150, "name": "größer"}},
    finished="2022-04-25T09:00:00Z",
)
FAILED = Result(replace(CELL, seed=234), "published", error="out of memory,\nafter all")


def test_every_fact_has_a_column() -> None:
    row = flatten(DONE)
    assert list(row) == list(COLUMNS)
    assert [row[name] for name in ("benchmark", "protocol", "method", "shift", "seed", "recipe")] == [
        *("emnist-da", "offline", "bufr", "sky", 123, "a1b2")
    ]
    assert (row["status"], row["error"], row["origin"]) == ("done", None, "published")
    assert (row["last_epoch"], row["last_accuracy"], row["last_ece"]) == (150, 0.8, 0.05)
    assert (row["best_mce"], row["best_nll"], row["best_brier"]) == (0.11, 0.69, 0.29)
    assert all(row[f"selected_{score}"] is None for score in ("epoch", "accuracy", "ece", "mce", "nll", "brier"))
    assert [row[name] for name in SIGNALS] == [0.01, None, 0.4, None]
    assert (row["peak_memory"], row["seconds"], row["finished"]) == (2**40, 12.5, "2022-04-25T09:00:00Z")
    assert json.loads(str(row["manifest"])) == DONE.manifest
    assert unflatten(row) == DONE


def test_csv_has_the_columns_and_one_line_a_result() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([DONE, FAILED]))))
    assert [list(row) for row in rows] == [list(COLUMNS)] * 2
    for row, result in zip(rows, (DONE, FAILED), strict=True):
        assert row == {name: "" if value is None else str(value) for name, value in flatten(result).items()}
    assert rows[1]["status"] == "failed"
    assert rows[1]["error"] == "out of memory,\nafter all"
    assert float(rows[0]["last_accuracy"]) == 0.8


def test_csv_of_nothing_is_a_header() -> None:
    assert to_csv([]).split("\n") == [",".join(COLUMNS), ""]


def test_json_holds_history_and_manifest_as_objects() -> None:
    first, second = json.loads(to_json([DONE, FAILED]), parse_constant=pytest.fail)
    assert list(first) == list(COLUMNS)
    assert first["manifest"] == DONE.manifest
    assert first["history"][0] == DONE.history[0]
    assert first["history"][1]["loss"] == "Infinity"
    assert first["last_accuracy"] == 0.8
    assert (second["status"], second["last_accuracy"], second["history"]) == ("failed", None, [])
    assert json.loads(to_json([])) == []


def test_numbers_that_are_not_finite_stay_visible() -> None:
    result = replace(DONE, last=Outcome(1, 0.1, math.nan, 0.1, math.inf, 0.9), alignment_loss=-math.inf)
    (row,) = csv.DictReader(io.StringIO(to_csv([result])))
    assert (row["last_ece"], row["last_nll"], row["alignment_loss"]) == ("nan", "inf", "-inf")
    (entry,) = json.loads(to_json([result]), parse_constant=pytest.fail)
    assert (entry["last_ece"], entry["last_nll"], entry["alignment_loss"]) == ("NaN", "Infinity", "-Infinity")


def test_scalars_of_numpy_and_torch_are_kept_as_numbers() -> None:
    odd: Any = replace(
        DONE,
        cell=replace(CELL, seed=np.int64(7)),  # type: ignore[arg-type]
        restoration_distance=torch.tensor(1.5),  # type: ignore[arg-type]
        alignment_loss=np.float32(0.25),  # type: ignore[arg-type]
    )
    row = flatten(odd)
    assert [type(row[name]) for name in ("seed", "restoration_distance", "alignment_loss")] == [int, float, float]
    assert (row["seed"], row["restoration_distance"], row["alignment_loss"]) == (7, 1.5, 0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last": None}, "neither a last outcome nor an error"),
        ({"signals": {"slice": 1.0}}, "unknown signals slice; expected some of slices"),
        (
            {"cell": replace(CELL, seed=2**63)},
            "seed is 9223372036854775808, expected a whole number of at most 64 bits",
        ),
        ({"epochs": 1.5}, "epochs is 1.5, expected a whole number"),
        ({"epochs": None}, "epochs is None, expected a whole number"),
        ({"seconds": "long"}, "seconds is 'long', expected a number"),
        ({"finished": 5}, "finished is 5, expected text in Unicode"),
        ({"finished": "\udcff"}, "finished is .*, expected text in Unicode"),
        ({"manifest": {"a": [{"b": Path("x")}]}}, r"manifest\.a\[0\]\.b is a PosixPath"),
        ({"manifest": {"rates": {0: 0.1}}}, r"manifest\.rates is a dict .* strings as keys"),
        ({"history": ({"loss": torch.zeros(2)},)}, r"history\[0\]\.loss is a Tensor"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        flatten(replace(DONE, **changes))


def test_words_that_stand_for_numbers_come_back_as_these() -> None:
    found = unflatten(flatten(replace(DONE, manifest={"a": "Infinity", "b": ["-Infinity", "nan", "NaN and more"]})))
    assert found.manifest == {"a": math.inf, "b": [-math.inf, "nan", "NaN and more"]}


def test_whole_numbers_of_64_bits_are_kept() -> None:
    for seed in (-(2**63), 2**63 - 1):
        assert flatten(replace(DONE, cell=replace(CELL, seed=seed)))["seed"] == seed


def test_an_error_may_quote_a_file_name_that_is_not_unicode() -> None:
    assert flatten(replace(FAILED, error="no file \udcff"))["error"] == r"no file \udcff"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"history": "[1"}, "Expecting"),
        ({"history": "{}"}, "history or manifest is of the wrong form"),
        ({"manifest": "[]"}, "history or manifest is of the wrong form"),
        ({"manifest": None}, "manifest is None, expected text"),
        ({"last_accuracy": None}, "last_accuracy is missing"),
        ({"last_epoch": None}, "last_epoch is missing"),
        ({"last_accuracy": "high"}, "last_accuracy is 'high', expected a number"),
        ({"last_accuracy": True}, "last_accuracy is True, expected a number"),
        (
            {f"last_{score}": None for score in ("epoch", "accuracy", "ece", "mce", "nll", "brier")},
            "there is neither a last",
        ),
        ({"selected_nll": 0.5}, "selected_epoch is missing"),
        ({"seconds": None}, "seconds is None, expected a number"),
        ({"origin": "elsewhere"}, "origin is 'elsewhere', expected one of published"),
        ({"status": "failed"}, "status is 'failed', but the error is None"),
        ({"error": "boom"}, "status is 'done', but the error is 'boom'"),
    ],
)
def test_a_damaged_row_is_named(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"the row of bufr on sky, seed 123 is damaged .{message}.*; delete it and run"):
        unflatten(flatten(DONE) | damage)
