import math

from largeprompt import _checks as checks
from largeprompt._typing import VectorLike
from largeprompt.measures import AbstractMeasure, Empirical, Mixture, as_measure


def with_query(mu: AbstractMeasure, z: VectorLike, L: int | float | None = None) -> AbstractMeasure:
    r"""The prompt with the query among its tokens, $\frac{L}{L+1}\mu + \frac{1}{L+1}\delta_z$.

    `L` is the number of tokens of an `Empirical` prompt unless said otherwise; for `L = inf` the query has no weight.
    Paper: Remark 3.2.
    """
    z = checks.vector("z", z, as_measure("mu", mu).dim)
    if L is None:
        if not isinstance(mu, Empirical):
            raise ValueError(
                f"L is None and mu is of type {type(mu).__name__}; only an Empirical has a length of its own"
            )
        L = mu.size
    L = checks.prompt_length(L)
    if math.inf == L:
        return mu
    return Mixture([L / (L + 1), 1 / (L + 1)], [mu, Empirical(z[None])])
