import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._expectation import Expectation, normal_derivatives, normal_nodes
from ._fourth_moments import of_second_cumulants
from ._measure import AbstractMeasure


class Gaussian(AbstractMeasure):
    r"""$\mathcal N(m, \Gamma)$ with any positive semi-definite $\Gamma$.

    $\Lambda(\theta) = m\cdot\theta + \tfrac12\theta^\top\Gamma\theta$.

    Paper: Lemma 2.1, whose proof is `tilt`.
    """

    m: Float[Array, " D"]
    Gamma: Float[Array, "D D"]
    _root: Float[Array, "D r"] | None

    def __init__(self, mean: Numbers, cov: Numbers):
        self.m = checks.vector("mean", mean)
        self.Gamma = checks.covariance("cov", cov, self.m.shape[0])
        self._root = None

    @classmethod
    def from_root(cls, mean: Numbers, root: Numbers) -> "Gaussian":
        r"""$\mathcal N(m, CC^\top)$ with the root C kept, so that sampling decomposes nothing."""
        m = checks.vector("mean", mean)
        C = checks.matrix("root", root, m.shape[0], None)
        return eqx.tree_at(lambda mu: mu._root, cls(m, C @ C.T), C, is_leaf=lambda leaf: leaf is None)

    @property
    def dim(self) -> int:
        return self.m.shape[0]

    def _cgf(self, theta):
        return self.m @ theta + theta @ self.Gamma @ theta / 2

    def _tilt(self, theta):
        """Tilting moves the mean by Γθ and leaves the covariance alone."""
        return eqx.tree_at(lambda mu: mu.m, self, self.m + self.Gamma @ theta)

    def _mean(self):
        return self.m

    def _cov(self):
        return self.Gamma

    def root(self) -> Float[Array, "D r"]:
        r"""A matrix C with $CC^\top = \Gamma$."""
        if self._root is not None:
            return self._root
        values, vectors = jnp.linalg.eigh(self.Gamma)  # not a Cholesky factor: Γ may be singular
        return vectors * jnp.sqrt(jnp.maximum(values, 0))

    def _fourth(self, b, A, B):
        return of_second_cumulants(self.Gamma, b, A, B)

    def _expectation(self, f, u, breaks):
        r"""$E f(s)z = E f\,m + E f'\,\Gamma u$ with $s\sim N(u\cdot m, u^\top\Gamma u)$, likewise the square."""
        m, along = self.m, self.Gamma @ u
        value, slope, curvature = normal_derivatives(f, u @ m, u @ along, breaks)
        cross = jnp.outer(m, along)
        second = (
            value * (self.Gamma + jnp.outer(m, m)) + slope * (cross + cross.T) + curvature * jnp.outer(along, along)
        )
        return Expectation(value, value * m + slope * along, second, jnp.zeros_like(value))

    def _quartic(self, f, u, breaks, A, B):
        """Given its score, a token is Gaussian with a mean that is affine in the score."""
        along = self.Gamma @ u
        deviation, t, weights = normal_nodes(u @ self.m, u @ along, breaks)
        unit = along / jnp.where(deviation > 0, deviation, 1.0)
        rest = jnp.zeros_like(A).at[:-1, :-1].set(self.Gamma - jnp.outer(unit, unit))
        centres = jnp.concatenate([self.m + t[:, None] * unit, jnp.ones_like(t)[:, None]], axis=1)
        given = jax.vmap(lambda centre: of_second_cumulants(rest, centre, A, B))(centres)
        return jnp.sum(weights * f(u @ self.m + deviation * t) * given)

    def _averages_exactly(self):
        return True

    @eqx.filter_jit  # one program, not ten
    def _sample(self, key: PRNGKeyArray, n: int):
        root = self.root()
        return self.m + jax.random.normal(key, (n, root.shape[1]), self.m.dtype) @ root.T

    def _subgaussian(self):
        return jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(self.Gamma)[-1], 0))

    def _radius(self):
        return jnp.where(jnp.any(self.Gamma != 0), jnp.inf, jnp.linalg.norm(self.m))

    def _tails(self):
        return (self.Gamma,)
