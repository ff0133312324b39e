"""Where the search for stationary points begins: random heads, as PyTorch draws them and of many sizes, and theory."""

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from largeprompt.attention import Head

from .._blocks import Blocks, blocks
from .._optimal_softmax import optimal_softmax
from ._symmetries import Vector, all_flat, apart
from ._units import Standard

Points = Float[np.ndarray, "s n"]


def random_starts(key: PRNGKeyArray, standard: Standard, starts: int, heads: int, *, aligned: bool = False) -> Points:
    """Blocks of `heads` heads, in standard units, with P = C = 0 where `aligned`."""
    task, (of_layers, of_others) = standard.given, jax.random.split(key)

    def drawn(key: PRNGKeyArray) -> Blocks:
        return blocks(Head.pytorch_default(key, task.dim, outputs=task.targets, heads=heads).merged(), task)

    # one head per key: of several, each from a key of its own
    keys = jax.random.split(of_layers, ((starts + 1) // 2) * heads)
    drawn_heads = [standard.into(Blocks(*parts)) for parts in zip(*jax.vmap(drawn)(keys), strict=True)]
    first = [all_flat(drawn_heads[i : i + heads]) for i in range(0, len(drawn_heads), heads)]
    rng = np.random.default_rng(np.asarray(jax.random.key_data(of_others)).ravel())
    scale = 10 ** rng.uniform(-1, 0.5, (starts // 2, 1))
    found = np.concatenate([np.stack(first), scale * rng.normal(size=(starts // 2, first[0].size))])
    if not aligned:
        return found
    return np.stack([all_flat(map(without_labels, apart(x, task.d, task.targets))) for x in found])


def without_labels(parts: Blocks) -> Blocks:
    """The same head with P = C = 0."""
    return parts._replace(C=0 * parts.C, P=0 * parts.P)


def shared_start(standard: Standard, L: int | float, heads: int) -> Vector:
    """The best softmax head, its values shared by several: a stationary point, at which all heads are alike."""
    best = standard.into(blocks(optimal_softmax(standard.given, L).attention, standard.given))
    return all_flat(heads * [best._replace(R=best.R / heads)])
