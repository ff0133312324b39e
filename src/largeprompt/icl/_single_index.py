"""Tasks whose labels depend on a covariate through one score."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.measures import AbstractMeasure, Expectation, as_measure

from ._estimate import Estimate
from ._labels import AbstractLabel
from ._task import AbstractTask, Instance


class LabelledTokens(AbstractMeasure):
    r"""Tokens $(x, y)$ with $x\sim\mu$ and a label that depends on $x$ through $t = \langle w, x\rangle$.

    $$\Lambda(\theta, \eta) = \Lambda_\mu(\theta) + \log E_{\mu_\theta}\,e^{k(t, \eta)},\qquad
      k(t,\eta) = \log E[e^{\eta y}\mid t]:$$

    averages along one direction, exact wherever `expectation` of the covariates is.
    """

    covariates: AbstractMeasure
    w: Float[Array, " d"]
    label: AbstractLabel
    eta: Float[Array, ""] | None = None  # the tilt of the label; its law is sampled only where there is none

    @property
    def dim(self) -> int:
        return self.covariates.dim + 1

    def _label_tilt(self) -> Float[Array, ""]:
        return jnp.zeros((), self.w.dtype) if self.eta is None else self.eta

    def _averages(self, orders: int) -> tuple[Float[Array, ""], list[Expectation]]:
        """A reference k, and E e^{k - reference} E[yⁿ | t, tilted] for n = 0, 1, …, with x and xxᵀ."""
        eta, one = self._label_tilt(), jnp.ones((), self.w.dtype)
        # k at the mean score, so that the exponentials are of order 1
        centre = (self.w @ self.covariates._mean())[None]
        reference = jax.lax.stop_gradient(self.label.log_mgf(centre, eta)[0])

        def cumulants(t) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
            def k_and_slope(eta):
                return jax.jvp(lambda eta: self.label.log_mgf(t, eta), (eta,), (one,))

            (k, mean), (_, variance) = jax.jvp(k_and_slope, (eta,), (one,))
            return k, mean, variance

        def moment(n: int):
            def f(t):
                k, mean, variance = cumulants(t)
                return jnp.exp(k - reference) * (1.0, mean, variance + mean**2)[n]

            return self.covariates._expectation(f, self.w, jnp.asarray(self.label.breaks(), self.w.dtype))

        return reference, [moment(n) for n in range(orders)]

    def _log_total(self) -> Float[Array, ""]:
        reference, (total,) = self._averages(1)
        return reference + jnp.log(total.value)

    def _cgf(self, theta):
        return self.covariates._cgf(theta[:-1]) + self._tilt(theta)._log_total() - self._log_total()

    def _tilt(self, theta):
        return LabelledTokens(self.covariates._tilt(theta[:-1]), self.w, self.label, self._label_tilt() + theta[-1])

    def _mean(self):
        _, (total, first) = self._averages(2)
        return jnp.append(total.times_z, first.value) / total.value

    def _cov(self):
        _, (total, first, second) = self._averages(3)
        mean = jnp.append(total.times_z, first.value) / total.value
        cross = first.times_z[:, None]
        square = jnp.block([[total.times_zz, cross], [cross.T, second.value[None, None]]])
        return square / total.value - jnp.outer(mean, mean)

    def _sample(self, key: PRNGKeyArray, n: int):
        if self.eta is not None:
            raise ValueError("this law of tokens is tilted; only the untilted one can be sampled")
        of_x, of_y = jax.random.split(key)
        x = self.covariates._sample(of_x, n)
        return jnp.concatenate([x, self.label.sample(of_y, x @ self.w)[:, None]], axis=1)

    def _subgaussian(self):
        raise ValueError("no sub-Gaussian constant is known for tokens with labels of any law")


class SingleIndex(AbstractTask):
    r"""Tokens $(x, y)$ whose label depends on $x$ through $t = \langle w, x\rangle$; query $(x_q, 0)$, target $y_q$.

    `covariates` is the law of $x$, `directions` that of $w$ (one for each prompt), and `label` the law of $y$ given $t$
    with its loss: `NoisyLink(f, noise)` for $y = f(t) + \varepsilon$, `LogisticLabel()` for signs. With $|f'|\le1$ and
    $w$ on a sphere of radius $\lambda$ the target functions are $\lambda$-Lipschitz.
    """

    label: AbstractLabel
    covariates: AbstractMeasure
    directions: AbstractMeasure

    def __init__(self, label: AbstractLabel, covariates: AbstractMeasure, directions: AbstractMeasure):
        if not isinstance(label, AbstractLabel):
            raise ValueError(
                f"label is of type {type(label).__name__}; it must be a label, such as NoisyLink(jnp.tanh)"
            )
        self.label, self.covariates = label, as_measure("covariates", covariates)
        self.directions = as_measure("directions", directions, covariates.dim)

    @property
    def dim(self) -> int:
        return self.covariates.dim + 1

    @property
    def targets(self) -> int:
        return 1

    def _loss(self, prediction, target):
        return self.label.loss(prediction, target)

    def _draw(self, key: PRNGKeyArray) -> Instance:
        of_w, of_x, of_y = jax.random.split(key, 3)
        w, x = self.directions._sample(of_w, 1)[0], self.covariates._sample(of_x, 1)[0]
        tokens = LabelledTokens(self.covariates, w, self.label)
        return Instance(tokens, jnp.append(x, 0.0), self.label.sample(of_y, (w @ x)[None]))

    def oracle_risk(self, key: PRNGKeyArray | None = None, *, draws: int = 2**16) -> Estimate:
        """The risk of one who knows w, which no prompt can beat: an average over directions, covariates and labels."""
        of_w, of_x, of_y = jax.random.split(checks.key_or_default(key), 3)
        n = checks.count("draws", draws, at_least=2)
        t = jnp.sum(self.directions._sample(of_w, n) * self.covariates._sample(of_x, n), axis=1)
        losses = jax.vmap(self.label.loss)(self.label.best(t)[:, None], self.label.sample(of_y, t)[:, None])
        error = jnp.std(losses, ddof=1) / math.sqrt(n)
        return Estimate(losses.mean(), error, f"Monte Carlo over {n} instances")
