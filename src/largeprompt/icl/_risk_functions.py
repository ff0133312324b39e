import abc
import math
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt._checks import is_traced
from largeprompt.attention import (
    AbstractAttention,
    AbstractLayer,
    WeightMoments,
    kind_of,
    merged_form,
    with_query,
)

from ._closed_forms import Blocks, aligned_gaussian_risk, blocks, gaussian_risk
from ._nodes import Nodes
from ._prompt import held_tokens, prompt_for
from ._regression import LinearRegression
from ._softmax_risk import aligned_softmax_risk, softmax_risk
from ._task import AbstractTask, prediction


class AbstractRisk(eqx.Module):
    """The risk of layers of one kind on one task at one prompt length, set up once to be evaluated again and again."""

    @property
    @abc.abstractmethod
    def method(self) -> str:
        """How the average is taken."""

    @property
    def streamed(self) -> bool:
        """Whether an evaluation already fills the memory that it should, so that several go one after another."""
        return False

    @abc.abstractmethod
    def value_and_gradient(self, layer: AbstractLayer) -> tuple[Float[Array, ""], AbstractLayer]:
        """The risk, and its gradient in the shape of the layer."""

    @abc.abstractmethod
    def terms(self, layer: AbstractLayer) -> Any:
        """What `finished` makes the risk and its standard error of."""

    @abc.abstractmethod
    def gradient_terms(self, layer: AbstractLayer) -> Any:
        """The same for the gradient."""

    @staticmethod
    @abc.abstractmethod
    def merged(first: Any, second: Any) -> Any:
        """The terms of two pieces as those of the whole."""

    @staticmethod
    @abc.abstractmethod
    def finished(terms: Any) -> tuple[Any, Any]:
        """The mean and its standard error."""

    def pieces(self, draws: int) -> "Iterable[AbstractRisk]":
        """Averages over `draws` draws each, a power of two, that make up this one."""
        return [self]

    def value_and_error(self, layer: AbstractLayer) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The risk and its standard error."""
        return self.finished(self.terms(layer))

    def gradient_and_error(self, layer: AbstractLayer) -> tuple[AbstractLayer, AbstractLayer]:
        """The gradient and the standard error of each entry."""
        return self.finished(self.gradient_terms(layer))


class ClosedForm(AbstractRisk):
    """Gaussian regression: linear attention at any length, softmax attention at infinite length.

    `aligned` layers have P = C = 0, which a gradient flow in (U, V) keeps.
    """

    task: LinearRegression
    L: Float[Array, ""]
    normaliser: Float[Array, ""] | None
    aligned: bool = eqx.field(static=True)

    @property
    def method(self) -> str:
        return "closed form"

    def _value(self, layer):
        parts = blocks(merged_form(layer), self.task)
        if self.aligned and self.normaliser is None:
            return aligned_gaussian_risk(parts, self.task, self.L)
        return gaussian_risk(parts, self.task, self.L, self.normaliser)

    def value_and_gradient(self, layer):
        return eqx.filter_value_and_grad(self._value)(layer)

    def terms(self, layer):
        return self._value(layer)

    def gradient_terms(self, layer):
        return eqx.filter_grad(self._value)(layer)

    @staticmethod
    def merged(first, second):
        raise NotImplementedError("a closed form is in one piece")

    @staticmethod
    def finished(terms):
        return terms, jax.tree.map(jnp.zeros_like, terms)


class OverNodes(AbstractRisk):
    """Gaussian regression and softmax attention at finite length: exact over prompts, nodes over (W, x).

    `theta` is the weight of the control variate. `aligned` layers have P = C = 0 and keep it along a gradient flow;
    then the average over W is exact too.
    """

    task: LinearRegression
    moments: WeightMoments
    nodes: Nodes
    theta: Float[Array, ""]
    aligned: bool = eqx.field(static=True)

    @property
    def method(self) -> str:
        over = "x" if self.aligned else "(W, x)"
        return f"exact over prompts, quasi-Monte Carlo over {over}"

    def _replicates(self, layer) -> Float[Array, " r"]:
        parts = self.parts(layer)
        if self.aligned:
            return aligned_softmax_risk(parts, self.task, self.moments, self.nodes, self.theta)
        return softmax_risk(parts, self.task, self.moments, self.nodes, self.theta)

    def parts(self, layer: AbstractLayer) -> Blocks:
        """The blocks of the layer that count."""
        return blocks(merged_form(layer), self.task)

    def value_and_gradient(self, layer):
        return eqx.filter_value_and_grad(lambda layer: self._replicates(layer).mean())(layer)

    def terms(self, layer):
        return jnp.ones(()), self._replicates(layer)

    def gradient_terms(self, layer):
        def of_replicate(nodes):
            function = eqx.tree_at(lambda f: f.nodes, self, nodes)
            return eqx.filter_grad(lambda layer: function._replicates(layer)[0])(layer)

        # each replicate's gradient from its own nodes: the rows of a Jacobian would pass through all of them
        return jnp.ones(()), eqx.filter_vmap(of_replicate)(self.nodes.split())

    @staticmethod
    def merged(first, second):
        (m, means), (n, others) = first, second
        return m + n, jax.tree.map(lambda a, b: (m * a + n * b) / (m + n), means, others)

    @staticmethod
    def finished(terms):
        _, means = terms
        error = jax.tree.map(lambda x: _spread(x) / math.sqrt(x.shape[0]), means)
        return jax.tree.map(lambda x: x.mean(axis=0), means), error

    def pieces(self, draws):
        if is_traced(self.nodes.x):
            return [self]
        return (eqx.tree_at(lambda f: f.nodes, self, nodes) for nodes in self.nodes.pieces(draws))


def _spread(x: Float[Array, "r *shape"]) -> Float[Array, "*shape"]:
    """The standard deviation along the first axis, of numbers whose squares may overflow."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=0), jnp.finfo(x.dtype).tiny)
    return (x / scale).std(axis=0, ddof=1) * scale


