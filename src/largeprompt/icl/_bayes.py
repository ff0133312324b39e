import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers, VectorLike
from largeprompt.measures import AbstractMeasure, Gaussian

from ._estimate import Estimate, exactly
from ._regression import LinearRegression, RegressionOn, root
from ._spectrum import factor, refuse_a_traced_task, spectrum
from ._task import WithLoss, as_task
from ._wishart import bartlett, effective_length, resolvent_trace

Regression = LinearRegression | RegressionOn
LONGEST_DRAWN = 10**9  # hours of drawing
EXACT_RANK = 100  # the exact mean costs a second at this rank and grows as its fourth power; past it, prompts are drawn
LONG = 10**15  # from here on the deterministic equivalent is exact to rounding, and the integrals are not
TOKENS = 2**16  # covariates drawn at a time, always as many: JAX compiles the sampler again for every other number


def bayes_risk(
    task: Regression, L: int | float, key: PRNGKeyArray | None = None, *, rtol: float = 1e-4, max_draws: int = 2**18
) -> Estimate:
    r"""The least risk of any predictor that reads `L` pairs, that of the posterior mean (`bayes_prediction`).

    $$R = \tfrac k2\big(s^2 + E\,\mathrm{tr}\,S C_L\big), \qquad C_L = (\Omega^{-1} + X^\top X/s^2)^{-1}, \quad
      S = E\,x_q x_q^\top ,$$

    for `L` from 0 to `math.inf`, singular matrices and no noise included. With centred Gaussian covariates it is exact
    to rounding while $\Sigma\Omega$ has rank 100 at most. Otherwise prompts are drawn, from `key` or by default
    `jax.random.key(0)`, until the standard error is `rtol` of the excess over $ks^2/2$ or `max_draws` are spent.
    Where the law is not Gaussian and the prompt long, two orders in $1/L$ serve, the next counted as standard error.
    """
    task, L = _known_regression(task), checks.prompt_length(L, at_least=0)
    rtol = float(checks.number("rtol", rtol, at_least=0))
    max_draws = checks.count("max_draws", max_draws, at_least=2)
    stream = checks.key_or_default(key)
    problem, covariates = _reduced(task), _law_unless_gaussian(task)
    n = len(problem.Lambda)

    def risk(remaining: float, method: str = "exact", stderr: float = 0.0) -> Estimate:
        value = task.targets / 2 * (problem.noise + problem.unidentified + remaining)
        return Estimate(jnp.asarray(value, float), jnp.asarray(task.targets / 2 * stderr, float), method)

    def precise(learned: float, stderr: float) -> bool:
        return stderr <= rtol * (problem.unidentified + learned)

    if L == 0 or n == 0:
        return risk(np.trace(problem.K))
    if math.inf == L or (covariates is None and problem.noise == 0 and n <= L):
        return risk(0.0)
    L = int(L)
    if covariates is None:
        if n <= EXACT_RANK or L > LONG:
            return risk(_learned_exactly(problem, L))
        grams = _wishart_grams(problem, L)
    else:
        learned, stderr = _expansion(problem, float(L), covariates, stream)
        # without noise both orders vanish at every L and say nothing
        if problem.noise > 0 and precise(learned, stderr):
            return risk(learned, "expansion in 1/L", stderr)
        if L > LONGEST_DRAWN:
            raise ValueError(
                f"L is {L}; for covariates that are not Gaussian such prompts are drawn, up to L = {LONGEST_DRAWN}"
            )
        grams = _prompt_grams(problem, L, covariates)
    learned, stderr = _sampled(problem, L, grams, stream, precise, max_draws)
    return risk(learned, "Monte Carlo", stderr)


def deterministic_equivalent(task: Regression, L: int | float) -> Estimate:
    r"""The Bayes risk with $X^\top X$ replaced by $t\,\Sigma$, with $t = L - \sum_i\lambda_it/(s^2+\lambda_it)$.

    $\lambda_i$ are the eigenvalues of $\Sigma\Omega$. A crude value, exact as $d$ and $L$ grow together: for the five
    covariates of the experiments it is up to 9 % low near $L = d$ and 0.2 % low at $L = 50$. For covariates that are
    neither Gaussian nor independent no error is known.
    """
    task, L = _known_regression(task), checks.prompt_length(L, at_least=0)
    problem = _reduced(task)
    Lambda = problem.Lambda
    if L == 0:
        learned = np.trace(problem.K)
    elif math.inf == L or len(Lambda) == 0 or (problem.noise == 0 and len(Lambda) <= L):
        learned = 0.0
    else:
        learned = _equivalent(problem, int(L))
    return exactly(task.targets / 2 * (problem.noise + problem.unidentified + learned), "deterministic equivalent")


