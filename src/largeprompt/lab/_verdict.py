r"""Where a run ended, by one rule on its whole recorded curve.

- The *level* of a run is the median of its risks over the last quarter of its steps, of three records at least where
  the second half has them: one record that is off does not count.
- A run *rests* if its level is within a tenth of its excess, or within the noise of its records, of the median around
  the half of its steps; if it was never lower than that before; if its last record is no lower than that either; and if
  it was long enough: twenty times the slowest time constant of the task, $1/\lambda_{\min}(\Sigma\Omega)$ (with
  $\Sigma_q$ where that is slower), in units of rate times steps. That is 100 in the isotropic experiments, where the
  runs that find the optimum have found it by then.
- The *tolerance* is the lesser of 1 % of the risk of predicting 0 and half of what the lowest spurious minimum of
  linear attention costs (`predicted_excess`; at least 0.01 % of the risk of predicting 0, below which it costs nothing
  that matters). The noise of SGD may widen it, five times that of the records, up to the 1 %; and it is at least five
  standard errors of the risk.

Then a run is, the first that holds:

- *diverged*: its parameters went beyond all bounds.
- *converged*: its level is within the tolerance of the least risk that layers of its shape have, and five standard
  errors, of the risk and of the noise, do not reach a spurious minimum from there.
- *unfinished*: it does not rest. It is falling, it is rising, or it was too short to tell.
- *trapped*: it rests above the tolerance of a risk that layers of its shape are known to attain. Saddles that hold a
  run for longer than it lasts are counted here: the risk alone does not tell them from minima, more steps do.
- *settled*: it rests, and nobody knows whether that is the optimum. That of several softmax heads, or of one that is
  narrower than the task, is not known (`yardstick`); or the errors reach from the optimum to a spurious minimum.
"""

import math
from collections.abc import Sequence

import numpy as np

from ._yardstick import STANDARD_ERRORS, Yardstick

VERDICTS = ("converged", "settled", "trapped", "unfinished", "diverged")
SHARE_OF_EXCESS = 0.1
_SIGMAS = 3.0  # of the noise of records, that a change may have and count as none


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
    level, noise = _level(at, curve), _noise(curve[at > at[-1] / 2])
    excess, tolerance = level - least, yardstick.tolerance(stderr, noise)
    if excess <= tolerance and excess + STANDARD_ERRORS * math.hypot(stderr, noise) < yardstick.apart:
        return "converged"
    little = max(SHARE_OF_EXCESS * excess, _SIGMAS * noise)
    if time < yardstick.long_enough or not _rests(at, curve, level, little):
        return "unfinished"
    return "trapped" if level - attainable > tolerance else "settled"


def _level(steps: np.ndarray, risk: np.ndarray) -> float:
    """The median over the last quarter of the steps, of three records at least where the second half has them."""
    late, last_three = steps > 0.75 * steps[-1], np.arange(len(steps)) >= len(steps) - 3
    last = np.arange(len(steps)) == len(steps) - 1
    return float(np.median(risk[late | (last_three & (steps > steps[-1] / 2)) | last]))


def _rests(steps: np.ndarray, risk: np.ndarray, level: float, little: float) -> bool:
    """Whether a run has come to rest at its level, changes up to `little` counting as none."""
    share = steps / max(steps[-1], 1.0)
    middle = risk[(share > 3 / 8) & (share <= 5 / 8)]
    if len(middle) == 0:
        middle = risk[(share > 1 / 4) & (share <= 3 / 4)]
    if len(middle) == 0:  # nothing tells where it was before
        return False
    windows = np.lib.stride_tricks.sliding_window_view(risk, min(3, len(risk)))
    lowest = float(np.min(np.median(windows, axis=1)))
    return abs(float(np.median(middle)) - level) <= little and lowest >= level - little and risk[-1] >= level - little


def _noise(risk: np.ndarray) -> float:
    """The standard deviation of records about a smooth curve, from what each is off the middle of its neighbours."""
    if len(risk) < 3:
        return 0.0
    off = risk[1:-1] - (risk[:-2] + risk[2:]) / 2
    return float(np.median(np.abs(off)) / (0.6745 * math.sqrt(1.5)))


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share, by default at 95 %; of nothing, anything."""
    if total == 0:
        return 0.0, 1.0
    share, weight = count / total, z * z / total
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return (0.0 if count == 0 else centre - half), (1.0 if count == total else centre + half)
