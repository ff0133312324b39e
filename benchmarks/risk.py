"""Claims: (1) the exact softmax risk and its gradient cost a thousand times less CPU than Monte Carlo over prompts at
equal accuracy, and their cost does not grow with L; (2) a softmax gradient flow to t = 1000 at d = 5, L = 1000 takes at
most 15 s on 2 cores once compiled; (3) the infinite-prompt flow comes within 1e-8 of its limit in seconds, to d = 100.

In (1) both sides compute the risk of one layer at the default initialisation, on regression with d = 5, Ω = I/5, noise
0.1. Each is timed on a fixed number of draws (calls alternate, best of 5, CPU time); its standard error is then scaled
to a common one as 1/√draws, which for quasi-Monte Carlo is pessimistic. Run: make bench-risk
"""

import math
import time
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

import largeprompt as lp
from largeprompt.dynamics import flow_limit, gradient_flow, structured_start
from largeprompt.icl import LinearRegression, identity, kms, norm, risk_function


def equal_accuracy() -> None:
    task = LinearRegression.experiment(identity(5))
    layer = lp.Head.pytorch_default(jax.random.key(0), 6).merged()
    value = eqx.filter_jit(lambda function, layer: function.value_and_error(layer))
    gradient = eqx.filter_jit(lambda function, layer: function.gradient_and_error(layer))
    print("    L         of   exact, s   ± error   sampled, s   ± error   CPU ratio at equal error")
    for L in (10, 1000, 1_000_000):
        exact = risk_function(layer, task, L, draws=2**15)
        sampled = risk_function(layer, task, L, jax.random.key(1), draws=max(8, 2**22 // L), method="sampled")
        for name, compute in (("risk", value), ("gradient", gradient)):
            times: dict[str, list[float]] = {"exact": [], "sampled": []}
            errors = {}
            for turn in range(6):
                for side, function in (("exact", exact), ("sampled", sampled)):
                    began = time.process_time()
                    _, error = jax.block_until_ready(compute(function, layer))
                    errors[side] = float(norm(error) if name == "gradient" else error)
                    if turn:  # the first call compiles
                        times[side].append(time.process_time() - began)
            best = {side: min(ts) for side, ts in times.items()}
            ratio = best["sampled"] * (errors["sampled"] / errors["exact"]) ** 2 / best["exact"]
            print(
                f"{L:>9} {name:>9}   {best['exact']:8.4f}   {errors['exact']:.1e}   {best['sampled']:10.3f}   "
                f"{errors['sampled']:.1e}   {ratio:24.3g}"
            )


def twice(follow):
    """Seconds of the first call, which compiles; what the second returns; its seconds."""
    began = time.perf_counter()
    follow()
    compiled = time.perf_counter()
    flow = follow()
    return compiled - began, flow, time.perf_counter() - compiled


def softmax_flows() -> None:
    print("\nsoftmax flows to t = 1000, d = 5, L = 1000, compiled")
    times = jnp.linspace(0, 1000, 51)[1:]
    default = lp.Head.pytorch_default(jax.random.key(0), 6)
    for name, Sigma in (("identity", identity(5)), ("kms:0.5", kms(5))):
        task = LinearRegression.experiment(Sigma)
        structured = structured_start(task, 0.3)
        cases: list[tuple[str, Any, Literal["stabilised", "explicit"]]]
        cases = [("K, Q, V, O default", default, "stabilised"), ("Assumption 5.1", structured, "stabilised")]
        if name == "identity":  # an ordinary explicit method takes minutes on the rest
            cases.append(("Assumption 5.1", structured, "explicit"))
        for start, layer, solver in cases:
            _, flow, wall = twice(partial(gradient_flow, layer, task, 1000, times, solver=solver))
            how = f"{name:>9} {start:>19} {solver:>11}"
            print(f"{how}: {wall:6.2f} s, {flow.steps} steps, risk {flow.risk[-1]:.6f}")


def infinite_flows() -> None:
    print("\ninfinite-prompt flows, Sigma = I")
    for d in (5, 20, 100):
        task = LinearRegression(identity(d), noise=0.1)
        start = structured_start(task, 0.1)
        follow = partial(gradient_flow, start, task, math.inf, [60.0], rtol=1e-10, atol=1e-11, solver="explicit")
        first, flow, wall = twice(follow)
        far = float(norm(jax.tree.map(jnp.subtract, flow.last, flow_limit(task, start))))
        print(f"d = {d:>3}: {wall:6.2f} s ({first:.1f} s with compilation), distance to the limit {far:.1e}")


if __name__ == "__main__":
    lp.use_float64()
    print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}, {jax.default_backend()}")
    equal_accuracy()
    softmax_flows()
    infinite_flows()
