r"""Means over queries: of the constants of the 1/L law, and of the exact mean squares of Gaussian prompts at every L.

At one query, Gaussian tokens give $E\,\Delta m^\top M\Delta m = b^\top Mb\,(Q-6W) + Q\,\mathrm{tr}\,M\Gamma$ with $b =
\Gamma u$, exactly, Q and W functions of $(\nu, L)$ (`attention.WeightMoments`). Over centred Gaussian queries both this
and the constants are closed or one-dimensional (`GaussianQueries`); over other laws they are averages over queries that
are drawn once, or over given ones (`Nodes`).
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt.attention import AbstractAttention, WeightMoments, kind_of
from largeprompt.icl import quadratic_form_averages
from largeprompt.measures import AbstractMeasure, Empirical, Gaussian

from ._memory import queries_at_once, queries_to_draw
from ._problem import Problem
from ._rates import Heads, constants_at, errors_are_exact, over_batches
from ._spectrum import spectrum
from ._squares import HeadsSquare, QuadraticForm

_DRAWS = 2**13
_DRAWS_BY_TOKENS = 2**10  # where the constant at each query is an average over tokens
_FEW = 2**12  # atoms that are all averaged over
_BATCH = 256
_LARGEST = 690.0  # exponent that is a number still


class Average(NamedTuple):
    """A mean over queries and its standard error, 0 where it is exact; the values behind it, where there are some."""

    value: float
    stderr: float
    values: Float[np.ndarray, " n"] | None = None


class Nodes:
    """Queries to average over, with their probabilities; drawn with a `key`, or given."""

    def __init__(
        self,
        mu: AbstractMeasure,
        z: Float[np.ndarray, "n D"],
        weights: Float[np.ndarray, " n"],
        key: PRNGKeyArray | None,
    ):
        self.mu, self.z, self.weights, self.key, self.drawn = mu, z, weights, key, key is not None
        self.words = self.exact_words = f"over {len(z)} queries" + (" drawn" if self.drawn else "")

    def average(self, values: Float[np.ndarray, " n"], error: float = 0.0) -> Average:
        """The mean of values at the queries; `error` is that of the values themselves."""
        values = np.asarray(values, float)
        spread = float(values.std(ddof=1) / math.sqrt(len(values))) if self.drawn else 0.0
        return Average(float(self.weights @ values), math.hypot(spread, error), values)

    def constants(self, heads: Heads, square: HeadsSquare, mu: AbstractMeasure, z: Float[np.ndarray, "n D"]):
        """The constants at some queries for a law of tokens, and the error of their mean over all queries."""
        key = jax.random.key(0) if self.key is None else jax.random.fold_in(self.key, 1)

        def found(tokens):
            held = 0 if tokens is None else len(tokens) * (mu.dim**2 if square.slopes else mu.dim)
            values = constants_at(heads, mu, square, z, queries_at_once(mu, _BATCH, held), tokens)
            mean = self.weights @ values if len(values) == len(self.weights) else values.mean()
            return np.append(values, mean)

        values, errors = over_batches(found, mu, errors_are_exact(heads, mu, square), key)
        return values[:-1], float(errors[-1])

    def constant(self, heads: Heads, square: HeadsSquare) -> Average:
        """The constant of the 1/L law."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.average(*self.constants(heads, square, self.mu, self.z))

    def exact_mean_square(self, head: AbstractAttention, form: QuadraticForm, L: int | float) -> Average:
        """The mean of Δmᵀ M Δm for a softmax head over prompts of Gaussian tokens, exactly; the form has no slopes."""
        assert isinstance(self.mu, Gaussian)
        U, Gamma, M = (np.asarray(a, float) for a in (head.U, self.mu.Gamma, form.M))
        b = self.z @ U.T @ Gamma
        Q, along = _parts(WeightMoments(L), np.sum(b * (self.z @ U.T), axis=1))
        return self.average(np.einsum("ni,ij,nj->n", b, M, b) * along + np.sum(M * Gamma) * Q)

    def scales(self, head: AbstractAttention, constant: Average) -> tuple[float, float]:
        r"""Typical $e^{\Lambda(2\theta)-2\Lambda(\theta)}$ and $e^{\Lambda(3\theta)-\Lambda(2\theta)-\Lambda(\theta)}$.

        They are those at the queries that make the constant of a softmax head.
        """
        weights = self.weights * (np.ones(len(self.z)) if constant.values is None else constant.values)
        if not np.sum(weights) > 0:
            return 1.0, 1.0
        scores = np.asarray(_scores(self.mu, jnp.asarray(self.z @ np.asarray(head.U).T)))
        medians = np.quantile(scores, 0.5, axis=1, weights=weights, method="inverted_cdf")
        dominated, second = np.exp(np.minimum(medians, _LARGEST)).tolist()
        return dominated, second


