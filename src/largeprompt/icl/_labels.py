import abc
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.measures._functions import as_pytree

Link = Callable[[Float[Array, " n"]], Float[Array, " n"]]


class AbstractLabel(AbstractShown):
    r"""The law of a label given the score $t = \langle w, x\rangle$ of its covariate, and how a prediction is judged.

    A subclass says what $k(t, \eta) = \log E[e^{\eta y}\mid t]$ is, how to sample, which prediction is best for one who
    knows $t$, and the scores at which $k$ has a kink; the loss is $\tfrac12(\hat y-y)^2$ unless it has another.
    """

    @abc.abstractmethod
    def log_mgf(self, t: Float[Array, " n"], eta: Float[Array, ""]) -> Float[Array, " n"]:
        """k(t, η)."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray, t: Float[Array, " n"]) -> Float[Array, " n"]:
        """One label for each score."""

    @abc.abstractmethod
    def best(self, t: Float[Array, " n"]) -> Float[Array, " n"]:
        """The prediction with the least mean loss given the score."""

    def loss(self, prediction: Float[Array, " k"], label: Float[Array, " k"]) -> Float[Array, ""]:
        """What a prediction costs."""
        return jnp.sum((prediction - label) ** 2) / 2

    def breaks(self) -> tuple[float, ...]:
        """The scores at which k has a kink or a jump."""
        return ()


class NoisyLink(AbstractLabel):
    r"""$y = f(t) + \varepsilon$ with $\varepsilon\sim\mathcal N(0, s^2)$ and `noise` the variance $s^2$.

    `link` is $f$, entry by entry on an array of scores; `kinks` are the scores at which it has a kink or a jump.
    """

    link: Link
    noise: Float[Array, ""]
    kinks: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, link: Link, noise: float = 0.0, kinks: Sequence[float] = ()):
        if not callable(link):
            raise ValueError(f"link is {link!r}; it must be a function of scores, such as jnp.tanh")
        self.link, self.noise = as_pytree(link), checks.number("noise", noise, at_least=0)
        self.kinks = tuple(float(checks.number("kinks", kink)) for kink in kinks)
        try:
            shape = jax.eval_shape(self.link, jax.ShapeDtypeStruct((2,), float)).shape
        except Exception as error:
            raise ValueError(f"link cannot be traced by JAX: {str(error).splitlines()[0]}") from None
        if shape != (2,):
            raise ValueError(f"link returns shape {shape} for 2 scores; it must act on each score by itself")

    def log_mgf(self, t, eta):
        return eta * self.link(t) + self.noise * eta**2 / 2

    def sample(self, key, t):
        return self.link(t) + jnp.sqrt(self.noise) * jax.random.normal(key, t.shape, t.dtype)

    def best(self, t):
        return self.link(t)

    def breaks(self):
        return self.kinks


class LogisticLabel(AbstractLabel):
    r"""$y = \pm1$ with $P(y=1\mid t) = 1/(1+e^{-t})$, and the logistic loss $\log(1+e^{-y\hat y})$."""

    def log_mgf(self, t, eta):
        return jnp.logaddexp(eta + jax.nn.log_sigmoid(t), -eta + jax.nn.log_sigmoid(-t))

    def sample(self, key, t):
        return jnp.where(jax.random.uniform(key, t.shape, t.dtype) < jax.nn.sigmoid(t), 1.0, -1.0)

    def best(self, t):
        return t

    def loss(self, prediction, label):
        return jnp.sum(jax.nn.softplus(-label * prediction))
