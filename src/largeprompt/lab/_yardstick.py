r"""What the risk of a run is compared with: the least risk of layers of its shape, or what is known of it.

With $\hat s = \frac1L\sum_l y_lx_l$, the odd part under $(w,\eta)\to-(w,\eta)$ of the output of linear heads is
$\hat s\cdot Mx$, $M = \sum_h(r_hA_h + p_hc_h^\top)$, a matrix of rank at most `heads` times `head_dim`; the target is
odd, and the even part only adds to the risk. So the least risk is that of the best M of this rank
(`best_reading_of_rank`), which p = c = 0 attains.

Of softmax heads that are wide enough the least risk is that of `optimal_heads`, for four heads where there are more:
more lower it by less than 0.2 % wherever we looked. Of one narrower head it is that of `optimal_heads` where
covariances have a common basis, and else at least that of a wide one. Several narrower heads with small scores, large
values and $\sum_hv_h = 0$ come as near as wanted to linear heads that read the centred second moment of the prompt,
that is, to linear attention at length L - 1. At L = inf softmax and linear heads are the same, and at L = 1 softmax
heads do not see the query.
"""

import math
import threading
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from largeprompt._precision import cached
from largeprompt.attention import SoftmaxAttention
from largeprompt.icl import (
    LinearRegression,
    bayes_risk,
    best_reading_of_rank,
    optimal_heads,
    optimal_linear,
    optimal_softmax,
    predicted_excess,
    risk,
    root,
)

from ._run import PAIR, Run

SHARE_OF_ZERO = 0.01
LITTLE = 1e-3  # of the risk of predicting 0: a spurious minimum that costs twice that or less is as good as the optimum
STANDARD_ERRORS = 5.0
TIME_CONSTANTS = 20.0
_ROUNDING = 1e-12
_MOST = 4  # heads beyond which more hardly help
_searching = threading.Lock()  # runs side by side share one search for an optimum


class Yardstick(NamedTuple):
    """What a run is compared with: the optimum, the risk of predicting 0, the excess of spurious minima, a length.

    Where the optimum is not known (NaN), no layer is better than `floor`, and some come as near as wanted to
    `attainable`.
    """

    optimum: float
    zero: float
    spurious: float = 0.0
    long_enough: float = 0.0
    floor: float = math.nan
    attainable: float = math.nan

    @property
    def bounds(self) -> tuple[float, float]:
        """What the optimum lies between."""
        return (self.floor, self.attainable) if math.isnan(self.optimum) else (self.optimum, self.optimum)

    def tolerance(self, stderr: float, scatter: float = 0.0) -> float:
        """The excess up to which a run counts as converged, whose records have that standard error and that scatter."""
        share = SHARE_OF_ZERO * self.zero
        half = self.spurious / 2 if self._is_material else LITTLE * self.zero if self.spurious > 0 else share
        return max(STANDARD_ERRORS * stderr, min(share, max(half, STANDARD_ERRORS * scatter)))

    @property
    def apart(self) -> float:
        """The excess to be distinguished from 0: of a spurious minimum, or ten per cent of zero where none matters."""
        return self.spurious if self._is_material else 10 * SHARE_OF_ZERO * self.zero

    @property
    def _is_material(self) -> bool:
        return self.spurious / 2 > LITTLE * self.zero


def yardstick(run: Run, member: str) -> Yardstick:
    """What is known of the least risk of layers of the run's shape."""
    what = {name: getattr(run, name) for name in ("L", "d", "sigma", "noise", "omega", "query_sigma")}
    width = run.dim if run.parameters == "UV" or run.head_dim is None else run.head_dim
    with _searching:
        return _yardstick(Run(**what), member, run.heads, width)


def bayes(run: Run) -> float:
    """The Bayes risk of the run's task at its length."""
    return float(bayes_risk(run.task(), run.L).value)


