"""Claim: a step of SGD on fresh prompts costs a small part of what it costs in PyTorch, with the same law.

For each attention and prompt length, one step of batch 128 at d = 5: as the paper's experiments do it (PyTorch modules
O, V, K, Q, data from `torch.randn`, autograd, SGD; written here), in the plain JAX reference, and in the fused engine.
One thread each, CPU time, contenders in turn, the best of several rounds. Then: what a step of linear attention costs
at L = 10⁶ over L = 10; what a token costs at d = 100 over d = 5; two runs on two cores over one on one; and a token's
nanoseconds beside those that its arithmetic alone would take on this machine.

The ratios to reach: softmax 30, 40, 50 at L = 10, 100, 1000; linear 30 and 500 at L = 10 and 1000; the pair 25 at L =
1000 (over two PyTorch runs); at most 1.1 from L = 10 to 10⁶; at most 1.5 from d = 5 to 100; at most 1.15 for two runs.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numba
import numpy as np
import torch

import largeprompt as lp
from largeprompt.attention import Kind
from largeprompt.dynamics import ReferenceTrainer, Training
from largeprompt.engine import FusedTrainer
from largeprompt.engine._target import tuned
from largeprompt.icl import LinearRegression, identity

BATCH, NOISE, RATE = 128, 0.1, 1e-3
ROUNDS = 7
SECONDS = 0.15  # of each contender in each round
# What LLVM makes of a pair of tokens in sixteen lanes, counted in the assembly of the two loops: vector operations on
# sixteen lanes for sixteen tokens, without loads and stores.
OPERATIONS_FOR_SIXTEEN_TOKENS = {"bits (Philox4x32-7)": 34, "normals": 31, "exponential": 12, "sums": 11}

Step = Callable[[int], None]  # so many steps


class Attention(torch.nn.Module):
    """One head as the experiments of the paper write it."""

    def __init__(self, d: int, softmax: bool):
        super().__init__()
        D = d + 1
        self.K, self.Q, self.V, self.O = (torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.softmax = softmax

    def forward(self, tokens: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("blk,bk->bl", self.K(tokens), self.Q(query))
        weights = torch.softmax(scores, dim=-1) if self.softmax else scores / tokens.shape[1]
        return self.O(torch.einsum("bl,blk->bk", weights, self.V(tokens)))[:, -1]


def pytorch(softmax: bool, L: int, d: int) -> Step:
    torch.manual_seed(0)
    model = Attention(d, softmax)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        w = torch.randn(BATCH, d) / math.sqrt(d)
        x = torch.randn(BATCH, L + 1, d)
        y = torch.einsum("bld,bd->bl", x, w) + math.sqrt(NOISE) * torch.randn(BATCH, L + 1)
        tokens = torch.cat([x[:, :-1], y[:, :-1, None]], dim=-1)
        query = torch.cat([x[:, -1], torch.zeros(BATCH, 1)], dim=-1)
        loss = (model(tokens, query) - y[:, -1]).square().mean() / 2
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def steps(n: int) -> None:
        for _ in range(n):
            step()

    return steps


def ours(trainer_type, kinds: tuple[Kind, ...], L: int, d: int, *, merged: bool = False) -> Step:
    task = LinearRegression.experiment(identity(d), NOISE)
    head = lp.Head.pytorch_default(jax.random.key(0), d + 1)
    layers = tuple(lp.Head(head.K, head.Q, head.V, head.O, kind=kind) for kind in kinds)
    if merged:
        layers = tuple(layer.merged() for layer in layers)
    trainer = trainer_type(Training(task, L, batch=BATCH, rate=RATE), layers)
    state = trainer.start()

    def steps(n: int) -> None:
        nonlocal state
        state = trainer.advance(state, state.step + n)

    return steps


def cpu_seconds(contenders: dict[str, Step]) -> dict[str, float]:
    """CPU seconds a step of each, the best of several rounds in which they take turns."""
    counts, best = {}, dict.fromkeys(contenders, math.inf)
    for name, steps in contenders.items():
        steps(1)
        began = time.process_time()
        steps(2)
        counts[name] = max(2, int(SECONDS * 2 / max(time.process_time() - began, 1e-6)))
    for _ in range(ROUNDS):
        for name, steps in contenders.items():
            began = time.process_time()
            steps(counts[name])
            best[name] = min(best[name], (time.process_time() - began) / counts[name])
    return best


KINDS: dict[str, tuple[Kind, ...]] = {"softmax": ("softmax",), "linear": ("linear",), "pair": ("softmax", "linear")}
TO_REACH: dict[tuple[str, int], int | None] = {
    ("softmax", 10): 30,
    ("softmax", 100): 40,
    ("softmax", 1000): 50,
    ("linear", 10): 30,
    ("linear", 100): None,
    ("linear", 1000): 500,
    ("pair", 10): None,
    ("pair", 1000): 25,
}


def against_pytorch() -> None:
    print("attention      L  PyTorch µs  reference µs  fused µs  PyTorch/fused  to reach")
    for (attention, L), goal in TO_REACH.items():
        kinds = KINDS[attention]
        contenders: dict[str, Step] = {f"PyTorch {kind}": pytorch(kind == "softmax", L, 5) for kind in kinds}
        contenders["reference"] = ours(ReferenceTrainer, kinds, L, 5)
        contenders["fused"] = ours(FusedTrainer, kinds, L, 5)
        took = cpu_seconds(contenders)
        whole = sum(value for name, value in took.items() if name.startswith("PyTorch"))
        print(
            f"{attention:10s}{L:6d}{1e6 * whole:12.0f}{1e6 * took['reference']:14.0f}{1e6 * took['fused']:10.1f}"
            f"{whole / took['fused']:15.1f}{goal or '':>10}",
            flush=True,
        )


def in_length_and_dimension() -> None:
    took = cpu_seconds({str(L): ours(FusedTrainer, ("linear",), L, 5) for L in (10, 10**6)})
    print(f"linear, a step at L = 10⁶ over L = 10: {took['1000000'] / took['10']:.3f} (to reach 1.1)", flush=True)
    for name, merged in (("(U, V)", True), ("(K, Q, V, O)", False)):
        contenders = {str(d): ours(FusedTrainer, ("softmax",), 1000, d, merged=merged) for d in (5, 100)}
        took = cpu_seconds(contenders)
        tokens = BATCH * 1000
        print(
            f"softmax in {name}, L = 1000, a token at d = 100 over d = 5: {took['100'] / took['5']:.2f} (1.5 to reach);"
            f" {1e9 * took['5'] / tokens:.2f} and {1e9 * took['100'] / tokens:.2f} ns",
            flush=True,
        )


def side_by_side() -> None:
    runs = [ours(FusedTrainer, ("softmax",), 1000, 5) for _ in range(2)]
    one = two = math.inf
    for steps in runs:
        steps(1)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            runs[0](1000)
            one = min(one, time.perf_counter() - began)
            began = time.perf_counter()
            list(pool.map(lambda steps: steps(1000), runs))
            two = min(two, time.perf_counter() - began)
    print(f"two runs on two cores over one on one, wall time: {two / one:.3f} (to reach 1.15)", flush=True)


@numba.njit(fastmath={"contract"})
def _multiply_and_add(x, n):
    tuned()
    a, b = np.float32(0.999), np.float32(0.001)
    size = x.shape[1]
    for _ in range(n):
        for j in range(size):
            y, z, u, v = x[0, j], x[1, j], x[2, j], x[3, j]
            for _ in range(16):
                y, z, u, v = y * a + b, z * a + b, u * a + b, v * a + b
            x[0, j], x[1, j], x[2, j], x[3, j] = y, z, u, v


def distance_to_the_limit() -> None:
    """Nanoseconds a token beside those of its arithmetic at the rate of chained multiply-and-adds measured here."""
    x = np.ones((4, 256), np.float32)
    _multiply_and_add(x, 1)
    n, best = 2000, math.inf
    long, short = ours(FusedTrainer, ("softmax",), 1000, 5), ours(FusedTrainer, ("softmax",), 100, 5)
    took = cpu_seconds({"long": long, "short": short})
    for _ in range(ROUNDS):
        began = time.process_time()
        _multiply_and_add(x, n)
        best = min(best, time.process_time() - began)
    lane = best / (n * x.size * 16)  # seconds an operation in one lane
    token = (took["long"] - took["short"]) / (900 * BATCH)
    count = sum(OPERATIONS_FOR_SIXTEEN_TOKENS.values())
    least = count * lane
    parts = ", ".join(f"{n} for {what}" for what, n in OPERATIONS_FOR_SIXTEEN_TOKENS.items())
    print(
        f"a token of softmax at d = 5: {1e9 * token:.2f} ns; its {count} operations a lane ({parts}) need "
        f"{1e9 * least:.2f} ns at the measured {1e-9 / lane:.0f} multiply-and-adds a nanosecond: "
        f"{token / least:.2f} times the limit"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["pytorch", "scaling", "cores", "limit"], help="one part of the comparison")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    parts = {
        "pytorch": against_pytorch,
        "scaling": in_length_and_dimension,
        "cores": side_by_side,
        "limit": distance_to_the_limit,
    }
    for name, part in parts.items():
        if only in (None, name):
            part()
