r"""The in-context risk of a finite prompt against that of the infinite one, and their gradients.

Measured on pairs: for each instance of the task and each prompt, the loss (or its gradient) at the finite prompt minus
that at the law itself. To first order in $1/\sqrt L$ that difference is linear in $\bar\omega y$ and
$\bar\omega(yy^\top-H)$, token averages whose means are exactly 0 because $\Lambda$ is known: subtracting this part
leaves the mean as it is, and what is left is of the order of the mean, $1/L$.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from largeprompt._device import DeviceName
from largeprompt.attention import AbstractLayer, kind_of, known_heads, merged_form, summed_heads
from largeprompt.icl import (
    LinearRegression,
    blocks,
    norm,
    prediction,
    risk,
    risk_gradient,
    risk_rate,
    squared_mean,
)
from largeprompt.icl._stand_in import RESAMPLES, Resampled, is_sampled, warn_of_few
from largeprompt.measures import Empirical

from ._deviation import LEVELS, Deviation, curve, refuse_overflow
from ._prediction import Prediction
from ._prompts import prompt_sums, softmax_reading, with_own
from ._quantities import NotPredictedError, task_of
from ._readers import SummedHeads, WholePrompts
from ._regime import Regime, breakdown_exponent
from ._reliability import reliability
from ._spectrum import spectrum

_DRAWS = 2**16  # nodes for the gradient of a risk, at most
_LATE = 1e13  # of lengths
_FOR_STAND_IN = 64  # prompts on which the error of a sampled law is found


def risk_deviation(
    layer: AbstractLayer,
    task: object,
    nu: object,
    Ls: Sequence[int],
    names: Sequence[str],
    key: PRNGKeyArray,
    replicates: int,
    query_in_prompt: bool,
    place: DeviceName,
    done,
) -> dict[str, Deviation]:
    """For "risk" and "risk-gradient", on the same prompts."""
    task, heads = task_of(layer, task, nu), known_heads(layer)
    reader = WholePrompts(layer, True) if heads is None else SummedHeads(heads, True)
    reader.sizes(max(Ls), 1, task.dim, place)  # refuses prompts that are too long to hold
    differences = _plain_differences if heads is None else _differences
    curves, errors = [], []
    sampled = is_sampled(task)
    if sampled:
        warn_of_few(layer, task, jax.random.split(key, 32))
    for L in Ls:
        chunk, batch = reader.sizes(L, 1, task.dim, place)
        batch = min(batch, 2 ** math.ceil(math.log2(replicates)))
        keys = jax.random.split(jax.random.fold_in(key, L), -(-replicates // batch) * batch)
        parts = []
        for i in range(0, replicates, batch):
            gradient = "risk-gradient" in names
            found = differences(layer, task, keys[i : i + batch], jnp.asarray(L), chunk, gradient, query_in_prompt)
            parts.append([np.asarray(part, float) for part in found])
        curves.append([np.concatenate(part)[:replicates] for part in zip(*parts, strict=True)])
        options = (jnp.asarray(L), chunk, "risk-gradient" in names, query_in_prompt)
        errors.append(
            _of_stand_in(differences, layer, task, keys[:_FOR_STAND_IN], options) if sampled else np.zeros((2, 2))
        )
        if done is not None:
            done(L)
    columns = {"risk": slice(0, 2), "risk-gradient": slice(2, 4)}
    return {
        name: _summary(name, Ls, [found[part] for found in curves], [found[part.start // 2] for found in errors])
        for name, part in ((name, columns[name]) for name in names)
    }


def _of_stand_in(differences, layer, task, keys, options) -> np.ndarray:
    """What the tokens that stand in for the laws add to the error of each mean difference, and with its linear part."""

    def means(task) -> list[np.ndarray]:
        found = [np.asarray(part, float) for part in differences(layer, task, keys, *options)]
        pairs = [(found[i], found[i] - found[i + 1]) for i in range(0, len(found), 2)]
        return [part.mean(axis=0) for pair in pairs for part in pair]

    before = means(task)
    others = [means(Resampled(task, key)) for key in jax.random.split(keys[0], RESAMPLES)]
    squares = [[np.sum((a - b) ** 2) for a, b in zip(other, before, strict=True)] for other in others]
    return np.sqrt(np.mean(squares, axis=0)).reshape(-1, 2)


@eqx.filter_jit
def _differences(layer, task, keys, L, chunk: int, gradient: bool, query_in_prompt: bool):
    """Of each instance: the difference of the losses and its linear part; the same for the gradients, flattened.

    For softmax and linear heads and sums of them; all heads of a layer read the same tokens.
    """
    parameters, static = eqx.partition(layer, eqx.is_inexact_array)

    def matrices(parameters):
        return [(head.U, head.V) for head in summed_heads(eqx.combine(parameters, static))]

    heads, pull = jax.vjp(matrices, parameters)
    kinds = [kind_of(head) for head in summed_heads(layer)]

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
            pulled = pull([(jnp.outer(H @ (V.T @ g), z), jnp.outer(g, m)) for (_, V), (m, H) in of_heads])[0]
            return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(pulled)])

        each = [_readings(mu, of_tokens, z, U @ z, kind) for (U, _), kind in zip(heads, kinds, strict=True)]
        there, off, first_order = (list(parts) for parts in zip(*each, strict=True))
        here = jax.tree.map(jnp.add, there, off)
        found = []
        for function in (lambda read: loss(output(read)), *((slope,) if gradient else ())):
            value, along = jax.jvp(function, (there,), (first_order,))
            found += [function(here) - value, along]
        return found

    def _readings(mu, key, z, u, kind):
        """What a head reads off the law, how far a prompt's is from it, and the linear part of that."""
        if kind == "linear":
            flat = jnp.zeros((1, mu.dim), u.dtype)
            sums = prompt_sums(mu, key, flat, L, chunk, True, flat[0])
            assert sums.second is not None  # asked for
            mean, second = mu._mean(), sums.second[0]
            H = mu._cov() + jnp.outer(mean, mean)
            linear_H = second / L - H
            dH = (second + jnp.outer(z, z)) / (L + 1) - H if query_in_prompt else linear_H
            return (H @ u, H), (dH @ u, dH), (linear_H @ u, linear_H)
        centre, tilted = mu._mean(), mu._tilt(u)
        m, H = tilted._mean(), tilted._cov()
        sums = prompt_sums(mu, key, u[None], L, chunk, True, centre)
        # from weights with the largest 1 to those with the mean 1 under the law
        scale = jnp.exp(sums.shift[0] - (mu._cgf(u) - u @ centre)) / L
        off = centre - m
        linear_m = scale * (sums.first[0] + off * sums.total[0])
        crossed = jnp.outer(sums.first[0], off)
        assert sums.second is not None  # asked for
        around = sums.second[0] + crossed + crossed.T + sums.total[0] * (jnp.outer(off, off) - H)
        here = softmax_reading(with_own(sums, u[None], (z - centre)[None]) if query_in_prompt else sums, centre)
        assert here.slope is not None
        return (m, H), (here.mean[0] - m, here.slope[0] - H), (linear_m, scale * around)

    return jax.vmap(of_instance)(keys)


