import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._typing import Numbers, VectorLike

from ._estimate import Estimate
from ._regression import LinearRegression, as_regression, root
from ._task import AbstractTask, Instance


class FiniteTasks(AbstractTask):
    r"""In-context regression whose coefficients are one of $m$ given vectors, each as likely as the others.

    `regression` says how prompts and queries are drawn, and is the law of fresh coefficients that a layer trained on
    these may meet later. A layer with $P = C = 0$ sees the vectors through their second moment alone:
    `gaussian` is the regression that has the same risk for all such layers. Lu et al. (2025), arXiv 2405.11751.
    """

    regression: LinearRegression
    tasks: Float[Array, "m d"]

    def __init__(self, regression: LinearRegression, tasks: Numbers):
        self.regression = as_regression(regression)
        if regression.targets != 1:
            raise ValueError(f"the regression has {regression.targets} targets; finitely many tasks have 1")
        self.tasks = checks.matrix("tasks", tasks, None, regression.d)

    @classmethod
    def drawn(cls, key: PRNGKeyArray, regression: LinearRegression, m: int) -> "FiniteTasks":
        r"""$m$ independent vectors $w\sim\mathcal N(0,\Omega)$ of the regression."""
        regression, shape = as_regression(regression), (checks.count("m", m), as_regression(regression).d)
        vectors = jax.random.normal(checks.key(key), shape, regression.Sigma.dtype) @ root(regression.Omega)
        return cls(regression, vectors)

    @property
    def dim(self) -> int:
        return self.regression.dim

    @property
    def targets(self) -> int:
        return 1

    @property
    def Omega(self) -> Float[Array, "d d"]:
        r"""The second moment of the coefficients, $\Omega_m = \frac1m\sum_i w_iw_i^\top$."""
        return self.tasks.T @ self.tasks / self.tasks.shape[0]

    @property
    def gaussian(self) -> LinearRegression:
        r"""The regression with $w\sim\mathcal N(0,\Omega_m)$."""
        return eqx.tree_at(lambda regression: regression.Omega, self.regression, self.Omega)

    def _draw(self, key: PRNGKeyArray) -> Instance:
        of_task, of_query, of_noise = jax.random.split(key, 3)
        i = jax.random.randint(of_task, (), 0, self.tasks.shape[0])
        return self.regression._given(self.tasks[i][None], of_query, of_noise)


def discrete_prediction(task: FiniteTasks, tokens: Numbers, x: VectorLike) -> Float[Array, ""]:
    r"""The posterior mean of the label at $x$ when $w$ is known to be one of the $m$ vectors.

    $$\hat y = \frac{\sum_i e^{-\|Y-Xw_i\|^2/2s^2}\,w_i\cdot x}{\sum_i e^{-\|Y-Xw_i\|^2/2s^2}} ;$$

    without noise the mean over the vectors that fit best. It is the best predictor on these tasks.
    """
    task = as_finite_tasks(task)
    tokens, d = checks.array("tokens", tokens, (None, task.dim)), task.dim - 1
    X, Y = tokens[:, :d], tokens[:, d]
    misfit = jnp.sum((Y - task.tasks @ X.T) ** 2, axis=1)
    return _weights(misfit, task.regression.noise) @ (task.tasks @ checks.vector("x", x, d))


def discrete_risk(
    task: FiniteTasks,
    L: int,
    key: PRNGKeyArray | None = None,
    *,
    on: LinearRegression | None = None,
    prompts: int = 2**12,
) -> Estimate:
    r"""The risk of `discrete_prediction` after `L` pairs: on its own tasks, or `on` a regression with fresh ones.

    An average over sampled prompts, and exact over the query: $2R = s^2 + E\,(\hat w-w)^\top\Sigma_q(\hat w-w)$.
    """
    task, L, n = as_finite_tasks(task), checks.count("L", L), checks.count("prompts", prompts, at_least=2)
    law = None if on is None else as_regression(on)
    if law is not None and (law.d, law.targets) != (task.dim - 1, 1):
        raise ValueError(f"on has {law.d} covariates and {law.targets} targets; it must have {task.dim - 1} and 1")
    losses = _losses(task, task.regression if law is None else law, L, law is None, checks.key_or_default(key), n)
    stderr = losses.std(ddof=1) / np.sqrt(n)
    return Estimate(jnp.asarray(losses.mean()), jnp.asarray(stderr), f"Monte Carlo over {n} prompts")


def _losses(task: FiniteTasks, law: LinearRegression, L: int, own: bool, key: PRNGKeyArray, n: int) -> np.ndarray:
    # NumPy: a simulation that JAX would compile again for each number of tasks and length
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    half, of_Omega, S = (np.asarray(M, float) for M in (root(law.Sigma), root(law.Omega), law.query_Sigma))
    tasks, d, found = np.asarray(task.tasks, float), law.d, []
    for start in range(0, n, size := max(1, 2**21 // (L * (len(tasks) + d)))):
        b = min(size, n - start)
        w = tasks[rng.integers(len(tasks), size=b)] if own else rng.normal(size=(b, d)) @ of_Omega
        X = rng.normal(size=(b, L, d)) @ half
        Y = np.einsum("bld,bd->bl", X, w) + math.sqrt(float(law.noise)) * rng.normal(size=(b, L))
        misfit = np.sum((Y[:, None] - tasks @ X.transpose(0, 2, 1)) ** 2, axis=2)
        off = np.asarray(jax.vmap(_weights, (0, None))(jnp.asarray(misfit), task.regression.noise)) @ tasks - w
        found.append((float(law.noise) + np.sum((off @ S) * off, axis=1)) / 2)
    return np.concatenate(found)


def _weights(misfit: Float[Array, " m"], noise: Float[Array, ""]) -> Float[Array, " m"]:
    """The posterior of the tasks; without noise, equal on those that fit to rounding."""
    off = misfit - misfit.min()
    sharp = off <= 1e-12 * (1 + misfit.min())
    return jax.nn.softmax(
        jnp.where(noise > 0, -off / jnp.where(noise > 0, 2 * noise, 1), jnp.where(sharp, 0, -jnp.inf))
    )


def as_finite_tasks(task: object) -> FiniteTasks:
    """`task` itself, once its tasks are finitely many."""
    if type(task) is not FiniteTasks:
        raise ValueError(f"task is of type {type(task).__name__}; it must be FiniteTasks(regression, tasks)")
    return task
