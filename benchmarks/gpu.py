"""Claim: an H200 runs the protocol of the paper in 45 s with set-up, once its programs are kept. A step of one run at
L = 1000 is six times as fast as in plain JAX, one of 132 runs at L = 10 takes at most 12 µs, and one query reads 10⁷
tokens as fast as a plain softmax does.

The protocol: 19 lengths from 10 to 1000, 2 covariances, 8 seeds, softmax and linear attention on shared tokens, batch
128, 500,000 steps, with the exact risk at every recorded step, through the same command and store as on a processor
(`lab.sweep`). Set-up is all of it: compiling the loop, drawing weights, writing results. Then microseconds a step of
one run, and of as many as fill the card, beside plain JAX on the same card (every token sampled, automatic
differentiation, steps in one compiled loop, the runs side by side by `vmap`), and beside what the arithmetic alone
would take: the fewest operations of a token over the card's rate, one operation a lane and cycle. Compiled programs
are kept as the command line keeps them (`LARGEPROMPT_CACHE`), so that a second process has them; the first line says
whether there were any. Last, one query of softmax attention on an `Empirical` prompt beside a plain softmax in JAX,
called in turn.
"""

import argparse
import json
import math
import tempfile
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import largeprompt as lp
from largeprompt import lab
from largeprompt._compiled import cache_folder
from largeprompt._device import gpu_refusal, jax_gpu
from largeprompt.engine import FusedTrainer, GpuBatch, GpuRun, GpuTrainer
from largeprompt.paper.choice import COVARIANCES, PRESETS

LANES = 128  # of a multiprocessor
# The fewest instructions of a token: a product and a sum are one, so is a 64-bit product, so is an xor of three words.
OPERATIONS = {
    "bits": 7 * 4 / 2,  # Philox: seven rounds of two products and two xor, for two tokens
    "normals": 14,  # to float, scaled, log, scaled, root, sign (2), mantissa, angle (2), sine, cosine, two products
    "weight and value": 5,  # shift, scale, 2^x, two products
    "sums": 11 + 3,  # and the products w f, w², w f w f that several share
}


def runs(lengths, seeds: int, steps: int) -> list[lab.Run]:
    """The pairs of the paper's protocol."""
    record = PRESETS["paper"].record
    return [
        lab.Run(L=L, sigma=covariance, d=5, steps=steps, weight_seed=seed, data_seed=seed, record=record)
        for L in lengths
        for covariance in COVARIANCES
        for seed in range(seeds)
    ]


def plain_risk(run: lab.Run, weights: list, key: jax.Array) -> jax.Array:
    """Half the mean squared errors of softmax and of linear attention on one batch of prompts, in float32."""
    task, L = run.task(), int(run.L)
    d = task.d
    root, prior = (np.linalg.cholesky(np.asarray(part)).astype(np.float32) for part in (task.Sigma, task.Omega))
    tokens, of_task, noise = jax.random.split(key, 3)
    x = jax.random.normal(tokens, (run.batch, L + 1, d), jnp.float32) @ root.T
    w = jax.random.normal(of_task, (run.batch, d), jnp.float32) @ prior.T
    y = jnp.einsum("bld,bd->bl", x, w) + math.sqrt(task.noise) * jax.random.normal(noise, x.shape[:2], jnp.float32)
    z, total = jnp.concatenate([x, y[..., None]], axis=-1)[:, :L], jnp.float32(0)
    for layer, (K, Q, V, O) in zip(run.layers(), weights, strict=True):
        scores = layer.scale * jnp.einsum("bld,bd->bl", z, x[:, L] @ Q[:, :d].T @ K)
        read = jax.nn.softmax(scores) if layer.kind == "softmax" else scores / L
        total += jnp.mean((jnp.einsum("bl,bld->bd", read, z) @ (O[-1] @ V) - y[:, L]) ** 2) / 2
    return total


