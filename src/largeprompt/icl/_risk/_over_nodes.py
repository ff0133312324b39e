r"""The risk of softmax attention at finite length on Gaussian regression: no prompt is ever sampled.

Given $(W, x)$ the tokens are Gaussian, so that the first two moments of the output are known functions of
$\nu = u^\top\Gamma_Wu$ and $L$ (`WeightMoments`): with $b = V\Gamma_Wu$, $a = \mathrm{tr}\,V\Gamma_WV^\top$, $t = Wx$,

$$2R_L = E\big[\|b\|^2K_2(\nu) + aQ(\nu) - 2(1-Q(\nu))\,b\cdot t + \|t\|^2\big] + ks^2,$$

and only the average over $(W, x)$ remains. The same with $K_2 = 1$, $Q = 0$ is $R_\infty$, known in closed form: it
serves as a control variate of weight $\theta$, 1 for long prompts, where the nodes then carry only the gap of order
$1/L$, and 0 where the heavy tails of $\|b\|^2$ make it harmful.

With the query in the prompt the moments (`QueryMoments`) depend on its score $\lambda = x^\top Ax$ too, $1-Q$ is
$1-C-Q$, and with $f = Px$, what the query itself contributes, there is
$$C_2\|f\|^2 + 2X\,b\cdot f - 2C\,f\cdot t$$
besides. Where $P = C = 0$ neither ν nor λ depends on $W$, f is 0 and the average over $W$ is closed.
"""

import abc
from typing import ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from largeprompt._checks import is_traced
from largeprompt.attention import AbstractLayer, QueryMoments, WeightMoments, merged_form

from .._blocks import Blocks, blocks
from .._regression import LinearRegression
from ._abstract import AbstractGaussianRisk, Replicates, pooled
from ._closed_form import gaussian_risk
from ._nodes import Nodes
from ._quadrature import METHOD

_WORSE = 2.0  # times the error without control variate: from there on it does harm
Average = TypeVar("Average", bound="AbstractOverNodes")


class AbstractOverNodes(AbstractGaussianRisk):
    """A risk that is exact over prompts and an average over nodes of (W, x).

    `control` is the weight of the control variate, 1 or 0, which the selector chooses once.
    """

    nodes: eqx.AbstractVar[Nodes]
    control: eqx.AbstractVar[Float[Array, ""]]
    exact: ClassVar[bool] = False

    @property
    def method(self) -> str:
        return "exact over prompts, quasi-Monte Carlo over (W, x)"

    @abc.abstractmethod
    def over(self, nodes: Nodes, layer: AbstractLayer) -> Float[Array, ""]:
        """The average over one replicate."""

    def of_layer(self, layer):
        return jax.vmap(lambda nodes: self.over(nodes, layer))(self.nodes)

    def average_with_gradient(self, layer):
        # each replicate's gradient from its own nodes: the rows of a Jacobian would pass through all of them
        of_replicate = eqx.filter_value_and_grad(lambda layer, nodes: self.over(nodes, layer))
        return Replicates(jnp.ones(()), jax.vmap(lambda nodes: of_replicate(layer, nodes))(self.nodes))

    def estimate(self, layer):
        # by the program that has chosen the control variate, rather than by one more
        each = pooled(self, layer, "average_of_each_control")
        return jax.tree.map(lambda both: jnp.where(self.control > 0, both[0], both[1]), each)

    def pieces(self, draws):
        if is_traced(self.nodes.x):
            return [self]
        return (eqx.tree_at(lambda f: f.nodes, self, nodes) for nodes in self.nodes.pieces(draws))

    @property
    def may_mislead(self) -> bool:
        return True

    def is_misled(self, layer):
        _, (controlled, without) = self.average_of_each_control(layer).finished()
        return (self.control > 0) & (controlled > _WORSE * without)

    def with_control(self: Average, weight: int | Bool[Array, ""] | Float[Array, ""]) -> Average:
        """The same average with a control variate of this weight."""
        # of the type of the one it replaces: JAX would compile again for another
        return eqx.tree_at(lambda f: f.control, self, jnp.full_like(self.control, weight))

    def without_control(self: Average) -> Average:
        return self.with_control(0)

    def average_of_each_control(self, layer) -> Replicates:
        """The risk with the control variate and without, along the last axis: the costly moments are found once."""
        each = jax.vmap(lambda weight: self.with_control(weight).of_layer(layer), out_axes=-1)
        return Replicates(jnp.ones(()), each(jnp.array([1.0, 0.0], self.control.dtype)))