class OverInstances(AbstractRisk):
    """Any task and any layer: an average over instances and prompts drawn from fixed keys, streamed."""

    task: AbstractTask
    keys: Array
    L: int | float = eqx.field(static=True)
    query_in_prompt: bool = eqx.field(static=True)

    @property
    def method(self) -> str:
        return f"Monte Carlo over {self.keys.shape[0]} instances"

    @property
    def streamed(self) -> bool:
        return True

    def _loss(self, layer: AbstractLayer, key: PRNGKeyArray) -> Float[Array, ""]:
        of_instance, of_prompt = jax.random.split(key)
        instance = self.task.draw(of_instance)
        # a finite prompt is an Empirical measure, an infinite one the law itself: the one definition of the risk
        if self.query_in_prompt:
            prompt = instance.prompt(of_prompt, self.L)
            mu = with_query(prompt.measure, prompt.query, self.L)
        else:
            prompt = prompt_for((layer,), instance, of_prompt, self.L)
            mu = prompt.measure
        return self.task._loss(prediction(layer._output(mu, prompt.query), self.task), prompt.target)

    def tokens(self, layer: AbstractLayer) -> int:
        """How many tokens one prompt holds; an infinite one counts as one."""
        if self.query_in_prompt:
            return 1 if math.inf == self.L else int(self.L)
        return held_tokens((layer,), self.task, self.L)

    def _moments(self, tokens: int, function) -> tuple[Array, Any, Any]:
        """How many keys, the mean of function(key), a tree of arrays, and its squared deviations, chunk by chunk."""
        n = self.keys.shape[0]
        budget = max(1, min(n, 2**20 // (tokens * self.task.dim)))
        chunk = math.gcd(n, 2 ** int(math.log2(budget)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, self.keys[0]))

        def merge(carry, keys):
            terms = jax.vmap(function)(keys)
            mean = jax.tree.map(lambda x: x.mean(axis=0), terms)
            square = jax.tree.map(lambda x, centre: jnp.sum((x - centre) ** 2, axis=0), terms, mean)
            return self.merged(carry, (jnp.full((), float(chunk)), mean, square)), None

        chunks = self.keys.reshape((n // chunk, chunk, *self.keys.shape[1:]))
        return jax.lax.scan(merge, (jnp.zeros(()), zeros, zeros), chunks)[0]

    def value_and_gradient(self, layer):
        differentiable, static = eqx.partition(layer, eqx.is_inexact_array)

        def of_key(key):
            return jax.value_and_grad(lambda part: self._loss(eqx.combine(part, static), key))(differentiable)

        _, (value, gradient), _ = self._moments(self.tokens(layer), of_key)
        return value, eqx.combine(gradient, static)

    def terms(self, layer):
        return self._moments(self.tokens(layer), lambda key: self._loss(layer, key))

    def gradient_terms(self, layer):
        differentiable, static = eqx.partition(layer, eqx.is_inexact_array)

        def of_key(key):
            return jax.grad(lambda part: self._loss(eqx.combine(part, static), key))(differentiable)

        count, *parts = self._moments(self.tokens(layer), of_key)
        return count, *(eqx.combine(part, static) for part in parts)

    @staticmethod
    def merged(first, second):
        # of the parts' means and squared deviations, so that a large mean does not drown a small spread
        (m, means, squares), (n, others, other_squares) = first, second
        off = jax.tree.map(jnp.subtract, others, means)
        squares = jax.tree.map(lambda a, b, off: a + b + off**2 * (m * n / (m + n)), squares, other_squares, off)
        return m + n, jax.tree.map(lambda mean, off: mean + off * (n / (m + n)), means, off), squares

    @staticmethod
    def finished(terms):
        n, mean, square = terms
        return mean, jax.tree.map(lambda total: jnp.sqrt(total / jnp.maximum(n - 1, 1) / n), square)

    def pieces(self, draws):
        n = self.keys.shape[0]
        return (eqx.tree_at(lambda f: f.keys, self, self.keys[i : i + draws]) for i in range(0, n, draws))


def gaussian_form(layer: AbstractLayer, task: AbstractTask) -> AbstractAttention | None:
    """The (U, V) form of a layer whose moments on the task are known exactly, if it has one."""
    return merged_form(layer) if type(task) is LinearRegression and kind_of(layer) is not None else None


def is_aligned(layer: AbstractLayer, task: LinearRegression) -> bool:
    """Whether a (U, V) layer has P = C = 0: then by the symmetry W → −W the gradient has it too."""
    if not isinstance(layer, AbstractAttention):  # K, Q, V, O of such a product need not stay so
        return False
    parts = blocks(layer, task)
    return not any(is_traced(part) or bool(jnp.any(part != 0)) for part in (parts.P, parts.C))
