"""Prompts as layers read them: token by token, or a long one that only linear attention reads by its second moment."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from largeprompt._memory import machine_memory
from largeprompt.attention import AbstractLayer, heads_of, kind_of
from largeprompt.measures import AbstractMeasure, Empirical, Gaussian

from ._task import AbstractTask, Instance

_LONG = 2**28  # numbers of a prompt
_COPIES = 4  # of the tokens that XLA holds at once, as measured


def prompt_for(layers: Sequence[AbstractLayer], instance: Instance, key: PRNGKeyArray, L: int | float) -> Instance:
    """The instance with a prompt of `L` tokens, equal in law for these layers."""
    mu = instance.measure
    if isinstance(mu, Gaussian) and _by_second_moment(layers, mu, L):
        return Instance(_with_second_moment(mu, key, L), instance.query, instance.target)
    return instance.prompt(key, L)


def held_tokens(layers: Sequence[AbstractLayer], task: AbstractTask, L: int | float) -> int:
    """How many tokens `prompt_for` holds for one prompt; an infinite one counts as one."""
    if not _is_long(L, task.dim):
        return 1 if math.inf == L else int(L)
    mu = eqx.filter_eval_shape(task._draw, jax.random.key(0)).measure
    return task.dim + 1 if _by_second_moment(layers, mu, L) else int(L)


def refuse_beyond_memory(tokens: int, dim: int) -> None:
    """Raise where a prompt of so many tokens does not fit the memory of this machine."""
    needed, there = _COPIES * tokens * dim * jnp.zeros(()).dtype.itemsize, machine_memory()
    if needed > there:
        raise ValueError(
            f"L is {tokens:.4g}; a prompt of that many tokens takes {needed / 1e9:.3g} GB, and this machine has "
            f"{there / 1e9:.3g} GB; use L = inf, fewer tokens, or linear attention on Gaussian tokens"
        )


def _is_long(L: int | float, dim: int) -> bool:
    return math.inf > L > _LONG / dim


def _by_second_moment(layers: Sequence[AbstractLayer], mu: AbstractMeasure, L: int | float) -> bool:
    return _is_long(L, mu.dim) and isinstance(mu, Gaussian) and all(map(_reads_second_moment, layers))


def _reads_second_moment(layer: AbstractLayer) -> bool:
    """Whether a prompt reaches the output through its second moment alone: not so in a kind that may read more."""
    heads = heads_of(layer)
    return heads is not None and all(kind_of(head) == "linear" for head in heads)


def _with_second_moment(mu: Gaussian, key: PRNGKeyArray, L: int | float) -> Empirical:
    r"""A few atoms whose second moment has the law of that of `L` tokens.

    It is $\bar z\bar z^\top + CTT^\top C^\top/L$ with $\bar z\sim\mathcal N(m, CC^\top/L)$ and, independent of it, $T$
    of Bartlett's decomposition with $L-1$ degrees of freedom.
    """
    of_mean, of_chi, of_rest = jax.random.split(key, 3)
    C = mu.root()
    n, dtype = C.shape[1], C.dtype
    degrees = float(L) - 1 - jnp.arange(n, dtype=dtype)
    chi = jnp.sqrt(2 * jax.random.gamma(of_chi, degrees / 2, dtype=dtype))
    T = jnp.diag(chi) + jnp.tril(jax.random.normal(of_rest, (n, n), dtype), -1)
    centre = mu.m + C @ jax.random.normal(of_mean, (n,), dtype) / math.sqrt(L)
    atoms = jnp.concatenate([centre[None], (C @ T).T / math.sqrt(L)])
    return Empirical(math.sqrt(n + 1) * atoms)
