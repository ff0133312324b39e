import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers
from largeprompt.measures import AbstractMeasure, Affine, Gaussian, Product, as_measure

from ._task import AbstractTask, Instance


@jax.jit
def root(cov: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The symmetric square root of a covariance; a Cholesky factor would refuse a singular one."""
    values, vectors = jnp.linalg.eigh(cov)
    return (vectors * jnp.sqrt(jnp.maximum(values, 0))) @ vectors.T


class AbstractRegression(AbstractTask):
    r"""Tokens $(x, y)$, $y = Wx + \eta$, with covariates of some law; the rows of $W$ are $\mathcal N(0,\Omega)$."""

    noise: Float[Array, ""]
    Omega: Float[Array, "d d"]
    _targets: int = eqx.field(static=True)

    @property
    def d(self) -> int:
        """Dimension of a covariate."""
        return self.Omega.shape[0]

    @property
    def dim(self) -> int:
        return self.d + self.targets

    @property
    def targets(self) -> int:
        return self._targets


class LinearRegression(AbstractRegression):
    r"""In-context linear regression: tokens $(x, y)$, $x\sim\mathcal N(0,\Sigma)$, $y = Wx + \eta$, query $(x_q, 0)$.

    The rows of $W$ (one for each target) are independent $\mathcal N(0,\Omega)$, by default $\Omega = I$;
    $\eta\sim\mathcal N(0, s^2 I)$ with `noise` the variance $s^2$; $x_q\sim\mathcal N(0,\Sigma_q)$, by default
    $\Sigma_q=\Sigma$. Given $W$ the tokens are $\mathcal N(0, \Gamma_W)$. The target $y_q$ carries noise too, so no
    risk falls below $s^2/2$ for each target. Paper: Section 5, Equations (11) and (12); Remark 4.1 for the queries.
    """

    Sigma: Float[Array, "d d"]
    query_Sigma: Float[Array, "d d"]

    def __init__(
        self,
        Sigma: Numbers,
        noise: float = 0.0,
        Omega: Numbers | None = None,
        query_Sigma: Numbers | None = None,
        targets: int = 1,
    ):
        self.Sigma = checks.covariance("Sigma", Sigma)
        d = self.Sigma.shape[0]
        self.noise = checks.number("noise", noise, at_least=0)
        self.Omega = jnp.asarray(np.eye(d)) if Omega is None else checks.covariance("Omega", Omega, d)
        self.query_Sigma = self.Sigma if query_Sigma is None else checks.covariance("query_Sigma", query_Sigma, d)
        self._targets = checks.count("targets", targets)

    @classmethod
    def experiment(cls, Sigma: Numbers, noise: float = 0.1, targets: int = 1) -> "LinearRegression":
        r"""The paper's experiments: $w\sim\mathcal N(0, I/d)$ and label noise of variance 0.1. Paper: Appendix A."""
        Sigma = checks.covariance("Sigma", Sigma)
        return cls(Sigma, noise, np.eye(len(Sigma)) / len(Sigma), targets=targets)

    @property
    def tau1(self) -> Float[Array, ""]:
        r"""$E\|w\|_\Sigma^2 = \mathrm{tr}\,\Sigma\Omega$."""
        return jnp.sum(self.Sigma * self.Omega)

    @property
    def rho2(self) -> Float[Array, ""]:
        r"""$\mathrm{tr}\,(\Sigma\Omega)^2$, half the variance of $\|w\|_\Sigma^2$."""
        product = self.Sigma @ self.Omega
        return jnp.sum(product * product.T)

    def token_covariance(self, W: Float[Array, "k d"]) -> Float[Array, "D D"]:
        r"""$\Gamma_W$, the covariance of $(x, Wx+\eta)$. Paper: Equation (12)."""
        cross = W @ self.Sigma
        return jnp.block([[self.Sigma, cross.T], [cross, cross @ W.T + self.noise * jnp.eye(self.targets)]])

    def subgaussian(self, W: Numbers) -> Float[Array, ""]:
        r"""The sub-Gaussian constant of the tokens given W, $\lambda_{\max}(\Gamma_W)^{1/2}$.

        Its square is at most $\|\Sigma\|(1+\|W\|^2) + s^2$, so that all its moments over tasks are finite
        (Assumption 4.2). Paper: Lemma F.1, where the printed bound is too small (errata, E1).
        """
        W = checks.matrix("W", W, self.targets, self.d)
        return jnp.sqrt(jnp.linalg.eigvalsh(self.token_covariance(W))[-1])

    def _draw(self, key: PRNGKeyArray) -> Instance:
        of_task, of_query, of_noise = jax.random.split(key, 3)
        W = jax.random.normal(of_task, (self.targets, self.d), self.Sigma.dtype) @ root(self.Omega)
        return self._given(W, of_query, of_noise)

    def _given(self, W: Float[Array, "k d"], of_query: PRNGKeyArray, of_noise: PRNGKeyArray) -> Instance:
        """An instance with these coefficients."""
        dtype = self.Sigma.dtype
        x = root(self.query_Sigma) @ jax.random.normal(of_query, (self.d,), dtype)
        half, eta = root(self.Sigma), jnp.sqrt(self.noise) * jnp.eye(self.targets, dtype=dtype)
        image = jnp.block([[half, jnp.zeros((self.d, self.targets), dtype)], [W @ half, eta]])
        return instance(Gaussian.from_root(jnp.zeros(self.dim, dtype), image), W, x, self.noise, of_noise)


class RegressionOn(AbstractRegression):
    r"""The same regression with covariates of any law: $(x, Wx+\eta)$ is a linear image of $(x, \eta)$.

    So $\Lambda$ of the tokens is known whenever that of the covariates is. `queries` is the law of $x_q$, by default
    that of the covariates.
    """

    covariates: AbstractMeasure
    queries: AbstractMeasure

    def __init__(
        self,
        covariates: AbstractMeasure,
        noise: float = 0.0,
        Omega: Numbers | None = None,
        queries: AbstractMeasure | None = None,
        targets: int = 1,
    ):
        self.covariates = as_measure("covariates", covariates)
        d = covariates.dim
        self.noise = checks.number("noise", noise, at_least=0)
        self.Omega = jnp.asarray(np.eye(d)) if Omega is None else checks.covariance("Omega", Omega, d)
        self.queries = covariates if queries is None else as_measure("queries", queries, d)
        self._targets = checks.count("targets", targets)

    def _draw(self, key: PRNGKeyArray) -> Instance:
        of_task, of_query, of_noise = jax.random.split(key, 3)
        k, d, dtype = self.targets, self.d, self.Omega.dtype
        W = jax.random.normal(of_task, (k, d), dtype) @ root(self.Omega)
        x = self.queries._sample(of_query, 1)[0]
        image = jnp.block([[jnp.eye(d, dtype=dtype), jnp.zeros((d, k), dtype)], [W, jnp.sqrt(self.noise) * jnp.eye(k)]])
        source = Product(self.covariates, Gaussian(jnp.zeros(k, dtype), jnp.eye(k, dtype=dtype)))
        return instance(Affine(image, jnp.zeros(self.dim, dtype), source), W, x, self.noise, of_noise)


def instance(
    measure: AbstractMeasure,
    W: Float[Array, "k d"],
    x: Float[Array, " d"],
    noise: Float[Array, ""],
    key: PRNGKeyArray,
) -> Instance:
    """The instance of a regression with coefficients `W` whose query is (x, 0)."""
    k = W.shape[0]
    eta = jnp.sqrt(noise) * jax.random.normal(key, (k,), W.dtype)
    return Instance(measure, jnp.concatenate([x, jnp.zeros(k, x.dtype)]), W @ x + eta)


def as_regression(task: object) -> LinearRegression:
    """`task` itself, once it is a Gaussian regression."""
    if type(task) is not LinearRegression:  # a subclass may draw or judge otherwise
        raise ValueError(f"task is of type {type(task).__name__}; this is known for LinearRegression only")
    return task
