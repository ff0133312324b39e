"""An experiment from question to verdict: does the mean of a prompt come near to that of its law as 1/L?

Copy this file to `src/largeprompt/paper/experiments/NAME.py`, add the module to the list in its `__init__.py`, and
`largeprompt figure means`, `largeprompt verify --claims X1` and the report know it. As a script it runs in seconds.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import xarray as xr

from largeprompt.concentration import fit_power_law
from largeprompt.lab import Progress
from largeprompt.paper import Choice
from largeprompt.paper.chart import BLUE, Chart, Panel, Series
from largeprompt.paper.claims import Check, Finding, claim
from largeprompt.paper.drawing import draw
from largeprompt.paper.experiment import Computation, Experiment, Needed, Results
from largeprompt.paper.files import write

# 1. Its sizes in each preset.
PROMPTS = {"smoke": 200, "quick": 2000, "paper": 20_000}


# 2. What it computes. The fields say all of it: their text is the key under which the dataset is kept, and what was
#    computed once is never computed again.
@dataclasses.dataclass(frozen=True)
class Means(Computation):
    """The mean square of the mean of L standard normal tokens, over sampled prompts."""

    words: ClassVar[str] = "means of {prompts} prompts"

    lengths: tuple[int, ...]
    prompts: int
    seed: int = 0

    def _compute(self, progress: Progress) -> xr.Dataset:
        rng, rows = np.random.default_rng(self.seed), []
        with progress.task(self.title, len(self.lengths)) as advance:
            for L in self.lengths:
                squares = rng.standard_normal((self.prompts, L)).mean(axis=1) ** 2
                rows.append((squares.mean(), squares.std(ddof=1) / np.sqrt(self.prompts)))
                advance(1, f"L = {L}")
        square, error = np.array(rows).T
        return xr.Dataset({"square": ("L", square), "error": ("L", error)}, {"L": list(self.lengths)})


# 3. Its dataset, its chart, and its main numbers.
class MeansByLength(Experiment):
    """The mean squared distance of the mean, by prompt length."""

    words: ClassVar[str] = "The mean of a prompt, by its length"
    advice: ClassVar[str] = "The points lie on the line 1/L."

    def _means(self, choice: Choice) -> Means:
        return Means((10, 30, 100, 300), PROMPTS[choice.preset])

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (self._means(choice),)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        return results[self._means(choice)]

    def chart(self, data: xr.Dataset) -> Chart:
        L, square, off = data.L.values, data.square.values, 2 * data.error.values
        points = Series("measured", L, square, "measured", BLUE, square - off, square + off, line=False, mark="o")
        return Chart((Panel("", "prompt length L", "mean square", (points, Series("1/L", L, 1 / L, "theory"))),))

    def summary(self, data: xr.Dataset) -> list[str]:
        return [f"At L = {int(L)} it is {float(value):.2e}." for L, value in zip(data.L, data.square, strict=True)]


MEANS = MeansByLength("means")


# 4. The claims that it settles: the docstring is the statement, and then what is measured. A check holds a number with
# its standard error against a target; one rule judges all.
@claim("X1", "a template", MEANS)
def _falls_as_one_over_L(data: xr.Dataset) -> Finding:
    """The mean square falls as 1/L.

    Its slope in log-log, within 0.1 of -1.
    """
    fit = fit_power_law(data.L.values, data.square.values, data.error.values)
    return Finding((Check("slope", fit.slope, "=", -1.0, fit.stderr, tolerance=0.1, resolution=0.1),))


# 5. Tried on its own.
def main() -> None:
    """Compute, judge and draw it, and print facts that a test checks."""
    choice = Choice("quick")
    data = MEANS.dataset(
        choice, {need: need.compute() for need in MEANS.needs(choice) if isinstance(need, Computation)}
    )
    entry = _falls_as_one_over_L.entry({"means": data})
    (check,) = entry["checks"]
    print(*MEANS.summary(data), sep="\n")
    print(f"{entry['key']}: {entry['statement']} {entry['verdict']}")
    print(f"slope, with three errors: {check['measured']:.3f} = -1 ± {3 * check['error']:.3f}")
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), "figure-means", draw(MEANS.chart(data)), data)
        sizes = [file.stat().st_size for file in files]
    print(f"files that hold something: {sum(size > 100 for size in sizes)} = {len(files)} ± 0")
    assert entry["verdict"] == "holds"


if __name__ == "__main__":
    main()
