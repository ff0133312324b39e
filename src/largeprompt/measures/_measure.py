import abc
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown, is_known
from largeprompt._typing import VectorLike

from ._expectation import Expectation, ScoreFunction, token_expectation, token_quartic
from ._fourth_moments import of_cumulants

Measure = TypeVar("Measure", bound="AbstractMeasure")
_SAMPLE = 2**14  # tokens of a fixed sample


class AbstractMeasure(AbstractShown):
    r"""A probability measure on tokens, seen through its cumulant generating function.

    $$\Lambda_\mu(\theta) = \log \int e^{\langle\theta, z\rangle}\,d\mu(z), \qquad
      d\mu_\theta \propto e^{\langle\theta, z\rangle}\,d\mu .$$

    Every measure obeys $\Lambda(0)=0$, $\nabla\Lambda(\theta) = \mathrm{mean}(\mu_\theta)$,
    $\nabla^2\Lambda(\theta) = \mathrm{cov}(\mu_\theta)$ and $(\mu_\theta)_\eta = \mu_{\theta+\eta}$.
    A subclass says what its `_cgf`, `_tilt`, `_mean`, `_cov`, `_sample` and `_subgaussian` are; the public methods
    check what goes in and what comes out.
    """

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Dimension of a token."""

    @abc.abstractmethod
    def _cgf(self, theta: Float[Array, " D"]) -> Float[Array, ""]: ...

    @abc.abstractmethod
    def _tilt(self: Measure, theta: Float[Array, " D"]) -> Measure: ...

    @abc.abstractmethod
    def _mean(self) -> Float[Array, " D"]: ...

    @abc.abstractmethod
    def _cov(self) -> Float[Array, "D D"]: ...

    @abc.abstractmethod
    def _sample(self, key: PRNGKeyArray, n: int) -> Float[Array, "n D"]: ...

    @abc.abstractmethod
    def _subgaussian(self) -> Float[Array, ""]: ...

    def _radius(self) -> Float[Array, ""]:
        return jnp.asarray(jnp.inf)

    def _tails(self) -> tuple[Float[Array, "D D"], ...] | None:
        return None

    def _shown(self) -> dict[str, Any]:
        shown = super()._shown()
        if is_known(shown.get("theta")) and not np.any(shown["theta"]):
            del shown["theta"]
        return shown

    def _fourth(self, b: Float[Array, " D"], A: Float[Array, "D D"], B: Float[Array, "D D"]) -> Float[Array, ""]:
        """E (yᵀAy)(yᵀBy) for y = z - mean + b and symmetric A, B."""
        return of_cumulants(lambda s: self._tilt(s)._cov(), self._cov(), b, A, B)

    def _atoms(self) -> "AbstractMeasure | None":
        """The same law as an `Empirical` of all its tokens; None where it has more than a few."""
        return None

    def _expectation(self, f: ScoreFunction, u: Float[Array, " D"], breaks: Float[Array, " b"]) -> Expectation:
        """By default over all tokens, or a fixed sample, which derivatives in the measure's own numbers do not move."""
        if (atoms := self._atoms()) is not None:
            return atoms._expectation(f, u, breaks)
        return token_expectation(self._fixed_sample(), None, jnp.zeros_like(u), f, u, sampled=True)

    def _quartic(
        self,
        f: ScoreFunction,
        u: Float[Array, " D"],
        breaks: Float[Array, " b"],
        A: Float[Array, "D1 D1"],
        B: Float[Array, "D1 D1"],
    ) -> Float[Array, ""]:
        """E f(s) (xᵀAx)(xᵀBx) for x = (z, 1) and symmetric A, B, as exact as `_expectation`."""
        if (atoms := self._atoms()) is not None:
            return atoms._quartic(f, u, breaks, A, B)
        return token_quartic(self._fixed_sample(), None, jnp.zeros_like(u), f, u, A, B)

    def _averages_exactly(self) -> bool:
        """Whether `_expectation` and `_quartic` are exact, and not averages over a fixed sample."""
        return self._atoms() is not None

    def _fixed_sample(self) -> Float[Array, "n D"]:
        """The tokens that stand for a measure where no exact average is known, always the same."""
        return jax.lax.stop_gradient(self._sample(jax.random.key(0), _SAMPLE))

    def expectation(self, f: ScoreFunction, u: VectorLike, breaks: Sequence[float] = ()) -> Expectation:
        r"""$E f(s)$, $E f(s)z$ and $E f(s)zz^\top$ with the score $s = \langle u, z\rangle$.

        `f` acts on an array of scores, entry by entry; `breaks` are the scores at which it has a kink or a jump, or
        between which it varies on a scale of its own. Exact for a `Gaussian` (a one-dimensional integral), an
        `Empirical`, and what is made of them; over a fixed sample elsewhere, with the standard error of $E f(s)$.
        """
        u = checks.vector("u", u, self.dim)
        found = self._expectation(f, u, jnp.asarray(breaks, u.dtype))
        return jax.tree.map(lambda moment: checks.result("the expectation", moment), found)

    def cgf(self, theta: VectorLike) -> Float[Array, ""]:
        r"""The cumulant generating function $\Lambda_\mu(\theta)$."""
        return checks.result("cgf(theta)", self._cgf(checks.vector("theta", theta, self.dim)))

    def tilt(self: Measure, theta: VectorLike) -> Measure:
        r"""The tilted measure $\mu_\theta \propto e^{\langle\theta, z\rangle}\mu$, a measure again."""
        return self._tilt(checks.vector("theta", theta, self.dim))

    def mean(self) -> Float[Array, " D"]:
        r"""$\int z\,d\mu(z)$."""
        return checks.result("the mean", self._mean())

    def cov(self) -> Float[Array, "D D"]:
        r"""$\int (z-Ez)(z-Ez)^\top d\mu(z)$."""
        return checks.result("the covariance", self._cov())

    def second_moment(self) -> Float[Array, "D D"]:
        r"""$\int z z^\top d\mu(z)$, all that linear attention sees."""
        m = self.mean()
        return checks.result("the second moment", self.cov() + jnp.outer(m, m))

    def sample(self, key: PRNGKeyArray, n: int) -> Float[Array, "n D"]:
        """`n` independent tokens."""
        return checks.result("a sample", self._sample(checks.key(key), checks.count("n", n)))

    def subgaussian(self) -> Float[Array, ""]:
        r"""A $\sigma$ with $\log E\,e^{\langle\theta, z-Ez\rangle} \le \sigma^2\|\theta\|^2/2$ for every $\theta$."""
        return checks.result("the sub-Gaussian constant", self._subgaussian())

    def radius(self) -> Float[Array, ""]:
        r"""The radius of a ball about 0 that holds the support; infinite where there is none, or none is known."""
        return self._radius()

    def tails(self) -> tuple[Float[Array, "D D"], ...] | None:
        r"""The covariances of the Gaussians that the law ends in: $\Lambda(t\theta)/t^2 \to
        \tfrac12\max_k\theta^\top\Gamma_k\theta$, and beyond any radius its mass is that of those Gaussians to first
        order of the exponent. Zero for bounded laws, None where they are not known.
        """
        return self._tails()

    def prompt(self, key: PRNGKeyArray, L: int | float) -> "AbstractMeasure":
        """A prompt of `L` independent tokens as a measure: their empirical measure, or for `L = inf` this measure."""
        from ._empirical import Empirical

        L = checks.prompt_length(L)
        return self if math.inf == L else Empirical(self.sample(key, int(L)))


