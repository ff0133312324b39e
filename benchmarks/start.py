"""Claim: with `compile_quickly()` the README's example takes three quarters of its time, and with `keep_compiled()`, in
a second process, half of it.

The example is run in processes of its own, four ways in turn: as XLA compiles by default, quickly, and both again with
programs kept by an earlier process. Least seconds, and CPU seconds of the process, over the rounds.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
QUICKLY = "lp.compile_quickly()"
WAYS = {
    "default": (False, False),
    "quickly": (True, False),
    "default, kept": (False, True),
    "quickly, kept": (True, True),
}


def example(quickly: bool, kept: bool) -> str:
    found = re.search(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert found is not None
    assert QUICKLY in found[1]
    lines = [line for line in found[1].splitlines() if quickly or QUICKLY not in line]
    at = next(i for i, line in enumerate(lines) if "use_float64" in line)
    return "\n".join([*lines[:at], *["lp.keep_compiled()"] * kept, *lines[at:]])


def seconds(program: str, cache: str) -> tuple[float, float]:
    """Of a process that runs the program: on the clock, and of CPU."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-c", program]
    subprocess.run(command, env={**environment, "LARGEPROMPT_CACHE": cache}, check=True, capture_output=True)
    after, taken = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    best = {name: (float("inf"), float("inf")) for name in WAYS}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("default, kept", "quickly, kept"):
            seconds(example(*WAYS[name]), cache)
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                found = seconds(example(*way), cache)
                best[name] = min(best[name][0], found[0]), min(best[name][1], found[1])
    usual = best["default"]
    print(f"{'':>15} {'seconds':>8} {'ratio':>6} {'CPU':>6} {'ratio':>6}")
    for name, (wall, cpu) in best.items():
        print(f"{name:>15} {wall:>8.2f} {wall / usual[0]:>6.2f} {cpu:>6.2f} {cpu / usual[1]:>6.2f}")


if __name__ == "__main__":
    main()
