"""Log-mass, mean and covariance of tilted tokens, streamed: extra memory is one tile of scores, whatever the lengths.

`jax.vmap` over tilts goes to one kernel for all of them (`custom_vmap`), so a batch of queries is blocked too.
Derivatives in the tilt are those that the moments are to each other (Λ' = mean, mean' = cov) and stream as well.
Where an input itself is as large as the scores (tokens that are differentiated or batched), nothing is gained by
streaming and the direct form is used.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ._exponential import power_of_two

DIRECT = 256  # tokens up to which the direct form always serves
ALONE = 2**20  # numbers that the direct form may hold for one tilt
CHUNK = 2**17  # tokens taken at once for one tilt
TILE = 2**22  # numbers held at once for many tilts
BLOCK = 1024  # tilts taken at once


def _scores(points, log_weights, theta):
    # A row times a matrix, not a matrix times a vector: the faster of the two on CPU.
    scores = (theta[None] @ points.T)[0]
    return scores if log_weights is None else scores + log_weights


# The direct form: scores of all tokens at once.


def _direct_log_mass(points, log_weights, theta):
    return jax.nn.logsumexp(_scores(points, log_weights, theta))


def _direct_mean(points, log_weights, theta):
    scores = _scores(points, log_weights, theta)
    masses = jnp.exp(scores - jax.lax.stop_gradient(scores.max()))
    return (masses[None] @ points)[0] / masses.sum()


def _direct_cov(points, log_weights, theta):
    masses = jax.nn.softmax(_scores(points, log_weights, theta))
    centred = points - masses @ points
    return (masses[:, None] * centred).T @ centred


# The direct form on a GPU: sums of products, which it computes as it reads; products of matrices take longer there.


def _fused_scores(points, log_weights, theta):
    scores = (points * theta).sum(axis=1)
    return scores if log_weights is None else scores + log_weights


def _fused_log_mass(points, log_weights, theta):
    return jax.nn.logsumexp(_fused_scores(points, log_weights, theta))


def _fused_mean(points, log_weights, theta):
    scores = _fused_scores(points, log_weights, theta)
    masses = jnp.exp(scores - scores.max())
    return (masses[:, None] * points).sum(axis=0) / masses.sum()


# The streamed form, for many tilts at once: thetas has shape (n, D).


def _chunked(points, log_weights, chunk):
    """How many whole chunks follow a shorter head, the head's size, and a reader of (tokens, log-weights)."""
    L = points.shape[0]
    whole = (L - 1) // chunk
    head = L - whole * chunk

    def read(start, size):
        tokens = jax.lax.dynamic_slice_in_dim(points, start, size)
        return tokens, None if log_weights is None else jax.lax.dynamic_slice_in_dim(log_weights, start, size)

    return whole, head, read


def _fold(whole, step, carry):
    """A loop whose body is not even traced when there is no whole chunk."""
    return jax.lax.fori_loop(0, whole, step, carry) if whole else carry


