from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._expectation import token_expectation, token_quartic
from ._measure import AbstractMeasure
from ._streaming import DIRECT, tilted_cov, tilted_fourth, tilted_log_mass, tilted_mean


class Empirical(AbstractMeasure):
    r"""A finite prompt: atoms $z_1,\dots,z_L$ with weights $\pi_l$ (uniform by default).

    $\Lambda(\theta) = \log\sum_l \pi_l e^{\langle\theta, z_l\rangle}$, and the weights of a tilt are the softmax
    of its scores. A tilt is kept as its $\theta$ and costs nothing; tokens are streamed when a moment is asked for,
    so that attention on 10⁷ tokens needs a few megabytes beside them.

    Paper: Section 2, finite-length prompt.
    """

    points: Float[Array, "L D"]
    # Log-weights, not weights: tilts add to them, and e^{⟨θ,z⟩} overflows float32 past 88. None means uniform.
    log_weights: Float[Array, " L"] | None
    theta: Float[Array, " D"]

    def __init__(self, points: Numbers, weights: Numbers | None = None):
        self.points = checks.matrix("points", points)
        self.log_weights = None if weights is None else checks.probabilities("weights", weights, self.points.shape[0])
        self.theta = jnp.asarray(np.zeros(self.points.shape[1]), self.points.dtype)

    @classmethod
    def from_log_weights(cls, points: Float[Array, "L D"], log_weights: Float[Array, " L"] | None) -> "Empirical":
        """Atoms with the logarithms of their weights, which add up to 1; nothing is checked."""
        uniform = cls(points)
        return eqx.tree_at(lambda mu: mu.log_weights, uniform, log_weights, is_leaf=lambda leaf: leaf is None)

    @property
    def dim(self) -> int:
        return self.points.shape[1]

    @property
    def size(self) -> int:
        """The number of atoms, L."""
        return self.points.shape[0]

    def _is_few(self, theta: Any = None) -> bool:
        """Whether NumPy does: JAX would compile a program for each number of tokens."""
        return self.size <= DIRECT and checks.library(self, theta) is np

    @checks.quietly
    def log_masses(self) -> Float[Array, " L"]:
        """The logarithms of the atoms' weights, tilt included, all at once."""
        return jnp.asarray(self._log_masses(np if self._is_few() else jnp), self.points.dtype)

    def _log_masses(self, library: Any) -> Any:
        scores = library.asarray(self.points) @ library.asarray(self.theta)
        scores = scores if self.log_weights is None else scores + library.asarray(self.log_weights)
        return scores - (np.logaddexp.reduce(scores) if library is np else jax.nn.logsumexp(scores))

    @checks.quietly
    def _cgf(self, theta):
        if self._is_few(theta):
            before = self._log_masses(np)
            after = before + np.asarray(self.points) @ np.asarray(theta)
            return jnp.asarray(np.logaddexp.reduce(after) - np.logaddexp.reduce(before), self.points.dtype)
        before = tilted_log_mass(self.points, self.log_weights, self.theta)
        return tilted_log_mass(self.points, self.log_weights, self.theta + theta) - before

    def _tilt(self, theta):
        return eqx.tree_at(lambda mu: mu.theta, self, self.theta + theta)

    @checks.quietly
    def _mean(self):
        if self._is_few():
            return jnp.asarray(np.exp(self._log_masses(np)) @ np.asarray(self.points), self.points.dtype)
        return tilted_mean(self.points, self.log_weights, self.theta)

    @checks.quietly
    def _cov(self):
        if self._is_few():
            masses, points = np.exp(self._log_masses(np)), np.asarray(self.points)
            centred = points - masses @ points
            return jnp.asarray((masses[:, None] * centred).T @ centred, points.dtype)
        return tilted_cov(self.points, self.log_weights, self.theta)

    def _fourth(self, b, A, B):
        return tilted_fourth(self.points, self.log_weights, self.theta, b, A, B)

    def _expectation(self, f, u, breaks):
        return token_expectation(self.points, self.log_weights, self.theta, f, u)

    def _quartic(self, f, u, breaks, A, B):
        return token_quartic(self.points, self.log_weights, self.theta, f, u, A, B)

    def _atoms(self):
        return self

    @eqx.filter_jit  # one program, not ten
    def _sample(self, key: PRNGKeyArray, n: int):
        return self.points[jax.random.choice(key, self.size, (n,), p=jnp.exp(self.log_masses()))]

    def _subgaussian(self):
        """The radius of a ball that holds every atom of positive weight (Hoeffding)."""
        held = np.ones(self.size, bool) if self.log_weights is None else self.log_weights > -jnp.inf
        return enclosing_radius(self.points, held)

    def _radius(self):
        norms = jnp.linalg.norm(self.points, axis=1)
        return norms.max() if self.log_weights is None else jnp.where(self.log_weights > -jnp.inf, norms, 0).max()

    def _tails(self):
        return (jnp.asarray(np.zeros((self.dim, self.dim)), float),)


@checks.quietly
def enclosing_radius(points: Float[Array, "n D"], held: Bool[Array | np.ndarray, " n"]) -> Float[Array, ""]:
    """The radius of a ball around the points that are held, the smaller of two simple ones."""
    library = checks.library(points, held) if len(points) <= DIRECT else jnp
    points, held = library.asarray(points), library.asarray(held)
    points = library.where(held[:, None], points, points[library.argmax(held)])
    middle = (points.max(axis=0) + points.min(axis=0)) / 2
    radii = [library.linalg.norm(points - centre, axis=1).max() for centre in (points.mean(axis=0), middle)]
    return jnp.asarray(library.minimum(*radii), points.dtype)
