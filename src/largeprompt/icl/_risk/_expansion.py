"""The risk of a layer on a long prompt to first order in 1/L."""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, heads_of, kind_of, merged_form
from largeprompt.attention._first_order import first_order
from largeprompt.attention._forms import described
from largeprompt.measures._worth import DoubtWarning, worth

from .._blocks import Blocks, blocks
from .._estimate import Estimate, exactly
from .._regression import LinearRegression, root
from .._task import AbstractTask, as_predictor, as_task, prediction
from ._closed_form import gaussian_risk

_TOKENS = 128  # drawn for each instance, for kinds that know their errors as averages over tokens only
_BATCH = 256  # instances at once


def risk_rate(
    layer: AbstractLayer, task: AbstractTask, key: PRNGKeyArray | None = None, *, draws: int = 2**12
) -> Estimate:
    r"""$\lim_L L(R_L - R_\infty) = E\big[\nabla\ell\cdot\beta + \tfrac12\langle\nabla^2\ell, C\rangle\big]$.

    $C/L$ and $\beta/L$ are covariance and bias of the output given the instance, and $\ell$ is expanded about the
    output on the infinite prompt: $\tfrac12\mathrm{tr}\,C + (T_\infty-y)\cdot\beta$ for squared errors. An average over
    `draws` instances, exact for one head of softmax or linear attention on Gaussian regression. There softmax attention
    has an infinite rate if it scores labels, or if $2\,\lambda_{\max}(\Sigma_q^{1/2}A^\top\Sigma A\Sigma_q^{1/2})
    \ge 1$: then the decay is slower than 1/L.
    """
    layer, task = as_predictor(layer, as_task(task)), as_task(task)
    if (known := _closed(layer, task)) is not None:
        return exactly(known[1], "closed form")
    terms = _terms(layer, task, key, draws)
    return _mean(terms[:, 1], terms[:, 1])


def risk_expansion(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float,
    key: PRNGKeyArray | None = None,
    *,
    draws: int = 2**12,
) -> Estimate:
    r"""$R_\infty + \text{rate}/L$: the risk to first order, the rate being that of `risk_rate`, on the same instances.

    Good once $L \gg e^{2\nu}$, where $\nu$ is the variance of scores.
    """
    layer, task, L = as_predictor(layer, as_task(task)), as_task(task), checks.prompt_length(L)
    if (known := _closed(layer, task)) is not None:
        return exactly(known[0] + known[1] / float(L), "closed form")
    terms = _terms(layer, task, key, draws)
    return _mean(terms[:, 0] + terms[:, 1] / float(L), terms[:, 1])


def _closed(layer: AbstractLayer, task: AbstractTask) -> tuple[Float[Array, ""], Float[Array, ""]] | None:
    """The infinite risk and the rate where both have closed forms."""
    if type(task) is not LinearRegression or kind_of(layer) is None:  # a subclass may draw or judge otherwise
        return None
    parts = blocks(merged_form(layer), task)
    limit = gaussian_risk(parts, task, jnp.inf)
    # the risk of linear attention is R_∞ + rate/L at every length
    return limit, gaussian_risk(parts, task, 1.0) - limit if kind_of(layer) == "linear" else rate(parts, task)


@jax.jit
def rate(parts: Blocks, task: LinearRegression) -> Float[Array, ""]:
    r"""$\tfrac12E\,e^\nu[a-\|b\|^2+2b\cdot t]$ for softmax attention on Gaussian regression; nothing is checked."""
    A, C, P, R = parts
    S, SA = root(task.query_Sigma), task.Sigma @ A
    form = S @ A.T @ SA @ S  # ν = ξᵀ form ξ for standard normal ξ
    form = (form + form.T) / 2
    # eigenvalues decide and no more: where two are equal their eigenvectors have no derivative
    finite = (jnp.linalg.eigvalsh(jax.lax.stop_gradient(form))[-1] < 0.5) & (jnp.max(jnp.abs(C)) == 0)
    shrunk = jnp.eye(task.d, dtype=form.dtype) - 2 * jnp.where(finite, form, 0)
    tilted = S @ jnp.linalg.solve(shrunk, S)  # the covariance of x under e^ν
    RR, h = jnp.sum(R**2), SA @ tilted
    inner = jnp.sum((P @ task.Sigma) * P) + (task.tau1 + task.noise) * RR
    inner -= jnp.sum((P @ h) * (P @ SA)) + RR * jnp.sum((task.Omega @ h) * SA)
    inner += 2 * jnp.trace(R) * jnp.sum(task.Omega * h)
    return jnp.where(finite, inner / jnp.sqrt(jnp.linalg.det(shrunk)) / 2, jnp.inf)


def _terms(layer: AbstractLayer, task: AbstractTask, key: PRNGKeyArray | None, draws: int) -> Float[Array, "n 2"]:
    """The loss on the infinite prompt and what 1/L multiplies, for each of many instances."""
    if heads_of(layer) is None:
        raise ValueError(f"the layer is {described(layer)}; it must be a head of attention or a sum of heads")
    keys = jax.random.split(checks.key_or_default(key), checks.count("draws", draws, at_least=2))
    return checks.result("the 1/L expansion of the risk", _of_instances(layer, task, keys))


@eqx.filter_jit
def _of_instances(layer: AbstractLayer, task: AbstractTask, keys) -> Float[Array, "n 2"]:
    def of_one(key: PRNGKeyArray) -> Float[Array, " 2"]:
        of_instance, of_tokens = jax.random.split(key)  # as in sampled risks: the same instances for the same keys
        instance = task.draw(of_instance)
        mu, z, heads = instance.measure, instance.query, heads_of(layer) or ()
        exact = all(one.errors_are_exact(mu, other) for one in heads for other in heads)
        first = first_order(heads, mu, z, None if exact else mu._sample(of_tokens, _TOKENS))
        k = task.targets
        covariance, bias = first.covariance[-k:, -k:], first.bias[-k:]
        answer = prediction(layer._output(mu, z), task)

        def loss(answer):
            return task._loss(answer, instance.target)

        curvature = jnp.sum(jax.hessian(loss)(answer) * covariance) / 2
        return jnp.stack([loss(answer), jax.grad(loss)(answer) @ bias + curvature])

    return jax.lax.map(of_one, keys, batch_size=_BATCH)


def _mean(values: Float[Array, " n"], rates: Float[Array, " n"]) -> Estimate:
    """The mean with its standard error; warns where a few instances carry the rate."""
    n = len(values)
    if not checks.is_traced(values):
        sizes = np.abs(np.asarray(rates, float))
        total = float(sizes.sum())
        carried = worth(sizes / total, np.ones(n), 1) if total > 0 else None
        if carried is not None and not carried.trusted:
            warnings.warn(
                f"of {n} instances {carried.effective:.3g} carry the 1/L constant (tail index {carried.tail:.2f}): it "
                "may be infinite, and its error is not to be trusted; use smaller scores, or raise draws",
                DoubtWarning,
                stacklevel=3,
            )
    error = jnp.std(values, ddof=1) / math.sqrt(n)
    reason = "an average of the first order over prompts"
    return Estimate(values.mean(), error, f"Monte Carlo over {n} instances", reason)
