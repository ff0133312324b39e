import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer, softmax_form

from .._blocks import Blocks, blocks
from .._regression import LinearRegression, as_regression, root
from .._task import as_predictor
from ._closed_form import gaussian_risk


def risk_rate(layer: AbstractLayer, task: LinearRegression) -> Float[Array, ""]:
    r"""$\lim_L L(R_L - R_\infty)$ of softmax attention on Gaussian regression, $\tfrac12E\,e^\nu[a-\|b\|^2+2b\cdot t]$.

    Infinite where the mean is: for layers that score labels ($C \ne 0$), and once $x^\top A^\top\Sigma Ax$ has an
    exponential moment no longer, $2\,\lambda_{\max}(\Sigma_q^{1/2}A^\top\Sigma A\Sigma_q^{1/2}) \ge 1$. Then the decay
    is slower than 1/L.
    """
    task = as_regression(task)
    return rate(blocks(softmax_form(as_predictor(layer, task)), task), task)


@jax.jit
def rate(parts: Blocks, task: LinearRegression) -> Float[Array, ""]:
    """The same for blocks, with nothing checked."""
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


def risk_expansion(layer: AbstractLayer, task: LinearRegression, L: int | float) -> Float[Array, ""]:
    r"""$R_\infty + \text{rate}/L$: the risk of softmax attention to first order, good once $L \gg e^{2\nu}$."""
    task = as_regression(task)
    parts = blocks(softmax_form(as_predictor(layer, task)), task)
    return gaussian_risk(parts, task, jnp.inf) + rate(parts, task) / float(checks.prompt_length(L))
