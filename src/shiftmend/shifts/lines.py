"""The soft line that dotted_line and zigzag draw, for a whole batch of lines at once."""

from __future__ import annotations

import torch
from torch import Tensor

REACH = 2.3


def line(start: Tensor, end: Tensor, height: int, width: int) -> Tensor:
    """One line per pair of points `[N, 2]` (column, row), as intensities in [0, 1], `[N, height, width]`.

    The intensity falls with the *vertical* distance d to the line, as 1 + log(1 - d / 2.3), so steep lines are
    thin. It is drawn on the columns from floor(start) up to but excluding ceil(end), which leaves none to a line
    that runs to the left by a pixel or more. A vertical line is not drawn at all.
    """
    columns = torch.arange(width, dtype=start.dtype, device=start.device)
    rows = torch.arange(height, dtype=start.dtype, device=start.device)
    start_column, start_row = start[:, :1], start[:, 1:]
    end_column, end_row = end[:, :1], end[:, 1:]
    vertical = end_column == start_column
    run = torch.where(vertical, 1, end_column - start_column)
    level = (end_row - start_row) / run * (columns - start_column) + start_row
    drawn = (columns >= start_column.floor()) & (columns < end_column.ceil()) & ~vertical
    # Far off the picture, a column that is not drawn has distance REACH everywhere and hence intensity 0.
    level = torch.where(drawn, level, -REACH)
    distance = (rows[None, :, None] - level[:, None, :]).abs_().clamp_(max=REACH - 1e-10)
    return distance.div_(-REACH).log1p_().add_(1).clamp_(min=0)


def dotted(start_row: Tensor, end_row: Tensor, height: int, width: int) -> Tensor:
    """A line from the left to the right edge, seen through a comb of two columns off, two columns on."""
    left = torch.stack((torch.zeros_like(start_row), start_row), dim=1)
    right = torch.stack((torch.full_like(end_row, width - 1), end_row), dim=1)
    comb = torch.arange(width, device=start_row.device) % 4 >= 2
    return line(left, right, height, width) * comb


def zigzag(start_row: Tensor, end_row: Tensor, height: int, width: int) -> Tensor:
    """A zigzag around the line between two rows, from the third column to the third last."""
    vertices = zigzag_vertices(start_row, end_row, width)
    drawing = start_row.new_zeros(len(start_row), height, width)
    for start, end in zip(vertices.unbind(1)[:-1], vertices.unbind(1)[1:], strict=True):
        drawing += line(start, end, height, width)
    return drawing.clamp_(max=1)


def zigzag_vertices(start_row: Tensor, end_row: Tensor, width: int) -> Tensor:
    """The corners (column, row) of each zigzag, `[N, V, 2]`: peaks two pixels high, four pixels apart.

    Zigzags of fewer corners than the longest repeat their last one; `line` draws nothing between equal points.
    The height of that last corner is the published generator's, which divides by what is left of a period.
    """
    first, last = 2, width - 3
    angle = torch.atan((end_row - start_row) / (last - first))
    length = (last - first) / torch.cos(angle)
    peaks = ((length - 2) / 4).floor()
    rest = length - 4 * (length / 4).floor()
    final_peak = 2 * (1 - 2 * peaks.remainder(2))
    whole = rest == 0
    end_along = torch.where(whole, 4 * peaks + 2, length)
    end_aside = torch.where(whole, final_peak, final_peak / (2 * torch.where(whole, 1, rest)))

    index = torch.arange(int(peaks.max()) + 1, dtype=start_row.dtype, device=start_row.device)
    exists = index <= peaks[:, None]
    along = torch.where(exists, 4 * index + 2, end_along[:, None])
    aside = torch.where(exists, 2 * (1 - 2 * index.remainder(2)), end_aside[:, None])
    origin = torch.zeros_like(start_row)[:, None]
    along = torch.cat((origin, along, end_along[:, None]), dim=1)
    aside = torch.cat((origin, aside, end_aside[:, None]), dim=1)

    cosine, sine = torch.cos(angle)[:, None], torch.sin(angle)[:, None]
    columns = along * cosine - aside * sine + first
    rows = along * sine + aside * cosine + start_row[:, None]
    return torch.stack((columns, rows), dim=2)
