r"""Where a run ended, by one rule on its whole recorded curve.

- The *level* of a run is the median of its risks over the last quarter of its steps, of three records at least where
  the second half has them: one record that is off does not count. Its *error* is five times the standard error of the
  last risk and the scatter of the records, together.
- The *tolerance* is the lesser of 1 % of the risk of predicting 0 and half of what the lowest spurious minimum of
  linear attention costs (`predicted_excess`), but at least 0.1 % of the risk of predicting 0: a spurious minimum that
  is as near is as good. Scatter widens it, up to the 1 %, and five standard errors do.
- A run *rests* if it was long enough, and if its level is that of the middle of its course, has not been lower before
  and is no lower at the last record, to within a tenth of its excess or three times the scatter. Long enough is twenty
  times the slowest time constant of the task, $1/\lambda_{\min}(\Sigma\Omega)$, in units of rate times steps, and
  longer where queries are smaller than tokens: 100 in the isotropic experiments, where the runs that find the optimum
  have found it by then.

Then a run is, the first that holds:

- *diverged*: its parameters went beyond all bounds.
- *converged*: its level is within the tolerance of the least risk that layers of its shape have, and its error does not
  reach a spurious minimum from there.
- *unfinished*: it does not rest. It is falling, it is rising, or it was too short to say.
- *trapped*: it rests above a risk that layers of its shape are known to attain, by more than the tolerance and its
  error. Saddles that hold a run for longer than it lasts are counted here: the risk alone does not distinguish them
  from minima, more steps do.
- *settled*: it rests, and whether at the optimum is not known. That of several softmax heads that are narrower than the
  task is not known (`yardstick`); or the error is too large to say.
"""

import math
from collections.abc import Sequence

import numpy as np

from ._yardstick import STANDARD_ERRORS, Yardstick

VERDICTS = ("converged", "settled", "trapped", "unfinished", "diverged")
SHARE_OF_EXCESS = 0.1
_SIGMAS = 3.0  # of the scatter, within which a change counts as none
_LOWER_HALF = 0.3246  # the mean size of a standard normal number in the lower half of sizes


def verdict(
    steps: Sequence[float] | np.ndarray,
    risk: Sequence[float] | np.ndarray,
    stderr: float,
    yardstick: Yardstick,
    *,
    diverged: int | None = None,
    time: float = math.inf,
) -> str:
    """Where a run with these recorded risks ended; `stderr` is that of the last, `time` is rate times steps."""
    at, curve = np.asarray(steps, float), np.asarray(risk, float)
    if diverged is not None or not math.isfinite(curve[-1]):
        return "diverged"
    at, curve = at[np.isfinite(curve)], curve[np.isfinite(curve)]
    least, attainable = yardstick.bounds
    level, scatter = float(np.median(_last_part(at, curve))), _scatter(curve[at > 3 / 8 * at[-1]])
    excess, tolerance = level - least, yardstick.tolerance(stderr, scatter)
    error = STANDARD_ERRORS * math.hypot(stderr, scatter)
    if excess <= tolerance and excess + error < yardstick.apart:
        return "converged"
    little = max(SHARE_OF_EXCESS * max(excess, yardstick.tolerance(0.0)), _SIGMAS * scatter)
    if time < yardstick.long_enough or not _rests(at, curve, level, little):
        return "unfinished"
    return "trapped" if level - attainable > max(tolerance, error) else "settled"


def _last_part(steps: np.ndarray, risk: np.ndarray) -> np.ndarray:
    """The records of the last quarter of the steps, three at least where the second half has them, or the last."""
    from_end = np.arange(len(steps))[::-1]
    return risk[(steps > 0.75 * steps[-1]) | ((from_end < 3) & (steps > steps[-1] / 2)) | (from_end == 0)]


def _rests(steps: np.ndarray, risk: np.ndarray, level: float, little: float) -> bool:
    """Whether a run has come to rest at its level, changes up to `little` counting as none."""
    share = steps / max(steps[-1], 1.0)
    middle = risk[(share > 3 / 8) & (share <= 5 / 8)]
    if len(middle) == 0:
        middle = risk[(share > 1 / 4) & (share <= 3 / 4)]
    if len(middle) == 0:  # where it was before is not known
        return False
    windows = np.lib.stride_tricks.sliding_window_view(risk, min(3, len(risk)))
    lowest = float(np.min(np.median(windows, axis=1)))
    return abs(float(np.median(middle)) - level) <= little and lowest >= level - little and risk[-1] >= level - little


def _scatter(risk: np.ndarray) -> float:
    """The standard deviation of records about a smooth curve, from what each is off the middle of its neighbours.

    Only the lower half of these counts: one record that is off, or one jump, is no scatter.
    """
    if len(risk) < 4:
        return 0.0
    off = np.sort(np.abs(risk[1:-1] - (risk[:-2] + risk[2:]) / 2))
    return float(np.mean(off[: len(off) // 2])) / (_LOWER_HALF * math.sqrt(1.5))
