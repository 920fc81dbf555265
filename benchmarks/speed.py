"""How fast this machine adapts: `shiftmend bench speed` as a script, for machines where only the source is at hand.

python benchmarks/speed.py [--device cuda] [--repeats 5] [--json]
"""

from __future__ import annotations

import sys

from shiftmend.cli import main

if __name__ == "__main__":
    main(["bench", "speed", *sys.argv[1:]])
