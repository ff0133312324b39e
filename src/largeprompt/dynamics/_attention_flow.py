import math
from typing import TYPE_CHECKING

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, dataset
from largeprompt._typing import Numbers
from largeprompt.attention import SoftmaxAttention
from largeprompt.icl import RegressionOn, aligned_blocks, from_blocks, risk_function
from largeprompt.icl._risk._over_counts import OverCounts
from largeprompt.measures import Empirical

from ._flow import increasing_times

if TYPE_CHECKING:
    from largeprompt._display import Axes, Dataset


class AttentionFlow(AbstractTable):
    r"""A flow of the scores $x^\top Ax_q$ on finitely many covariates, recorded.

    At `times[t]` the matrix is `A[t]`, its velocity `velocity[t]`, the mean weight of covariate $i$ at query $q$
    `attention[t, i, q]`, and the risk at query $q$ `risk_by_query[t, q]`.
    """

    times: Float[Array, " t"]
    A: Float[Array, "t d d"]
    velocity: Float[Array, "t d d"]
    attention: Float[Array, "t n n"]
    risk_by_query: Float[Array, "t n"]
    risk: Float[Array, " t"]

    @property
    def own(self) -> Float[Array, "t n"]:
        """The mean weight that each query gives its own covariate."""
        return jnp.diagonal(self.attention, axis1=1, axis2=2)

    def first(self, level: float) -> Float[np.ndarray, " n"]:
        """When the weight of each query's own covariate first reaches `level`, interpolated; inf where it does not."""
        level, times = float(checks.number("level", level)), np.asarray(self.times)
        found = []
        for weight in np.asarray(self.own).T:
            i = int(np.argmax(weight >= level))
            if weight[i] < level:
                found.append(math.inf)
            elif i == 0:
                found.append(times[0])
            else:
                share = (level - weight[i - 1]) / (weight[i] - weight[i - 1])
                found.append(times[i - 1] + share * (times[i] - times[i - 1]))
        return np.asarray(found)

    def to_dataset(self) -> "Dataset":
        own = np.asarray(self.own)
        columns = {"least_attention": own.min(axis=1), "greatest_attention": own.max(axis=1), "risk": self.risk}
        by_query = {"own": ("query", own), "risk_by_query": ("query", self.risk_by_query)}
        rest = {name: getattr(self, name) for name in ("A", "velocity", "attention")}
        return dataset("time", self.times, columns | by_query | rest, {})

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The weight that each query gives its own covariate."""
        ax = axes(ax)
        ax.plot(self.times, self.own)
        ax.set(xlabel="time", ylabel="attention to the query's own covariate")
        return ax


def attention_flow(
    task: RegressionOn, L: int | float, times: Numbers, *, start: Numbers | None = None, rtol: float = 1e-7
) -> AttentionFlow:
    r"""The gradient flow of $A$ in softmax attention with scores $x^\top Ax_q$ that reads labels as they are, from 0.

    The covariates of the task are finitely many (`Empirical`), so that the vector field is exact at every length. The
    value matrix stays $(0, 1)$. Huang, Cheng and Liang (2024), arXiv 2310.05249, for orthonormal covariates.
    """
    covariates = task.covariates if type(task) is RegressionOn and task.queries is task.covariates else None
    if type(covariates) is not Empirical or task.targets != 1:
        raise ValueError(
            "the task must be RegressionOn(Empirical(points, weights)), with one target and no own queries"
        )
    record = increasing_times(times)
    begin = jnp.zeros((task.d, task.d)) if start is None else checks.matrix("start", start, task.d, task.d)

    function = risk_function(_layer(begin, task), task, L)
    assert isinstance(function, OverCounts)
    A = checks.result("the flow", _solved(function, begin, record, float(checks.number("rtol", rtol, at_least=1e-14))))
    moving, weights, risks = _readings(function, A)
    return AttentionFlow(record, A, moving, weights, risks, risks @ jnp.exp(covariates.log_masses()))


def _layer(A: Float[Array, "d d"], task: RegressionOn) -> SoftmaxAttention:
    return from_blocks(aligned_blocks(A, 1.0, task), SoftmaxAttention)


@eqx.filter_jit
def _velocity(t, A, function: OverCounts):
    return -jax.grad(lambda A: function.of_layer(_layer(A, function.task)))(A)


@eqx.filter_jit
def _solved(function: OverCounts, begin: Float[Array, "d d"], times: Float[Array, " t"], rtol: float) -> Array:
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(_velocity),
        diffrax.Tsit5(),
        t0=jnp.zeros_like(times[-1]),
        t1=times[-1],
        dt0=1e-6 * times[-1],
        y0=begin,
        args=function,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-9),
        max_steps=2**16,
        adjoint=diffrax.ForwardMode(),
    )
    return jnp.asarray(solution.ys)


@eqx.filter_jit
def _readings(function: OverCounts, matrices: Float[Array, "t d d"]):
    """Velocity, mean weights and risks by query at each time."""

    def at_one_time(A):
        layer = _layer(A, function.task)
        return _velocity(0.0, A, function), function.attention(layer), function.by_query(layer)

    return jax.lax.map(at_one_time, matrices)


def time_to_attend(attention: float, K: int) -> float:
    r"""When the flow on `K` balanced orthonormal covariates gives the query's own one the weight `attention`.

    For infinite prompts and $A(0) = 0$ the weight obeys $\dot a = \frac{K}{(K-1)^2}a^2(1-a)^3$, $a(0) = 1/K$, so that
    $$t = \frac{(K-1)^2}{K}\Big[-\frac1a+3\log\frac a{1-a}+\frac2{1-a}+\frac1{2(1-a)^2}\Big]_{1/K}^{a}:$$
    about $K^2$ until attention is reached, then $K/2\varepsilon^2$ until it is $1-\varepsilon$.
    """
    K, a = checks.count("K", K, at_least=2), float(checks.number("attention", attention))
    if not 1 / K <= a < 1:
        raise ValueError(f"attention is {a:g}; it starts at 1/K = {1 / K:g} and stays below 1")

    def antiderivative(a: float) -> float:
        return -1 / a + 3 * math.log(a / (1 - a)) + 2 / (1 - a) + 1 / (2 * (1 - a) ** 2)

    return (K - 1) ** 2 / K * (antiderivative(a) - antiderivative(1 / K))
