"""The table of architectures: what a step changes is counted, and one that fails stops no other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import architectures as script
from architectures import Architecture
from bench_models import Deadline, RowFile

CPU = torch.device("cpu")


def draw(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 4), torch.randn(samples, 4) + 1


def make_network(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    layers = [nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 3))


def fail() -> nn.Module:
    raise ModuleNotFoundError("No module named 'elsewhere'")


CATALOGUE = {
    "normalised": Architecture("here", make_network, draw),
    "broken": Architecture("elsewhere", fail, draw),
    "dict": Architecture("here", lambda: ByName(), lambda samples: ({"x": draw(samples)[0]}, {"x": draw(samples)[1]})),
}


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_network(nn.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.slow
def test_one_that_fails_is_a_row_and_stops_no_other(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.json", ("architecture",))
    script.measure_all(CATALOGUE, file, CPU, Deadline(None), 32)
    rows = {row["architecture"]: row for row in file.rows}
    assert list(rows) == list(CATALOGUE)
    assert "elsewhere" in script.find_errors(rows["broken"])["profile"]
    assert [*rows["normalised"]["methods"]] == ["adabn", "fr", "bufr"]
    assert [*rows["dict"]["methods"]] == ["fr", "bufr"]  # it has no BatchNorm
    for name in ("normalised", "dict"):
        assert not script.find_errors(rows[name])
        assert rows[name]["taps"]["features"]["units"] == 8
        for method in ("fr", "bufr"):
            found = rows[name]["methods"][method]
            assert found["blocks_changed"] == len(rows[name]["blocks"]) == 2
            assert found["outside_changed"] == []
    page = script.write_page(file, list(CATALOGUE))
    assert "**2 of 3 architectures went through all methods that apply to them.**" in page
    assert "broken, profile: ModuleNotFoundError" in page
    where = f"CPU ({torch.get_num_threads()} thread"
    assert f"| dict | here | 0.0 | `net.1` | 8 | 2 | {where}" in page
    assert f"32 samples, torch {torch.__version__.partition('+')[0]} | – | " in page
    # Rows that worked are kept, and those that failed are tried again.
    again = RowFile(tmp_path / "rows.json", ("architecture",))
    repaired = CATALOGUE | {"broken": CATALOGUE["normalised"], "normalised": CATALOGUE["broken"]}
    script.measure_all(repaired, again, CPU, Deadline(None), 32)
    assert not any(script.find_errors(row) for row in again.rows)


def test_a_row_that_takes_too_long_is_left_out_and_the_next_is_tried(tmp_path: Path) -> None:
    def wait() -> nn.Module:
        while True:
            time.sleep(0.01)

    catalogue = {"endless": Architecture("here", wait, draw), "broken": CATALOGUE["broken"]}
    file = RowFile(tmp_path / "rows.json", ("architecture",))
    script.measure_all(catalogue, file, CPU, Deadline(None), 8, row_seconds=0.05)
    assert [row["architecture"] for row in file.rows] == ["broken"]
    assert "Not run yet: endless." in script.write_page(file, list(catalogue))


def test_each_row_says_on_what_it_was_run(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.json", ("architecture",))
    row = script.measure(CATALOGUE["broken"], CPU, 8)
    for name, device, version in (("one", "NVIDIA H200", "2.11.0+cu130"), ("other", "cpu", "2.13.0")):
        file.add((name,), row, {"environment": {"device": device, "torch": version}, "samples": 8})
    page = script.write_page(file, ["one", "other"])
    assert "| NVIDIA H200, 8 samples, torch 2.11.0 |" in page
    assert "| CPU, 8 samples, torch 2.13.0 |" in page


def test_a_cell_says_what_a_step_did_not_reach() -> None:
    found = {"seconds": 1.0, "peak_mebibytes": 512.0, "blocks_changed": 1, "buffers_changed": 0, "outside_changed": []}
    row = {"blocks": ["stem", "body"], "methods": {"fr": found, "adabn": found, "bufr": {"error": "no"}}}
    assert script.describe_method(row, "fr") == "1.0 s, 0.5 GiB **1 blocks unchanged**"
    assert script.describe_method(row, "adabn") == "1.0 s, 0.5 GiB **nothing changed**"
    assert script.describe_method(row, "bufr") == "failed"
