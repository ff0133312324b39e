import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.attention import MultiHead, WeightMoments
from largeprompt.attention._pair import pair_table

from ._blocks import aligned_blocks, head_from_blocks
from ._estimate import Estimate, exactly
from ._optimal_linear import best_reading
from ._optimal_softmax import best_scores, limit_scale, optimal_softmax
from ._regression import LinearRegression, as_regression
from ._risk._closed_form import gaussian_risk
from ._risk._quadrature import METHOD, AlignedRisk, Matrix


class HeadsOptimum(AbstractShown):
    r"""The best softmax heads, their risk, and the task's `rate` for that many: $\lim_L L\,(\min R_L - R_\infty)$."""

    attention: MultiHead
    risk: Estimate
    rate: Float[Array, ""]


def optimal_heads(task: LinearRegression, L: int | float, heads: int) -> HeadsOptimum:
    r"""One softmax head or two of least risk with $P = C = 0$ at length `L`.

    One head is that of `optimal_softmax`. Two heads are the best pair $(A, R/2)$, $(-A, -R/2)$: half the sum of heads
    and of the same with opposite signs has the same mean output and no larger a variance. As its scores tend to 0 a
    pair becomes linear attention at length L − 1; a finite scale is always better. The `rate` of a pair is that of
    linear attention. That no other two heads are better is not proved.
    """
    task, L = as_regression(task), checks.prompt_length(L)
    if checks.count("heads", heads) > 2:
        raise ValueError(f"heads is {heads}; the least risk is known for 1 and 2 softmax heads")
    if heads == 1:
        single = optimal_softmax(task, L)
        A, r = np.asarray(single.attention.U, float)[: task.d, : task.d], float(single.attention.V[-1, -1])
        return HeadsOptimum(aligned_heads([(A, r)], task), single.risk, single.rate)
    limit = best_reading(task, math.inf)
    parts = aligned_blocks(limit, 1.0, task)
    rate = gaussian_risk(parts, task, 1.0) - gaussian_risk(parts, task, math.inf)
    if L in (1, math.inf):
        scale = limit_scale(task)[0]
        A, r = scale * np.asarray(limit, float), (1 / scale if math.inf == L else 0.0)
        parts = aligned_blocks(limit, 1.0 if math.inf == L else 0.0, task)
        value = exactly(gaussian_risk(parts, task, math.inf), "closed form")
        return HeadsOptimum(aligned_heads([(A, r / 2), (-A, -r / 2)], task), value, rate)
    pair = AlignedRisk.of(task, WeightMoments(L), pair_table(L))
    reading = np.asarray(best_reading(task, L - 1), float)
    A = best_scores(task, pair, reading, float(rate) / L, (0.4, _small_width(task.d, L)))
    quadratic, linear, still = pair.coefficients(A)
    r = linear / (2 * quadratic) if quadratic > 0 else 0.0
    value = exactly(still - task.targets * r * linear / 2, METHOD)
    return HeadsOptimum(aligned_heads([(A, r / 2), (-A, -r / 2)], task), value, rate)


def _small_width(d: int, L: int | float) -> float:
    """The standard deviation of scores that is best for long prompts, where covariances are isotropic."""
    return math.sqrt(12 / ((d + 4) * (d + 3) * L))


def aligned_heads(parts: list[tuple[Matrix, float]], task: LinearRegression) -> MultiHead:
    """Softmax heads with P = C = 0, R = rI and scores A, given as pairs (A, r), with balanced keys and queries."""
    return MultiHead([head_from_blocks(aligned_blocks(jnp.asarray(A), r, task)) for A, r in parts])
