"""Claim: momentum with its rate times 1 − β ends where plain SGD does, in traps as in optima; Adam has other basins.

    python benchmarks/optimisers.py [--seeds 20] [--jobs 1]

Trains d = 5 from default starts for 20,000 steps, with SGD to a time of 400 of the gradient flow, and prints how many
runs are trapped, with 95 % Wilson intervals, and in how many seeds the verdict is that of SGD. Seven minutes of one
core; softmax attention at L = 1000, which takes most of it, has half of the seeds.
"""

import argparse
import tempfile

import largeprompt as lp
from largeprompt import lab

OPTIMISERS = {  # each with its rate
    "SGD, γ = 0.02": ("sgd", 0.02),
    "momentum 0.9, γ = 0.002": ("momentum:0.9", 0.002),
    "momentum 0.9, γ = 0.02": ("momentum:0.9", 0.02),
    "Adam, γ = 0.002": ("adam", 0.002),
    "Adam, γ = 0.01": ("adam", 0.01),
}
CASES = [
    (sigma, L, attention)
    for sigma in ("identity", "kms:0.5")
    for L in (100, 1000)
    for attention in ("linear", "softmax")
]


def verdicts(sigma: str, L: int, attention: str, optimiser: str, rate: float, seeds: int, jobs: int) -> list[str]:
    """Where the runs of one kind ended, by seed."""
    settings = {"sigma": sigma, "L": L, "attention": attention, "optimiser": optimiser, "rate": rate, "seeds": seeds}
    settings |= {"batch": 64, "steps": 20_000, "record": {"what": [], "points": 60}}
    with tempfile.TemporaryDirectory() as folder:
        return [
            str(data.verdict.values[0]) for data in lab.sweep(lab.runs_from(settings), lab.Store(folder), jobs=jobs)
        ]


def cell(ends: list[str], of_sgd: list[str]) -> str:
    """Trapped runs, what became of others that did not converge, and in how many seeds SGD ended the same way."""
    count = ends.count("trapped")
    low, high = lab.wilson(count, len(ends))
    rest = [f"{ends.count(end)} {end}" for end in ("settled", "unfinished", "diverged") if end in ends]
    same = sum(one == other for one, other in zip(ends, of_sgd, strict=True))
    return "; ".join([f"{count}/{len(ends)} [{100 * low:.0f}, {100 * high:.0f}] %", *rest, f"{same} as SGD"])


def main() -> None:
    """Print the table as Markdown, a line for each kind as it is finished."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    lp.use_float64()
    print("", "Σ", "L", "attention", *OPTIMISERS, "", sep=" | ")
    print("|---" * (3 + len(OPTIMISERS)) + "|")
    for sigma, L, attention in CASES:
        seeds = options.seeds // (2 if (L, attention) == (1000, "softmax") else 1)
        ends = [verdicts(sigma, L, attention, *one, seeds, options.jobs) for one in OPTIMISERS.values()]
        print("", sigma, L, attention, *(cell(own, ends[0]) for own in ends), "", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
