r"""The sums over Gaussian prompts by JAX, for a GPU: the tokens of `_prompt_sums`, number for number, to rounding.

A lane draws a few tokens from their counters and sums them in float32 below their own largest $g$; lanes are joined
within a piece of a prompt, $\sum\omega = e^{\beta(s_1-s)}\sum\omega_1 + e^{\beta(s_2-s)}\sum\omega_2$ with $s =
\max(s_1, s_2)$, and pieces likewise in float64. A round of all prompts is one reduction, so that XLA can make one
kernel of it, which stores no normal. With many coordinates the sums are too many for that, and products of matrices
take its place.
"""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ._elementary import two_normals
from ._philox import TOKENS, philox
from ._prompt_sums import sum_count

f32, f64, u32, i64 = jnp.float32, jnp.float64, jnp.uint32, jnp.int64
_HELD = 2**28  # normals drawn in a round of all prompts: long beside its launch, and 1 GB if they were stored
_MOST = 64  # operands of a reduction
_LOWEST = -100.0  # no g is as low


class Span(NamedTuple):
    """The tokens of a prompt that a round draws: so many pieces of so many tokens."""

    pieces: int
    tokens: int


# few, since each is compiled; by the length alone, so that a prompt does not depend on those beside it
_SPANS = Span(1, 128), Span(1, 1024), Span(16, 1024), Span(16, 8192)
_WASTE = 1.15  # tokens drawn over tokens asked for, at most, but in the shortest


