r"""Where a run ended, by one rule.

- *diverged*: its parameters went beyond all bounds.
- *converged*: its final risk is within a tolerance of the exact optimum of its attention. The tolerance is the lesser
  of 1 % of the risk of predicting 0 and half of what the lowest spurious minimum of linear attention costs
  (`predicted_excess`), but at least five standard errors of the final risk: so that the noise of SGD around the optimum
  counts as converged and no spurious minimum does.
- *unfinished*: above the tolerance, and either still falling (over the second half of its steps the risk fell by more
  than a tenth of what it is still above the optimum) or shorter than twenty times the task's slowest time constant,
  $1/\lambda_{\min}(\Sigma\Omega)$, in units of rate times steps: 100 in the isotropic experiments, where the runs that
  find the optimum have found it by then.
- *trapped*: above the tolerance, long enough, and still. Saddles that hold a run for longer than it lasts are counted
  here: the risk alone does not tell them from minima, more steps do.
"""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from largeprompt._precision import cached
from largeprompt.icl import bayes_risk, optimal_linear, optimal_softmax, predicted_excess

from ._run import Run

VERDICTS = ("converged", "trapped", "unfinished", "diverged")
SHARE_OF_ZERO = 0.01
SHARE_OF_EXCESS = 0.1
STANDARD_ERRORS = 5.0
TIME_CONSTANTS = 20.0
_searching = threading.Lock()  # runs side by side share one search for an optimum


class Yardstick(NamedTuple):
    """What a run is held against: the optimum, the risk of predicting 0, the excess of spurious minima, a length."""

    optimum: float
    zero: float
    spurious: float = 0.0
    long_enough: float = 0.0

    def tolerance(self, stderr: float) -> float:
        """The excess up to which a run counts as converged."""
        share = SHARE_OF_ZERO * self.zero
        return max(STANDARD_ERRORS * stderr, min(share, self.spurious / 2) if self.spurious > 0 else share)


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
    if diverged is not None or not math.isfinite(risk[-1]):
        return "diverged"
    excess = float(risk[-1]) - yardstick.optimum
    if excess <= yardstick.tolerance(stderr):
        return "converged"
    at_half = int(np.searchsorted(np.asarray(steps), steps[-1] / 2, side="right")) - 1
    fallen = float(risk[at_half] - risk[-1])
    still = fallen <= SHARE_OF_EXCESS * excess
    return "trapped" if still and time >= yardstick.long_enough and steps[-1] > 0 else "unfinished"


def yardstick(run: Run, member: str) -> Yardstick:
    """The exact optimum of one head of this attention on the run's task, and what goes with it."""
    what = {name: getattr(run, name) for name in ("L", "d", "sigma", "noise", "omega", "query_sigma")}
    with _searching:
        return _yardstick(Run(**what), member)


def bayes(run: Run) -> float:
    """The Bayes risk of the run's task at its length."""
    return float(bayes_risk(run.task(), run.L).value)


@cached(maxsize=1024)
def _yardstick(run: Run, member: str) -> Yardstick:
    task, L = run.task(), run.L
    optimum = (optimal_softmax if member == "softmax" else optimal_linear)(task, L).risk.value
    zero = (float(np.sum(np.asarray(task.query_Sigma) * np.asarray(task.Omega))) + float(task.noise)) / 2
    try:
        spurious = float(predicted_excess(task, L))
    except ValueError:  # a singular covariance: then it is not known
        spurious = 0.0
    pace = np.linalg.eigvals(np.asarray(task.Sigma) @ np.asarray(task.Omega)).real
    paces = [float(value) for value in pace if value > 1e-12 * max(pace.max(), 0)]
    return Yardstick(float(optimum), zero, spurious, TIME_CONSTANTS / min(paces) if paces else math.inf)


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share, by default at 95 %; of nothing, anything."""
    if total == 0:
        return 0.0, 1.0
    share, weight = count / total, z * z / total
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return (0.0 if count == 0 else centre - half), (1.0 if count == total else centre + half)
