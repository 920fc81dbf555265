"""`python -m shiftmend`: the command line where the script is not on the path, or only the source is at hand."""

from __future__ import annotations

from shiftmend.cli import main

if __name__ == "__main__":  # a worker that is spawned imports this file again
    main()
