"""Formatting of numbers and text."""

from __future__ import annotations

import math
from typing import Any

from markupsafe import Markup


def format_number(value: float) -> str:
    """Format a distance with two or three significant figures, never as a row of zeros.

    Example:
        >>> format_number(0.0123), format_number(0.0001), format_number(float("nan"))
        ('0.012', 'below 0.0005', 'infinite')
    """
    if not math.isfinite(value):
        return "infinite"
    if value < 0.0005:
        return "0" if value == 0 else "below 0.0005"
    return f"{value:.2g}" if value < 0.01 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def format_percent(share: float, digits: int = 0) -> str:
    """Format a share from 0 to 1 in percent, with a non-breaking space before the percent sign; a dash for NaN."""
    return f"{100 * share:.{digits}f}\u00a0%" if math.isfinite(share) else "–"


def make_printable(value: Any) -> Any:
    """Replace control characters in text, which HTML does not allow, by a visible one; keep markup and numbers."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c in "\n\t\u00a0" or c.isprintable() else "\ufffd" for c in value)