def token_sum(points, log_weights, theta, columns, part):
    """The sum of `part(tokens, masses)` over tilted tokens, a chunk at a time, differentiable in either mode.

    `part` holds so many columns for each token. Chunks are small enough for thousands of directions under `vmap`.
    """
    chunk = max(64, min(4096, 2**20 // columns))
    whole, head, read = _chunked(points, log_weights, chunk)
    log_mass = tilted_log_mass(points, log_weights, theta)

    def term(start, size):
        tokens, weights = read(start, size)
        return part(tokens, jnp.exp(_scores(tokens, weights, theta) - log_mass))

    @jax.checkpoint
    def step(total, i):
        return jax.tree.map(jnp.add, total, term(head + i * chunk, chunk)), None

    first = term(0, head)
    return jax.lax.scan(step, first, jnp.arange(whole))[0] if whole else first


def _streamed_sums(points, log_weights, thetas):
    """Σ_l 2^{s_l - M} z_l, Σ_l 2^{s_l - M} and the shift M, for each tilt, with scores s in units of log 2."""
    n = thetas.shape[0]
    thetas = thetas / math.log(2)
    chunk = min(CHUNK, max(512, TILE // max(n, points.shape[1] + 1) // 64 * 64))
    whole, head, read = _chunked(points, log_weights, chunk)

    def scores(start, size):
        tokens, weights = read(start, size)
        s = thetas @ tokens.T
        return tokens, s if weights is None else s + weights / math.log(2)

    def sums(tokens, s, shift):
        masses = power_of_two(s - shift[:, None])
        if n < 8:
            return masses @ tokens, masses.sum(axis=1)
        # for many tilts the total comes with the first moments, from one more column
        both = masses @ jnp.concatenate([tokens, jnp.ones((tokens.shape[0], 1), tokens.dtype)], axis=1)
        return both[:, :-1], both[:, -1]

    def step(follow_the_maximum, i, carry):
        first, total, shift = carry
        tokens, s = scores(head + i * chunk, chunk)
        if follow_the_maximum:
            higher = jnp.maximum(shift, s.max(axis=1))
            rescale = jnp.exp2(shift - higher)
            first, total, shift = first * rescale[:, None], total * rescale, higher
        more_first, more_total = sums(tokens, s, shift)
        return first + more_first, total + more_total, shift

    tokens, s = scores(0, head)
    # finite even where the whole head has weight zero: -inf - (-inf) is NaN
    shift = jnp.maximum(s.max(axis=1), float(jnp.finfo(points.dtype).min) / 4)
    start = (*sums(tokens, s, shift), shift)
    # The head's maximum nearly always serves as the shift of all: no pass over the scores for theirs. Where a later
    # score exceeds it by so much that the total nears overflow, everything is done again with a shift that follows.
    hopeful = _fold(whole, functools.partial(step, False), start)
    if not whole:
        return hopeful
    harmless = hopeful[1] < math.sqrt(float(jnp.finfo(points.dtype).max))
    return jax.lax.cond(jnp.all(harmless), lambda: hopeful, lambda: _fold(whole, functools.partial(step, True), start))


def _in_blocks(f, thetas):
    n = thetas.shape[0]
    if n <= BLOCK:
        return f(thetas)
    blocks = -(-n // BLOCK)
    padded = jnp.zeros((blocks * BLOCK, thetas.shape[1]), thetas.dtype).at[:n].set(thetas)
    out = jax.lax.map(f, padded.reshape(blocks, BLOCK, -1))
    return out.reshape(blocks * BLOCK, *out.shape[2:])[:n]


def _streamed_log_mass(points, log_weights, thetas):
    def block(thetas):
        _, total, shift = _streamed_sums(points, log_weights, thetas)
        return (shift + jnp.log2(total)) * math.log(2)

    return _in_blocks(block, thetas)


def _streamed_mean(points, log_weights, thetas):
    def block(thetas):
        first, total, _ = _streamed_sums(points, log_weights, thetas)
        return first / total[:, None]

    return _in_blocks(block, thetas)


def _streamed_cov(points, log_weights, thetas):
    """A second pass, about each tilt's own mean: about a common centre a far tilt would cancel."""
    chunk = min(CHUNK, max(512, TILE // points.shape[1]))
    whole, head, read = _chunked(points, log_weights, chunk)

    def one(theta):
        log_mass, mean = tilted_log_mass(points, log_weights, theta), tilted_mean(points, log_weights, theta)

        @functools.partial(jax.checkpoint, static_argnums=(1,))
        def part(start, size):
            tokens, weights = read(start, size)
            masses = power_of_two((_scores(tokens, weights, theta) - log_mass) / math.log(2))
            centred = tokens - mean
            return (masses[:, None] * centred).T @ centred

        return _fold(whole, lambda i, C: C + part(head + i * chunk, chunk), part(0, head))

    return jax.lax.map(one, thetas)


# The two forms as one function of (points, log_weights, theta).


def _batched(direct, streamed, holds, fused):
    """`streamed` under a vmap over theta, however nested; `direct` where small sizes, or batched tokens, allow it.

    `holds(points)` is how many numbers the direct form keeps for one tilt; `fused` is that form for a GPU.
    """

    def vmappable(one_level, more_levels):
        """`one_level` with the rule that a vmap over theta alone becomes `more_levels`."""
        f = custom_vmap(one_level)

        @f.def_vmap
        def _(size, batched, points, log_weights, theta):
            if any(jax.tree.leaves(batched[:2])):
                axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
                plain = direct if theta.ndim == 1 + batched[2] else jax.vmap(direct, in_axes=(None, None, 0))
                return jax.vmap(plain, in_axes=axes)(points, log_weights, theta), True
            if not batched[2]:
                return one_level(points, log_weights, theta), False
            return more_levels(points, log_weights, theta), True

        return f

    def flattened(points, log_weights, thetas):
        out = many(points, log_weights, thetas.reshape(-1, thetas.shape[-1]))
        return out.reshape(*thetas.shape[:-1], *out.shape[1:])

    def all_at_once(points, log_weights, thetas):
        if thetas.shape[0] * holds(points) <= TILE:
            return jax.vmap(direct, in_axes=(None, None, 0))(points, log_weights, thetas)
        return streamed(points, log_weights, thetas)

    def one(points, log_weights, theta):
        if holds(points) <= ALONE:
            return direct(points, log_weights, theta)

        def alone(points, log_weights, theta):
            return streamed(points, log_weights, theta[None])[0]

        if fused is None:
            return alone(points, log_weights, theta)
        # a GPU would start a few kernels for each chunk, and has room for the scores where it has room for the tokens
        return jax.lax.platform_dependent(points, log_weights, theta, cpu=alone, default=fused)

    many = vmappable(all_at_once, flattened)
    return vmappable(one, many)


def _moment(direct, streamed, holds, slope, fused=None):
    """A moment with its derivative in theta; `slope(points, log_weights, theta, tangent)` gives that."""
    value = _batched(direct, streamed, holds, fused)
    wrapped = jax.custom_jvp(lambda points, log_weights, theta: value(points, log_weights, theta))

    def rule(primals, tangents):
        is_zero = lambda t: isinstance(t, SymbolicZero)  # noqa: E731
        zeros = [is_zero(t) for t in jax.tree.leaves(tangents[:2], is_leaf=is_zero)]
        if not all(zeros):
            full = jax.tree.map(
                lambda t: jnp.zeros(t.aval.shape, t.aval.dtype) if is_zero(t) else t, tangents, is_leaf=is_zero
            )
            return jax.jvp(direct, primals, full)
        out = wrapped(*primals)
        return out, jnp.zeros_like(out) if is_zero(tangents[2]) else slope(*primals, tangents[2])

    wrapped.defjvp(rule, symbolic_zeros=True)

    def moment(points, log_weights, theta):
        return (direct if points.shape[0] <= DIRECT else wrapped)(points, log_weights, theta)

    return jax.jit(moment)


def _cov_slope(points, log_weights, theta, tangent):
    """The third cumulants along the tangent."""
    if points.size <= ALONE:
        along = functools.partial(_direct_cov, points, log_weights)
    else:
        along = lambda t: _streamed_cov(points, log_weights, t[None])[0]  # noqa: E731
    return jax.jvp(along, (theta,), (tangent,))[1]


@jax.jit
def tilted_fourth(points, log_weights, theta, b, A, B):
    """E (yᵀAy)(yᵀBy) for y = z - mean + b under the tilt, one chunk of tokens after another."""
    centre = tilted_mean(points, log_weights, theta) - b

    def part(tokens, masses):
        y = tokens - centre
        return masses @ (jnp.sum((y @ A) * y, axis=1) * jnp.sum((y @ B) * y, axis=1))

    return token_sum(points, log_weights, theta, 4 * points.shape[1], part)


def _tokens(points):
    return points.shape[0]


def _coordinates(points):
    return points.size


tilted_cov = _moment(_direct_cov, _streamed_cov, _coordinates, _cov_slope)
tilted_mean = _moment(_direct_mean, _streamed_mean, _tokens, lambda *args: tilted_cov(*args[:3]) @ args[3], _fused_mean)
tilted_log_mass = _moment(
    _direct_log_mass, _streamed_log_mass, _tokens, lambda *args: tilted_mean(*args[:3]) @ args[3], _fused_log_mass
)