def plain_jax(run: lab.Run, copies: int, steps: int) -> float:
    """Microseconds a step of so many runs side by side."""
    weights = [[np.asarray(part, np.float32) for part in (w.K, w.Q, w.V, w.O)] for w in run.layers()]
    weights = jax.tree.map(lambda part: np.repeat(part[None], copies, axis=0), weights)
    slopes = jax.vmap(jax.grad(lambda weights, key: plain_risk(run, weights, key)))

    @jax.jit
    def descend(weights, key):
        def step(i, weights):
            found = slopes(weights, jax.random.split(jax.random.fold_in(key, i), copies))
            return jax.tree.map(lambda part, slope: part - np.float32(run.rate) * slope, weights, found)

        return jax.lax.fori_loop(0, steps, step, weights)

    with jax.default_device(jax_gpu()):
        jax.block_until_ready(descend(weights, jax.random.key(0)))
        began = time.perf_counter()
        jax.block_until_ready(descend(weights, jax.random.key(1)))
    return (time.perf_counter() - began) / steps * 1e6


def engine(run: lab.Run, copies: int, seconds: float = 1.0) -> float:
    """Microseconds a step of so many runs side by side, in one launch that is long enough to tell."""
    training, state = run.training(), FusedTrainer(run.training(), run.layers()).start()
    batch = GpuBatch([GpuRun(training.with_seed(seed), state, 10**7) for seed in range(copies)])
    batch.advance(0.02)
    before = {i: segment.state.step for i, segment in batch.advance(0.02).items()}
    began = time.perf_counter()
    segments = batch.advance(seconds)
    taken = time.perf_counter() - began
    return taken / float(np.mean([segment.state.step - before[i] for i, segment in segments.items()])) * 1e6


