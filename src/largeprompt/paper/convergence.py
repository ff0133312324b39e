"""How fast the output and the gradients of softmax attention reach their infinite-prompt limits, law by law.

Propositions 3.1 and 3.4: measured, predicted and bounded, for one head at the paper's default initialisation. Its
scores carry the usual factor 1/√D, but for the last law, where they have the paper's factor 1: there the mean over
queries of the constants is infinite, and the decay slower than 1/L.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.attention import Head, SoftmaxAttention, softmax_form
from largeprompt.concentration import RateFit, bounds, deviation, fit_power_law, predict
from largeprompt.icl import kms
from largeprompt.measures import AbstractMeasure, Cube, Gaussian, Mixture, Rademacher, Sphere

QUANTITIES = ("output", "V", "U")
UNSCALED = "KMS, unscaled"
LAWS = ("Gaussian", "KMS", "mixture", "Rademacher", "cube", "sphere", UNSCALED)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured: laws by name, prompt lengths, prompts a length, token dimension and seed."""

    lengths: tuple[int, ...]
    replicates: int
    laws: tuple[str, ...] = LAWS
    dim: int = 6
    seed: int = 0

    def __post_init__(self):
        lengths = [checks.prompt_length(L) for L in self.lengths]
        if len(lengths) < 2 or any(isinstance(L, float) for L in lengths) or sorted(set(lengths)) != lengths:
            raise ValueError(f"lengths is {self.lengths}; it must be two or more finite lengths in increasing order")
        if not self.laws or not set(self.laws) <= set(LAWS):
            raise ValueError(f"laws is {self.laws}; it must be some of {', '.join(LAWS)}")
        checks.count("replicates", self.replicates, at_least=2)
        checks.count("dim", self.dim)
        if checks.count("seed", self.seed, at_least=0) >= 2**32:
            raise ValueError(f"seed is {self.seed}; it must be below {2**32}")


PRESETS = {
    "smoke": Settings(lengths=(20, 60), replicates=100, laws=("Gaussian", "Rademacher", UNSCALED)),
    "quick": Settings(lengths=(10, 30, 100, 300, 1000, 3000, 10_000), replicates=600),
}


def laws(settings: Settings) -> dict[str, AbstractMeasure]:
    """Centred laws, each coordinate of variance one."""
    dim = settings.dim
    centre, eye = jnp.full(dim, math.sqrt(0.5)), jnp.eye(dim)
    correlated = Gaussian(jnp.zeros(dim), kms(dim))
    known = {
        "Gaussian": Gaussian(jnp.zeros(dim), eye),
        "KMS": correlated,
        "mixture": Mixture([0.5, 0.5], [Gaussian(sign * centre, 0.5 * eye) for sign in (1.0, -1.0)]),
        "Rademacher": Rademacher(jnp.ones(dim)),
        "cube": Cube(jnp.full(dim, math.sqrt(3.0))),
        "sphere": Sphere(math.sqrt(dim), dim),
        UNSCALED: correlated,
    }
    return {name: known[name] for name in settings.laws}


def attention(settings: Settings, name: str) -> SoftmaxAttention:
    """The head at the default initialisation of the paper's experiments (Appendix A.1), with the scores of a law."""
    scale = 1.0 if name == UNSCALED else settings.dim**-0.5
    return softmax_form(Head.pytorch_default(jax.random.key(settings.seed), settings.dim, scale=scale))


def steps(settings: Settings) -> Iterator[tuple[str, int]]:
    """The measurements, in the order in which they are made."""
    return ((name, L) for name in laws(settings) for L in settings.lengths)


def measure(settings: Settings, done: Callable[[str, int], None] = lambda name, L: None) -> xr.Dataset:
    """Measured, predicted and bounded, by law, quantity and length; `done` hears of each measurement's end."""
    began = time.perf_counter()
    known = laws(settings)
    curves: dict[str, Any] = {
        "mean_square": "mean squared deviation from the infinite prompt",
        "stderr": "its standard error over prompts",
        "predicted": "predicted: exact, or the 1/L law",
        "trusted": "1 where heavy tails leave an estimate as good as it seems",
        "bound_log10": "decimal logarithm of the bound of Proposition 3.1 or 3.4",
    }
    numbers = ("constant", "exponent", "slope", "slope_stderr", "predicted_slope", "ratio", "ratio_stderr")
    shape = (len(known), len(QUANTITIES))
    values = {name: np.full((*shape, len(settings.lengths)), math.nan) for name in curves}
    told = {name: np.full(shape, math.nan) for name in numbers}
    regimes = []
    for i, (name, mu) in enumerate(known.items()):
        layer, key = attention(settings, name), jax.random.fold_in(jax.random.key(settings.seed + 1), i)
        predicted = predict(layer, mu, None, settings.lengths, QUANTITIES)
        regimes.append(predicted["output"].regime.sentence)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the mean cannot be trusted")  # marked in the data
            measured = deviation(
                layer,
                mu,
                None,
                settings.lengths,
                QUANTITIES,
                key,
                replicates=settings.replicates,
                done=lambda L, name=name: done(name, L),
            )
        for j, quantity in enumerate(QUANTITIES):
            curve, theory = measured[quantity], predicted[quantity]
            values["mean_square"][i, j], values["stderr"][i, j] = curve.mean_square, curve.stderr
            values["predicted"][i, j], values["trusted"][i, j] = theory.mean_square, curve.trusted
            values["bound_log10"][i, j] = [
                bounds.bound(layer, mu, mu, L, quantity).log10 if L > 1 else math.nan for L in settings.lengths
            ]
            told["constant"][i, j], told["exponent"][i, j] = theory.constant, theory.regime.exponent
            for part, number in _compared(curve, theory).items():
                told[part][i, j] = number
    dims = ("law", "quantity")
    return xr.Dataset(
        {name: ((*dims, "L"), values[name], {"long_name": text}) for name, text in curves.items()}
        | {name: (dims, told[name]) for name in numbers}
        | {"regime": ("law", regimes)},
        coords={"law": list(known), "quantity": list(QUANTITIES), "L": np.asarray(settings.lengths)},
        attrs={
            **{k: v for k, v in dataclasses.asdict(settings).items() if k not in ("lengths", "laws")},
            "paper": "arXiv:2512.11784, Propositions 3.1 and 3.4",
            "seconds": time.perf_counter() - began,
        },
    )


def _compared(curve, theory) -> dict[str, float]:
    """Slopes over the longer half of the lengths, and there the weighted mean of measured over predicted."""
    upper = slice(len(curve.L) // 2, None) if len(curve.L) > 3 else slice(None)
    L, square, error, expected = (
        curve.L[upper],
        curve.mean_square[upper],
        curve.stderr[upper],
        theory.mean_square[upper],
    )
    fit = fit_power_law(L, square, error)
    found = {"slope": fit.slope, "slope_stderr": fit.stderr}
    if np.isfinite(expected).all():
        line: RateFit = fit_power_law(L, expected, error * expected / square)
        weight = (expected / error) ** 2
        found["predicted_slope"] = line.slope
        found["ratio"] = float(weight @ (square / expected) / weight.sum())
        found["ratio_stderr"] = float(weight.sum() ** -0.5)
    return found