def as_measure(name: str, mu: Any, dim: int | None = None) -> AbstractMeasure:
    """`mu` itself, once it is a measure on tokens of dimension `dim`."""
    if not isinstance(mu, AbstractMeasure):
        raise ValueError(f"{name} is of type {type(mu).__name__}; it must be a measure, such as Empirical(tokens)")
    if dim is not None and mu.dim != dim:
        raise ValueError(f"{name} has tokens of dimension {mu.dim}; they must be of dimension {dim}")
    return mu


def linearised(mu: AbstractMeasure, f: ScoreFunction, u: Float[Array, " D"]) -> Expectation:
    """The expectation for scores near 0, where f(s) is f(0) + f'(0)s."""
    constant, slope = jax.jvp(lambda s: f(s)[0], (jnp.zeros(1, u.dtype),), (jnp.ones(1, u.dtype),))
    mean, second, third = moments_along(mu, u)
    value, times_z = constant + slope * (u @ mean), constant * mean + slope * second @ u
    return Expectation(value, times_z, constant * second + slope * third, jnp.zeros((), u.dtype))


def moments_along(
    mu: AbstractMeasure, u: Float[Array, " D"]
) -> tuple[Float[Array, " D"], Float[Array, "D D"], Float[Array, "D D"]]:
    """E z, E zzᵀ and E zzᵀ⟨u,z⟩, whose third cumulant is the slope of the covariance."""
    mean = mu._mean()
    cov, third = jax.jvp(lambda s: mu._tilt(s)._cov(), (jnp.zeros_like(u),), (u,))
    second = cov + jnp.outer(mean, mean)
    return mean, second, third + _both(mean, cov @ u) + (mean @ u) * second


def fourth_along(mu: AbstractMeasure, u: Float[Array, " D"], v: Float[Array, " D"]) -> Float[Array, "D D"]:
    """E zzᵀ⟨u,z⟩⟨v,z⟩, from the covariance and its derivatives in a tilt, which are cumulants."""
    mean = mu._mean()
    slope = lambda s: jax.jvp(lambda s: mu._tilt(s)._cov(), (s,), (v,))  # noqa: E731
    (cov, of_v), (of_u, of_both) = jax.jvp(slope, (jnp.zeros_like(u),), (u,))
    second = cov + jnp.outer(mean, mean)
    with_means = (mean @ u) * (of_v + _both(mean, cov @ v)) + (mean @ v) * (of_u + _both(mean, cov @ u))
    return of_both + _both(mean, of_u @ v) + _both(cov @ u, cov @ v) + with_means + (u @ second @ v) * second


def _both(a: Float[Array, " D"], b: Float[Array, " D"]) -> Float[Array, "D D"]:
    return jnp.outer(a, b) + jnp.outer(b, a)
