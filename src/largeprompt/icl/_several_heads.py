r"""The least risk of H softmax heads with $P = C = 0$, by variable projection.

Heads $(A_h, r_hI)$ have the risk $k\,(\frac12r^\top Mr - c^\top r)$ above that of predicting 0: given the scores it is
quadratic in the values, least at $r = M^{-1}c$, and $-\frac12c^\top M^{-1}c$ is searched over the scores. With
$g_h = \Sigma A_hx$, over queries x,
$$M_{hg} = E\big[(\tau_1+s^2)q + c_{uu}\,g_h^\top\Omega g_h + (c_{uv}+c_{vu})\,g_h^\top\Omega g_g
  + c_{vv}\,g_g^\top\Omega g_g\big],\qquad c_h = E\,(1-Q_h)\,g_h^\top\Omega x .$$
M is the sum of an odd and an even part (`ParityMoments`). Pairs $(A, r/2)$, $(-A, -r/2)$ have the odd part alone: the
even one, which only adds to the risk, cancels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize

from largeprompt._checks import key_or_default
from largeprompt.attention import WeightMoments
from largeprompt.attention._joint_integrals import TABULATED
from largeprompt.attention._parity import ParityMoments, Parts, direct_parts

from ._optimal_softmax import ScoreFamily
from ._regression import LinearRegression
from ._risk._nodes import radial_nodes, regression_nodes
from ._risk._quadrature import Matrix

_FLOOR = 1e-7  # of E y² Q: what a value costs, so that values do not grow without end where scores tend to 0
_SEARCHED, _REPLICATES, _EACH = 2**8, 16, 2**8  # queries of the search, and of the risk that is reported
_CHECKED = 32  # queries at which the table is compared with the quadrature
_SPARE = 3.0  # standard deviations of a query's length that the table must hold
_LEAST = 1e-4  # standard deviation of scores
_FOLLOWED = 2  # starts


class Readings(NamedTuple):
    """At every query, for pairs h ≤ g of heads: standard deviations, correlation, and the three products of gᵀΩg."""

    one: Array
    two: Array
    correlation: Array
    hh: Array
    hg: Array
    gg: Array


class Forms(eqx.Module):
    """M and c as functions of the scores, over queries in independent replicates with weights."""

    task: LinearRegression
    moments: WeightMoments
    parity: ParityMoments
    x: Float[Array, "r d n"]
    weights: Float[Array, "r n"]

    def __call__(self, A: Float[Array, "h d d"], paired: bool) -> tuple[Array, Array, Array]:
        """M, c and what values cost, over each replicate."""
        return jax.vmap(lambda x, weights: self._over(A, x, weights, paired))(self.x, self.weights)

    def _over(self, A, x, weights, paired):
        task, h = self.task, len(A)
        found, i, j = readings(A, x, task), *np.triu_indices(h)
        label, parity = task.tau1 + task.noise, self.parity
        at = found.one, found.two, found.correlation
        # less its value at infinite length, whose average is known
        upper = _combined(parity.odd(*at), label, found) - found.hg
        if not paired:
            upper += _combined(parity.even(*at), label, found)
        SA = task.Sigma @ A
        limit = jnp.einsum("hij,jk,glk,li->hg", SA, task.query_Sigma, SA, task.Omega)
        M = jnp.zeros((h, h)).at[i, j].set(upper @ weights)
        M = M + jnp.triu(M, 1).T + limit
        nu, met = found.one[i == j] ** 2, jnp.einsum("hij,jn,ik,kn->hn", SA, x, task.Omega, x)
        Q = self.moments.shares(nu)[0]
        c = jnp.einsum("hij,jk,ki->h", SA, task.query_Sigma, task.Omega) - (Q * met) @ weights
        return M, c, _FLOOR * label * (Q @ weights)

    def corrected(self, A: Float[Array, "h d d"], paired: bool, L: float) -> Float[np.ndarray, "h h"]:
        """What the quadrature of the joint moments adds to M, from some of the queries."""
        found, tabulated = jax.tree.map(np.asarray, _tabulated(A, self))
        label = float(self.task.tau1 + self.task.noise)
        columns = zip(*(np.ravel(part).tolist() for part in found[:3]), strict=True)
        direct = np.array([direct_parts(one, two, r, L, TABULATED) for one, two, r in columns]).T
        off = direct.reshape(tabulated.shape) - tabulated
        mean = _combined(Parts(*off[:4]), label, found).mean(axis=-1)
        if not paired:
            mean = mean + _combined(Parts(*off[4:]), label, found).mean(axis=-1)
        M = np.zeros((len(A), len(A)))
        M[np.triu_indices(len(A))] = mean
        return M + np.triu(M, 1).T


def readings(A: Float[Array, "h d d"], x: Float[Array, "d n"], task: LinearRegression) -> Readings:
    """What M is made of, at every query."""
    u = A @ x
    image = task.Sigma @ u
    rho, hOh = jnp.einsum("hin,gin->hgn", u, image), jnp.einsum("hin,ij,gjn->hgn", image, task.Omega, image)
    i, j = np.triu_indices(len(A))
    beta = jnp.sqrt(jnp.maximum(jnp.einsum("hhn->hn", rho), 1e-200))
    return Readings(beta[i], beta[j], rho[i, j] / (beta[i] * beta[j]), hOh[i, i], hOh[i, j], hOh[j, j])


def _combined(parts: Parts, label: Array | float, found: Readings) -> Array | np.ndarray:
    return label * parts.Q + parts.uu * found.hh + parts.vv * found.gg + parts.both * found.hg


def forms_at(task: LinearRegression, L: int | float, *, line: bool, final: bool) -> Forms:
    """M and c at one length; on a `line`, where all scores are multiples of each other, an integral over |x|."""
    if line:
        nodes = radial_nodes(task)
        n = nodes.x.shape[-1] // task.d
        weights = nodes.weights[:, :n] / n  # pyrefly: ignore[unsupported-operation]
        kept = np.flatnonzero(np.asarray(weights[0] > 1e-14 * weights.max()))
        x, weights = nodes.x[:, :, kept], weights[:, kept]
    else:
        replicates, each = (_REPLICATES, _EACH) if final else (1, _SEARCHED)
        x = regression_nodes(key_or_default(None), task, each, replicates).x
        weights = jnp.full((replicates, each), 1 / each)
    return Forms(task, WeightMoments(L), ParityMoments(L, line=line), x, weights)


@eqx.filter_jit
def _tabulated(A: Float[Array, "h d d"], forms: Forms) -> tuple[Readings, Array]:
    """Some of the queries, and the eight parts there."""
    found = readings(A, forms.x[0, :, :_CHECKED], forms.task)
    at = found.one, found.two, found.correlation
    return found, jnp.stack([*forms.parity.odd(*at), *forms.parity.even(*at)])


class Plan(NamedTuple):
    """Heads of a search: the family and the sign of the scores of each, and whether each of them is a pair."""

    families: Sequence[ScoreFamily]
    signs: tuple[int, ...]
    paired: bool

    def matrices(self, parameters: Float[np.ndarray, " p"]) -> Float[np.ndarray, "h d d"]:
        parts = zip(self.families, self.signs, self._split(parameters), strict=True)
        return np.stack([sign * family.matrix(part) for family, sign, part in parts])

    def slope(self, parameters: Float[np.ndarray, " p"], slope: Float[np.ndarray, "h d d"]) -> Float[np.ndarray, " p"]:
        parts = zip(self.families, self.signs, self._split(parameters), slope, strict=True)
        return np.concatenate([sign * family.slope(part, along) for family, sign, part, along in parts])

    def bounds(self, widest: float) -> list[tuple[float, float]]:
        found = []
        for family in self.families:
            most = widest / (math.sqrt(len(family.right) if family.groups is None else family.groups.sum()) + _SPARE)
            free = (-most, most) if family.groups is None else (math.log(_LEAST), math.log(most))
            found += [free] * self._size(family)
        return found

    def _size(self, family: ScoreFamily) -> int:
        return family.right.size if family.groups is None else family.groups.shape[1]

    def _split(self, parameters: Float[np.ndarray, " p"]) -> list[Float[np.ndarray, " q"]]:
        return np.split(parameters, np.cumsum([self._size(family) for family in self.families])[:-1])


class Found(NamedTuple):
    """The end of a search: heads and what they take off the risk of predicting 0, for one target."""

    plan: Plan
    parameters: Float[np.ndarray, " p"]
    gain: float


def searched(forms: Forms, plan: Plan, starts: Sequence[Float[np.ndarray, " p"]]) -> Found:
    """The best heads of a plan, from the better ones of these starts."""
    bounds = plan.bounds(forms.parity.widest)
    low, high = np.array(bounds).T
    starts = [np.clip(start, low, high) for start in starts]

    def objective(parameters) -> tuple[float, Float[np.ndarray, " p"]]:
        value, slope = _objective(jnp.asarray(plan.matrices(parameters)), forms, plan.paired)
        return float(value) / unit, plan.slope(parameters, np.asarray(slope, float)) / unit

    unit = 1.0
    values = [objective(start)[0] for start in starts]
    unit = max(-min(values), 1e-300)
    options = {"gtol": 1e-8, "ftol": 1e-12 if forms.parity.line else 1e-9, "maxcor": 20, "maxiter": 200}
    ends = [
        minimize(objective, starts[i], jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        for i in np.argsort(values)[: _FOLLOWED if forms.parity.line else 1]
    ]
    best = min(ends, key=lambda end: end.fun)
    return Found(plan, best.x, -float(best.fun) * unit)


@eqx.filter_jit
def _objective(A: Float[Array, "h d d"], forms: Forms, paired: bool) -> tuple[Array, Array]:
    def value(A):
        M, c, cost = (part.mean(axis=0) for part in forms(A, paired))
        return -c @ jnp.linalg.solve(M + jnp.diag(cost), c) / 2

    return jax.value_and_grad(value)(A)


class Solved(NamedTuple):
    """Heads as scores and values, what they take off the risk of predicting 0 for one target, and its error."""

    parts: list[tuple[Matrix, float]]
    gain: float
    stderr: float


def solved(forms: Forms, found: Found, L: float) -> Solved:
    """The best values of the heads of a search, with the quadrature in place of the table where that is coarse."""
    A, paired = found.plan.matrices(found.parameters), found.plan.paired
    M, c, cost = (np.asarray(part, float) for part in eqx.filter_jit(forms)(jnp.asarray(A), paired))
    if not forms.parity.line:
        M = M + forms.corrected(jnp.asarray(A), paired, L)
    r = np.linalg.solve(M.mean(axis=0) + np.diag(cost.mean(axis=0)), c.mean(axis=0))
    gains = c @ r - np.einsum("rhg,h,g->r", M, r, r) / 2
    stderr = float(gains.std(ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else 0.0
    if paired:
        return Solved([(sign * A[h], sign * r[h] / 2) for h in range(len(A)) for sign in (1, -1)], gains.mean(), stderr)
    return Solved([(A[h], r[h]) for h in range(len(A))], float(gains.mean()), stderr)