@eqx.filter_jit
def _plain_differences(layer, task, keys, L, chunk: int, gradient: bool, query_in_prompt: bool):
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


def _summary(name: str, Ls: Sequence[int], curves, errors) -> Deviation:
    points = []
    for L, (raw, linear), of_limits in zip(Ls, curves, errors, strict=True):
        raw, linear = (part.reshape(len(part), -1) for part in (raw, linear))
        refuse_overflow(name, L, raw)
        # with the linear part taken out or not, whichever leaves less: heavy tails can make it worse
        better = np.isfinite(linear).all() and (raw - linear).var() < raw.var()
        d = raw - linear if better else raw
        square, error = squared_mean(d)
        square = max(square, 0.0)
        gap = float(d.mean()) if name == "risk" else math.sqrt(square)
        gap_error = float(d.std(ddof=1)) / math.sqrt(len(d)) if name == "risk" else error / (2 * max(gap, 1e-300))
        of_limit = float(of_limits[int(better)])
        gap_error, error = math.hypot(gap_error, of_limit), math.hypot(error, (2 * abs(gap) + of_limit) * of_limit)
        trust = reliability(np.linalg.norm(d, axis=1), relative=error / (2 * max(square, 1e-300)))
        points.append(
            trust._asdict()
            | {
                "mean_square": square,
                "stderr": error,
                "low": max(square - 1.96 * error, 0.0),
                "high": square + 1.96 * error,
                "quantiles": np.quantile(np.sum(raw**2, axis=1), LEVELS),
                "gap": gap,
                "gap_stderr": gap_error,
            }
        )
    return curve(name, Ls, points, len(curves[0][0]), "pairs of a prompt and its law, whole prompts")


