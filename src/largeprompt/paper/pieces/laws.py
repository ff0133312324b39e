"""How fast the output and the gradients of softmax attention reach their infinite-prompt limits, law by law.

Propositions 3.1 and 3.4: measured, predicted and bounded, for one head at the paper's default initialisation. Its
scores carry the usual factor 1/√D, but for the last law, where they have the paper's factor 1: there the mean over
queries of the constants is infinite, and the decay slower than 1/L.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import xarray as xr

from largeprompt import _checks as checks
from largeprompt.attention import Head, softmax_form
from largeprompt.lab import Progress, Study

from ._piece import AbstractPiece, Done

QUANTITIES = ("output", "V", "U")
UNSCALED = "KMS, unscaled"
LAWS = ("Gaussian", "KMS", "mixture", "Rademacher", "cube", "sphere", UNSCALED)
MORE = 10  # times as many prompts where tails are heavy or gradients compared: Gaussian prompts are cheap


class _Noted(Progress):
    """Passes on the notes of a study."""

    def __init__(self, done: Done):
        self._done = done

    def step(self, name: str, done: float, note: str = "") -> None:
        self._done(note)


@dataclasses.dataclass(frozen=True)
class AbstractStudies(AbstractPiece):
    """Studies of one head on several laws: `prompts` drawn for each length, token dimension, seed of all."""

    lengths: tuple[int, ...]
    prompts: int
    dim: int = 6
    seed: int = 0

    def __post_init__(self):
        whole = [checks.prompt_length(L) for L in self.lengths]
        if len(whole) < 2 or any(isinstance(L, float) for L in whole) or sorted(set(whole)) != whole:
            raise ValueError(f"lengths is {self.lengths}; it must be two or more finite lengths in increasing order")
        checks.count("prompts", self.prompts, at_least=2)
        checks.count("dim", self.dim)
        if checks.count("seed", self.seed, at_least=0) >= 2**32:
            raise ValueError(f"seed is {self.seed}; it must be below {2**32}")

    @property
    def studies(self) -> dict[str, Study]:
        """The study of each law, by its name."""
        raise NotImplementedError

    def _compute(self, done: Done) -> xr.Dataset:
        """By law, quantity and length; each law with the settings of its study."""
        parts = {
            name: study.run(_Noted(lambda note, name=name: done(f"{name}: {note}")))
            for name, study in self.studies.items()
        }
        first = next(iter(parts.values())).attrs
        data = xr.concat(parts.values(), "law", combine_attrs="drop").assign_coords(law=list(parts))
        data["toml"] = "law", [part.attrs["toml"] for part in parts.values()]
        data["prompts"] = "law", np.asarray([part.attrs["replicates"] for part in parts.values()], np.int32)
        return data.assign_attrs(dim=self.dim, seed=self.seed, paper=first["paper"], versions=first["versions"])


@dataclasses.dataclass(frozen=True)
class Laws(AbstractStudies):
    """Output, ∇_V and ∇_U on tokens of several laws, by name. Paper: Propositions 3.1 and 3.4."""

    laws: tuple[str, ...] = LAWS

    def __post_init__(self):
        super().__post_init__()
        if not self.laws or not set(self.laws) <= set(LAWS):
            raise ValueError(f"laws is {self.laws}; it must be some of {', '.join(LAWS)}")

    @property
    def title(self) -> str:
        return "convergence by law of tokens"

    @property
    def seconds(self) -> float:
        streamed = len(set(self.laws) - {"Gaussian", "KMS", UNSCALED})  # compiled anew for each, and drawn whole
        return 8 + streamed * (30 + 8e-7 * self.prompts * sum(self.lengths))

    @property
    def studies(self) -> dict[str, Study]:
        """The head of the paper's experiments (Appendix A.1) in its (U, V) form."""
        measures, found = _measures(self.dim), {}
        for name in self.laws:
            scale = 1.0 if name == UNSCALED else self.dim**-0.5
            layer = softmax_form(Head.pytorch_default(jax.random.key(self.seed), self.dim, scale=scale))
            found[name] = Study(
                measures[name],
                layer={"U": np.asarray(layer.U), "V": np.asarray(layer.V)},
                lengths=self.lengths,
                quantities=QUANTITIES,
                replicates=self.prompts * (MORE if name == UNSCALED else 1),
                seed=(len(LAWS) * self.seed + LAWS.index(name)) % 2**32,
            )
        return found


@dataclasses.dataclass(frozen=True)
class Weights(AbstractStudies):
    """∇_K and ∇_Q of the same head on standard Gaussian tokens. Paper: end of Section 3, by the chain rule from ∇_U."""

    @property
    def title(self) -> str:
        return "convergence of the gradients in K and Q"

    @property
    def seconds(self) -> float:
        return 5.0

    @property
    def studies(self) -> dict[str, Study]:
        """The head with its own matrices."""
        study = Study(
            _measures(self.dim)["Gaussian"],
            layer={"init": "pytorch", "seed": self.seed, "scale": self.dim**-0.5},
            lengths=self.lengths,
            quantities=("K", "Q"),
            replicates=self.prompts * MORE,
            seed=self.seed,
        )
        return {"Gaussian": study}


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
