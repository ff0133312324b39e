"""Errors measured: outputs of a head over prompts redrawn, in blocks, from text that it has not seen."""

import numpy as np
from jaxtyping import Float, Int

from ._call import HeadCall
from ._statistics import attended

BLOCK = 16  # tokens that stay together: text is not independent from token to token
REDRAWS = 64
QUERIES = 16


def redrawn_errors(
    head: HeadCall, pool: HeadCall, sinks: Int[np.ndarray, " s"], lengths: Int[np.ndarray, " l"], seed: int
) -> Float[np.ndarray, " l"]:
    """The root mean square distance, over redraws and queries, of outputs on so many tokens from their mean.

    Queries and sinks are those of the head; the other tokens are drawn in blocks from the pool's, at the places that
    they have there, so that what a model does by position is kept. Each query sees the places that it saw before.
    """
    rng = np.random.default_rng(seed)
    at = np.unique(np.linspace(0, len(head.queries) - 1, min(QUERIES, len(head.queries))).round().astype(int))
    some = HeadCall(
        head.queries[at],
        pool.keys,
        pool.values,
        head.scale,
        None if head.log_weights is None else head.log_weights[at],
        None,
    )
    scores, prior, _, _ = attended(some)
    kept = HeadCall(head.queries[at], head.keys, head.values, head.scale, some.log_weights, None)
    own_scores, own_prior, _, _ = attended(kept)
    top = np.maximum(scores.max(axis=1), own_scores.max(axis=1))[:, None]
    masses = prior * np.exp(scores - top)
    masses[:, sinks] = 0.0
    atoms = (own_prior * np.exp(own_scores - top))[:, sinks]
    fixed, fixed_total = atoms @ head.values[sinks], atoms.sum(axis=1)
    found = []
    for L in lengths:
        counts = _drawn(rng, masses.shape[1], int(L))
        factor = masses.shape[1] / counts.sum(axis=1)  # the drawn tokens stand for all
        squares = []
        for i in range(len(at)):
            w = counts * masses[i] * factor[:, None]
            out = (w @ pool.values + fixed[i]) / (w.sum(axis=1) + fixed_total[i])[:, None]
            squares.append(np.sum(np.var(out, axis=0, ddof=1)))
        found.append(np.sqrt(np.mean(squares)))
    return np.array(found)


def _drawn(rng: np.random.Generator, tokens: int, L: int) -> Float[np.ndarray, "r L"]:
    """How often each token is drawn: whole blocks, from any start, around the end to the beginning."""
    blocks = max(1, round(L / BLOCK))
    starts = rng.integers(0, tokens, (REDRAWS, blocks))
    which = (starts[..., None] + np.arange(min(BLOCK, L))) % tokens
    return np.stack([np.bincount(row.ravel(), minlength=tokens) for row in which]).astype(float)
