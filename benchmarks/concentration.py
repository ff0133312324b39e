"""Claim: Gaussian prompts drawn through what attention sees of them cost one normal a token whatever the dimension, so
that 10⁴ prompts of 10⁶ tokens are measured in well under a minute on two cores; whole tokens of any law stream in
bounded memory.

Prints nanoseconds a token of both samplers for the output and for its gradients (CPU time, in turn, the best of
several), then the time and the peak memory of the long measurement. `python benchmarks/concentration.py [--long]`.
"""

import argparse
import resource
import time
import warnings

import jax
import jax.numpy as jnp

import largeprompt as lp
from largeprompt.concentration import deviation


def cost(mu, layer, quantity: str, L: int, replicates: int, sampler: str) -> float:
    """Nanoseconds of CPU time a token."""
    began = time.process_time()
    deviation(layer, mu, None, [L], quantity, jax.random.key(1), replicates=replicates, sampler=sampler)
    return (time.process_time() - began) / (L * replicates) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="also 10⁴ prompts of 10⁶ tokens")
    long = parser.parse_args().long
    lp.use_float64()
    warnings.simplefilter("ignore")
    print(f"{'tokens':>12} {'D':>4} {'quantity':>9} {'reduced':>9} {'whole':>9}   ns of CPU time a token")
    for D in (6, 48):
        mu = lp.Gaussian(jnp.zeros(D), jnp.eye(D))
        layer = lp.SoftmaxAttention(0.3 * jnp.eye(D), jnp.ones((1, D)) / D**0.5)
        for quantity in ("output", "U"):
            best = {"auto": float("inf"), "tokens": float("inf")}
            for _ in range(4):  # the first compiles
                for sampler in best:
                    best[sampler] = min(best[sampler], cost(mu, layer, quantity, 20_000, 512, sampler))
            print(f"{'Gaussian':>12} {D:>4} {quantity:>9} {best['auto']:>9.2f} {best['tokens']:>9.2f}")
    if long:
        mu, layer = lp.Gaussian(jnp.zeros(6), jnp.eye(6)), lp.SoftmaxAttention(0.3 * jnp.eye(6), jnp.eye(6))
        for name, law, replicates in (("Gaussian", mu, 10_000), ("Rademacher", lp.Rademacher(jnp.ones(6)), 100)):
            began = time.perf_counter()
            found = deviation(layer, law, None, [10**6], "output", jax.random.key(2), replicates=replicates)
            seconds = time.perf_counter() - began
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            print(
                f"{name}: {replicates} prompts of 10⁶ tokens, L·E‖ΔT‖² = {found.mean_square[0] * 1e6:.3f} ± "
                f"{found.stderr[0] * 1e6:.3f}, {seconds:.1f} s, peak {memory:.0f} MB"
            )


if __name__ == "__main__":
    main()
