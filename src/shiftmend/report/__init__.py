"""Reports: one self-contained page on what happened to a model at a new site, and on whether mending helped.

>>> found = shiftmend.report.gather(model, target, profile, adaptation)  # doctest: +SKIP
>>> shiftmend.report.write(found, "report.html")  # doctest: +SKIP
"""

from __future__ import annotations

from shiftmend.report.facts import Facts, gather
from shiftmend.report.page import write

__all__ = ["Facts", "gather", "write"]
