r"""What the bounds ask of the laws of tokens and queries: centred, with a certified sub-Gaussian constant, and moments.

Assumption 3.3 is on the moments of tokens under the tilt of a random query, $E_Z E_{\mu_Z}\|Z_1\|^p\|Z\|^{p'}$.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from largeprompt.attention import AbstractLayer, softmax_form
from largeprompt.concentration._spectrum import factor
from largeprompt.measures import AbstractMeasure, Affine, Empirical, Gaussian, Mixture, as_measure
from largeprompt.measures._from_sampler import sampled_parts

from ._bound import log_sum

Kind = Literal["exact", "upper bound", "estimated"]
POWERS = (0, 4, 8)
_CENTRED = 1e-6  # how far off 0 a mean may be, in units of the law's scale
_QUERIES = 2**14  # of the fixed sample where no closed form is known


def certified(name: str, mu: AbstractMeasure) -> AbstractMeasure:
    """`mu` itself, once its sub-Gaussian constant is that of the law and not of a stand-in."""
    if sampled_parts(mu):
        raise ValueError(
            f"{name} is known by its sampler only (FromSampler); a bound needs a law with a proven constant"
        )
    return mu


def is_centred(mu: AbstractMeasure) -> bool:
    """Whether the mean is 0, up to rounding."""
    mean, scale = np.asarray(mu.mean(), float), float(mu.subgaussian())
    return float(np.linalg.norm(mean)) <= _CENTRED * scale


def centred(mu: AbstractMeasure) -> AbstractMeasure:
    """The law of z - Ez, of the same kind where that is known."""
    return mu if is_centred(mu) else _shifted(mu, -mu.mean())


def _shifted(mu: AbstractMeasure, by) -> AbstractMeasure:
    if isinstance(mu, Gaussian):
        return Gaussian(mu.mean() + by, mu.cov())
    if isinstance(mu, Mixture):
        return Mixture(jnp.exp(mu.log_weights), [_shifted(part, by) for part in mu.components])
    if isinstance(mu, Empirical):
        return Empirical(mu.points + by, jnp.exp(mu.log_masses()))
    return Affine(jnp.eye(mu.dim), by, mu)


def fourth_moment_root(mu: AbstractMeasure, W: np.ndarray) -> float:
    """F = (E((z - Ez)ᵀW(z - Ez))²)^{1/2}, exactly, from the cumulants of the law."""
    return math.sqrt(max(float(_fourth(mu, jnp.asarray(W))), 0.0))


@eqx.filter_jit
def _fourth(mu: AbstractMeasure, W: jax.Array) -> jax.Array:
    return mu._fourth(jnp.zeros(mu.dim), W, W)


@dataclass(frozen=True)
class MomentConstants:
    r"""The moments of Assumption 3.3 and its constants $M_{p,p'}$ = moment / $\sigma^{2p}$, for $p,p'\in\{0,4,8\}$.

    `kind` says whether the moments are exact, upper bounds, or averages over a fixed sample of queries.
    """

    moments: Mapping[tuple[int, int], float]
    sigma: float
    kind: Kind

    @property
    def M(self) -> dict[tuple[int, int], float]:
        """The constants M_{p,p'}."""
        return {(p, q): value / self.sigma ** (2 * p) for (p, q), value in self.moments.items()}

    def rescaled(self, scale: float) -> "MomentConstants":
        """Those of the queries z/scale, which U·scale sees as U saw z."""
        moments = {(p, q): value / scale**q for (p, q), value in self.moments.items()}
        return MomentConstants(moments, self.sigma, self.kind)


def moment_constants(layer: AbstractLayer, mu: AbstractMeasure, nu: AbstractMeasure) -> MomentConstants:
    r"""The moments of Assumption 3.3 for tokens of law μ, once centred, and queries of law ν.

    Exact for Gaussian μ and centred Gaussian ν: $E\|\Gamma Uz+\Gamma^{1/2}Y\|^{2\alpha}\|z\|^{2\beta}$ is a joint
    moment of two quadratic forms in Gaussians. For bounded μ, $\mathrm{radius}^pE\|Z\|^{p'}$ from above. For mixtures
    of Gaussians exact given the query: from above for bounded ν, otherwise averaged over a fixed sample.
    """
    attention = softmax_form(layer)
    mu = centred(certified("mu", as_measure("mu", mu, attention.dim)))
    nu = as_measure("nu", nu, attention.dim)
    U = np.asarray(attention.U, float)
    sigma = max(1.0, float(mu.subgaussian()))
    moments, kind = _moments(U, mu, nu)
    return MomentConstants(moments, sigma, kind)


def _moments(U: np.ndarray, mu: AbstractMeasure, nu: AbstractMeasure) -> tuple[dict[tuple[int, int], float], Kind]:
    components = gaussian_components(mu)
    if isinstance(mu, Gaussian) and isinstance(nu, Gaussian) and is_centred(nu):
        joint = joint_moments(np.asarray(mu.Gamma, float), U, np.asarray(nu.cov(), float), 4)
        return {(p, q): float(joint[p // 2, q // 2]) for p in POWERS for q in POWERS}, "exact"
    reach = float(nu.radius())
    if components is None:
        radius = float(mu.radius())
        if not math.isfinite(radius):
            raise ValueError(
                f"mu is of type {type(mu).__name__}; the tilted moments of Assumption 3.3 are known for bounded laws, "
                "Gaussians and their mixtures"
            )
        of_query, sampled = _query_moments(nu)
        kind: Kind = "estimated" if sampled else "upper bound"
        return {(p, q): radius**p * of_query[q] for p in POWERS for q in POWERS}, kind
    if math.isfinite(reach):
        largest = np.max([_largest(mean, Gamma, U, reach) for _, mean, Gamma in components], axis=0)
        return {(p, q): float(largest[p // 2]) * reach**q for p in POWERS for q in POWERS}, "upper bound"
    z = _sample(nu)
    tilted = _given_queries(components, z @ U.T)
    sizes = np.linalg.norm(z, axis=1)
    return {(p, q): float(np.mean(tilted[p // 2] * sizes**q)) for p in POWERS for q in POWERS}, "estimated"


def _query_moments(nu: AbstractMeasure) -> tuple[dict[int, float], bool]:
    """E‖Z‖^q, exact or from above, and whether it had to be sampled."""
    if isinstance(nu, Gaussian):
        moments = norm_moments(np.asarray(nu.m, float), np.asarray(nu.Gamma, float), 4)
        return {q: float(moments[q // 2]) for q in POWERS}, False
    reach = float(nu.radius())
    if math.isfinite(reach):
        return {q: reach**q for q in POWERS}, False
    sizes = np.linalg.norm(_sample(nu), axis=1)
    return {q: float(np.mean(sizes**q)) for q in POWERS}, True


def _sample(nu: AbstractMeasure) -> np.ndarray:
    return np.asarray(nu.sample(jax.random.key(0), _QUERIES), float)


Component = tuple[float, np.ndarray, np.ndarray]


def gaussian_components(mu: AbstractMeasure) -> list[Component] | None:
    """Log-weights, means and covariances of a Gaussian or of a mixture of Gaussians."""
    if isinstance(mu, Gaussian):
        return [(0.0, np.asarray(mu.m, float), np.asarray(mu.Gamma, float))]
    if isinstance(mu, Mixture) and all(isinstance(part, Gaussian) for part in mu.components):
        held = zip(np.asarray(mu.log_weights, float), mu.components, strict=True)
        return [(float(w), np.asarray(part.mean()), np.asarray(part.cov())) for w, part in held if w > -np.inf]
    return None


def _largest(mean: np.ndarray, Gamma: np.ndarray, U: np.ndarray, reach: float) -> np.ndarray:
    """Moments of ‖Z₁‖² from above over queries in a ball: they are polynomials in cumulants, all coefficients ≥ 0."""
    far = np.linalg.norm(mean) + np.linalg.norm(Gamma @ U, 2) * reach
    top, traces = np.linalg.norm(Gamma, 2), [np.trace(np.linalg.matrix_power(Gamma, n)) for n in range(1, 5)]
    cumulants = [
        2 ** (n - 1) * math.factorial(n - 1) * (traces[n - 1] + n * top ** (n - 1) * far**2) for n in range(1, 5)
    ]
    return _from_cumulants(cumulants)


def _given_queries(components: list[Component], thetas: np.ndarray) -> np.ndarray:
    """E‖Z₁‖^{2k}, k ≤ 4, under the tilt of each query: the tilted mixture has moved means and new weights."""
    masses = [w + thetas @ m + np.einsum("ni,ij,nj->n", thetas, G, thetas) / 2 for w, m, G in components]
    weights = np.exp(np.stack(masses) - log_sum(masses))
    moments = [norm_moments(m + thetas @ G, G, 4) for _, m, G in components]
    return np.einsum("kn,akn->an", weights, np.stack(moments, axis=1))


def norm_moments(mean: np.ndarray, Gamma: np.ndarray, order: int) -> np.ndarray:
    r"""$E\|x\|^{2k}$, k ≤ order, for $x\sim\mathcal N(m,\Gamma)$, of one mean or of rows of means.

    The cumulants of $\|x\|^2$ are $2^{n-1}(n-1)!\,(\mathrm{tr}\,\Gamma^n + n\,m^\top\Gamma^{n-1}m)$.
    """
    cumulants, moved = [], mean
    for n in range(1, order + 1):
        trace = np.trace(np.linalg.matrix_power(Gamma, n))
        cumulants.append(2 ** (n - 1) * math.factorial(n - 1) * (trace + n * np.sum(moved * mean, axis=-1)))
        moved = moved @ Gamma
    return _from_cumulants(cumulants)


def _from_cumulants(cumulants: list) -> np.ndarray:
    moments = [np.ones_like(cumulants[0])]
    for n in range(1, len(cumulants) + 1):
        moments.append(sum(math.comb(n - 1, k) * cumulants[k] * moments[n - 1 - k] for k in range(n)))
    return np.stack(moments)


def joint_moments(Gamma: np.ndarray, U: np.ndarray, S: np.ndarray, order: int) -> np.ndarray:
    r"""$E\|\Gamma Uz+\Gamma^{1/2}Y\|^{2\alpha}\|z\|^{2\beta}$ for $z\sim\mathcal N(0,S)$, $Y\sim\mathcal N(0,I)$.

    Both are quadratic forms $B_1, B_2$ in $(S^{-1/2}z, Y)$: $E e^{t_1q_1+t_2q_2} = \exp\sum_n\frac{2^n}{2n}\mathrm{tr}
    (t_1B_1+t_2B_2)^n$, whose series is kept up to the order in each.
    """
    root_S, root = factor(S), factor(Gamma)
    N = np.hstack([Gamma @ U @ root_S, root])
    B1, B2 = N.T @ N, np.zeros((N.shape[1],) * 2)
    B2[: len(S), : len(S)] = root_S.T @ root_S
    logs = np.zeros((order + 1, order + 1))
    powers = {0: np.eye(len(B1))}  # of t₁B₁+t₂B₂, by the degree in t₁
    for n in range(1, 2 * order + 1):
        powers = {
            i: powers.get(i - 1, 0 * B1) @ B1 + powers.get(i, 0 * B1) @ B2
            for i in range(max(0, n - order), min(n, order) + 1)
        }
        for i, matrix in powers.items():
            logs[i, n - i] = 2**n / (2 * n) * np.trace(matrix)
    factorials = np.array([math.factorial(k) for k in range(order + 1)], float)
    return _exponential(logs) * np.outer(factorials, factorials)


def _exponential(K: np.ndarray) -> np.ndarray:
    """The coefficients of e^K for a series K in two variables without constant: i R_ij = Σ a K_ab R_{i-a,j-b}."""
    R = np.zeros_like(K)
    R[0, 0] = 1
    for i, j in np.ndindex(*K.shape):
        if i + j:
            a, b = np.indices((i + 1, j + 1))
            weight, by = (a, i) if i else (b, j)
            R[i, j] = np.sum(weight * K[: i + 1, : j + 1] * R[i::-1, j::-1][: i + 1, : j + 1]) / by
    return R
