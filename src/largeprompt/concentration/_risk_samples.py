r"""The in-context risk of a finite prompt against that of the infinite one, and their gradients, measured on pairs.

For each instance of the task and each prompt, the loss (or its gradient) at the finite prompt minus that at the law
itself. To first order in $1/\sqrt L$ that difference is linear in $\bar\omega y$ and $\bar\omega(yy^\top-H)$, token
averages whose means are exactly 0 because $\Lambda$ is known: subtracting this part leaves the mean as it is, and what
is left is of the order of the mean, $1/L$. It is known for softmax and linear heads.
"""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from largeprompt._compiled import optimised_jit
from largeprompt._device import DeviceName
from largeprompt.attention import heads_of, kind_of
from largeprompt.icl import prediction, squared_mean
from largeprompt.icl._stand_in import Resampled, is_sampled, warn_of_few
from largeprompt.measures import Empirical

from ._problem import RiskProblem
from ._prompts import StreamedHeads, prompt_sums, reader_of, second_moment_sum, sizes
from ._reliability import reliability
from ._samples import LEVELS, batched_keys, in_batches, refuse_overflow
from ._stand_in import changes

_FOR_STAND_IN = 64  # prompts on which the error of a sampled law is found


class RiskSample(NamedTuple):
    """Differences at one length, of losses and of gradients, each beside its linear part, prompts in rows.

    `errors` are those of the limits, without and with the linear part taken out.
    """

    differences: dict[str, tuple[np.ndarray, np.ndarray]]
    errors: dict[str, np.ndarray]
    method: str = "pairs of a prompt and its law, whole prompts"
    doubt: None = None

    def point(self, name: str, L: int) -> dict[str, Any]:
        """The numbers of a `Deviation` for one quantity at this length."""
        raw, linear = (part.reshape(len(part), -1) for part in self.differences[name])
        refuse_overflow(name, L, raw)
        # with the linear part taken out or not, whichever leaves less: heavy tails can make it worse
        better = np.isfinite(linear).all() and (raw - linear).var() < raw.var()
        d = raw - linear if better else raw
        square, error = squared_mean(d)
        square = max(square, 0.0)
        gap = float(d.mean()) if name == "risk" else math.sqrt(square)
        gap_error = float(d.std(ddof=1)) / math.sqrt(len(d)) if name == "risk" else error / (2 * max(gap, 1e-300))
        of_limit = float(self.errors[name][int(better)])
        gap_error, error = math.hypot(gap_error, of_limit), math.hypot(error, (2 * abs(gap) + of_limit) * of_limit)
        trust = reliability(np.linalg.norm(d, axis=1), relative=error / (2 * max(square, 1e-300)))
        return trust._asdict() | {
            "mean_square": square,
            "stderr": error,
            "low": max(square - 1.96 * error, 0.0),
            "high": square + 1.96 * error,
            "quantiles": np.quantile(np.sum(raw**2, axis=1), LEVELS),
            "gap": gap,
            "gap_stderr": gap_error,
        }


class RiskPairs:
    """Pairs of a prompt and its law, for the risks of a task and their gradients, on the same prompts."""

    def __init__(self, problem: RiskProblem, key: PRNGKeyArray, device: DeviceName):
        self.problem = problem
        self.device: DeviceName = device
        self.reader = reader_of(problem.layer, problem.heads, True)
        self.reader.chunk(max(problem.lengths), 1, problem.task.dim)  # refuses prompts that are too long to hold
        self.sampled = is_sampled(problem.task)
        if self.sampled:
            warn_of_few(problem.layer, problem.task, jax.random.split(key, 32))

    def sample(self, L: int, key: PRNGKeyArray, replicates: int) -> RiskSample:
        """The differences of so many pairs."""
        layer, task, names = self.problem.layer, self.problem.task, self.problem.quantities
        chunk, batch = sizes(self.reader, L, 1, task.dim, self.device)
        keys, batch = batched_keys(key, batch, replicates)
        function = head_differences if isinstance(self.reader, StreamedHeads) else layer_differences
        options = (jnp.asarray(L), chunk, "risk-gradient" in names, self.problem.query_in_prompt)
        found = in_batches(lambda keys: function(layer, task, keys, *options), keys, batch, replicates)
        errors = np.zeros(4)
        if self.sampled:
            first = keys[:_FOR_STAND_IN]

            def means(key: PRNGKeyArray | None) -> list[Any]:
                law = task if key is None else Resampled(task, key)
                found = [np.asarray(part, float) for part in function(layer, law, first, *options)]
                pairs = [(found[i], found[i] - found[i + 1]) for i in range(0, len(found), 2)]
                return [part.mean(axis=0) for pair in pairs for part in pair]

            errors = changes(means, keys[0])
        places = {"risk": slice(0, 2), "risk-gradient": slice(2, 4)}
        return RiskSample(
            {name: (found[places[name]][0], found[places[name]][1]) for name in names},
            {name: errors[places[name]] for name in names},
        )


