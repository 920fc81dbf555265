"""The table of architectures: what a step changes is counted, and one that fails stops no other."""

from __future__ import annotations

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
    assert "**2 of 3 architectures went through all methods.**" in page
    assert "broken, profile: ModuleNotFoundError" in page
    assert "| dict | here | 0.0 | `net.1` | 8 | 2 | – | " in page
    # Rows that worked are kept, and those that failed are tried again.
    again = RowFile(tmp_path / "rows.json", ("architecture",))
    repaired = CATALOGUE | {"broken": CATALOGUE["normalised"], "normalised": CATALOGUE["broken"]}
    script.measure_all(repaired, again, CPU, Deadline(None), 32)
    assert not any(script.find_errors(row) for row in again.rows)


def test_a_cell_says_what_a_step_did_not_reach() -> None:
    found = {"seconds": 1.0, "peak_mebibytes": 512.0, "blocks_changed": 1, "buffers_changed": 0, "outside_changed": []}
    row = {"blocks": ["stem", "body"], "methods": {"fr": found, "adabn": found, "bufr": {"error": "no"}}}
    assert script.describe_method(row, "fr") == "1.0 s, 0.5 GiB **1 blocks unchanged**"
    assert script.describe_method(row, "adabn") == "1.0 s, 0.5 GiB **nothing changed**"
    assert script.describe_method(row, "bufr") == "failed"