class GaussianQueries:
    r"""Centred Gaussian queries of softmax heads on Gaussian tokens: all means in closed form.

    $e^\nu$ turns N(0, S) into $\det(I-2JS)^{-1/2}$ times N(0, S'), $S' = S(I-2JS)^{-1}$, $J = U^\top\Gamma U$; under it
    the means of products of up to three quadratic forms are sums of traces.
    """

    words = "in closed form"
    exact_words = "one-dimensional quadrature over queries"

    def __init__(self, mu: Gaussian, nu: Gaussian):
        self.Gamma, self.S = np.asarray(mu.Gamma, float), np.asarray(nu.Gamma, float)

    def constant(self, heads: Heads, square: HeadsSquare) -> Average:
        """The constant of the 1/L law."""
        own = sum(self.head_constant(head, form) for head, form in zip(heads, square.each, strict=True))
        return Average(own + (self._crossed(heads) if square.is_crossed else 0.0), 0.0)

    def head_constant(self, head: AbstractAttention, form: QuadraticForm) -> float:
        r"""That of a form of one head's differences; infinite from $\theta^2 = \tfrac12$ on."""
        U, Gamma = np.asarray(head.U, float), self.Gamma
        factor, tilted = self._tilted(U.T @ Gamma @ U)
        if tilted is None:
            return math.inf
        GU = Gamma @ U

        def through(W):  # b^T W b = z^T (.) z
            return GU.T @ np.asarray(W, float) @ GU

        total = _means(tilted, [through(form.M)]) + np.sum(np.asarray(form.M) * Gamma)
        for A, B, N in ((np.asarray(part, float) for part in slope) for slope in form.slopes):
            a, b = np.sum(A * Gamma), np.sum(B * Gamma)
            cross = A @ Gamma @ B
            plain = a * b + np.sum((B @ Gamma) * (Gamma @ A))
            linear = (cross + cross.T) + a * B + b * A
            total += plain * _means(tilted, [N]) + _means(tilted, [N, through(linear)])
            total += _means(tilted, [N, through(A), through(B)])
        return float(total * factor)

    def _crossed(self, heads: Heads) -> float:
        r"""What each pair of heads adds: $C_{hg} = e^{z^\top Jz}[\Gamma+\Gamma u_gu_h^\top\Gamma]$, $J = U_h^\top\Gamma
        U_g$."""
        Gamma, total = self.Gamma, 0.0
        matrices = [(np.asarray(head.U, float), np.asarray(head.V, float)) for head in heads]
        for i, (U, V) in enumerate(matrices):
            for W, X in matrices[:i]:
                factor, tilted = self._tilted(U.T @ Gamma @ W)
                if tilted is None:
                    return math.inf
                value = np.sum((V @ Gamma) * X) + np.sum((X @ Gamma @ U @ tilted) * (V @ Gamma @ W))
                total += 2 * value * factor
        return float(total)

    def _tilted(self, form: Float[np.ndarray, "D D"]) -> tuple[float, Float[np.ndarray, "D D"] | None]:
        """E e^{zᵀJz} for this form J, and the covariance of the law tilted so; None where that mean is infinite."""
        weights, axes = spectrum(form, self.S)
        if weights[-1] >= 0.5:
            return math.inf, None
        return float(np.prod(1 - 2 * weights) ** -0.5), (axes / (1 - 2 * weights)) @ axes.T

    def exact_mean_square(self, head: AbstractAttention, form: QuadraticForm, L: int | float) -> Average:
        """The mean of Δmᵀ M Δm over prompts and queries, by a one-dimensional quadrature."""
        U, M, moments = np.asarray(head.U, float), np.asarray(form.M, float), WeightMoments(L)
        weights, axes = spectrum(U.T @ self.Gamma @ U, self.S)
        inner = self.Gamma @ U @ axes
        # beyond it lies less than 1e-17/L, and the error at a query is never more than its scores' size
        reach = math.sqrt(2 * math.log(L) + 80) if math.inf > L else 9.5
        means, squares, _ = quadratic_form_averages(weights, lambda scores: np.stack(_parts(moments, scores)), reach)
        value = np.sum(M * self.Gamma) * means[0] + np.einsum("ij,ik,kj->j", inner, M, inner) @ squares[1]
        return Average(float(value), 0.0)

    def scales(self, head: AbstractAttention, constant: Average) -> tuple[float, float]:
        """Typical e^{Λ(2θ)-2Λ(θ)} and e^{Λ(3θ)-Λ(2θ)-Λ(θ)}, which are e^ν and e^{2ν}."""
        U = np.asarray(head.U, float)
        weights, _ = spectrum(U.T @ self.Gamma @ U, self.S)
        typical = float(np.sum(weights / (1 - 2 * weights)))  # under e^ν the queries are wider: the mean of ν there
        return math.exp(min(typical, _LARGEST)), math.exp(min(2 * typical, _LARGEST))


