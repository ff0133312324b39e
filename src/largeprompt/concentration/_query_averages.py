r"""Means over queries: of the constants of the 1/L law, and of the exact mean squares of Gaussian prompts at every L.

At one query, Gaussian tokens give $E\,\Delta m^\top M\Delta m = b^\top Mb\,(Q-6W) + Q\,\mathrm{tr}\,M\Gamma$ with $b =
\Gamma u$, exactly, Q and W functions of $(\nu, L)$ (`attention.WeightMoments`). Over centred Gaussian queries both this
and the constants are closed or one-dimensional; over other laws they are averages over queries that are drawn once.
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

from ._asymptotics import query_constants
from ._crossed import Heads
from ._memory import queries_at_once
from ._quantities import Form
from ._spectrum import spectrum

DRAWS = 2**13
_FEW = 2**12  # atoms that are all averaged over
_BATCH = 256


class Average(NamedTuple):
    """A mean over queries and its standard error, 0 where no query was drawn; the values behind it, where some were."""

    value: float
    stderr: float
    values: Float[np.ndarray, " n"] | None


class Nodes(NamedTuple):
    """Queries to average over, with their probabilities; `drawn` where they are a sample."""

    z: Float[np.ndarray, "n D"]
    weights: Float[np.ndarray, " n"]
    drawn: bool

    def average(self, values: Float[np.ndarray, " n"]) -> Average:
        values = np.asarray(values, float)
        mean = float(self.weights @ values)
        error = float(values.std(ddof=1) / math.sqrt(len(values))) if self.drawn else 0.0
        return Average(mean, error, values)


def query_nodes(nu: AbstractMeasure, key: PRNGKeyArray, draws: int = DRAWS) -> Nodes:
    """All atoms of a prompt of queries, or a sample of any other law."""
    if isinstance(nu, Empirical) and nu.size <= _FEW:
        return Nodes(np.asarray(nu.points, float), np.exp(np.asarray(nu.log_masses(), float)), False)
    z = np.asarray(nu._sample(key, draws), float)
    return Nodes(z, np.full(len(z), 1 / len(z)), True)


def closed(heads: Heads, mu: AbstractMeasure, nu: AbstractMeasure) -> bool:
    """Whether tokens and centred queries are Gaussian and heads softmax: the mean over queries needs no sample."""
    return (
        all(kind_of(head) == "softmax" for head in heads)
        and isinstance(mu, Gaussian)
        and isinstance(nu, Gaussian)
        and not bool(np.any(np.asarray(nu.m)))
    )


def constants_at(
    attention: AbstractAttention, mu: AbstractMeasure, form: Form, z: Float[np.ndarray, "n D"]
) -> Float[np.ndarray, " n"]:
    """The constant of the 1/L law at each query."""
    batch = queries_at_once(mu, _BATCH)
    return np.asarray(_constants(attention, mu, form, jnp.asarray(z), batch), float)


@eqx.filter_jit
def _constants(attention, mu, form: Form, z: Float[Array, "n D"], batch: int) -> Float[Array, " n"]:
    return jax.lax.map(lambda one: query_constants(attention, mu, [form], one)[0], z, batch_size=batch)


def gaussian_constant(attention: AbstractAttention, mu: Gaussian, nu: Gaussian, form: Form) -> float:
    r"""Its mean over centred Gaussian queries, in closed form; infinite from $\theta^2 = \tfrac12$ on.

    $e^\nu$ turns N(0, S) into $\det(I-2JS)^{-1/2}$ times N(0, S'), $S' = S(I-2JS)^{-1}$, $J = U^\top\Gamma U$; under it
    the means of products of up to three quadratic forms are sums of traces.
    """
    U, Gamma, S = (np.asarray(a, float) for a in (attention.U, mu.Gamma, nu.Gamma))
    weights, axes = spectrum(U.T @ Gamma @ U, S)
    if weights[-1] >= 0.5:
        return math.inf
    tilted = (axes / (1 - 2 * weights)) @ axes.T
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
    return float(total * np.prod(1 - 2 * weights) ** -0.5)


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


def exact_mean_square(
    attention: AbstractAttention, mu: Gaussian, nu: AbstractMeasure, form: Form, L: int | float, nodes: Nodes | None
) -> Average:
    """The mean of Δmᵀ M Δm over prompts of Gaussian tokens, exactly, and over queries; `form` has no slopes."""
    U, Gamma, M = (np.asarray(a, float) for a in (attention.U, mu.Gamma, form.M))
    moments, width = WeightMoments(L), float(np.sum(M * Gamma))
    if nodes is None:
        assert isinstance(nu, Gaussian)
        weights, axes = spectrum(U.T @ Gamma @ U, nu.Gamma)
        inner = Gamma @ U @ axes
        # beyond it lies less than 1e-17/L, and the error at a query is never more than its scores' size
        reach = math.sqrt(2 * math.log(L) + 80) if math.inf > L else 9.5
        means, squares, _ = quadratic_form_averages(weights, lambda scores: np.stack(_parts(moments, scores)), reach)
        value = width * means[0] + np.einsum("ij,ik,kj->j", inner, M, inner) @ squares[1]
        return Average(float(value), 0.0, None)
    b = nodes.z @ U.T @ Gamma
    Q, along = _parts(moments, np.sum(b * (nodes.z @ U.T), axis=1))
    return nodes.average(np.einsum("ni,ij,nj->n", b, M, b) * along + width * Q)


def _parts(moments: WeightMoments, nu: Float[np.ndarray, " n"]) -> list[Float[np.ndarray, " n"]]:
    """Q and Q − 6W, the latter the mean square along the query over ν, less Q."""
    Q, _, _, lost = moments.shares_of_many(np.maximum(nu, 0))
    return [Q, 2 * Q - lost]
