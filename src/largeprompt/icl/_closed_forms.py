r"""Risks of linear attention at every prompt length, and of softmax attention at infinite length, in closed form.

Only four blocks of a layer reach the prediction: $U = \begin{pmatrix}A & *\\ C & *\end{pmatrix}$, the starred columns
meeting the zeros of the query, and the rows $V = (P, R)$ of the predicted coordinates. Given $W$ the infinite layer
predicts $G(W)\,x$ with $G = V\Gamma_W\binom{A}{C} = G_0 + (P\Sigma W^\top C + RW\Sigma A) + RW\Sigma W^\top C$ and
$G_0 = P\Sigma A + s^2 RC$: an even part and an odd part in $W$, whose moments are those of a Gaussian matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from largeprompt.attention import AbstractAttention

from ._regression import LinearRegression


class Blocks(NamedTuple):
    """The blocks of U and V that reach the prediction of a regression."""

    A: Float[Array, "d d"]
    C: Float[Array, "k d"]
    P: Float[Array, "k d"]
    R: Float[Array, "k k"]


def blocks(attention: AbstractAttention, task: LinearRegression) -> Blocks:
    """The blocks of a layer whose last outputs are the prediction."""
    d, k = task.d, task.targets
    V = attention.V[attention.outputs - k :]
    return Blocks(attention.U[:d, :d], attention.U[d:, :d], V[:, :d], V[:, d:])


Scalar = int | float | Real[Array, ""]


@jax.jit
def gaussian_risk(
    parts: Blocks, task: LinearRegression, L: Scalar, normaliser: Scalar | None = None
) -> Float[Array, ""]:
    r"""$R_L$ of linear attention; with `L = inf`, $R_\infty$ of linear and of softmax attention alike.

    Given $(W, x)$ the output of linear attention is a Wishart form with mean $Gx$ and variance
    $(a\nu + \|Gx\|^2)/L$, where $a = \mathrm{tr}\,V\Gamma_WV^\top$ and $\nu = u^\top\Gamma_Wu$, so that
    $2R_L = E\|Gx - Wx\|^2 + (E\,a\nu + E\|Gx\|^2)/L + ks^2$. With a `normaliser` $\rho$ the query is one more token of
    the prompt and the sum over tokens is divided by $\rho$: $L+1$ in Remark 3.2, $L$ in Zhang et al. (2024).
    """
    if normaliser is None:
        return _expected_square(parts, task, L) / 2
    f = L / normaliser
    shrunk = parts._replace(P=f * parts.P, R=f * parts.R)
    A, _, P, _ = parts
    S, symmetric = task.query_Sigma, (parts.A + parts.A.T) / 2
    # the query adds (Px)(xᵀAx)/ρ, independent of the prompt; E_W (G − W) is all it meets of the rest
    offset = _even_part(shrunk, task) + task.tau1 * shrunk.R @ shrunk.C
    SA, trace = S @ symmetric, jnp.sum(A * S)
    mean_product = jnp.sum((offset @ S) * P) * trace + 2 * jnp.sum((offset @ SA @ S) * P)
    B = P @ S @ P.T
    square = jnp.trace(B) * (trace**2 + 2 * jnp.sum(SA * SA.T))
    square += 4 * trace * jnp.sum((P @ SA @ S) * P) + 8 * jnp.sum((P @ SA @ SA @ S) * P)
    return (_expected_square(shrunk, task, L) + 2 * mean_product / normaliser + square / normaliser**2) / 2


@jax.jit
def aligned_gaussian_risk(parts: Blocks, task: LinearRegression, L) -> Float[Array, ""]:
    """The same for P = C = 0, where a dozen of the products vanish."""
    SA = task.Sigma @ parts.A
    SAS, RR = SA @ task.query_Sigma, jnp.sum(parts.R**2)
    square = (1 + 1 / L) * jnp.sum((task.Omega @ SAS) * SA) + (task.tau1 + task.noise) / L * jnp.sum(SAS * parts.A)
    still = task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise)
    return (RR * square - 2 * jnp.trace(parts.R) * jnp.sum(SAS * task.Omega) + still) / 2


def _even_part(parts: Blocks, task: LinearRegression) -> Float[Array, "k d"]:
    return parts.P @ task.Sigma @ parts.A + task.noise * parts.R @ parts.C


def _expected_square(parts: Blocks, task: LinearRegression, L) -> Float[Array, ""]:
    A, C, P, R = parts
    Sigma, Omega, S, s2, tau1, rho2 = task.Sigma, task.Omega, task.query_Sigma, task.noise, task.tau1, task.rho2
    k = task.targets
    PS, SA, RC = P @ Sigma, Sigma @ A, R @ C
    K = C @ S @ C.T  # E of the label block of u uᵀ
    even = _even_part(parts, task)
    RKR, RR = jnp.sum((R @ K) * R), jnp.sum(R**2)
    spread = jnp.sum((PS @ Omega) * PS)
    mixed = jnp.sum((PS @ Omega @ SA @ S) * RC)
    # E‖Gx‖²: the even part, with E[N B N] = τ1² B + ρ2 (Bᵀ + tr B) for N = WΣWᵀ, then the odd part
    square = jnp.sum((even @ S) * (even + 2 * tau1 * RC)) + (tau1**2 + rho2) * RKR + rho2 * RR * jnp.trace(K)
    square += jnp.trace(K) * spread + RR * jnp.sum((Omega @ SA @ S) * SA) + 2 * mixed
    # E (Gx)·(Wx): only the odd part meets W
    cross = jnp.trace(R) * jnp.sum((SA @ S) * Omega) + jnp.sum((PS @ Omega @ S) * C)
    # E aν
    alpha, gamma = jnp.sum(PS * P) + s2 * RR, jnp.sum((SA @ S) * A) + s2 * jnp.trace(K)
    product = alpha * (gamma + tau1 * jnp.trace(K)) + tau1 * gamma * RR
    product += tau1**2 * jnp.trace(K) * RR + 2 * rho2 * RKR + 4 * mixed
    return square - 2 * cross + k * jnp.sum(S * Omega) + k * s2 + (product + square) / L
