r"""Prompts drawn again from the groups at hand, as weights, and what their outputs say of real redraws of the prompt.

**Partitions.** The groups are split at random into $K$ parts of $m=\lfloor n/K\rfloor$. Outputs on disjoint parts are
independent and distributed as on any prompt of $m$ groups, so their sample variance is an unbiased estimate of
$V(m)=\mathrm{Var}\,F_m$, whatever the network; it is averaged over partitions. From halves and quarters the variance of
the whole prompt follows by a power law, $V(n)=V(m)(m/n)^\gamma$: for outputs that are smooth in the measure $\gamma$ is
near 1, for networks that grow surer with every row it is not.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

_PARTS = (2, 4)
_EXPECTED, _SPREAD = 0.25, 0.5  # what was seen on networks that learn in context: exponents from -0.3 to 0.5
_REFITS = 100
_SHARPEST = 0.12  # error of a mean logarithm: above, an agreement says little


def counts(rng: np.random.Generator, draws: int, n: int) -> Float[np.ndarray, "r n"]:
    """How often each group comes among n draws with replacement: the weights of the bootstrap."""
    return rng.multinomial(n, np.full(n, 1 / n), draws).astype(float)


def subsets(rng: np.random.Generator, draws: int, n: int, size: int) -> Float[np.ndarray, "r n"]:
    """Weight 1 on as many groups, drawn without replacement, and 0 on the others."""
    return (_ranks(rng, draws, n) < size).astype(float)


def partitions(rng: np.random.Generator, draws: int, n: int) -> list[Float[np.ndarray, "r K n"]]:
    """Weights of the parts of random partitions, half of the draws in halves and half in quarters."""
    found = []
    for parts in _PARTS:
        part = _ranks(rng, max(3, draws // (len(_PARTS) * parts)), n) // (n // parts)  # what is left over has no part
        found.append((part[:, None] == np.arange(parts)[:, None]).astype(float))
    return found


def _ranks(rng: np.random.Generator, draws: int, n: int) -> np.ndarray:
    return np.argsort(rng.random((draws, n)), axis=1).argsort(axis=1)


class VarianceLaw(NamedTuple):
    """The variance over redraws of all groups, the exponent by which it falls with their number, and their errors.

    `like` are deviations whose mean square is that variance, with the correlations of outputs; `bias` is the mean
    output on halves minus that on all groups.
    """

    variance: Float[np.ndarray, " p"]
    exponent: float
    exponent_stderr: float
    freedom: float
    like: Float[np.ndarray, "r p"]
    bias: Float[np.ndarray, " p"]


def variance_law(
    rng: np.random.Generator, outputs: list[Float[np.ndarray, "r K p"]], estimate: Float[np.ndarray, " p"], n: int
) -> VarianceLaw:
    """The law of the variance from outputs on the parts of partitions; one exponent for all outputs.

    A single output says little about its exponent: what is seen is averaged with what is usual, each by its precision.
    """
    variances = [np.var(each, axis=1, ddof=1) for each in outputs]
    moving = np.all([each.mean(axis=0) > 0 for each in variances], axis=0)
    shares = [(n // each.shape[1]) / n for each in outputs]
    base = math.log(shares[0] / shares[1])
    moved = [each[:, moving] for each in variances]
    seen, error = _with_error(rng, moved, lambda means: np.log(means[1] / means[0]) / base)
    known, prior = 1 / max(error**2, 1e-6), 1 / _SPREAD**2
    exponent = (known * seen + prior * _EXPECTED) / (known + prior)
    degrees = [each.shape[0] * (each.shape[1] - 1) for each in outputs]
    whole = [v.mean(axis=0) * share**exponent for v, share in zip(variances, shares, strict=True)]
    variance = np.average(whole, axis=0, weights=degrees)
    like = []
    for each, own in zip(outputs, variances, strict=True):
        factor = np.sqrt(each.shape[1] / (each.shape[1] - 1) * variance / _positive(own.mean(axis=0)))
        like.append(((each - each.mean(axis=1, keepdims=True)) * factor).reshape(-1, each.shape[2]))
    bias = outputs[0].mean(axis=(0, 1)) - estimate
    stderr = float((known + prior) ** -0.5)
    return VarianceLaw(variance, float(exponent), stderr, float(sum(degrees)), np.concatenate(like), bias)


def agrees(
    rng: np.random.Generator, outputs: list[Float[np.ndarray, "r K p"]], variance: Float[np.ndarray, " p"], n: int
) -> bool:
    """Whether the variances on halves and quarters are two and four times that of the whole, as to first order.

    The mean logarithm of their ratio over outputs is 0 within two standard errors, and these are small.
    """
    able = variance > 0
    for each in outputs:
        ratios = np.var(each[..., able], axis=1, ddof=1) * (n // each.shape[1]) / (n * variance[able])
        seen, error = _with_error(rng, [ratios], lambda means: np.log(means[0]))
        if not able.any() or error > _SHARPEST or abs(seen) > 2 * error:
            return False
    return True


def _with_error(
    rng: np.random.Generator,
    variances: list[Float[np.ndarray, "r p"]],
    of_means: Callable[[list[np.ndarray]], np.ndarray],
) -> tuple[float, float]:
    """A function of mean variances, averaged over outputs, with its standard error over partitions drawn again."""
    if not variances[0].shape[1]:
        return 0.0, math.inf
    least = np.finfo(float).tiny  # few partitions may happen to show no variance; then nothing is known
    drawn = [
        [np.maximum(each[rng.integers(0, len(each), len(each))].mean(axis=0), least) for each in variances]
        for _ in range(_REFITS)
    ]
    seen = float(np.mean(of_means([np.maximum(each.mean(axis=0), least) for each in variances])))
    return seen, float(np.std([np.mean(of_means(means)) for means in drawn]))


def _positive(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 1.0)
