import abc
import functools
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt.measures._expectation import Expectation, slope_of

from ._attention import AbstractAttention, register


class AbstractElementwise(AbstractAttention):
    r"""Attention whose weights are a function of the score, $T[\mu](z) = V N/D$ with $N = E\,\varphi(s)z'$.

    The score is $s = \langle Uz, z'\rangle$, and $D$ is 1, or $E\,\varphi(s)$ where `normalised`; a normalised layer
    reads 0 off a prompt that has no weight at all. A subclass says what `weight` is, and at which scores (`breaks`) it
    has a kink or changes its scale; all errors are moments of tokens along the query. Its errors are of order 1/L
    wherever these moments are finite.
    """

    normalised: bool = eqx.field(static=True, default=False)
    breaks: ClassVar[tuple[float, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in cls.__dict__:
            register(f"normalised-{cls.kind}", functools.partial(cls, normalised=True))

    @abc.abstractmethod
    def weight(self, s: Float[Array, " n"]) -> Float[Array, " n"]:
        """The weights φ(s) of tokens with these scores."""

    def _mean(self, f, mu, u) -> Expectation:
        return mu._expectation(f, u, jnp.asarray(self.breaks, u.dtype))

    def _quartic(self, f, mu, u, A, B) -> Float[Array, ""]:
        return mu._quartic(f, u, jnp.asarray(self.breaks, u.dtype), A, B)

    def _parts(self, mu, u) -> tuple[Float[Array, " D"], Float[Array, ""]]:
        """The reading m and what it is divided by; where there is no weight, 0 and infinity."""
        total = self._mean(self.weight, mu, u)
        if not self.normalised:
            return total.times_z, jnp.ones_like(total.value)
        held = total.value != 0
        D = jnp.where(held, total.value, 1.0)
        return jnp.where(held, total.times_z / D, 0.0), jnp.where(held, D, jnp.inf)

    def reading(self, mu, u):
        return self._parts(mu, u)[0]

    def reading_slope(self, mu, u):
        r"""$E\,\varphi'(s)z'z'^\top$, or where normalised $E\,\varphi'(s)(z'-m)z'^\top/D$."""
        steep = self._mean(slope_of(self.weight), mu, u)
        if not self.normalised:
            return steep.times_zz
        m, D = self._parts(mu, u)
        return (steep.times_zz - jnp.outer(m, steep.times_z)) / D

    def influence(self, mu, u, tokens):
        r"""$\varphi(s')z' - N$, or where normalised $\varphi(s')(z'-m)/D$."""
        m, D = self._parts(mu, u)
        weights = self.weight(tokens @ u)[:, None]
        return weights * (tokens - m) / D if self.normalised else weights * tokens - m

    def slope_influence(self, mu, u, tokens):
        r"""$\varphi'z'z'^\top - H$, or $[(z'-m)(\varphi'z'-\varphi p)^\top - \varphi H]/D$, $p = E\,\varphi'z'/D$."""
        s, H = tokens @ u, self.reading_slope(mu, u)
        weights, slopes = self.weight(s)[:, None], slope_of(self.weight)(s)[:, None]
        if not self.normalised:
            return (slopes * tokens)[:, :, None] * tokens[:, None, :] - H
        m, D = self._parts(mu, u)
        p = self._mean(slope_of(self.weight), mu, u).times_z / D
        outer = (tokens - m)[:, :, None] * (slopes * tokens - weights * p)[:, None, :]
        return (outer - weights[:, :, None] * H) / D

    def error_covariance(self, mu, u, other, v, tokens=None):
        r"""Exact for a head with itself: $E\,\varphi^2z'z'^\top - NN^\top$, or $E\,\varphi^2(z'-m)(z'-m)^\top/D^2$."""
        if tokens is not None or other is not self or v is not u:
            return super().error_covariance(mu, u, other, v, tokens)
        m, D = self._parts(mu, u)
        square = self._mean(lambda s: self.weight(s) ** 2, mu, u)
        if not self.normalised:
            return square.times_zz - jnp.outer(m, m)
        cross = jnp.outer(m, square.times_z)
        return (square.times_zz - cross - cross.T + square.value * jnp.outer(m, m)) / D**2

    def slope_error(self, mu, u, A, B, tokens=None):
        if tokens is not None:
            return super().slope_error(mu, u, A, B, tokens)
        weight, slope = self.weight, slope_of(self.weight)
        H = self.reading_slope(mu, u)
        of_H = jnp.sum((A @ H) * (H @ B))
        if not self.normalised:
            zero = jnp.zeros_like(u)
            return self._quartic(lambda s: slope(s) ** 2, mu, u, _about(A, zero), _about(B, zero)) - of_H
        m, D = self._parts(mu, u)
        p = self._mean(slope, mu, u).times_z / D
        # (yᵀAy)(wᵀBw) - 2φ yᵀAHBw + φ² tr(HᵀAHB) with y = z' - m and w = φ'z' - φp, by powers of φ and φ'
        around, G = _about(A, m), A @ H @ B
        square, product = lambda s: weight(s) ** 2, lambda s: weight(s) * slope(s)
        mixed, plain = self._mean(product, mu, u), self._mean(square, mu, u)
        line = jnp.zeros_like(around).at[:-1, -1].set(-B @ p).at[-1, :-1].set(-B @ p)
        constant = jnp.zeros_like(around).at[-1, -1].set(p @ B @ p)
        total = (
            self._quartic(lambda s: slope(s) ** 2, mu, u, around, _about(B, jnp.zeros_like(u)))
            + self._quartic(product, mu, u, around, line)
            + self._quartic(square, mu, u, around, constant)
        )
        crossed = jnp.sum(G * mixed.times_zz) - m @ G @ mixed.times_z - (plain.times_z - plain.value * m) @ G @ p
        return (total - 2 * crossed + plain.value * of_H) / D**2

    def reading_bias(self, mu, u, tokens=None):
        r"""$-E\,\varphi^2(z'-m)/D^2$ where normalised; there is none otherwise."""
        if not self.normalised:
            return jnp.zeros_like(u)
        if tokens is not None:
            return super().reading_bias(mu, u, tokens)
        m, D = self._parts(mu, u)
        square = self._mean(lambda s: self.weight(s) ** 2, mu, u)
        return -(square.times_z - square.value * m) / D**2

    def errors_are_exact(self, mu, other=None):
        """Those of one head, wherever averages along a direction are; those of two, on prompts of few tokens."""
        alone = other is None or other is self
        return (alone and mu._averages_exactly()) or super().errors_are_exact(mu, other)


def _about(A: Float[Array, "D D"], m: Float[Array, " D"]) -> Float[Array, "D1 D1"]:
    """The matrix of (z - m)ᵀA(z - m) as a form in (z, 1)."""
    onto = jnp.concatenate([jnp.eye(len(m), dtype=m.dtype), -m[:, None]], axis=1)
    return onto.T @ A @ onto
