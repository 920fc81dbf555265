"""One self-contained page: what happened to the model at a new site, and did mending help?

>>> found = shiftmend.report.facts(model, target, profile, adaptation)  # doctest: +SKIP
>>> shiftmend.report.write(found, "report.html")  # doctest: +SKIP
"""

from __future__ import annotations

from shiftmend.report.facts import Facts, facts
from shiftmend.report.page import write

__all__ = ["Facts", "facts", "write"]
