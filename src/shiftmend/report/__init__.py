"""Reports: one self-contained page on what happened to a model at a new site, and on whether mending helped.

Example:
    >>> import torch, shiftmend
    >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    >>> model, source = torch.nn.Sequential(*layers).eval(), torch.randn(500, 4)
    >>> facts = shiftmend.report.gather(model, source + 2, shiftmend.profile(model, source))
    >>> facts.samples
    500
"""

from __future__ import annotations

from shiftmend.report.facts import Facts, gather
from shiftmend.report.page import write

__all__ = ["Facts", "gather", "write"]
