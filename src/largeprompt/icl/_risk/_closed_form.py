r"""Risks of linear attention at every prompt length, and of softmax attention at infinite length, in closed form.

Given $W$ the infinite layer of these `Blocks` predicts $G(W)\,x$ with $G = V\Gamma_W\binom{A}{C} = G_0 +
(P\Sigma W^\top C + RW\Sigma A) + RW\Sigma W^\top C$ and $G_0 = P\Sigma A + s^2 RC$: an even part and an odd part in
$W$, whose moments are those of a Gaussian matrix.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from largeprompt import _checks as checks

from .._blocks import Blocks
from .._regression import LinearRegression
from ._abstract import AbstractHeadRisk

Scalar = int | float | Real[Array, ""]


class ClosedForm(AbstractHeadRisk):
    """Linear attention at any length and softmax attention at infinite length: a formula.

    With `normalisers` the query is one more token of the prompt, as in `gaussian_risk`. `shares` are the weights of an
    average over lengths `L`.
    """

    task: LinearRegression
    L: Float[Array, " n"]
    normalisers: Float[Array, " n"] | None
    shares: Float[Array, " n"]
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return "closed form"

    def of_blocks(self, parts):
        each = jax.vmap(lambda L, normaliser: gaussian_risk(parts, self.task, L, normaliser))
        return (self.shares @ each(self.L, self.normalisers))[None]


def gaussian_risk(
    parts: Blocks, task: LinearRegression, L: Scalar, normaliser: Scalar | None = None
) -> Float[Array, ""]:
    r"""$R_L$ of linear attention; with `L = inf`, $R_\infty$ of linear and of softmax attention alike.

    Given $(W, x)$ the output of linear attention is a Wishart form with mean $Gx$ and variance
    $(a\nu + \|Gx\|^2)/L$, where $a = \mathrm{tr}\,V\Gamma_WV^\top$ and $\nu = u^\top\Gamma_Wu$, so that
    $2R_L = E\|Gx - Wx\|^2 + (E\,a\nu + E\|Gx\|^2)/L + ks^2$. With a `normaliser` $\rho$ the query is one more token of
    the prompt and the sum over tokens is divided by $\rho$: $L+1$ in Remark 3.2, $L$ in Zhang et al. (2024).
    """
    dtype = task.Sigma.dtype
    scale = None if normaliser is None else checks.real_length(normaliser, dtype)
    return _gaussian_risk(parts, task, checks.real_length(L, dtype), scale)


@jax.jit
def _gaussian_risk(
    parts: Blocks, task: LinearRegression, L: Float[Array, ""], normaliser: Float[Array, ""] | None
) -> Float[Array, ""]:
    if normaliser is None:
        return _expected_square(parts, task, L) / 2
    f = jnp.where(jnp.isinf(normaliser), 1, L / normaliser)
    shrunk = parts._replace(P=f * parts.P, R=f * parts.R)
    A, _, P, _ = parts
    S, symmetric = task.query_Sigma, (parts.A + parts.A.T) / 2
    # the query adds (Px)(xᵀAx)/ρ, independent of the prompt; E_W (G − W) is all it meets of the rest
    offset = _even_mean(shrunk, task)
    SA, trace = S @ symmetric, jnp.sum(A * S)
    mean_product = jnp.sum((offset @ S) * P) * trace + 2 * jnp.sum((offset @ SA @ S) * P)
    B = P @ S @ P.T
    square = jnp.trace(B) * (trace**2 + 2 * jnp.sum(SA * SA.T))
    square += 4 * trace * jnp.sum((P @ SA @ S) * P) + 8 * jnp.sum((P @ SA @ SA @ S) * P)
    return (_expected_square(shrunk, task, L) + 2 * mean_product / normaliser + square / normaliser / normaliser) / 2


def _odd_error(parts: Blocks, task: LinearRegression, SA, SAS) -> Float[Array, ""]:
    r"""$E\|RW\Sigma Ax - Wx\|^2$ as a sum of squares: near the optimum it is not a difference of large numbers.

    With $r = \mathrm{tr}R/k$ and $M = r\Sigma A - I$, $k\,\mathrm{tr}\,\Omega M\Sigma_qM^\top$ and what R is off rI.
    """
    r, rest = _mean_and_rest(parts.R)
    M, MS = r * SA - jnp.eye(task.d, dtype=SA.dtype), r * SAS - task.query_Sigma
    return task.targets * jnp.sum((task.Omega @ MS) * M) + jnp.sum(rest**2) * jnp.sum((task.Omega @ SAS) * SA)


def _mean_and_rest(R: Float[Array, "k k"]) -> tuple[Float[Array, ""], Float[Array, "k k"]]:
    r = jnp.trace(R) / R.shape[0]
    return r, R - r * jnp.eye(R.shape[0], dtype=R.dtype)


def _even_mean(parts: Blocks, task: LinearRegression) -> Float[Array, "k d"]:
    """E G, the mean of its even part."""
    return parts.P @ task.Sigma @ parts.A + (task.noise + task.tau1) * parts.R @ parts.C


def _expected_square(parts: Blocks, task: LinearRegression, L: Float[Array, ""]) -> Float[Array, ""]:
    A, C, P, R = parts
    Sigma, Omega, S, s2, tau1, rho2 = task.Sigma, task.Omega, task.query_Sigma, task.noise, task.tau1, task.rho2
    PS, SA, RC = P @ Sigma, Sigma @ A, R @ C
    SAS, PSO = SA @ S, PS @ Omega
    K = C @ S @ C.T  # E of the label block of u uᵀ
    RKR, RR = jnp.sum((R @ K) * R), jnp.sum(R**2)
    # E‖Gx‖²: the even part, with E[N B N] = τ1² B + ρ2 (Bᵀ + tr B) for N = WΣWᵀ, then the odd part
    mean = _even_mean(parts, task)
    even = jnp.sum((mean @ S) * mean) + rho2 * (RKR + RR * jnp.trace(K))
    labels, mixed = jnp.trace(K) * jnp.sum(PSO * PS), jnp.sum((PSO @ SAS) * RC)
    square = even + labels + RR * jnp.sum((Omega @ SAS) * SA) + 2 * mixed
    # E‖Gx − Wx‖²: only the odd part meets W
    r, rest = _mean_and_rest(R)
    met = jnp.sum((PSO @ (r * SAS - S)) * C) + jnp.sum((PSO @ SAS) * (rest @ C))
    error = even + labels + _odd_error(parts, task, SA, SAS) + 2 * met
    # E aν
    alpha, gamma = jnp.sum(PS * P) + s2 * RR, jnp.sum(SAS * A) + s2 * jnp.trace(K)
    product = alpha * (gamma + tau1 * jnp.trace(K)) + tau1 * gamma * RR
    product += tau1**2 * jnp.trace(K) * RR + 2 * rho2 * RKR + 4 * mixed
    return error + task.targets * s2 + (product + square) / L
