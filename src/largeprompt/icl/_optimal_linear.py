import math
from typing import Generic, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import Numbers
from largeprompt.attention import Lengths, LinearAttention, Merged, length_or_law

from ._blocks import aligned_blocks, from_blocks
from ._estimate import Estimate, exactly
from ._regression import LinearRegression, as_regression, root
from ._risk._closed_form import gaussian_risk
from ._spectrum import factor, projection, refuse_a_doubtful_rank, refuse_a_traced_task, spectrum

_ROUNDING = 1e-12


class Optimum(AbstractShown, Generic[Merged]):
    """A layer and its risk."""

    attention: Merged
    risk: Estimate


def best_reading(task: LinearRegression, L: int | float | Lengths) -> Float[Array, "d d"]:
    r"""The matrix $W^\top$ for which $x\mapsto \hat s\,W^\top x$, $\hat s = \frac1L\sum y_lx_l^\top$, predicts best.

    The normal equations $E[\hat s^\top\hat s]\,W^\top\Sigma_q = E[\hat s^\top W]\,\Sigma_q$ read
    $\big[(1+\tfrac1L)\Sigma\Omega\Sigma + \tfrac{\tau_1+s^2}{L}\Sigma\big]W^\top\Sigma_q = \Sigma\Omega\Sigma_q$; of
    many solutions, the least. For a law of lengths $1/L$ is its mean over prompts that are not empty.
    """
    task, L = as_regression(task), length_or_law(L)
    return checks.result("the best reading", jnp.asarray(normal_equations(task, L).reading, task.Sigma.dtype))


class RankedReading(NamedTuple):
    """The best reading of a bounded rank, its risk, and twice what each direction takes off the risk at most."""

    reading: Float[np.ndarray, "d d"]
    risk: float
    squares: Float[np.ndarray, " d"]

    @property
    def needed(self) -> int:
        """How many directions help at all."""
        return int(np.sum(self.squares > _ROUNDING * self.squares.max(initial=0.0)))


def best_reading_of_rank(task: LinearRegression, L: int | float, rank: int) -> RankedReading:
    r"""The best $M$ of at most that rank for $x\mapsto\hat s\,Mx$: what linear heads whose widths add up to it attain.

    With $G = (1+\tfrac1L)\Sigma^{1/2}\Omega\Sigma^{1/2} + \tfrac{\tau_1+s^2}LI$,
    $N = G^{-1/2}\Sigma^{1/2}\Omega\Sigma_q^{1/2}$ and $X = G^{1/2}\Sigma^{1/2}M\Sigma_q^{1/2}$ the risk is
    $\frac k2(\mathrm{tr}\,\Sigma_q\Omega + s^2 - \|N\|_F^2 + \|X-N\|_F^2)$. So the best X is N cut off after its
    largest singular values (Eckart and Young), and each takes half its square off the risk.
    """
    Sigma, Omega, query = (np.asarray(part, float) for part in (task.Sigma, task.Omega, task.query_Sigma))
    half, of_query, noise = (*(np.asarray(root(part), float) for part in (Sigma, query)), float(task.noise))
    gram = (1 + 1 / L) * half @ Omega @ half + (float(task.tau1) + noise) / L * np.eye(len(Sigma))
    values, vectors = np.linalg.eigh(gram)
    there = values > _ROUNDING * max(values.max(), 0.0)
    inverse = (vectors[:, there] / np.sqrt(values[there])) @ vectors[:, there].T
    left, singular, right = np.linalg.svd(inverse @ half @ Omega @ of_query)
    kept = (left[:, :rank] * singular[:rank]) @ right[:rank]
    ends = [np.linalg.pinv(part, rcond=math.sqrt(_ROUNDING), hermitian=True) for part in (half, of_query)]
    zero = float(np.sum(query * Omega)) + noise
    risk = task.targets * (zero - float(np.sum(singular[:rank] ** 2))) / 2
    return RankedReading(ends[0] @ inverse @ kept @ ends[1], risk, singular**2)


class NormalEquations(NamedTuple):
    """Their least solution, the projections on what they see from the left and from the right, and the risk left."""

    reading: Float[np.ndarray, "d d"]
    left: Float[np.ndarray, "d d"]
    right: Float[np.ndarray, "d d"]
    risk: float


