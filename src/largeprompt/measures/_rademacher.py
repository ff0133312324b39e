import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._empirical import Empirical
from ._measure import AbstractMeasure

_ENUMERATED = 12  # coordinates up to which all signs are gone through


class Rademacher(AbstractMeasure):
    r"""Independent signs $\pm h_i$: $\Lambda(\theta) = \sum_i \log\cosh(h_i\theta_i)$; a tilt makes them biased."""

    h: Float[Array, " D"]
    # Half the log-odds of +h against -h: tilts add to it, and it neither over- nor underflows.
    bias: Float[Array, " D"]

    def __init__(self, scale: Numbers):
        self.h = checks.scales("scale", scale)
        self.bias = jnp.asarray(np.zeros(self.h.shape), self.h.dtype)

    @property
    def dim(self) -> int:
        return self.h.shape[0]

    def _cgf(self, theta):
        x = self.h * theta
        plus, minus = jax.nn.log_sigmoid(2 * self.bias), jax.nn.log_sigmoid(-2 * self.bias)
        return jnp.logaddexp(plus + x, minus - x).sum()

    def _tilt(self, theta):
        return eqx.tree_at(lambda mu: mu.bias, self, self.bias + self.h * theta)

    def _mean(self):
        return self.h * jnp.tanh(self.bias)

    def _cov(self):
        # 4 p (1-p), not 1 - tanh²: keeps its digits when one sign is nearly certain.
        log_variance = jax.nn.log_sigmoid(2 * self.bias) + jax.nn.log_sigmoid(-2 * self.bias)
        return jnp.diag(4 * self.h**2 * jnp.exp(log_variance))

    def _atoms(self):
        if self.dim > _ENUMERATED:
            return None
        signs = jnp.asarray(list(itertools.product((-1.0, 1.0), repeat=self.dim)), self.h.dtype)
        return Empirical.from_log_weights(signs * self.h, jax.nn.log_sigmoid(2 * self.bias * signs).sum(axis=1))

    @eqx.filter_jit  # one program, not ten
    def _sample(self, key: PRNGKeyArray, n: int):
        plus = jax.random.uniform(key, (n, self.dim), self.h.dtype) < jax.nn.sigmoid(2 * self.bias)
        return jnp.where(plus, self.h, -self.h)

    def _subgaussian(self):
        """σ² = max h² tanh(x)/x at x = half the log-odds, the best constant for two points (Kearns and Saul)."""
        x = jnp.where(self.bias == 0, 1.0, self.bias)
        return (self.h * jnp.sqrt(jnp.where(self.bias == 0, 1.0, jnp.tanh(x) / x))).max()

    def _radius(self):
        return jnp.linalg.norm(self.h)

    def _tails(self):
        return (jnp.asarray(np.zeros((self.dim, self.dim)), float),)
