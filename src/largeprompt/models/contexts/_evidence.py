r"""Linear coefficients from ablations and gradients together, each trusted as far as the data say.

With $x_i=\pm1$ for a sentence that is there or not, values at random subsets are modelled as

$$y = c + \sum_i b_i x_i + u(x) + e,\qquad b_i = \sum_k\kappa_k m_{ki} + \delta_i,$$

where $m_k$ are what gradients predict, $\kappa_k$ their scales (around 1), $\delta_i$ what they miss, $u$ effects of
pairs of sentences and $e$ noise, all Gaussian. Three variances are unknown: of $\delta$, of $u$ and of $e$. They are
those of the largest evidence, which integrates over all else. Where values are few, $b$ stays at $\sum_k m_k$; where
they are many, it is the regression; where gradients predict nothing, the variance of $\delta$ is large and they are
ignored.
A few sentences may be missed by far more than the others (Student's law for $\delta$, by reweighting).
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.stats import rankdata

_SCALE_ERROR = 0.7  # standard deviation of κ
_FREEDOM = 3.0  # degrees of freedom of Student's law
_REWEIGHTED = 3  # times
_CONSTANT = 100.0  # variance of c over that of the values
_STARTS = (0.2, 0.5, 0.2)  # shares of the variance of values: noise, what gradients miss, pairs
_WIDTH = 2.5  # standard deviation of the logarithm of a variance, around its start


@dataclasses.dataclass(frozen=True)
class Fit:
    """Coefficients of sentences in nats, from absent to there, with standard errors; `fit` is the rank correlation of
    predictions with values on parts of the data that the coefficients have not seen, NaN below ten values.
    """

    coefficients: Float[np.ndarray, " g"]
    stderr: Float[np.ndarray, " g"]
    fit: float


def combined(
    subsets: Bool[np.ndarray, "n g"],
    values: Float[np.ndarray, " n"],
    expected: Float[np.ndarray, "k g"] | None = None,
) -> Fit:
    """The coefficients that values at subsets and parts of expected coefficients give together; each may be absent."""
    problem = _Problem.of(subsets, values, expected)
    if not problem.spread:
        return Fit(2 * problem.expected.sum(0), np.full(subsets.shape[1], np.nan), float("nan"))
    logs = problem.starts
    for _ in range(_REWEIGHTED):
        logs = problem.best(logs)
        delta, variance = problem.missed(logs)
        problem = problem.reweighted(delta**2 + variance, np.exp(logs[1]))
    found, variance = problem.coefficients(logs)
    return Fit(2 * found, 2 * np.sqrt(variance), problem.validated(logs))


@dataclasses.dataclass(frozen=True)
class _Problem:
    signs: np.ndarray  # (n, g), ±1
    values: np.ndarray  # (n,), of mean 0
    expected: np.ndarray  # (k, g), parts of b
    share: np.ndarray  # (g,), of the variance of δ, for each sentence

    @classmethod
    def of(cls, subsets: np.ndarray, values: np.ndarray, expected: np.ndarray | None) -> "_Problem":
        groups = subsets.shape[1]
        return cls(
            2.0 * subsets - 1,
            values - values.mean() if len(values) else values,
            np.zeros((1, groups)) if expected is None else expected / 2,
            np.ones(groups),
        )

    @property
    def spread(self) -> float:
        """The variance of the values."""
        return float(np.var(self.values)) if len(self.values) > 1 else 0.0

    @property
    def starts(self) -> np.ndarray:
        """Logarithms of the variances at first: of e, of δ, of u."""
        return np.log(np.array(_STARTS) * self.spread / [1, self.signs.shape[1], 1])

    @property
    def _left(self) -> np.ndarray:
        """What the expected coefficients do not explain."""
        return self.values - self.signs @ self.expected.sum(0)

    def _kernels(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What the three variances multiply, and what does not depend on them."""
        n, groups = self.signs.shape
        pairs = ((self.signs @ self.signs.T) ** 2 - groups) / max(groups * (groups - 1), 1)
        along = self.signs @ self.expected.T
        fixed = _CONSTANT * self.spread * np.ones((n, n)) + _SCALE_ERROR**2 * along @ along.T
        fixed += 1e-9 * self.spread * np.eye(n)
        return np.eye(n), (self.signs * self.share) @ self.signs.T, pairs, fixed

    def best(self, logs: np.ndarray) -> np.ndarray:
        """The variances of the largest evidence, from those given on."""
        kernels, starts, left = self._kernels(), self.starts, self._left

        def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
            parts = [np.exp(each) * kernel for each, kernel in zip(at, kernels, strict=False)]
            factor = cho_factor(sum(parts) + kernels[3], lower=True)
            solved, inverse = cho_solve(factor, left), cho_solve(factor, np.eye(len(left)))
            slope = [0.5 * (np.sum(inverse * part) - solved @ part @ solved) for part in parts]
            away = (at - starts) / _WIDTH
            value = 0.5 * left @ solved + np.log(np.diag(factor[0])).sum() + 0.5 * away @ away
            return float(value), np.array(slope) + away / _WIDTH

        bounds = [(start - 12, start + 6) for start in starts]
        return minimize(loss, logs, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 50}).x

    def missed(self, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What gradients miss: δ and its variance, given the values."""
        prior = np.exp(logs[1]) * self.share
        factor, solved = self._solved(logs)
        reach = prior[:, None] * self.signs.T
        return reach @ solved, prior - np.einsum("in,ni->i", reach, cho_solve(factor, reach.T))

    def reweighted(self, square: np.ndarray, variance: float) -> "_Problem":
        """Student's law: a sentence that was missed by much may be missed by much."""
        share = (_FREEDOM + square / variance) / (_FREEDOM + 1)
        return dataclasses.replace(self, share=share / np.exp(np.mean(np.log(share))))

    def coefficients(self, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The coefficients b and their variances, given the values."""
        factor, solved = self._solved(logs)
        prior = np.exp(logs[1]) * self.share
        reach = prior[:, None] * self.signs.T + _SCALE_ERROR**2 * self.expected.T @ (self.expected @ self.signs.T)
        total = prior + _SCALE_ERROR**2 * (self.expected**2).sum(0)
        variance = total - np.einsum("in,ni->i", reach, cho_solve(factor, reach.T))
        return self.expected.sum(0) + reach @ solved, np.maximum(variance, 0)

    def _solved(self, logs: np.ndarray) -> tuple[tuple[np.ndarray, bool], np.ndarray]:
        kernels = self._kernels()
        parts = [np.exp(each) * kernel for each, kernel in zip(logs, kernels, strict=False)]
        factor = cho_factor(sum(parts) + kernels[3], lower=True)
        return factor, cho_solve(factor, self._left)  # pyrefly: ignore[bad-return]

    def validated(self, logs: np.ndarray, folds: int = 10) -> float:
        """The rank correlation of values with what the coefficients from other values predict, variances as found."""
        n = len(self.values)
        if n < folds:
            return float("nan")
        part, predicted = np.arange(n) % folds, np.zeros(n)
        for k in range(folds):
            inside, outside = part != k, part == k
            mean = self.values[inside].mean()
            others = dataclasses.replace(self, signs=self.signs[inside], values=self.values[inside] - mean)
            predicted[outside] = self.signs[outside] @ others.coefficients(logs)[0]
        return rank_correlation(predicted, self.values)


def rank_correlation(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"]) -> float:
    """The correlation of ranks (Spearman's), 0 where all are equal."""
    if not (np.ptp(first) and np.ptp(second)):
        return 0.0
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])
