from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import VectorLike

from ._empirical import Empirical
from ._functions import as_pytree
from ._measure import AbstractMeasure


class FromSampler(AbstractMeasure):
    r"""A law known only by its sampler, stood in for by `size` tokens drawn once, with its Monte-Carlo error.

    Every number is that of the stand-in; `effective_size`, `cgf_stderr` and `mean_error` say how far it may be from
    the law's own. A far tilt leaves few effective tokens: the errors then say so.
    """

    known_sample: Callable[[PRNGKeyArray, int], Float[Array, "n D"]] | None
    stand_in: Empirical

    def __init__(
        self,
        sample: Callable[[PRNGKeyArray, int], Float[Array, "n D"]],
        dim: int,
        key: PRNGKeyArray,
        size: int = 100_000,
    ):
        if not callable(sample):
            raise ValueError(f"sample is {sample!r}; it must be a function (key, n) -> tokens")
        dim, size = checks.count("dim", dim), checks.count("size", size, at_least=2)
        self.known_sample = as_pytree(sample)
        self.stand_in = Empirical(
            checks.array("what sample(key, n) returned", sample(checks.key(key), size), (size, dim))
        )

    @property
    def dim(self) -> int:
        return self.stand_in.dim

    def _cgf(self, theta):
        return self.stand_in._cgf(theta)

    def _tilt(self, theta):
        # A tilt forgets the sampler, which draws from the untilted law; its samples come from the stand-in.
        return eqx.tree_at(
            lambda mu: (mu.stand_in, mu.known_sample),
            self,
            (self.stand_in._tilt(theta), None),
            is_leaf=lambda x: x is None,
        )

    def _mean(self):
        return self.stand_in._mean()

    def _cov(self):
        return self.stand_in._cov()

    def _fourth(self, b, A, B):
        return self.stand_in._fourth(b, A, B)

    def _sample(self, key: PRNGKeyArray, n: int):
        """From the sampler itself; from the weighted stand-in once tilted."""
        if self.known_sample is None:
            return self.stand_in._sample(key, n)
        return checks.array("what sample(key, n) returned", self.known_sample(key, n), (n, self.dim))

    def _subgaussian(self):
        """That of the stand-in, whose support is bounded; the law itself may have none."""
        return self.stand_in._subgaussian()

    def effective_size(self) -> Float[Array, ""]:
        r"""$1/\sum_l a_l^2$, how many equally weighted tokens would carry this Monte-Carlo error."""
        return checks.result("the effective size", 1 / jnp.sum(jnp.exp(2 * self.stand_in.log_masses())))

    def cgf_stderr(self, theta: VectorLike) -> Float[Array, ""]:
        r"""Standard error of $\Lambda(\theta)$ (delta method)."""
        tilted = self.stand_in._tilt(checks.vector("theta", theta, self.dim))
        change = jnp.exp(tilted.log_masses()) - jnp.exp(self.stand_in.log_masses())
        return checks.result("the standard error", jnp.linalg.norm(change))

    def mean_error(self) -> Float[Array, "D D"]:
        r"""Covariance of the Monte-Carlo error of the mean, $\sum_l a_l^2 (z_l-m)(z_l-m)^\top$."""
        centred = (self.stand_in.points - self._mean()) * jnp.exp(self.stand_in.log_masses())[:, None]
        return checks.result("the Monte-Carlo error", centred.T @ centred)
