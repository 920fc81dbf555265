"""How long `import shiftmend` takes beside `import torch`: fresh interpreters, taking turns, medians and spread.

python benchmarks/import_time.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

FORBIDDEN = ("matplotlib", "sklearn", "PIL", "rich", "typer", "torchvision", "scipy")


def seconds(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    statements = ("import torch", "import shiftmend")
    for statement in statements:
        seconds(statement)  # warm the file cache
    times: dict[str, list[float]] = {statement: [] for statement in statements}
    for _ in range(repeats):
        for statement in statements:
            times[statement].append(seconds(statement))
    for statement, taken in times.items():
        low, high = min(taken), max(taken)
        print(f"{statement:<18} median {statistics.median(taken):.3f} s, {low:.3f} to {high:.3f}, {repeats} runs")
    ratio = statistics.median(times["import shiftmend"]) / statistics.median(times["import torch"])
    print(f"ratio {ratio:.3f} (goal: at most 1.2)")
    found = subprocess.run(
        [sys.executable, "-c", f"import shiftmend, sys; print([m for m in {FORBIDDEN!r} if m in sys.modules])"],
        check=True,
        capture_output=True,
        text=True,
    )
    print(f"imported besides, of {', '.join(FORBIDDEN)}: {found.stdout.strip()}")


if __name__ == "__main__":
    main()
