"""The error of a risk on the infinite prompt where the law of its tokens is known by a sampler only."""

import math
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.attention import AbstractLayer
from largeprompt.measures._from_sampler import resampled, sampled_parts
from largeprompt.measures._worth import FewTokensWarning

from ._risk._over_instances import OverInstances
from ._task import AbstractChanged, AbstractTask, Instance

RESAMPLES = 24
_INSTANCES = 256
_LOOKED_AT = 32
_DOUBTFUL = 0.05  # share of queries at which too few tokens may carry the tilt


class Resampled(AbstractChanged):
    """A task whose laws have their stand-ins resampled, all with one key."""

    task: AbstractTask
    key: PRNGKeyArray

    def _draw(self, key):
        drawn = self.task._draw(key)
        return Instance(resampled(drawn.measure, self.key), drawn.query, drawn.target)


def is_sampled(task: AbstractTask) -> bool:
    """Whether the laws of its instances are known by a sampler."""
    return bool(sampled_parts(eqx.filter_eval_shape(task._draw, jax.random.key(0)).measure))


def stand_in_error(
    layer: AbstractLayer,
    task: AbstractTask,
    L: int | float,
    key: PRNGKeyArray | None,
    query_in_prompt: bool,
    gradient: bool = False,
) -> Any:
    """What the tokens that stand in for the laws of the infinite prompt add to the error of the risk or its gradient.

    None where there are none, or nothing has a value yet. Warns where too few tokens carry the tilts.
    """
    traced = any(checks.is_traced(leaf) for leaf in jax.tree.leaves((layer, task)))
    if math.inf > L or traced or not is_sampled(task):
        return None
    keys = jax.random.split(jax.random.fold_in(checks.key_or_default(key), 1), _INSTANCES)
    warn_of_few(layer, task, keys[:_LOOKED_AT])
    function = OverInstances(task=task, keys=keys, L=L, query_in_prompt=query_in_prompt, reason="")
    before = _mean(function, layer, gradient)
    squares = jax.tree.map(jnp.zeros_like, before)
    for one in jax.random.split(jax.random.fold_in(keys[0], 1), RESAMPLES):
        other = _mean(eqx.tree_at(lambda f: f.task, function, Resampled(task, one)), layer, gradient)
        squares = jax.tree.map(lambda total, a, b: total + (a - b) ** 2 / RESAMPLES, squares, other, before)
    return jax.tree.map(jnp.sqrt, squares)


@eqx.filter_jit
def _mean(function: OverInstances, layer: AbstractLayer, gradient: bool) -> Any:
    return function.value_and_gradient(layer)[1] if gradient else function.average(layer).mean


@eqx.filter_jit
def _drawn(task: AbstractTask, key: PRNGKeyArray) -> Instance:
    return task.draw(jax.random.split(key)[0])


def warn_of_few(layer: AbstractLayer, task: AbstractTask, keys) -> None:
    """Warn where the tokens that stand in for a law are too few at the queries of some instances."""
    few = []
    for key in keys:
        drawn = _drawn(task, key)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FewTokensWarning)
            layer._output(drawn.measure, drawn.query)
        few += [warning.message for warning in caught if issubclass(warning.category, FewTokensWarning)][:1]
    if len(few) > _DOUBTFUL * len(keys):
        warnings.warn(f"at {len(few)} of {len(keys)} queries {few[-1]}", FewTokensWarning, stacklevel=4)
