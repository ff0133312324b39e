"""Columns of a table as TabPFN v1 was published to see them, with every average over rows weighted.

A row of weight a counts as a rows. Averages, standard deviations, the maximum of the likelihood in the power transform
and the choice of columns that vary are all exact in that: a whole weight is the same as so many copies of the row.
"""

import torch
from torch import Tensor

from ._power import best_exponent, transformed

_SMALL, _LARGEST, _SIGMAS = 1e-6, 100.0, 4.0  # as published: added to deviations, the clip, and where outliers begin


class Columns:
    """The columns of tables (b, n + t, f), or of one (1, n + t, f), under weights (b, n) of their labelled rows."""

    def __init__(self, table: Tensor, weights: Tensor):
        self._known = weights.shape[1]
        missing = torch.isnan(table)
        known, unknown, seen = table[:, : self._known], missing[:, : self._known], weights[..., None] > 0
        highest = torch.where(seen & ~unknown, known, -torch.inf).amax(dim=1)
        lowest = torch.where(seen & ~unknown, known, torch.inf).amin(dim=1)
        # a column with missing values varies, as published
        self.varied = (highest > lowest) | (seen & unknown).any(dim=1)
        present = weights[..., None] * ~unknown
        # the deviation of a single value is not a number: as published, nothing of such a column is read
        self._missing = missing | (present.sum(dim=1, keepdim=True) <= 1)
        self._present = present
        # from the lowest value on: a constant column is then 0 exactly, and has no deviation from rounding
        filled = torch.where(missing, 0, table - torch.where(lowest.isfinite(), lowest, 0)[:, None])
        mean, deviation = self._moments(filled, present)
        self.standard = ((filled - mean) / (deviation + _SMALL)).clamp(-_LARGEST, _LARGEST)

    def member(self, power: bool) -> Tensor:
        """The columns (b, n + t, f) for members of the ensemble with or without the power transform; missing as 0."""
        return torch.where(self._missing, 0, self._without_outliers(self._powers() if power else self.standard))

    def _powers(self) -> Tensor:
        known = self.standard[:, : self._known]
        y = transformed(self.standard, best_exponent(known, self._present))
        mean, deviation = self._moments(y, self._present, unbiased=False)
        return torch.where(deviation > 0, (y - mean) / torch.where(deviation > 0, deviation, 1), self.standard)

    def _without_outliers(self, x: Tensor) -> Tensor:
        """Beyond four standard deviations, those of the values within four, a value grows like its logarithm."""
        mean, deviation = self._moments(x, self._present)
        within = (x[:, : self._known] - mean).abs() <= _SIGMAS * deviation
        mean, deviation = self._moments(x, self._present * within)
        grown = x.abs().log1p()
        x = torch.maximum(mean - _SIGMAS * deviation - grown, x)
        return torch.minimum(mean + _SIGMAS * deviation + grown, x)

    def _moments(self, x: Tensor, weights: Tensor, *, unbiased: bool = True) -> tuple[Tensor, Tensor]:
        """Means and standard deviations (b, 1, f) of the labelled rows."""
        total = weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        mean = (weights * x[:, : self._known]).sum(dim=1, keepdim=True) / total
        squares = (weights * (x[:, : self._known] - mean) ** 2).sum(dim=1, keepdim=True)
        # total - 1 from two rows on; below, it may not come near 0 or turn negative
        variance = squares / (torch.maximum(total - 1, total / 2) if unbiased else total)
        # no infinite derivative of the root at 0
        return mean, torch.where(variance > 0, torch.where(variance > 0, variance, 1).sqrt(), 0)


def arranged(columns: Tensor, varied: Tensor, shift: int, places: int) -> Tensor:
    """Columns (b, N, f) that vary, first to last, rotated by `shift`, scaled by their number, zeros after them.

    Each prompt of the batch has its own columns that vary, as its rows of positive weight decide.
    """
    count = varied.sum(dim=1, keepdim=True)
    at = torch.arange(places, device=columns.device).expand(len(varied), -1)
    order = torch.argsort((~varied).to(torch.uint8), dim=1, stable=True)
    # a shift past the last column leaves them as they are, as published
    rotated = torch.where(count > shift, (at + shift) % count.clamp_min(1), at)
    order = torch.gather(order, 1, rotated.clamp_max(varied.shape[1] - 1))
    order = torch.where(at < count, order, varied.shape[1])
    padded = torch.nn.functional.pad(columns, (0, 1)).expand(len(varied), -1, -1)
    found = torch.gather(padded, 2, order[:, None].expand(-1, columns.shape[1], -1))
    return found * (places / count.clamp_min(1))[..., None]