class OverNodes(AbstractOverNodes):
    """One softmax head at finite length.

    Where `aligned`, with the query in the prompt, it is an average over nodes of x and holds of layers with P = C = 0
    only.
    """

    task: LinearRegression
    moments: WeightMoments | QueryMoments
    nodes: Nodes
    control: Float[Array, ""]
    reason: str = eqx.field(static=True)
    aligned: bool = eqx.field(static=True, default=False)

    @property
    def method(self) -> str:
        if not self.aligned:
            return super().method
        return METHOD if self.nodes.x.shape[0] == 1 else "exact over prompts, quasi-Monte Carlo over x"

    def of_blocks(self, parts: Blocks) -> Float[Array, " r"]:
        """The risk of a layer with these blocks, over each replicate."""
        return jax.vmap(lambda nodes: self._over(nodes, parts))(self.nodes)

    def over(self, nodes, layer):
        return self._over(nodes, blocks(merged_form(layer), self.task))

    def _over(self, nodes: Nodes, parts: Blocks) -> Float[Array, ""]:
        if self.aligned and isinstance(self.moments, QueryMoments):
            return _aligned_risk(parts, self.task, self.moments, nodes, self.control)
        return softmax_risk(parts, self.task, self.moments, nodes, self.control)


def softmax_risk(
    parts: Blocks, task: LinearRegression, moments: WeightMoments | QueryMoments, nodes: Nodes, theta: Float[Array, ""]
) -> Float[Array, ""]:
    """R_L, averaged over one replicate of the nodes and over ±W."""
    A, C, P, R = parts
    Sigma, s2, W, WS, N = task.Sigma, task.noise, nodes.W, nodes.WS, nodes.N
    u, labels = A @ nodes.x, C @ nodes.x
    h = Sigma @ u
    WSu, Nl = jnp.sum(WS * u, axis=1), jnp.sum(N * labels, axis=1) + s2 * labels
    # every quantity is an even part in W, plus or minus an odd one
    nu = jnp.sum(u * h, axis=0) + jnp.sum(labels * Nl, axis=0), 2 * jnp.sum(labels * WSu, axis=0)
    b = P @ h + R @ Nl, P @ jnp.sum(WS * labels[:, None], axis=0) + R @ WSu
    a = (
        jnp.sum((P @ Sigma) * P) + s2 * jnp.sum(R**2) + jnp.sum(N * (R.T @ R)[..., None], axis=(0, 1)),
        2 * jnp.sum(WS * (R.T @ P)[..., None], axis=(0, 1)),
    )
    t = jnp.sum(W * nodes.x, axis=1)

    # both signs along one axis: half the code to compile of two calls
    sign = jnp.array([[1.0], [-1.0]], t.dtype)
    signed = b[0][:, None] + sign * b[1][:, None]
    square, cross = jnp.sum(signed**2, axis=0), sign * jnp.sum(signed * t[:, None], axis=0)
    given = theta, nu[0] + sign * nu[1], a[0] + sign * a[1], square, cross
    if isinstance(moments, WeightMoments):
        integrand = _integrand(moments, *given)
    else:
        f = P @ nodes.x
        own = jnp.sum(f**2, axis=0), jnp.sum(signed * f[:, None], axis=0), sign * jnp.sum(f * t, axis=0)
        integrand = _with_query(moments, jnp.sum(nodes.x * u, axis=0), own, *given)
    return nodes.mean(integrand.mean(axis=0)) + exact_part(parts, task, theta)


def _aligned_risk(
    parts: Blocks, task: LinearRegression, moments: QueryMoments, nodes: Nodes, theta: Float[Array, ""]
) -> Float[Array, ""]:
    """The same for P = C = 0 with the query in the prompt, averaged over W in closed form."""
    u, r = parts.A @ nodes.x, jnp.trace(parts.R)
    h, RR = task.Sigma @ u, jnp.sum(parts.R**2)
    nu, Oh = jnp.sum(u * h, axis=0), task.Omega @ h
    a, square, cross = RR * (task.tau1 + task.noise), RR * jnp.sum(h * Oh, axis=0), r * jnp.sum(nodes.x * Oh, axis=0)
    integrand = _with_query(moments, jnp.sum(nodes.x * u, axis=0), (0.0, 0.0, 0.0), theta, nu, a, square, cross)
    return nodes.mean(integrand) + exact_part(parts, task, theta)


def exact_part(parts: Blocks, task: LinearRegression, theta: Float[Array, ""]) -> Float[Array, ""]:
    """What the nodes do not carry: the risk of predicting 0, and θ times what R_∞ is off it."""
    base = task.targets * (jnp.sum(task.query_Sigma * task.Omega) + task.noise) / 2
    return base + theta * (gaussian_risk(parts, task, jnp.inf) - base)


def _integrand(moments: WeightMoments, theta, nu, a, square, cross) -> Float[Array, "*signs n"]:
    Q, unheld, K2, lost = moments.shares(nu)
    # (1−θ) − lost and (1−θ) − Q, without cancellation at either θ
    return (a * Q + square * ((1 - theta) * K2 - theta * lost) - 2 * cross * ((1 - theta) * unheld - theta * Q)) / 2


def _with_query(moments: QueryMoments, lam, own, theta, nu, a, square, cross) -> Float[Array, "*signs n"]:
    """With the query, of which `own` are ‖f‖², b·f and f·t, in the prompt."""
    found = moments.shares(nu, jnp.broadcast_to(lam, nu.shape))
    of_square, of_output, of_target = own
    tokens = a * found.Q + square * (found.K2 - theta) - 2 * cross * (found.kept - theta)
    return (tokens + found.C2 * of_square + 2 * found.X * of_output - 2 * found.C * of_target) / 2
