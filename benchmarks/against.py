"""Claim: training, risks and concentration are no more than 5 % slower than in another checkout.

    python benchmarks/against.py OTHER [--rounds 5]

OTHER is a folder with another version of the repository, for example `git worktree add ../other TAG`. Both versions run
the same cases through public names, in alternating processes. A case costs the least CPU time of all its repetitions,
after a first one that compiles.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
REPEATED = 3  # times in each process


def cases():
    """Each case by its name, as a function without arguments."""
    import jax
    import numpy as np

    import largeprompt as lp
    from largeprompt import concentration, dynamics, icl
    from largeprompt.engine import trainer_for

    lp.use_float64()
    key = jax.random.key(0)
    task = icl.LinearRegression.experiment(icl.kms(5))
    rng = np.random.default_rng(0)
    U, V = 0.3 * np.eye(6) + 0.02 * rng.normal(size=(6, 6)), rng.normal(size=(1, 6))
    general, aligned = lp.SoftmaxAttention(U, V), dynamics.structured_start(task, alpha=0.3)
    head, mu = lp.Head.pytorch_default(key, 6), lp.Gaussian(np.zeros(6), np.eye(6))
    cube = lp.Cube(np.ones(6))

    def trained(kinds, L, steps):
        heads = tuple(lp.Head.pytorch_default(key, 6, kind=kind) for kind in kinds)
        trainer = trainer_for(dynamics.Training(task, L=L, batch=128, rate=1e-3, seed=1), heads, engine="fused")
        start = trainer.start()
        return lambda: trainer.advance(start, steps)

    return {
        "train softmax, L = 10": trained(["softmax"], 10, 20_000),
        "train softmax, L = 1000": trained(["softmax"], 1000, 500),
        "train both, L = 100": trained(["softmax", "linear"], 100, 2500),
        "train linear, L = 1000": trained(["linear"], 1000, 20_000),
        "risk, aligned, L = 100": lambda: icl.risk(aligned, task, 100),
        "risk, general, L = 100": lambda: icl.risk(general, task, 100),
        "gradient of the risk, L = 100": lambda: icl.risk_gradient(general, task, 100),
        "optimal softmax, L = 100": lambda: icl.optimal_softmax(task, 100),
        "gradient flow, L = 100": lambda: dynamics.gradient_flow(aligned, task, 100, times=[1.0, 10.0], draws=2**10),
        "deviation, Gaussian": lambda: concentration.deviation(
            head, mu, None, [100, 10**4], "output", key, replicates=20_000
        ),
        "deviation, cube": lambda: concentration.deviation(head, cube, None, [100, 1000], "gradient", key),
        "predict, Gaussian": lambda: concentration.predict(head, mu, None, [100, 10**4], "gradient"),
        "predict, cube": lambda: concentration.predict(head, cube, None, [100], "output"),
    }


def measure() -> None:
    """The CPU seconds of each case, as JSON."""
    found = {}
    for name, case in cases().items():
        case()
        times = []
        for _ in range(REPEATED):
            before = time.process_time()
            case()
            times.append(time.process_time() - before)
        found[name] = min(times)
    print(json.dumps(found))


def measured(checkout: Path) -> dict[str, float]:
    """The same in a process that imports the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, __file__, "--measure"], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each version")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure()
    if options.other is None or not (options.other / "src" / "largeprompt").is_dir():
        parser.error(f"other is {options.other}; it must be a checkout of the repository, with src/largeprompt in it")
    rounds = [(measured(options.other), measured(HERE)) for _ in range(options.rounds)]
    print(f"{'case':32} {'there':>9} {'here':>9} {'ratio':>7}")
    for name in rounds[0][0]:
        there, here = (min(one[side][name] for one in rounds) for side in (0, 1))
        print(f"{name:32} {there:8.3f}s {here:8.3f}s {here / there:7.3f}")


if __name__ == "__main__":
    main()
