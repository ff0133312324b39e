"""Errors measured: outputs of a head over prompts redrawn, in blocks, from text that it has not seen."""

import numpy as np
from jaxtyping import Float, Int

from ._call import HeadCall
from ._statistics import attended

BLOCK = 16  # tokens that stay together: text is not independent from token to token
REDRAWS = 64
QUERIES = 16


def redrawn_errors(
    head: HeadCall, pool: HeadCall, sinks: Int[np.ndarray, " s"], shares: Float[np.ndarray, " l"], seed: int
) -> Float[np.ndarray, " l"]:
    """The root mean square distance, over redraws and queries, of outputs from their mean.

    Queries and sinks are those of the head; the other tokens are drawn in blocks from the pool's, at the places that
    they have there, so that what a model does by position is kept. Each query sees the places that it saw before, and
    of its tokens as many as a share says.
    """
    rng = np.random.default_rng(seed)
    at = np.unique(np.linspace(0, len(head.queries) - 1, min(QUERIES, len(head.queries))).round().astype(int))
    added = None if head.log_weights is None else head.log_weights[at]
    own = attended(HeadCall(head.queries[at], head.keys, head.values, head.scale, added, None))
    drawn = attended(HeadCall(head.queries[at], pool.keys, pool.values, head.scale, added, None))
    top = np.maximum(own.scores.max(axis=1), drawn.scores.max(axis=1))[:, None]
    masses, atoms = drawn.prior * np.exp(drawn.scores - top), (own.prior * np.exp(own.scores - top))[:, sinks]
    masses[:, sinks] = 0.0
    seen = (masses > 0).astype(float)
    found = []
    for share in shares:
        counts = _drawn(rng, masses.shape[1], share)
        of_query = counts @ seen.T  # tokens drawn that a query sees; they stand for all that it sees
        factors = seen.sum(axis=1) / np.maximum(of_query, 1)
        variances = []
        for i in range(len(at)):
            w = counts * masses[i] * factors[:, i : i + 1]
            total = w.sum(axis=1) + atoms[i].sum()
            outputs = (w @ pool.values + atoms[i] @ head.values[sinks]) / np.maximum(total, 1e-300)[:, None]
            known = outputs[of_query[:, i] > 0]  # at short lengths a query may see nothing of what was drawn
            if len(known) > 1:
                variances.append(np.sum(np.var(known, axis=0, ddof=1)))
        found.append(np.sqrt(np.mean(variances)) if variances else np.nan)
    return np.array(found)


def _drawn(rng: np.random.Generator, tokens: int, share: float) -> Float[np.ndarray, "r L"]:
    """How often each token is drawn: whole blocks, from any start, around the end to the beginning."""
    block = min(BLOCK, tokens)
    starts = rng.integers(0, tokens, (REDRAWS, max(2, round(share * tokens / block))))
    which = (starts[..., None] + np.arange(block)) % tokens
    return np.stack([np.bincount(row.ravel(), minlength=tokens) for row in which]).astype(float)