@functools.partial(optimised_jit, fusing=False)
def head_differences(layer, task, keys, L, chunk: int, gradient: bool, query_in_prompt: bool):
    """Of each instance: the difference of the losses and its linear part; the same for the gradients, flattened.

    For softmax and linear heads and sums of them; all heads of a layer read the same tokens.
    """
    parameters, static = eqx.partition(layer, eqx.is_inexact_array)

    def matrices(parameters):
        return [(head.U, head.V) for head in heads_of(eqx.combine(parameters, static)) or ()]

    heads, pull = jax.vjp(matrices, parameters)
    readers = heads_of(layer) or ()

    def of_instance(key):
        of_draw, of_tokens = jax.random.split(key)
        instance = task._draw(of_draw)
        mu, z = instance.measure, instance.query

        def output(read):
            """The sum of the heads' outputs, from the pair (m, H) that each reads off the prompt."""
            return jnp.stack([V @ m for (_, V), (m, _) in zip(heads, read, strict=True)]).sum(axis=0)

        def loss(T):
            return task._loss(prediction(T, task), instance.target)

        def slope(read):
            """The gradient in the layer's parameters, through what it reads off the prompt."""
            g = jax.grad(loss)(output(read))
            of_heads = zip(heads, read, strict=True)
            pulled = pull([(jnp.outer(H.T @ (V.T @ g), z), jnp.outer(g, m)) for (_, V), (m, H) in of_heads])[0]
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(pulled)])

        each = [_read(head, mu, of_tokens, z, L, chunk, query_in_prompt) for head in readers]
        there, off, first_order = (list(parts) for parts in zip(*each, strict=True))
        here = jax.tree.map(jnp.add, there, off)
        found = []
        for function in (lambda read: loss(output(read)), *((slope,) if gradient else ())):
            value, along = jax.jvp(function, (there,), (first_order,))
            found += [function(here) - value, along]
        return found

    return jax.vmap(of_instance)(keys)


def _read(head, mu, key, z, L, chunk: int, query_in_prompt: bool):
    """What a head reads off the law, how far a prompt's is from it, and the linear part of that."""
    u = head.U @ z
    m, H = head.reading(mu, u), head.reading_slope(mu, u)
    if kind_of(head) == "linear":
        second = second_moment_sum(mu, key, L, chunk, u.dtype)
        linear_H = second / L - H
        dH = (second + jnp.outer(z, z)) / (L + 1) - H if query_in_prompt else linear_H
        return (m, H), (dH @ u, dH), (linear_H @ u, linear_H)
    centre = mu._mean()
    sums = prompt_sums(mu, key, u[None], L, chunk, True, centre)
    assert sums.second is not None  # asked for
    # from weights with the largest 1 to those with the mean 1 under the law
    scale = jnp.exp(sums.shift[0] - (mu._cgf(u) - u @ centre)) / L
    off = centre - m
    linear_m = scale * (sums.first[0] + off * sums.total[0])
    crossed = jnp.outer(sums.first[0], off)
    around = sums.second[0] + crossed + crossed.T + sums.total[0] * (jnp.outer(off, off) - H)
    sums = sums.with_own(u[None], (z - centre)[None]) if query_in_prompt else sums
    here = sums.softmax_reading(centre)
    assert here.slope is not None
    return (m, H), (here.mean[0] - m, here.slope[0] - H), (linear_m, scale * around)


@functools.partial(optimised_jit, fusing=False)
def layer_differences(layer, task, keys, L, chunk: int, gradient: bool, query_in_prompt: bool):
    """The same for any layer, by asking it, on prompts of `chunk` = L tokens; no linear part is known."""
    parameters, static = eqx.partition(layer, eqx.is_inexact_array)

    def of_instance(key):
        of_draw, of_tokens = jax.random.split(key)
        instance = task._draw(of_draw)
        tokens = instance.measure._sample(of_tokens, chunk)
        prompt = Empirical(jnp.concatenate([tokens, instance.query[None]]) if query_in_prompt else tokens)

        def loss(parameters, mu):
            output = eqx.combine(parameters, static)._output(mu, instance.query)
            return task._loss(prediction(output, task), instance.target)

        def slope(mu):
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.grad(loss)(parameters, mu))])

        off = [loss(parameters, prompt) - loss(parameters, instance.measure)]
        off += [slope(prompt) - slope(instance.measure)] if gradient else []
        return [part for difference in off for part in (difference, jnp.zeros_like(difference))]

    return jax.vmap(of_instance)(keys)
