"""Measure `bench status` on a store with many rows: seconds, and memory beyond what the imports take.

python benchmarks/large_store.py --rows 100000
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

BENCHMARK = "cifar-10-c"
EPOCHS = 15
"""Epochs of a stored history, as those of the published settings have."""


def make_results(rows: int) -> Iterator[object]:
    """Make results of all cells of as many seeds as it takes."""
    from shiftmend.research.bench.benchmark import Outcome, Result
    from shiftmend.research.bench.plan import plan
    from shiftmend.research.bench.suite import find

    history = tuple({"epoch": epoch, "losses": {"features": 0.1}, "accuracy": 0.5} for epoch in range(EPOCHS))
    manifest = {"stages": [{"name": f"block {n}", "epochs": 5} for n in range(9)], "seed": 1}
    first = plan(find(BENCHMARK), seeds=[0])
    seeds = range(1 + rows // len(first))
    for cell in islice(plan(find(BENCHMARK), seeds=list(seeds)), rows):
        outcome = Outcome(EPOCHS, 0.5, 0.1, 0.3, 1.0, 0.2)
        yield Result(
            cell,
            origin="published",
            last=outcome,
            selected=outcome,
            seconds=12.5,
            epochs=EPOCHS,
            history=history,
            manifest=manifest,
            finished="2026-01-01T00:00:00Z",
        )


def measure(folder: Path) -> dict[str, float]:
    """Run `bench status` in this process, after its imports."""
    from shiftmend.cli import main
    from shiftmend.research.bench import results

    assert results is not None
    before = _read_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Linux counts the peak anew from here.
    started = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(["bench", "status", BENCHMARK, "--folder", str(folder)])
    seconds = time.process_time() - started
    return {"seconds": seconds, "megabytes": _read_memory("VmHWM") - before, "before": before}


def _read_memory(name: str) -> float:
    """Read an entry of /proc/self/status, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        print(json.dumps(measure(given.measure)))
        return
    from shiftmend.research.bench.store import STORE, Store

    with tempfile.TemporaryDirectory() as folder:
        with Store(Path(folder) / STORE) as store:
            store.merge(make_results(given.rows))  # type: ignore[arg-type]
        size = (Path(folder) / STORE).stat().st_size
        command = [sys.executable, __file__, "--measure", folder]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"{given.rows:,} rows, {size / 1e6:,.0f} MB: status in {found['seconds']:.2f} s of a core and "
        f"{found['megabytes']:.0f} MB beyond the {found['before']:.0f} MB that the imports take"
    )


if __name__ == "__main__":
    main()
