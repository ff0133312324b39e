"""Claims F4 and S4: does the scale of the best softmax attention follow the Lipschitz constant, the noise and L?"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import largeprompt as lp
from largeprompt.concentration import RateFit, fit_power_law
from largeprompt.icl import NoisyLink, SingleIndex, optimal_in_family
from largeprompt.lab import Progress
from largeprompt.paper.claims import Check, Finding, claim
from largeprompt.paper.experiment import Computation, Measurement

DRAWS = {"smoke": 2**7, "quick": 2**10, "paper": 2**13}
_D = 3  # coordinates of a covariate
_L, _SLOPE, _NOISE = 128, 2.0, 0.4  # where another is varied


@dataclasses.dataclass(frozen=True)
class LearnedScales(Computation):
    """The scale κ of the scores κ⟨x, x_q⟩ at which averages of labels predict best, tokens on the unit sphere.

    Labels are w·x plus noise, ‖w‖ is the Lipschitz constant; one of prompt length, constant and noise varies at a time.
    """

    words: ClassVar[str] = "best scale of attention, {draws} instances"

    draws: int
    lengths: tuple[int, ...] = (32, 128, 512)
    slopes: tuple[float, ...] = (1.0, 2.0, 4.0)
    noises: tuple[float, ...] = (0.1, 0.4, 1.6)
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 10.0 + 9.0 * self.draws / 2**10

    def settings(self) -> list[dict[str, Any]]:
        """Prompt length, Lipschitz constant and variance of the noise, and which of them is varied."""
        usual = {"L": _L, "slope": _SLOPE, "noise": _NOISE}
        ranges = {"L": self.lengths, "slope": self.slopes, "noise": self.noises}
        return [usual | {name: value, "varied": name} for name, values in ranges.items() for value in values]

    def table(self, found: list[tuple[float, float]]) -> xr.Dataset:
        """The settings with what was found: the best scale, and the error of its logarithm."""
        scale, error = np.array(found).T
        settings = self.settings()
        columns = {name: [one[name] for one in settings] for name in settings[0]}
        columns |= {"scale": scale, "error": scale * error}
        return xr.Dataset({name: ("setting", values) for name, values in columns.items()})

    def _compute(self, progress: Progress) -> xr.Dataset:
        found, settings = [], self.settings()
        with progress.task(self.title, len(settings)) as advance:
            for i, one in enumerate(settings):
                label = NoisyLink(_identity, one["noise"])
                task = SingleIndex(label, lp.Sphere(1.0, _D), lp.Sphere(one["slope"], _D))
                key = jax.random.fold_in(jax.random.key(self.seed), i)
                best = optimal_in_family(_averages_of_labels, [2.0], task, one["L"], key, draws=self.draws)
                found.append((float(jnp.exp(best.parameters[0])), float(best.stderr[0])))
                advance(1, f"L = {one['L']}")
        return self.table(found)


def _identity(t):
    return t


def _averages_of_labels(parameters) -> lp.SoftmaxAttention:
    """Scores e^p⟨x, x_q⟩, values that read the label."""
    label = jnp.zeros(_D + 1).at[_D].set(1.0)
    return lp.SoftmaxAttention(jnp.exp(parameters[0]) * jnp.diag(1 - label), label[None])


SCALES = Measurement("scales", computation=lambda choice: LearnedScales(DRAWS[choice.preset]))


def _exponent(data: xr.Dataset, varied: str) -> RateFit:
    """Of the scale in what is varied."""
    at = data.varied.values == varied
    return fit_power_law(*(data[name].values[at] for name in (varied, "scale", "error")))


@claim("F4", "Collins et al. (2024), abstract", SCALES, role="context")
def _adapts(data: xr.Dataset) -> Finding:
    """The window of softmax attention widens with decreasing Lipschitz constant and with increasing label noise.

    Exponent of the best scale κ of the scores in the Lipschitz constant, positive, and in the variance of the noise,
    negative; the window has the width of κ to the power of −1/2.
    """
    in_slope, in_noise = _exponent(data, "slope"), _exponent(data, "noise")
    return Finding(
        (
            Check("exponent in the Lipschitz constant", in_slope.slope, ">", 0.0, in_slope.stderr),
            Check("exponent in the variance of the noise", in_noise.slope, "<", 0.0, in_noise.stderr),
        ),
        f"If noise were all of the variance, they would be {4 / (_D + 3):.3f} and {-2 / (_D + 3):.3f}.",
    )


@claim("S4", "docs/tasks.md", SCALES, role="own")
def _grows_with_length(data: xr.Dataset) -> Finding:
    """For affine targets on a sphere of dimension d − 1 the best scale grows as L to the power of 2/(d + 3).

    Exponent of the best scale in the prompt length, within 0.1 of it.
    """
    fit = _exponent(data, "L")
    return Finding((Check("exponent in L", fit.slope, "=", 2 / (_D + 3), fit.stderr, tolerance=0.1, resolution=0.1),))
