"""Claim: in float64, softmax attention on an `Empirical` prompt of 10⁵ tokens is at least as fast as PyTorch's
`scaled_dot_product_attention` and as a plain JAX softmax, for one query and for 1,000, and for 1,000 takes less memory
than the plain softmax; on 10⁷ tokens its extra memory is a small part of the prompt, for outputs and for gradients.

Each contender lives in a process of its own and is called in turn, round after round. Shown are the best wall and CPU
time of a call, and how far peak resident memory rises above what was resident before the call (Linux only).

    make bench                                     # or: python benchmarks/streaming.py [--quick] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

DIMENSION = 6
CASES = [  # tokens, queries, type, what is computed
    (100_000, 1, "float64", "output"),
    (100_000, 1000, "float64", "output"),
    (100_000, 1, "float32", "output"),
    (100_000, 1000, "float32", "output"),
    (10_000_000, 1, "float64", "output"),
    (10_000_000, 1, "float64", "gradient"),
]
CONTENDERS = ("largeprompt", "plain JAX", "PyTorch")


def data(L: int, queries: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(L, DIMENSION)).astype(dtype), rng.normal(size=(queries, DIMENSION)).astype(dtype)


def largeprompt_call(L: int, queries: int, dtype: str, what: str) -> Callable[[], np.ndarray]:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import largeprompt as lp

    lp.use_float64()
    tokens, Q = (jnp.asarray(a) for a in data(L, queries, dtype))
    layer = lp.SoftmaxAttention(jnp.eye(DIMENSION, dtype=dtype), jnp.eye(DIMENSION, dtype=dtype))
    mu = lp.Empirical(tokens)

    def output(layer, mu, Q):
        return layer(mu, Q[0])[None] if queries == 1 else layer.map(mu, Q)

    def gradient(layer, mu, Q):
        return jax.grad(lambda U: output(eqx.tree_at(lambda t: t.U, layer, U), mu, Q).sum())(layer.U)

    f = jax.jit(output if what == "output" else gradient)
    return lambda: np.asarray(f(layer, mu, Q))


def plain_call(L: int, queries: int, dtype: str, what: str) -> Callable[[], np.ndarray]:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    tokens, Q = (jnp.asarray(a) for a in data(L, queries, dtype))

    def output(U, tokens, Q):
        return jax.nn.softmax(Q @ U.T @ tokens.T) @ tokens

    f = jax.jit(output if what == "output" else jax.grad(lambda U, tokens, Q: output(U, tokens, Q).sum()))
    identity = jnp.eye(DIMENSION, dtype=dtype)
    return lambda: np.asarray(f(identity, tokens, Q))


def pytorch_call(L: int, queries: int, dtype: str, what: str) -> Callable[[], np.ndarray]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    tokens, Q = (torch.from_numpy(a)[None, None] for a in data(L, queries, dtype))
    U = torch.eye(DIMENSION, dtype=tokens.dtype, requires_grad=what == "gradient")

    def output():
        with torch.no_grad():
            return scaled_dot_product_attention(Q, tokens, tokens, scale=1.0)[0, 0].numpy()

    def gradient():
        U.grad = None
        scaled_dot_product_attention(Q @ U.T, tokens, tokens, scale=1.0).sum().backward()
        assert U.grad is not None
        return U.grad.numpy()

    return output if what == "output" else gradient


CALLS: dict[str, Callable] = dict(zip(CONTENDERS, (largeprompt_call, plain_call, pytorch_call), strict=True))


def peak_memory() -> int:
    """The peak resident memory in bytes since it was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def serve(contender: str, case: list) -> None:
    """In a contender's process: for each line with a number of calls, answer with best times, memory and the result."""
    call = CALLS[contender](*case)
    result = call()
    for line in sys.stdin:
        memory = None
        if Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")
            before = peak_memory()
            call()
            memory = peak_memory() - before
        walls, calls = [], int(line)
        cpu = time.process_time()
        for _ in range(calls):
            start = time.perf_counter()
            call()
            walls.append(time.perf_counter() - start)
        cpu = (time.process_time() - cpu) / calls
        print(json.dumps({"wall": min(walls), "cpu": cpu, "memory": memory, "result": result.sum().item()}), flush=True)


def compare(case: tuple, rounds: int) -> dict[str, dict]:
    L, queries, *_ = case
    command = [sys.executable, __file__, "--serve", json.dumps(case)]
    processes = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in CONTENDERS
    }
    best: dict[str, dict] = {}
    calls = max(3, min(200, 2 * 10**7 // (L * queries)))
    try:
        for _ in range(rounds):
            for name, process in processes.items():
                assert process.stdin
                assert process.stdout
                process.stdin.write(f"{calls}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
                if not answer:
                    raise RuntimeError(f"{name} ended early; is it installed?")
                new = json.loads(answer)
                old = best.setdefault(name, new)
                for key in ("wall", "cpu"):
                    old[key] = min(old[key], new[key])
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    results = [b["result"] for b in best.values()]
    tolerance = 1e-9 if "float64" in case else 1e-2
    assert np.allclose(results, results[0], rtol=tolerance, atol=tolerance * queries), results
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Streamed attention against PyTorch and plain JAX.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no prompt of 10⁷ tokens")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.serve[1], json.loads(arguments.serve[0]))
    rows = []
    head = f"{'tokens':>10} {'queries':>7} {'type':>8} {'':>9}  {'contender':<12}"
    print(f"{head}{'wall ms':>9}{'CPU ms':>9}{'memory MB':>11}   ours/this")
    for case in CASES[:4] if arguments.quick else CASES:
        best = compare(case, 3 if arguments.quick else 7)
        for name, b in best.items():
            memory = "n/a" if b["memory"] is None else f"{b['memory'] / 1e6:.0f}"
            ratios = [best["largeprompt"][k] / b[k] for k in ("wall", "cpu")]
            head = f"{case[0]:>10} {case[1]:>7} {case[2]:>8} {case[3]:>9}  {name:<12}"
            times = f"{1e3 * b['wall']:>9.2f}{1e3 * b['cpu']:>9.2f}{memory:>11}"
            print(f"{head}{times}   wall {ratios[0]:.2f}, CPU {ratios[1]:.2f}", flush=True)
            rows.append(dict(zip(("tokens", "queries", "type", "what"), case, strict=True)) | {"contender": name} | b)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
