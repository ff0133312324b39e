"""Claim T5: does it matter whether the query is one of the tokens of the prompt (Remark 3.2)?"""

import dataclasses
import math
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from largeprompt.attention import SoftmaxAttention
from largeprompt.concentration import deviation
from largeprompt.lab import Progress
from largeprompt.measures import Gaussian
from largeprompt.paper.claims import Check, Finding, claim
from largeprompt.paper.experiment import Computation, Measurement
from largeprompt.paper.experiments.limits import LENGTHS, PROMPTS, rate


@dataclasses.dataclass(frozen=True)
class QueryInPrompt(Computation):
    """The mean squared output deviation with the query left out of the prompt and put into it, on the line.

    Tokens are N(0, `tokens`), queries N(0, `queries`), U = `U` and V = 1.
    """

    words: ClassVar[str] = "the query in the prompt, tokens N(0, {tokens:g}), queries N(0, {queries:g})"

    tokens: float
    queries: float
    U: float
    lengths: tuple[int, ...]
    prompts: int
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 2 + 4e-8 * self.prompts * sum(self.lengths)

    def _compute(self, progress: Progress) -> xr.Dataset:
        layer = SoftmaxAttention([[self.U]], [[1.0]])
        mu, nu = (Gaussian([0.0], [[variance]]) for variance in (self.tokens, self.queries))
        key, Ls = jax.random.key(self.seed), list(self.lengths)
        found = [
            deviation(layer, mu, nu, Ls, "output", key, replicates=self.prompts, query_in_prompt=inside)
            for inside in (False, True)
        ]
        return xr.Dataset(
            {
                "mean_square": (("prompt", "L"), np.array([measured.mean_square for measured in found])),
                "mean_square_stderr": (("prompt", "L"), np.array([measured.stderr for measured in found])),
            },
            {"L": Ls, "prompt": ["without the query", "with the query"]},
        )


ALIKE, WIDER = (
    Measurement(
        f"query in the prompt, tokens {tokens:g}",
        computation=lambda choice, tokens=tokens, U=U: QueryInPrompt(tokens, 1.0, U, LENGTHS, PROMPTS[choice.preset]),
    )
    for tokens, U in ((1.0, 0.3), (0.01, math.sqrt(10)))
)


@claim("T5", "Remark 3.2", WIDER, ALIKE)
def _query_in_the_prompt(wider: xr.Dataset, alike: xr.Dataset) -> Finding:
    """Putting the query into the prompt changes nothing: both conventions converge at the same rate.

    Exponents of the mean squared output deviation in the prompt length, with the query in the prompt and without it, on
    the line, queries N(0, 1): tokens N(0, 1) with U = 0.3, N(0, 0.01) with U = √10.
    """
    checks = []
    for data, queries in ((wider, "wider than tokens"), (alike, "distributed like tokens")):
        without, within = (rate(data.isel(prompt=i)) for i in (0, 1))
        checks.append(
            Check(
                f"slope of log E‖T_L − T_∞‖² in log L with the query less that without it, queries {queries}",
                within.slope - without.slope,
                "=",
                0.0,
                math.hypot(without.stderr, within.stderr),
                tolerance=0.1,
                resolution=0.2,
            )
        )
    return Finding(
        tuple(checks),
        "The rate is the same where queries are distributed like tokens; where they are wider the query outweighs the "
        "rest of the prompt (erratum G17).",
    )
