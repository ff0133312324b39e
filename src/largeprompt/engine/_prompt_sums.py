r"""Sums over Gaussian prompts: all that softmax attention with one head sees of them, one prompt per lane.

A token's score is $\beta g$ and its coordinates along an orthonormal basis are standard normal $h_0 = g, h_1, \dots,
h_{k-1}$; what lies across the basis is Gaussian given these sums (the squares of the weights say how wide). With
$\omega = e^{\beta(g-s)}$, $s$ the largest $g$: $\sum\omega$, $\sum\omega h_i$, $\sum\omega h_ih_j$ for $i\le j$, and
the same with $\omega^2$.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float

from largeprompt._device import Device, resolve_device

from ._elementary import exp2
from ._kernel import source_hash
from ._lanes import LANES, aligned, carry, fill_normals, on_lanes, row
from ._philox import TOKENS
from ._target import tuned
from ._tokens import LOG2_E
from ._within import outermost

f32, u32, f64 = np.float32, np.uint32, np.float64
_BLOCK = 8  # tokens whose normals are drawn before they are used: their number is then a multiple of four
_CARRY = 32  # blocks after which float32 sums go over to float64 ones
_LEAST = f32(-62)  # of the exponent of a weight: its square is still a normal float32, and 2^-62 of the largest is 0
LONGEST = 2**30  # tokens; counters are 32 bits wide


def sum_count(k: int, products: bool) -> int:
    """How many sums of each power of the weights there are."""
    return 1 + k + (k * (k + 1) // 2 if products else 0)


@on_lanes
def _follow(normals, k, count, beta, shift, n, S, sums):
    """Raise the shift of each lane to the largest g of the block, and the sums with it."""
    tuned()
    higher = False
    for t in range(count):
        for j in range(LANES):
            if normals[row(t * k, j)] > shift[j]:
                higher = True
    if not higher:
        return
    for j in range(LANES):
        top = shift[j]
        for t in range(count):
            top = max(top, normals[row(t * k, j)])
        kept = exp2(max(beta[j] * (shift[j] - top), f32(-126)))
        shift[j] = top
        for i in range(n):
            S[row(i, j)] *= kept
            S[row(n + i, j)] *= kept * kept
            sums[row(i, j)] *= f64(kept)
            sums[row(n + i, j)] *= f64(kept) * f64(kept)


@on_lanes
def _add(normals, k, count, beta, shift, weight, products, n, S):
    tuned()
    for t in range(count):
        for j in range(LANES):
            w = exp2(max(beta[j] * (normals[row(t * k, j)] - shift[j]), _LEAST))
            weight[row(0, j)] = w
            weight[row(1, j)] = w * w
            S[row(0, j)] += w
            S[row(n, j)] += w * w
        at = 1 + k
        for i in range(k):
            for j in range(LANES):
                h = normals[row(t * k + i, j)]
                weight[row(2, j)] = weight[row(0, j)] * h
                weight[row(3, j)] = weight[row(1, j)] * h
                S[row(1 + i, j)] += weight[row(2, j)]
                S[row(n + 1 + i, j)] += weight[row(3, j)]
            if products:
                for l in range(i, k):
                    for j in range(LANES):
                        h = normals[row(t * k + l, j)]
                        S[row(at, j)] += weight[row(2, j)] * h
                        S[row(n + at, j)] += weight[row(3, j)] * h
                    at += 1


@functools.cache
def _compiled(sources: str):
    @outermost()
    def prompts(first, last, start, L, k, n, products, seed, betas, normals, weight, S, sums, beta, shift, out):
        """The sums of the prompts first to last, LANES at a time, and the shifts in the last column."""
        tuned()
        _ = sources  # part of the name under which the compiled code is kept
        k0, k1 = u32(seed & 0xFFFFFFFF), u32(seed >> 32)
        for prompt in range(first, last, LANES):
            for j in range(LANES):
                beta[j] = f32(betas[min(prompt + j, last - 1)]) * LOG2_E
                shift[j] = f32(-100)
            for i in range(2 * n):
                for j in range(LANES):
                    S[row(i, j)] = f32(0)
                    sums[row(i, j)] = 0.0
            for block in range((L + _BLOCK - 1) // _BLOCK):
                count = min(_BLOCK, L - block * _BLOCK)
                fill_normals(normals, block * 2 * k, _BLOCK * k, start + prompt, u32(L), TOKENS, k0, k1)
                _follow(normals, k, count, beta, shift, n, S, sums)
                _add(normals, k, count, beta, shift, weight, products, n, S)
                if block % _CARRY == _CARRY - 1:
                    carry(S, 0, 2 * n, sums)
            carry(S, 0, 2 * n, sums)
            for j in range(min(LANES, last - prompt)):
                for i in range(2 * n):
                    out[prompt + j, i] = sums[row(i, j)]
                out[prompt + j, 2 * n] = shift[j]

    return prompts


def gaussian_prompt_sums(
    betas: Float[np.ndarray, " b"],
    L: int,
    k: int,
    seed: int,
    *,
    products: bool,
    start: int = 0,
    device: Device = "auto",
) -> Float[np.ndarray, "b sums"]:
    """One row per prompt: the sums with ω, those with ω², and the shift s, for scores βg of L tokens and k coordinates.

    The prompt in row i is a function of (seed, L, start + i) alone, whatever the threads or the others beside it; on a
    GPU its sums are the same to float32's rounding.
    """
    n, b = sum_count(k, products), len(betas)
    if not 1 <= L * k <= LONGEST * 4:
        raise ValueError(f"L is {L} with {k} coordinates a token; the compiled sums go up to {LONGEST * 4 // k}")
    if np.any(betas < 0):
        raise ValueError(f"betas has {np.min(betas):g}; it must be at least 0")
    place = resolve_device(device)
    betas, out = np.asarray(betas, float), np.zeros((b, 2 * n + 1))
    if place == "gpu":
        from ._prompt_sums_jax import prompt_sums_by_jax  # which counts its sums as here

        return prompt_sums_by_jax(betas, L, k, seed, products=products, start=start, platform="gpu")
    run = _compiled(source_hash())
    groups = -(-b // LANES)
    workers = min(groups, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    cuts = [LANES * (groups * i // workers) for i in range(workers)] + [b]

    def part(i: int) -> None:
        normals, weight, S = (aligned(-(-size // 4) * 4 * LANES, f32) for size in (_BLOCK * k, 4, 2 * n))
        wide, beta, shift = aligned(2 * n * LANES, f64), aligned(LANES, f32), aligned(LANES, f32)
        run(cuts[i], cuts[i + 1], start, L, k, n, products, seed, betas, normals, weight, S, wide, beta, shift, out)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(part, range(workers)))
    return out
