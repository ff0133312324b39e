from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers

from ._functions import as_pytree
from ._measure import AbstractMeasure


class FromCGF(AbstractMeasure):
    r"""A law of which only $\Lambda$ is known; mean, covariance and tilts come from automatic differentiation.

    `cgf` maps a vector to a scalar with JAX operations. `sample(key, n)`, where known, draws from the untilted law.
    `subgaussian`, where known, is a $\sigma$ with $\nabla^2\Lambda \preceq \sigma^2 I$ everywhere, so that it
    serves every tilt as well.
    """

    known_cgf: Callable[[Float[Array, " D"]], Float[Array, ""]]
    known_sample: Callable[[PRNGKeyArray, int], Float[Array, "n D"]] | None
    known_subgaussian: Float[Array, ""] | None
    theta: Float[Array, " D"]

    def __init__(
        self,
        cgf: Callable[[Float[Array, " D"]], Float[Array, ""]],
        dim: int,
        sample: Callable[[PRNGKeyArray, int], Float[Array, "n D"]] | None = None,
        subgaussian: Numbers | None = None,
    ):
        for name, function in (("cgf", cgf), ("sample", sample)):
            if not (callable(function) or (name == "sample" and function is None)):
                raise ValueError(f"{name} is {function!r}; it must be a function")
        self.theta = jnp.zeros(checks.count("dim", dim))
        self.known_cgf = as_pytree(cgf)
        self.known_sample = None if sample is None else as_pytree(sample)
        self.known_subgaussian = None if subgaussian is None else checks.number("subgaussian", subgaussian, at_least=0)
        _refuse_what_is_no_cgf(self.known_cgf, self.theta)

    @property
    def dim(self) -> int:
        return self.theta.shape[0]

    def _cgf(self, theta):
        return self.known_cgf(self.theta + theta) - self.known_cgf(self.theta)

    def _tilt(self, theta):
        # A tilt forgets the sampler, which draws from the untilted law.
        return eqx.tree_at(
            lambda mu: (mu.theta, mu.known_sample), self, (self.theta + theta, None), is_leaf=lambda x: x is None
        )

    def _mean(self):
        return jax.grad(self.known_cgf)(self.theta)

    def _cov(self):
        return jax.hessian(self.known_cgf)(self.theta)

    def _sample(self, key: PRNGKeyArray, n: int):
        if self.known_sample is None:
            raise ValueError(
                "this FromCGF has no sampler: give it sample=(key, n) -> tokens, which draws from the untilted law; "
                "for tilted samples use FromSampler, an approximation that reports its error"
            )
        return checks.array("what sample(key, n) returned", self.known_sample(key, n), (n, self.dim))

    def _subgaussian(self):
        if self.known_subgaussian is None:
            raise ValueError(
                "no sub-Gaussian constant follows from the values of a CGF; give FromCGF "
                "subgaussian=σ with ∇²Λ(θ) ≤ σ² at every θ"
            )
        return self.known_subgaussian


def _refuse_what_is_no_cgf(cgf, zero) -> None:
    try:
        shape = jax.eval_shape(cgf, zero).shape
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"cgf fails on a vector of dimension {zero.shape[0]} ({type(error).__name__}: {reason}); "
            "it must be a function written with jax.numpy that returns one number"
        ) from None
    if shape != ():
        raise ValueError(
            f"cgf returns shape {shape} for a vector of dimension {zero.shape[0]}; it must return a scalar"
        )
    # in one program: a first look at a law should not wait for one per operation
    at_zero, slope, curvature = jax.jit(lambda at: (cgf(at), jax.grad(cgf)(at), jax.hessian(cgf)(at)))(zero)
    if checks.is_traced(at_zero):
        return
    if not abs(at_zero) < 1e-6:
        raise ValueError(f"cgf(0) is {float(at_zero):g}; the cumulant generating function of a probability is 0 there")
    checks.finite("the gradient of cgf at 0", slope)
    checks.covariance("the Hessian of cgf at 0", curvature)