def least_linear_risk(task: LinearRegression, L: int | float, rank: int) -> float:
    """The least risk of linear heads whose widths add up to `rank`."""
    found = best_reading_of_rank(task, L, rank)
    return float(optimal_linear(task, L).risk.value) if rank >= found.needed else found.risk


def _root(cov: np.ndarray) -> np.ndarray:
    return np.asarray(root(cov), float)


@cached(maxsize=1024)
def _yardstick(run: Run, member: str, heads: int, width: int) -> Yardstick:
    task, L, d = run.task(), run.L, run.task().d
    zero = (float(np.sum(np.asarray(task.query_Sigma) * np.asarray(task.Omega))) + float(task.noise)) / 2
    needed = best_reading_of_rank(task, L, d).needed
    try:
        spurious = float(predicted_excess(task, L))
    except ValueError:  # a singular covariance: then it is not known
        spurious = 0.0
    given = zero, spurious, _long_enough(task)
    if member not in PAIR:  # nothing is known of other kinds, but that they can predict 0
        return Yardstick(math.nan, zero, 0.0, _long_enough(task), floor=bayes(run), attainable=zero)
    if member == "linear" or math.inf == L:
        return Yardstick(least_linear_risk(task, L, min(d, heads * width)), *given)
    if L == 1:
        return Yardstick(zero, *given)
    if width >= needed:
        return Yardstick(float(optimal_heads(task, L, min(heads, _MOST)).risk.value), *given)
    if heads > 1:
        attainable = least_linear_risk(task, L - 1, min(d, heads * width))
        return Yardstick(math.nan, *given, floor=bayes(run), attainable=attainable)
    try:
        return Yardstick(float(optimal_heads(task, L, 1, head_dim=width).risk.value), *given)
    except ValueError:  # covariances without a common basis
        floor = float(optimal_softmax(task, L).risk.value)
        return Yardstick(math.nan, *given, floor=floor, attainable=_narrow_softmax_risk(task, L, width))


def _narrow_softmax_risk(task: LinearRegression, L: int | float, width: int) -> float:
    """The risk of a good softmax layer of that rank: the best one of any rank, cut off and scaled again."""
    d = task.d
    A = np.asarray(optimal_softmax(task, L).attention.U, float)[:d, :d]
    half, of_query = _root(np.asarray(task.Sigma)), _root(np.asarray(task.query_Sigma))
    _, _, turned = np.linalg.svd(half @ A @ of_query)
    cut = turned[:width].T @ turned[:width]
    A = A @ of_query @ cut @ np.linalg.pinv(of_query, rcond=math.sqrt(_ROUNDING), hermitian=True)

    def risk_at(log_scale: float, r: float) -> float:
        U, V = np.zeros((d + 1, d + 1)), np.zeros((1, d + 1))
        U[:d, :d], V[0, d] = math.exp(log_scale) * A, r
        return float(risk(SoftmaxAttention(U, V), task, L).value)

    def least(log_scale: float) -> float:  # the risk is quadratic in r
        ahead, behind, still = (risk_at(log_scale, r) for r in (1.0, -1.0, 0.0))
        curvature = ahead + behind - 2 * still
        return still - (ahead - behind) ** 2 / (8 * curvature) if curvature > 0 else still

    options = {"bounds": (-0.7, 0.7), "method": "bounded", "options": {"xatol": 0.02}}
    return float(minimize_scalar(least, **options).fun)


def _long_enough(task: LinearRegression) -> float:
    """Twenty times the task's slowest time constant, longer where queries are smaller than tokens: so are gradients."""
    product = np.asarray(task.Sigma) @ np.asarray(task.Omega)
    paces = np.linalg.eigvals(product).real
    paces = paces[paces > _ROUNDING * max(paces.max(), 0.0)]
    size = float(np.sum(np.asarray(task.query_Sigma) * np.asarray(task.Omega)))
    if len(paces) == 0 or size <= 0:
        return math.inf
    return TIME_CONSTANTS / float(paces.min()) * max(1.0, float(np.trace(product)) / size)