class Reduced(NamedTuple):
    r"""The problem in the coordinates $z = P^\top\Omega^{1/2}x$ that can be learned; $E\,zz^\top=\Lambda$ is diagonal.

    $$\mathrm{tr}\,S C_L = \text{unidentified} + \mathrm{tr}\,K\,(I + Z^\top Z/s^2)^{-1}, \qquad
      K = P^\top\Omega^{1/2} S\,\Omega^{1/2} P .$$
    """

    Lambda: Float[np.ndarray, " n"]
    K: Float[np.ndarray, "n n"]
    projection: Float[np.ndarray, "n d"]
    unidentified: float
    noise: float

    @property
    def D(self) -> Float[np.ndarray, " n"]:
        r"""$s^2/\lambda_i$, where no noise stands for noise far below rounding."""
        # the second floor keeps e^{log D - DEPTH} above underflow
        least = (
            max(1e-24 * self.Lambda.min(), 1e-60 * self.Lambda.max()) if self.noise == 0 else 1e-60 * self.Lambda.max()
        )
        return max(self.noise, least) / self.Lambda


def _reduced(task: Regression) -> Reduced:
    r"""Drop what no prompt can teach: the directions $\Omega$ or $\Sigma$ leave out."""
    if isinstance(task, LinearRegression):
        Sigma, S = task.Sigma, task.query_Sigma
    else:
        Sigma, S = task.covariates.second_moment(), task.queries.second_moment()
    refuse_a_traced_task((Sigma, S, task.Omega, task.noise), "the Bayes risk")
    found = spectrum(Sigma, task.Omega)
    n, modes = found.rank, found.modes
    queried = np.sum((factor(S).F.T @ modes[:, n:]) ** 2)
    K = modes[:, :n].T @ np.asarray(S, float) @ modes[:, :n]
    return Reduced(found.values[:n], K, modes[:, :n].T, float(queried), float(task.noise))


def _learned_exactly(problem: Reduced, L: int) -> float:
    r"""$E\,\mathrm{tr}\,K(I+Z^\top Z/s^2)^{-1}$ for Gaussian $z$."""
    # z_i and -z_i have one law, so the mean of the inverse is diagonal and only the diagonal of K counts
    Lambda, K, n = problem.Lambda, np.diag(problem.K), len(problem.Lambda)
    if problem.noise == 0 and np.ptp(Lambda) <= 1e-12 * Lambda.max():
        return float(np.sum(K)) * (n - L) / n
    if L > LONG:
        return _equivalent(problem, L)
    return resolvent_trace(K * problem.D, problem.D, L)


def _equivalent(problem: Reduced, L: int) -> float:
    r"""The same with $X^\top X$ replaced by its deterministic equivalent: right to a few $n/L$ of its value."""
    K, D = np.diag(problem.K), problem.D
    return float(np.sum(K * D / (effective_length(D, L) + D)))


def _expansion(problem: Reduced, L: float, covariates: AbstractMeasure, key: PRNGKeyArray) -> tuple[float, float]:
    r"""Two orders in $1/L$ of the same mean for any law of $z$, with $R = (s^2+L\Lambda)^{-1}$, and their error:

    $$s^2\,\mathrm{tr}\,KR + s^2L\,\big(E\,(z^\top Rz)(z^\top RKRz) - \mathrm{tr}\,KR\Lambda R\Lambda R\big).$$

    The error is that of the mean, which is sampled, and four times the next order, guessed from the ratio of these two.
    """
    Lambda, K, noise = problem.Lambda, problem.K, problem.noise
    R = 1 / (noise + L * Lambda)
    z = np.asarray(covariates.sample(key, TOKENS), float) @ problem.projection.T
    fourth = np.sum(z**2 * R, 1) * np.sum((z * R) @ K * (z * R), 1)
    first = noise * np.sum(np.diag(K) * R)
    second = noise * L * (fourth.mean() - np.sum(np.diag(K) * R * (Lambda * R) ** 2))
    truncation = 4 * second**2 / first if first > 0 else 0.0
    return float(first + second), float(math.hypot(noise * L * fourth.std() / math.sqrt(len(fourth)), truncation))


Grams = Callable[[PRNGKeyArray], Float[np.ndarray, "b n n"]]