def normal_equations(task: LinearRegression, L: int | float | Lengths) -> NormalEquations:
    r"""Those of `best_reading` in float64, through the `Spectrum` of the task: $\Sigma\Omega\Sigma$ is never formed.

    $$2R/k = s^2 + \sum_i\kappa_i\,\frac{\lambda_i+\tau_1+s^2}{(L+1)\lambda_i+\tau_1+s^2},\qquad
      \kappa_i = \|F_{\Sigma_q}^\top F_\Omega y_i\|^2 ,$$

    with $\kappa_i = \lambda_i$ where queries are distributed like covariates. The reading is as exact as $\Sigma$ lets
    it be: to rounding times the condition number of its correlations.
    """
    refuse_a_traced_task(task, "the optimum of linear attention")
    found, queries = spectrum(task.Sigma, task.Omega), factor(task.query_Sigma)
    for name, part in (("Sigma", found.of_Sigma), ("Omega", found.of_Omega), ("query_Sigma", queries)):
        refuse_a_doubtful_rank(name, part, getattr(task, name))
    values, noise, known = found.values, float(task.noise), np.arange(task.d) < found.rank
    length, empty = (L.harmonic_mean, L.empty) if isinstance(L, Lengths) else (float(L), 0.0)
    share, spread = 1 / length, float(np.sum(values)) + noise
    spread *= share
    denominator = (1 + share) * values + spread
    # at infinite length the directions that no prompt shows solve the equations with any coefficient
    solved = denominator > 0
    inverse = np.where(solved, found.roots / np.where(solved, denominator, 1), 0)
    left, right = found.of_Sigma.projection, queries.projection
    reading = found.of_Sigma.inverse.T @ (found.left * inverse) @ found.modes.T @ right
    if spread == 0 and found.rank < found.of_Sigma.rank:
        left = projection(found.of_Sigma.F @ found.left[:, : found.rank])
        reading = left @ reading
    unknown = np.where(known, (share * values + spread) / np.where(known, denominator, 1), 1.0)
    unknown = empty + (1 - empty) * unknown
    weights = np.sum((queries.F.T @ found.modes) ** 2, axis=0)
    return NormalEquations(reading, left, right, task.targets / 2 * (noise + float(weights @ unknown)))


def optimal_linear(task: LinearRegression, L: int | float | Lengths) -> Optimum[LinearAttention]:
    r"""The global minimiser over all (U, V) of linear attention at length `L`, and the minimal risk.

    Under $(W,\eta)\to-(W,\eta)$ the target is odd, so that the even part of the output only hurts; the odd part is best
    of the form $\hat sW^\top x$. For $\Omega = I$ without noise it is that of Zhang et al. (2024). The scale between U
    and V is free; it is balanced, $\|U\|_F = \|V\|_F$, as gradient flow from Assumption 5.1 leaves it. For a law of
    `Lengths` the risk is their average, and the layer that of their harmonic mean.
    """
    task, L = as_regression(task), length_or_law(L)
    found = normal_equations(task, L)
    r = math.sqrt(float(np.linalg.norm(found.reading)) / math.sqrt(task.targets))
    A = checks.result("the optimum", jnp.asarray(found.reading / r if r > 0 else found.reading, task.Sigma.dtype))
    layer = from_blocks(aligned_blocks(A, r, task), LinearAttention)
    return Optimum(layer, exactly(jnp.asarray(found.risk, task.Sigma.dtype), "closed form"))


def gradient_descent(
    task: LinearRegression, L: int | float, *, step: float | None = None, preconditioner: Numbers | None = None
) -> Optimum[LinearAttention]:
    r"""One step of gradient descent from 0 on the prompt's squared error: $\hat y = \hat s\,(\text{step}\cdot P)\,x_q$.

    $P$ is the `preconditioner`, by default the identity; without a `step`, the best one. It is a layer of linear
    attention, so that its risk is exact. The best preconditioner of all gives `optimal_linear`.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    P = jnp.eye(task.d) if preconditioner is None else checks.matrix("preconditioner", preconditioner, task.d, task.d)

    def risk_at(step) -> Float[Array, ""]:
        return gaussian_risk(aligned_blocks(step * P, 1.0, task), task, L)

    if step is None:  # the risk is quadratic in the step: three values fix it
        ahead, behind, still = risk_at(1.0), risk_at(-1.0), risk_at(0.0)
        curvature = ahead + behind - 2 * still
        size = jnp.where(curvature > 0, (behind - ahead) / (2 * jnp.where(curvature > 0, curvature, 1)), 0)
    else:
        size = checks.number("step", step)
    parts = aligned_blocks(checks.finite("step", size * P), 1.0, task)
    value = checks.result("the risk", gaussian_risk(parts, task, L))
    return Optimum(from_blocks(parts, LinearAttention), exactly(value, "closed form"))