def queries_of(problem: Problem, heads: Heads, key: PRNGKeyArray) -> Nodes | GaussianQueries:
    """How means over the queries of a problem are taken: in closed form where they can be."""
    mu, nu = problem.mu, problem.nu
    softmax = all(kind_of(head) == "softmax" for head in heads)
    if softmax and isinstance(mu, Gaussian) and isinstance(nu, Gaussian) and not np.any(np.asarray(nu.m)):
        return GaussianQueries(mu, nu)
    if isinstance(nu, Empirical) and nu.size <= _FEW:
        return Nodes(mu, np.asarray(nu.points, float), np.exp(np.asarray(nu.log_masses(), float)), None)
    exact = all(head.errors_are_exact(mu) for head in heads)
    z = np.asarray(nu._sample(key, queries_to_draw(mu, _DRAWS if exact else _DRAWS_BY_TOKENS)), float)
    return Nodes(mu, z, np.full(len(z), 1 / len(z)), key)


def _means(S: Float[np.ndarray, "D D"], quadratic: list[Float[np.ndarray, "D D"]]) -> float:
    """E ∏ xᵀW_ix for x ~ N(0, S) and up to three symmetric W."""
    P = [(W + W.T) / 2 @ S for W in quadratic]
    t = [float(np.trace(p)) for p in P]
    if len(P) == 1:
        return t[0]
    pair = {(i, j): float(np.sum(P[i] * P[j].T)) for i in range(len(P)) for j in range(i)}
    if len(P) == 2:
        return t[0] * t[1] + 2 * pair[1, 0]
    triple = float(np.trace(P[0] @ P[1] @ P[2]))
    return t[0] * t[1] * t[2] + 2 * (t[0] * pair[2, 1] + t[1] * pair[2, 0] + t[2] * pair[1, 0]) + 8 * triple


def _parts(moments: WeightMoments, nu: Float[np.ndarray, " n"]) -> list[Float[np.ndarray, " n"]]:
    """Q and Q − 6W, the latter the mean square along the query over ν, less Q."""
    Q, _, _, lost = moments.shares_of_many(np.maximum(nu, 0))
    return [Q, 2 * Q - lost]


@eqx.filter_jit
def _scores(mu: AbstractMeasure, thetas: Float[Array, "n D"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Λ(2θ) - 2Λ(θ) and Λ(3θ) - Λ(2θ) - Λ(θ) at each query."""

    def one(theta):
        single, double, triple = (mu._cgf(k * theta) for k in (1, 2, 3))
        return double - 2 * single, triple - double - single

    return jax.lax.map(one, thetas, batch_size=_BATCH)
