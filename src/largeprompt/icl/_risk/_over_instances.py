import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt.attention import AbstractLayer, Lengths, longest, with_query
from largeprompt.measures import Empirical

from .._prompt import held_tokens, prompt_for
from .._task import AbstractTask, Instance, prediction
from ._abstract import AbstractRisk, Moments


class OverInstances(AbstractRisk):
    """Any task and any layer: an average over instances and prompts drawn from fixed keys, streamed."""

    task: AbstractTask
    keys: Array
    L: int | float | Lengths = eqx.field(static=True)
    query_in_prompt: bool = eqx.field(static=True)
    reason: str = eqx.field(static=True)

    @property
    def method(self) -> str:
        return f"Monte Carlo over {self.keys.shape[0]} instances"

    @property
    def streamed(self) -> bool:
        return True

    def _loss(self, layer: AbstractLayer, key: PRNGKeyArray) -> Float[Array, ""]:
        of_instance, of_prompt = jax.random.split(key)
        instance = self.task.draw(of_instance)
        if isinstance(self.L, Lengths):
            return self._loss_of_prefix(layer, instance, of_prompt, self.L)
        # a finite prompt is an Empirical measure, an infinite one the law itself: the one definition of the risk
        if self.query_in_prompt:
            prompt = instance.prompt(of_prompt, self.L)
            mu = with_query(prompt.measure, prompt.query, self.L)
        else:
            prompt = prompt_for((layer,), instance, of_prompt, self.L)
            mu = prompt.measure
        return self.task._loss(prediction(layer._output(mu, prompt.query), self.task), prompt.target)

    def _loss_of_prefix(
        self, layer: AbstractLayer, instance: Instance, key: PRNGKeyArray, lengths: Lengths
    ) -> Float[Array, ""]:
        """The loss on a prompt whose length is drawn: the tokens beyond it have weight 0, so that shapes are fixed."""
        of_length, of_tokens = jax.random.split(key)
        before = np.cumsum((0.0, *lengths.probabilities[:-1]))
        drawn = jnp.searchsorted(jnp.asarray(before), jax.random.uniform(of_length), side="right") - 1
        length = jnp.asarray(lengths.values)[drawn]
        tokens = instance.measure.sample(of_tokens, lengths.longest)
        if self.query_in_prompt:
            tokens, length = jnp.concatenate([instance.query[None], tokens]), length + 1
        shown = jnp.maximum(length, 1)
        log_weights = jnp.where(jnp.arange(len(tokens)) < shown, -jnp.log(shown.astype(tokens.dtype)), -jnp.inf)
        output = layer._output(Empirical.from_log_weights(tokens, log_weights), instance.query)
        answer = jnp.where(length > 0, prediction(output, self.task), 0)
        return self.task._loss(answer, instance.target)

    def tokens(self, layer: AbstractLayer) -> int:
        """How many tokens one prompt holds; an infinite one counts as one."""
        if self.query_in_prompt or isinstance(self.L, Lengths):
            return 1 if math.inf == self.L else int(longest(self.L))
        return held_tokens((layer,), self.task, self.L)

    def _moments(self, layer: AbstractLayer, function) -> Moments:
        """The moments of function(loss, parameters) over all keys, chunk by chunk."""
        parameters, static = eqx.partition(layer, eqx.is_inexact_array)
        n = self.keys.shape[0]
        budget = max(1, min(n, 2**20 // (self.tokens(layer) * self.task.dim)))
        chunk = math.gcd(n, 2 ** int(math.log2(budget)))

        @functools.partial(jax.jit, inline=True)  # traced once, for its shapes and for the scan
        @jax.vmap
        def of_keys(key) -> Any:
            return function(lambda parameters: self._loss(eqx.combine(parameters, static), key))(parameters)

        def merge(total: Moments, keys):
            terms = of_keys(keys)
            mean = jax.tree.map(lambda x: x.mean(axis=0), terms)
            squares = jax.tree.map(lambda x, centre: jnp.sum((x - centre) ** 2, axis=0), terms, mean)
            return total.merged(Moments(jnp.full((), float(chunk)), mean, squares)), None

        chunks = self.keys.reshape((n // chunk, chunk, *self.keys.shape[1:]))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), jax.eval_shape(of_keys, chunks[0]))
        return jax.lax.scan(merge, Moments(jnp.zeros(()), zeros, zeros), chunks)[0]

    def value_and_gradient(self, layer):
        return self.average_with_gradient(layer).mean

    def average(self, layer):
        return self._moments(layer, lambda loss: loss)

    def average_with_gradient(self, layer):
        return self._moments(layer, jax.value_and_grad)

    def pieces(self, draws):
        n = self.keys.shape[0]
        return (eqx.tree_at(lambda f: f.keys, self, self.keys[i : i + draws]) for i in range(0, n, draws))
