import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import VectorLike

from ._empirical import Empirical
from ._expectation import token_expectation
from ._functions import as_pytree
from ._measure import AbstractMeasure
from ._worth import FewTokensWarning, Worth, worth

Tree = TypeVar("Tree")


class FromSampler(AbstractMeasure):
    r"""A law known only by its sampler, stood in for by `size` tokens drawn once, with its Monte-Carlo error.

    Every number is that of the stand-in; `effective_size`, `cgf_stderr` and `mean_error` say how far it may be from
    the law's own, as long as enough tokens carry the tilt. A far tilt leaves too few, and then no error that the
    tokens themselves give is large enough: its moments warn of it wherever they are computed outside `jit` and `vmap`.
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
        warn_of_few(self._tilt(theta), 0)
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
        warn_of_few(self, 1)
        return self.stand_in._mean()

    def _cov(self):
        warn_of_few(self, 2)
        return self.stand_in._cov()

    def _fourth(self, b, A, B):
        warn_of_few(self, 4)
        return self.stand_in._fourth(b, A, B)

    def _expectation(self, f, u, breaks):
        warn_of_few(self, 2)
        there = self.stand_in
        return token_expectation(there.points, there.log_weights, there.theta, f, u, sampled=True)

    def _quartic(self, f, u, breaks, A, B):
        warn_of_few(self, 4)
        return self.stand_in._quartic(f, u, breaks, A, B)

    def _averages_exactly(self):
        """They are those of the stand-in, as all else here is."""
        return True

    def _sample(self, key: PRNGKeyArray, n: int):
        """From the sampler itself; from the weighted stand-in once tilted."""
        if self.known_sample is None:
            return self.stand_in._sample(key, n)
        return checks.array("what sample(key, n) returned", self.known_sample(key, n), (n, self.dim))

    def _subgaussian(self):
        """That of the stand-in, whose support is bounded; the law itself may have none."""
        return self.stand_in._subgaussian()

    def _worth(self, power: int) -> Worth:
        """What the tilted tokens are worth for an average of |z - mean|^power."""
        masses, points = np.exp(np.asarray(self.stand_in.log_masses(), float)), np.asarray(self.stand_in.points, float)
        return worth(masses, np.linalg.norm(points - masses @ points, axis=1), power)

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
        centred = (self.stand_in.points - self.stand_in._mean()) * jnp.exp(self.stand_in.log_masses())[:, None]
        return checks.result("the Monte-Carlo error", centred.T @ centred)


def sampled_parts(tree: Any) -> list[FromSampler]:
    """The laws known by their samplers inside a measure, a task or anything else that holds measures."""
    return [part for part in jax.tree.leaves(tree, is_leaf=_is_sampled) if _is_sampled(part)]


def resampled(tree: Tree, key: PRNGKeyArray) -> Tree:
    """The same with every stand-in's tokens weighted by exponential variables, as if others had been drawn."""
    points = [part.stand_in.points for part in sampled_parts(tree)]
    keys = jax.random.split(key, max(1, len(points)))
    draws = [jax.random.exponential(k, (len(z),), z.dtype) for k, z in zip(keys, points, strict=False)]
    return with_log_weights(tree, [jnp.log(w / w.mean()) for w in draws])


def with_log_weights(tree: Tree, logs: Sequence[Float[Array, " n"]]) -> Tree:
    """The same with one more log-weight on every token of each stand-in."""
    others = iter(logs)

    def weighted(part: Any) -> Any:
        if not _is_sampled(part):
            return part
        before = part.stand_in.log_weights
        new = next(others) if before is None else before + next(others)
        return eqx.tree_at(lambda mu: mu.stand_in.log_weights, part, new, is_leaf=lambda leaf: leaf is None)

    return jax.tree.map(weighted, tree, is_leaf=_is_sampled)


def _is_sampled(part: Any) -> bool:
    return isinstance(part, FromSampler)


def warn_of_few(mu: AbstractMeasure, power: int) -> None:
    """Warn where too few tokens of a stand-in in `mu`, tilted, carry averages of this power; not under tracing."""
    for part in sampled_parts(mu):
        traced = any(checks.is_traced(leaf) for leaf in jax.tree.leaves(part.stand_in))
        # NumPy's any: that of JAX is traced inside `jit` even for a constant
        if traced or not np.any(np.asarray(part.stand_in.theta)):
            continue
        if not (found := part._worth(power)).trusted:
            warnings.warn(found.sentence, FewTokensWarning, stacklevel=4)
