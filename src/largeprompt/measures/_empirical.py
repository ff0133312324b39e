import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._expectation import token_expectation, token_quartic
from ._measure import AbstractMeasure
from ._streaming import tilted_cov, tilted_fourth, tilted_log_mass, tilted_mean


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
        self.theta = jnp.asarray(np.zeros(self.points.shape[1], self.points.dtype))

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

    def log_masses(self) -> Float[Array, " L"]:
        """The logarithms of the atoms' weights, tilt included, all at once."""
        scores = self.points @ self.theta
        return jax.nn.log_softmax(scores if self.log_weights is None else scores + self.log_weights)

    def _cgf(self, theta):
        before = tilted_log_mass(self.points, self.log_weights, self.theta)
        return tilted_log_mass(self.points, self.log_weights, self.theta + theta) - before

    def _tilt(self, theta):
        return eqx.tree_at(lambda mu: mu.theta, self, self.theta + theta)

    def _mean(self):
        return tilted_mean(self.points, self.log_weights, self.theta)

    def _cov(self):
        return tilted_cov(self.points, self.log_weights, self.theta)

    def _fourth(self, b, A, B):
        return tilted_fourth(self.points, self.log_weights, self.theta, b, A, B)

    def _expectation(self, f, u, breaks):
        return token_expectation(self.points, self.log_weights, self.theta, f, u)

    def _quartic(self, f, u, breaks, A, B):
        return token_quartic(self.points, self.log_weights, self.theta, f, u, A, B)

    def _atoms(self):
        return self

    def _sample(self, key: PRNGKeyArray, n: int):
        return self.points[jax.random.choice(key, self.size, (n,), p=jnp.exp(self.log_masses()))]

    def _subgaussian(self):
        """The radius of a ball that holds every atom of positive weight (Hoeffding)."""
        held = jnp.ones(self.size, bool) if self.log_weights is None else self.log_weights > -jnp.inf
        return enclosing_radius(self.points, held)

    def _radius(self):
        norms = jnp.linalg.norm(self.points, axis=1)
        return norms.max() if self.log_weights is None else jnp.where(self.log_weights > -jnp.inf, norms, 0).max()

    def _tails(self):
        return (jnp.zeros((self.dim, self.dim)),)


def enclosing_radius(points: Float[Array, "n D"], held: Bool[Array, " n"]) -> Float[Array, ""]:
    """The radius of a ball around the points that are held, the smaller of two simple ones."""
    points = jnp.where(held[:, None], points, points[jnp.argmax(held)])
    middle = (points.max(axis=0) + points.min(axis=0)) / 2
    radii = [jnp.linalg.norm(points - centre, axis=1).max() for centre in (points.mean(axis=0), middle)]
    return jnp.minimum(*radii)