def span_for(L: int) -> Span:
    """The longest that wastes little."""
    fitting = [span for span in _SPANS if -(-L // _size(span)) * _size(span) <= _WASTE * L]
    return fitting[-1] if fitting else _SPANS[0]


def _size(span: Span) -> int:
    return span.pieces * span.tokens


def _of_type(dtype) -> Any:
    return functools.partial(jnp.asarray, dtype=dtype)


def _halves(product):
    return (product >> jnp.uint64(32)).astype(u32), product.astype(u32)


_AS_ARRAYS: dict[str, Any] = {
    "f32": _of_type(f32),
    "i32": _of_type(jnp.int32),
    "u32": _of_type(u32),
    "u64": _of_type(jnp.uint64),
    "as_bits": lambda x: jax.lax.bitcast_convert_type(x, u32),
    "from_bits": lambda bits: jax.lax.bitcast_convert_type(bits, f32),
    "wide_product": lambda a, b: _halves(jnp.asarray(a, jnp.uint64) * jnp.asarray(b, jnp.uint64)),
    "xor": lambda a, b, c: a ^ b ^ c,
    "wrapped_sum": lambda a, b: jnp.asarray(a, u32) + u32(b),
    "has_instructions": lambda: False,
    "math": jnp,
    "np": jnp,
}


def on_arrays(scalar: Any) -> Any:
    """The engine's function of numbers as one of arrays: its source, with its names for types read as JAX's."""
    source = getattr(scalar, "py_func", scalar)
    return types.FunctionType(source.__code__, source.__globals__ | _AS_ARRAYS)


_philox, _two_normals = on_arrays(philox), on_arrays(two_normals)


def _four_normals(index, prompt, L, key):
    a, b, c, d = _philox(index, prompt, L.astype(u32), TOKENS, *key)
    return *_two_normals(a, b), *_two_normals(c, d)


def _joined(one, other):
    """The sums over two pieces of a prompt from those of each: β, s, then the sums with ω, then those with ω²."""
    (beta, s, *first), (other_beta, t, *second) = one, other
    beta = jnp.maximum(beta, other_beta)  # the same, or 0 in what is empty
    less = jnp.exp(-beta * jnp.abs(s - t))
    kept, added = jnp.where(s >= t, 1, less), jnp.where(s >= t, less, 1)
    n = len(first) // 2
    sums = [kept * x + added * y for x, y in zip(first[:n], second[:n], strict=True)]
    squares = [kept**2 * x + added**2 * y for x, y in zip(first[n:], second[n:], strict=True)]
    return (beta, jnp.maximum(s, t), *sums, *squares)


def _reduced(parts, axis: int):
    kind = parts[0].dtype
    empty = (0, _LOWEST, *(0 for _ in parts[2:]))
    return jax.lax.reduce(tuple(parts), tuple(jnp.asarray(x, kind) for x in empty), _joined, (axis,))


def _terms(h, products: bool):
    """What the weights multiply: 1, the coordinates and, where asked for, their products."""
    pairs = [h[i] * h[l] for i in range(len(h)) for l in range(i, len(h))] if products else []
    return [jnp.ones_like(h[0]), *h, *pairs]


def _by_lanes(quad, prompt, beta, L, key, k: int, products: bool, quads: int):
    """β, the largest g and the sums of the tokens from 4·quad on, `quads` quadruples per lane, joined along rows."""
    flat = [x for c in range(quads * k) for x in _four_normals(quad * u32(k) + u32(c), prompt, L, key)]
    left = jnp.clip(L - 4 * quad.astype(i64), 0, 4 * quads).astype(jnp.int32)
    drawn = [t < left for t in range(4 * quads)]
    tokens = [flat[t * k : (t + 1) * k] for t in range(4 * quads)]
    s = functools.reduce(jnp.maximum, (jnp.where(there, h[0], _LOWEST) for there, h in zip(drawn, tokens, strict=True)))
    weights = [jnp.where(there, jnp.exp(beta * (h[0] - s)), 0) for there, h in zip(drawn, tokens, strict=True)]
    sums = [
        functools.reduce(jnp.add, map(jnp.multiply, powers, terms))
        for powers in (weights, [w * w for w in weights])
        for terms in zip(*(_terms(h, products) for h in tokens), strict=True)
    ]
    return _reduced([jnp.broadcast_to(beta, s.shape), s, *sums], 1)


def _by_matrices(first, prompt, beta, L, key, k: int, products: bool, tokens: int):
    """β, the largest g and the sums of the tokens from `first` on, by products of matrices over their coordinates."""
    rows = len(first)
    index = ((first // 4) * k).astype(u32) + jnp.arange(tokens * k // 4, dtype=u32)
    h = jnp.stack(_four_normals(index, prompt, L, key), axis=-1).reshape(rows, tokens, k)
    drawn = first + jnp.arange(tokens) < L
    s = jnp.where(drawn, h[:, :, 0], _LOWEST).max(axis=1)
    w = jnp.where(drawn, jnp.exp(beta * (h[:, :, 0] - s[:, None])), 0)
    found = [beta[:, 0], s]
    for power in (w, w * w):
        found += [power.sum(axis=1), *jnp.einsum("rt,rti->ir", power, h, precision="highest")]
        if products:
            pairs = jnp.einsum("rti,rtj->ijr", power[:, :, None] * h, h, precision="highest")
            found += list(pairs[np.triu_indices(k)])
    return found


def _few(k: int, products: bool) -> bool:
    """Whether a reduction takes all sums."""
    return 2 * sum_count(k, products) + 2 <= _MOST


@functools.partial(jax.jit, static_argnames=("k", "products", "span"))
def sums_of_prompts(betas, start, L, key, *, k: int, products: bool, span: Span):
    """The sums of the prompts from `start` on, one for each β, in float64."""
    pieces, tokens = span
    shape = (len(betas), pieces)
    rows = len(betas) * pieces
    beta = jnp.repeat(betas.astype(f32), pieces)[:, None]
    prompt = (start + jnp.repeat(jnp.arange(len(betas), dtype=u32), pieces))[:, None]
    offset = jnp.tile(jnp.arange(pieces, dtype=i64) * tokens, len(betas))[:, None]
    quads = 2 if k == 1 else 1

    def added(i, state):
        first = i.astype(i64) * _size(span) + offset
        if _few(k, products):
            lane = jax.lax.broadcasted_iota(u32, (rows, tokens // (4 * quads)), 1)
            found = _by_lanes((first // 4).astype(u32) + lane * u32(quads), prompt, beta, L, key, k, products, quads)
        else:
            found = _by_matrices(first, prompt, beta, L, key, k, products, tokens)
        return _joined(state, tuple(x.astype(f64).reshape(shape) for x in found))

    empty = (0.0, _LOWEST, *(0.0 for _ in range(2 * sum_count(k, products))))
    state = tuple(jnp.full(shape, x, f64) for x in empty)
    _, s, *sums = _reduced(jax.lax.fori_loop(0, (L + _size(span) - 1) // _size(span), added, state), 1)
    return jnp.stack([*sums, s], axis=1)


def prompt_sums_by_jax(
    betas: Float[np.ndarray, " b"], L: int, k: int, seed: int, *, products: bool, start: int, platform: str
) -> Float[np.ndarray, "b sums"]:
    """What `gaussian_prompt_sums` returns, on the first device of a platform of JAX."""
    span, b = span_for(L), len(betas)
    most = max(1, _HELD // (_size(span) * (k if _few(k, products) else 4 * k)))
    batch = -(-b // -(-b // most))  # one shape for all
    with jax.enable_x64(True), jax.default_device(jax.devices(platform)[0]):
        key = u32(seed & 0xFFFFFFFF), u32(seed >> 32)
        parts = []
        for i in range(0, b, batch):
            these = np.zeros(batch, np.float32)
            these[: len(betas[i : i + batch])] = betas[i : i + batch]
            parts.append(sums_of_prompts(these, u32(start + i), i64(L), key, k=k, products=products, span=span))
        return np.concatenate([np.asarray(part) for part in parts])[:b]
