"""The speed of adaptation on this machine: ratios measured in one run, warm, with their spread.

PYTHONPATH=src python benchmarks/speed [--device cuda] [--only steps,histogram] [--out speed.json] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

# `python benchmarks/speed` puts the folder itself on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from shiftmend.errors import ShiftmendError
from speed import TABLES, report
from speed.timing import show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--only", help=f"some of {','.join(TABLES)}")
    parser.add_argument("--repeats", type=int, help="measurements of each; 5 on a GPU, 3 on a CPU")
    parser.add_argument("--out", type=Path, help="write JSON to this file as it is measured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    chosen = parser.parse_args()
    only = None if chosen.only is None else [name.strip() for name in chosen.only.split(",") if name.strip()]
    try:
        shown = None if chosen.json else show
        facts = report(chosen.device, only, repeats=chosen.repeats, show=shown, out=chosen.out)
    except (ShiftmendError, OSError) as error:
        sys.exit(f"error: {error}")
    if chosen.json:
        print(json.dumps(facts, allow_nan=False))


if __name__ == "__main__":
    main()
