"""How fast the output and the gradients of softmax attention reach their infinite-prompt limits, law by law.

Propositions 3.1 and 3.4: measured, predicted and bounded, for one head at the paper's default initialisation. Its
scores carry the usual factor 1/√D, but for the last law, where they have the paper's factor 1: there the mean over
queries of the constants is infinite, and the decay slower than 1/L.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.attention import Head, softmax_form
from largeprompt.lab import Study

QUANTITIES = ("output", "V", "U")
UNSCALED = "KMS, unscaled"
MORE = 10  # times as many prompts for it: heavy tails ask for them, and Gaussian ones are cheap
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


def _measures(dim: int) -> dict[str, dict[str, Any]]:
    """Centred laws, each coordinate of variance one."""
    centre, half = np.full(dim, math.sqrt(0.5)), 0.5 * np.eye(dim)
    components = [{"kind": "gaussian", "mean": sign * centre, "cov": half} for sign in (1.0, -1.0)]
    correlated = {"kind": "gaussian", "cov": "kms:0.5", "dim": dim}
    return {
        "Gaussian": {"kind": "gaussian", "cov": "identity", "dim": dim},
        "KMS": correlated,
        "mixture": {"kind": "mixture", "weights": [0.5, 0.5], "components": components},
        **{name: {"kind": name.lower(), "dim": dim} for name in ("Rademacher", "cube", "sphere")},
        UNSCALED: correlated,
    }


def studies(settings: Settings) -> dict[str, Study]:
    """The study of each law: the head of the paper's experiments (Appendix A.1) in its (U, V) form."""
    measures, found = _measures(settings.dim), {}
    for name in settings.laws:
        scale = 1.0 if name == UNSCALED else settings.dim**-0.5
        layer = softmax_form(Head.pytorch_default(jax.random.key(settings.seed), settings.dim, scale=scale))
        found[name] = Study(
            measures[name],
            layer={"U": np.asarray(layer.U), "V": np.asarray(layer.V)},
            lengths=settings.lengths,
            quantities=QUANTITIES,
            replicates=settings.replicates * (MORE if name == UNSCALED else 1),
            seed=(len(LAWS) * settings.seed + LAWS.index(name)) % 2**32,
        )
    return found


def measure(settings: Settings, done: Callable[[str, Any], None] = lambda name, part: None) -> xr.Dataset:
    """The studies as one dataset, by law, quantity and length; `done` hears of each part of each of them."""
    parts = {
        name: study.carry_out(lambda part, name=name: done(name, part)) for name, study in studies(settings).items()
    }
    data = xr.concat(parts.values(), "law", combine_attrs="drop").assign_coords(law=list(parts))
    data["toml"] = "law", [part.attrs["toml"] for part in parts.values()]
    attrs = {name: next(iter(parts.values())).attrs[name] for name in ("paper", "versions")}
    seconds = sum(part.attrs["seconds"] for part in parts.values())
    return data.assign_attrs(
        **attrs, replicates=settings.replicates, dim=settings.dim, seed=settings.seed, seconds=seconds
    )