def _wishart_grams(problem: Reduced, L: int) -> Grams:
    r"""$Z^\top Z$ of Gaussian prompts."""
    n = len(problem.Lambda)

    def grams(key: PRNGKeyArray) -> Float[np.ndarray, "b n n"]:
        T = np.sqrt(problem.Lambda)[:, None] * bartlett(key, n, L, max(1, TOKENS // n**2))
        return T @ T.transpose(0, 2, 1)

    return grams


def _prompt_grams(problem: Reduced, L: int, covariates: AbstractMeasure) -> Grams:
    r"""$Z^\top Z$ of prompts of any law, whose tokens are drawn and forgotten in pieces."""
    prompts = max(1, TOKENS // L)

    def grams(key: PRNGKeyArray) -> Float[np.ndarray, "b n n"]:
        n = len(problem.Lambda)
        total = np.zeros((prompts, n, n))
        for start in range(0, L, TOKENS):
            piece = min(L - start, TOKENS)
            x = np.asarray(covariates.sample(jax.random.fold_in(key, start // TOKENS), TOKENS), float)
            z = (x[: prompts * piece] @ problem.projection.T).reshape(prompts, piece, n)
            total += z.transpose(0, 2, 1) @ z
        return total

    return grams


def _sampled(
    problem: Reduced,
    L: int,
    grams: Grams,
    key: PRNGKeyArray,
    precise: Callable[[float, float], bool],
    max_draws: int,
) -> tuple[float, float]:
    r"""The mean of $\mathrm{tr}\,K(I+Z^\top Z/s^2)^{-1}$ over prompts, in rounds that double, and its standard error.

    The control variate is its linear part in $Z^\top Z$ at the deterministic equivalent, whose mean is known.
    """
    r = problem.D / (effective_length(problem.D, L) + problem.D)
    linear = r[:, None] * problem.K * r
    mean = L * np.sum(np.diag(linear) * problem.Lambda)
    f = c = np.zeros(0)
    # enough that a rare kind of prompt shows before the error is believed, unless the prompts are very long
    goal = min(max(64, min(1024, 2**24 // L)), max_draws)
    while True:
        while len(f) < goal:
            key, now = jax.random.split(key)
            A = grams(now)[: max_draws - len(f)]
            f = np.append(f, _unlearned(problem, A))
            c = np.append(c, np.einsum("bij,ij->b", A, linear) - mean)
        centred = c - c.mean()
        spread = centred @ centred
        corrected = f - (centred @ f / spread if spread > 0 else 0.0) * c
        value, stderr = float(corrected.mean()), float(corrected.std(ddof=1) / math.sqrt(len(f)))
        if precise(value, stderr) or len(f) >= max_draws:
            return value, stderr
        goal = min(2 * len(f), max_draws)


def _unlearned(problem: Reduced, A: Float[np.ndarray, "b n n"]) -> Float[np.ndarray, " b"]:
    r"""$\mathrm{tr}\,K(I+A/s^2)^{-1}$, with no noise the trace of $K$ on the kernel of $A$."""
    values, vectors = np.linalg.eigh(A)
    rounding = 10 * A.shape[-1] * np.finfo(float).eps * values[:, -1:]
    values = np.where(values > rounding, values, 0.0)
    unlearned = np.where(values == 0, 1.0, problem.noise / (problem.noise + np.where(values == 0, 1.0, values)))
    return np.einsum("bia,ba->b", vectors * (problem.K @ vectors), unlearned)


def bayes_prediction(task: Regression, tokens: Numbers, x: VectorLike) -> Float[Array, " k"]:
    r"""The posterior mean $E[y_q\mid\text{prompt}, x_q=x] = \hat W x$."""
    task = _known_regression(task)
    return ridge_coefficients(task, tokens) @ checks.vector("x", x, task.d)


def ridge_coefficients(task: Regression, tokens: Numbers) -> Float[Array, "k d"]:
    r"""The posterior mean of $W$ given pairs: $\hat W^\top = (X^\top X + s^2\Omega^{-1})^{-1}X^\top Y$.

    With no noise, the interpolation of least norm $\mathrm{tr}\,W\Omega^{-1}W^\top$; with no pairs, 0.
    """
    task = _known_regression(task)
    if getattr(tokens, "shape", None) == (0, task.dim):
        return jnp.zeros((task.targets, task.d), task.Omega.dtype)
    tokens = checks.array("tokens", tokens, (None, task.dim))
    X, Y = tokens[:, : task.d], tokens[:, task.d :]
    prior = root(task.Omega)
    # singular values of X, not eigenvalues of XᵀX: with no noise the condition number would be squared
    left, values, right = jnp.linalg.svd(X @ prior, full_matrices=False)
    kept = values > 10 * max(X.shape) * jnp.finfo(values.dtype).eps * values[0]
    shrunk = jnp.where(kept, values / jnp.where(kept, values**2 + task.noise, 1), 0)
    return ((Y.T @ left) * shrunk) @ right @ prior


def _known_regression(task: object) -> Regression:
    """`task` itself, once its Bayes risk is known."""
    task = as_task(task)
    known = isinstance(task, LinearRegression | RegressionOn)
    if not known or type(task) not in (LinearRegression, RegressionOn):  # a subclass may draw or judge otherwise
        kind = "WithLoss(...)" if isinstance(task, WithLoss) else type(task).__name__
        raise ValueError(
            f"task is {kind}; the Bayes risk is known for LinearRegression and RegressionOn under squared error"
        )
    return task


def _law_unless_gaussian(task: Regression) -> AbstractMeasure | None:
    """The law of the covariates, or nothing where it is a centred Gaussian, of which the second moment says all."""
    if isinstance(task, LinearRegression):
        return None
    centred = isinstance(task.covariates, Gaussian) and not bool(jnp.any(task.covariates.mean()))
    return None if centred else task.covariates