def agreement(L: float, steps: int) -> float:
    """The largest difference of the two engines' parameters after so many steps, over the largest change."""
    run = lab.Run(L=L, d=5, rate=0.02)
    one, other = FusedTrainer(run.training(), run.layers()), GpuTrainer(run.training(), run.layers())
    start = one.start()
    flat = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.layers)])
        for state in (start, one.advance(start, steps), other.advance(start, steps))
    ]
    return float(np.abs(flat[1] - flat[2]).max() / np.abs(flat[1] - flat[0]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--part", choices=("protocol", "steps", "attention", "all"), default="all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*Grid size")
    reason = gpu_refusal("cuda")
    if reason is not None:
        raise SystemExit(f"no GPU: {reason}")
    began_with = list(cache.glob("gpu/*")) if (cache := cache_folder()) is not None else []
    print(f"programs kept on disk: {len(began_with)} loops of the engine in {cache or 'no folder'}")
    lp.keep_compiled()
    lp.use_float64()
    # many small operations to set runs up; what is for the card says so
    jax.config.update("jax_default_device", jax.devices("cpu")[0])
    from numba import cuda

    card = cuda.get_current_device()
    rate = card.MULTIPROCESSOR_COUNT * LANES * card.CLOCK_RATE * 1e3
    operations = sum(OPERATIONS.values())
    name = card.name.decode() if isinstance(card.name, bytes) else card.name
    print(f"{name}: {rate / 1e12:.1f} T operations/s; {operations:.0f} operations a token")
    numbers: dict = {"card": name, "rate": rate, "operations": operations}
    if options.part in ("protocol", "all"):
        numbers["protocol"] = protocol(options.seeds, options.steps, operations / rate)
    if options.part in ("attention", "all"):
        numbers["attention"] = attention()
    if options.part in ("steps", "all"):
        numbers["steps"] = by_length(card.MULTIPROCESSOR_COUNT, operations / rate)
        numbers["agreement after 300 steps"] = {str(L): agreement(L, 300) for L in (10, 100, 1000, math.inf)}
        print("largest difference to the processor's engine after 300 steps, over the largest change:")
        print("  " + ", ".join(f"L = {L}: {value:.1e}" for L, value in numbers["agreement after 300 steps"].items()))
    print(json.dumps(numbers))


def protocol(seeds: int, steps: int, seconds_an_operation_token: float) -> dict:
    """The whole of it, with what it ends in."""
    began = time.perf_counter()
    lengths = PRESETS["paper"].lengths
    some = runs(lengths, seeds, steps)
    marks: list[tuple[float, int]] = []

    class FirstLaunch(lab.Progress):
        def step(self, name, done, note=""):
            if not marks:
                marks.append((time.perf_counter() - began, 0))

    with tempfile.TemporaryDirectory() as folder:
        made = time.perf_counter() - began
        results = lab.sweep(some, lab.Store(folder), device="gpu", progress=FirstLaunch())
    taken = time.perf_counter() - began
    limit = sum(run.L * run.batch * run.steps for run in some) * seconds_an_operation_token
    ends = [str(end) for data in results for end in data.verdict.values]
    verdicts = {end: ends.count(end) for end in dict.fromkeys(ends)}
    found = {"seconds": taken, "settings": made, "first launch": marks[0][0], "limit": limit, "runs": len(some)}
    print(f"{len(some)} pairs of {steps} steps: {taken:.1f} s in all, first launch done after {marks[0][0]:.1f} s")
    print(f"arithmetic of the tokens alone: {limit:.1f} s; {verdicts}")
    return {**found, "verdicts": verdicts}


def by_length(processors: int, seconds_an_operation_token: float) -> list[dict]:
    """Microseconds a step."""
    rows: list[dict[str, Any]] = []
    for L, copies in [(L, copies) for L in (10, 100, 1000) for copies in (1, processors)]:
        # one run has one multiprocessor
        limit = L * 128 * seconds_an_operation_token * processors * 1e6
        rows.append({"L": L, "runs": copies, "engine": engine(lab.Run(L=L, d=5), copies), "limit": limit})
        print("L = {L}, {runs} runs: {engine:.2f} µs a step; limit {limit:.2f}".format(**rows[-1]))
    print(f"{'L':>5} {'runs':>5} {'engine':>9} {'plain JAX':>10} {'ratio':>6}   (µs a step)")
    for row in rows:
        L, copies, ours = row["L"], row["runs"], row["engine"]
        # so many steps that starting the loop, a millisecond or two, does not count
        theirs = row["plain JAX"] = plain_jax(lab.Run(L=L, d=5), copies, 10_000 if copies == 1 else 1000)
        print(f"{L:>5} {copies:>5} {ours:>9.2f} {theirs:>10.1f} {theirs / ours:>6.1f}")
    return rows


def attention(L: int = 10**7, rounds: int = 15) -> list[dict]:
    """Milliseconds of one query on a long prompt, ours and a plain softmax."""
    ways = {
        "ours": jax.jit(lambda layer, mu, z: layer(mu, z)),
        "plain": jax.jit(lambda layer, mu, z: layer.V @ (jax.nn.softmax(mu.points @ (layer.U @ z)) @ mu.points)),
    }
    rows = []
    with jax.default_device(jax_gpu()):
        for dtype, D in [(dtype, D) for dtype in (jnp.float32, jnp.float64) for D in (2, 8, 64)]:
            mu = lp.Empirical(jax.random.normal(jax.random.key(0), (L, D), dtype))
            layer, z = lp.SoftmaxAttention(0.1 * jnp.eye(D, dtype=dtype), jnp.eye(D, dtype=dtype)), jnp.ones(D, dtype)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    began = time.perf_counter()
                    jax.block_until_ready(way(layer, mu, z))
                    times[name].append(time.perf_counter() - began)
            best = {name: 1e3 * min(taken) for name, taken in times.items()}
            rows.append({"type": jnp.dtype(dtype).name, "D": D} | best)
            ratio = best["ours"] / best["plain"]
            print("{type}, D = {D}: ours {ours:.3f} ms, plain {plain:.3f} ms".format(**rows[-1]), f"({ratio:.2f})")
    return rows


if __name__ == "__main__":
    main()
