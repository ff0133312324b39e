"""How fast the output and the gradients of softmax attention reach their infinite-prompt limits, for three laws.

Propositions 3.1 and 3.4, measured, beside the sharp 1/L prediction, at the paper's default initialisation.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.attention import Head, SoftmaxAttention, softmax_form
from largeprompt.concentration import deviation, fit_power_law, predict
from largeprompt.measures import AbstractMeasure, Gaussian, Mixture, Rademacher

QUANTITIES = ("output", "V", "U")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured: prompt lengths, prompts a length, queries, token dimension and seed."""

    lengths: tuple[int, ...]
    replicates: int
    queries: int
    dim: int = 6
    seed: int = 0

    def __post_init__(self):
        lengths = [checks.prompt_length(L) for L in self.lengths]
        if not lengths or any(isinstance(L, float) for L in lengths) or sorted(set(lengths)) != lengths:
            raise ValueError(f"lengths is {self.lengths}; it must be finite prompt lengths in increasing order")
        checks.count("replicates", self.replicates, at_least=2)
        checks.count("queries", self.queries)
        checks.count("dim", self.dim)
        if checks.count("seed", self.seed, at_least=0) >= 2**32:
            raise ValueError(f"seed is {self.seed}; it must be below {2**32}")


PRESETS = {
    "smoke": Settings(lengths=(10, 1000), replicates=64, queries=8),
    "quick": Settings(lengths=(10, 30, 100, 300, 1000, 3000, 10_000, 30_000), replicates=256, queries=32),
}


def laws(dim: int) -> dict[str, AbstractMeasure]:
    """A Gaussian, a mixture of two and random signs, centred, each coordinate of variance one."""
    centre = jnp.full(dim, jnp.sqrt(0.5))
    halves = [Gaussian(sign * centre, 0.5 * jnp.eye(dim)) for sign in (1.0, -1.0)]
    return {
        "Gaussian": Gaussian(jnp.zeros(dim), jnp.eye(dim)),
        "mixture": Mixture([0.5, 0.5], halves),
        "Rademacher": Rademacher(jnp.ones(dim)),
    }


def attention(settings: Settings) -> SoftmaxAttention:
    """The layer at the default initialisation of the paper's experiments (Appendix A.1)."""
    return softmax_form(Head.pytorch_default(jax.random.key(settings.seed), settings.dim))


def steps(settings: Settings) -> Iterator[tuple[str, int]]:
    """The measurements, in the order in which they are made."""
    return ((name, L) for name in laws(settings.dim) for L in settings.lengths)


def measure(settings: Settings, done: Callable[[str, int], None] = lambda name, L: None) -> xr.Dataset:
    """Mean squares over prompts and queries, by law, quantity and length; `done` hears of each step's end."""
    began = time.perf_counter()
    layer, shape = attention(settings), (3, len(QUANTITIES), len(settings.lengths))
    squares, errors, constants = np.empty(shape), np.empty(shape), np.empty(shape[:2])
    root = jax.random.key(settings.seed + 1)
    for i, (name, mu) in enumerate(laws(settings.dim).items()):
        law_key = jax.random.fold_in(root, i)
        queries = mu.sample(jax.random.fold_in(law_key, 0), settings.queries)
        predicted = predict(layer, mu, queries, settings.lengths, QUANTITIES)
        constants[i] = [predicted[q].constant for q in QUANTITIES]
        measured = deviation(
            layer,
            mu,
            queries,
            settings.lengths,
            QUANTITIES,
            law_key,
            replicates=settings.replicates,
            sampler="tokens",  # all queries on every prompt
            done=lambda L, name=name: done(name, L),
        )
        squares[i] = [measured[q].mean_square for q in QUANTITIES]
        errors[i] = [measured[q].stderr for q in QUANTITIES]
    dims = ("law", "quantity", "L")
    lengths = np.asarray(settings.lengths)
    return xr.Dataset(
        {
            "mean_square": (dims, squares, {"long_name": "mean squared deviation from the infinite prompt"}),
            "stderr": (dims, errors, {"long_name": "its standard error over prompts"}),
            "predicted": (dims, constants[:, :, None] / lengths, {"long_name": "the 1/L law"}),
        },
        coords={"law": list(laws(settings.dim)), "quantity": list(QUANTITIES), "L": lengths},
        attrs={
            **{k: v for k, v in dataclasses.asdict(settings).items() if k != "lengths"},
            "paper": "arXiv:2512.11784, Propositions 3.1 and 3.4",
            "seconds": time.perf_counter() - began,
        },
    )


def slopes(data: xr.Dataset) -> xr.Dataset:
    """Log-log slope over the upper half of the lengths by weighted least squares, and its standard error."""
    upper = data.isel(L=slice(data.sizes["L"] // 2, None)) if data.sizes["L"] > 3 else data
    found = np.empty((2, data.sizes["law"], data.sizes["quantity"]))
    for i, j in np.ndindex(*found.shape[1:]):
        curve = upper.isel(law=i, quantity=j)
        fit = fit_power_law(curve.L.values, curve.mean_square.values, curve.stderr.values)
        found[:, i, j] = fit.slope, fit.stderr
    dims = ("law", "quantity")
    coords = {name: data[name] for name in dims}
    return xr.Dataset({"slope": (dims, found[0]), "stderr": (dims, found[1])}, coords)