def risk_prediction(
    layer: AbstractLayer,
    task: object,
    nu: object,
    Ls: Sequence[int],
    name: str,
    key: PRNGKeyArray,
    query_in_prompt: bool,
) -> Prediction:
    """The gap of the risks, or of their gradients, exactly or exactly over prompts: Gaussian regression."""
    task = task_of(layer, task, nu)
    if kind_of(layer) is None:
        raise NotPredictedError(
            f"the layer is of type {type(layer).__name__}; a risk is predicted for one head of softmax or linear "
            "attention, else only measured"
        )
    if type(task) is not LinearRegression:
        raise NotPredictedError(
            f"mu is of type {type(task).__name__}; a risk is predicted for LinearRegression, else only measured"
        )
    merged = merged_form(layer)
    linear = kind_of(merged) == "linear"
    if query_in_prompt and not linear:
        raise NotPredictedError("query_in_prompt is True; with softmax attention a risk is then only measured")
    gaps, errors = zip(*(_gap(layer, task, L, name, key, query_in_prompt) for L in Ls), strict=True)
    constant = math.nan
    if name == "risk":
        rate = _gap(layer, task, 1, name, key, False)[0] if linear else float(risk_rate(layer, task))
        constant = rate**2
        # so late the difference of the risks is lost to rounding, and all but its first order in 1/L is gone
        gaps = [rate / L if L > _LATE and math.isfinite(rate) else gap for gap, L in zip(gaps, Ls, strict=True)]
    squares = np.square(gaps)
    return Prediction(
        quantity=name,
        L=np.array(Ls),
        mean_square=squares,
        stderr=2 * np.abs(gaps) * np.array(errors),
        constant=constant,
        constant_stderr=0.0,
        regime=_regime(merged, task, linear),
        method="exact over prompts" if not linear else "exact",
        exact=not np.any(errors),
        gap=np.array(gaps),
    )


def _gap(layer, task, L: int, name: str, key, query_in_prompt: bool) -> tuple[float, float]:
    options: Any = {"query_in_prompt": query_in_prompt}
    if name == "risk":
        finite, infinite = risk(layer, task, L, key, **options), risk(layer, task, math.inf, key)
        return float(finite.value - infinite.value), float(finite.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # near an optimum a gradient is small beside its error: the error is told below
        finite = risk_gradient(layer, task, L, key, max_draws=_DRAWS, **options)
    infinite = risk_gradient(layer, task, math.inf, key)
    finite_part, infinite_part = (eqx.filter(g.layer, eqx.is_inexact_array) for g in (finite, infinite))
    return float(norm(jax.tree.map(jnp.subtract, finite_part, infinite_part))), float(norm(finite.stderr))


def _regime(merged, task: LinearRegression, linear: bool) -> Regime:
    if linear:
        return Regime("1/L", 2.0, 0.0, 1.0, 1.0, 2.0)
    parts = blocks(merged, task)
    if bool(jnp.any(parts.C != 0)):
        return Regime("slower than any power", 0.0, math.nan, math.nan, math.nan, 2.0)
    A = np.asarray(parts.A, float)
    spread = float(spectrum(A.T @ np.asarray(task.Sigma, float) @ A, task.query_Sigma)[0][-1])
    power = breakdown_exponent(spread)
    name = "1/L" if spread < 0.5 else "slower than 1/L"
    return Regime(name, 2 * power, spread, math.nan, math.nan, 2.0)
