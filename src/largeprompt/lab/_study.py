"""How near finite prompts are to their limit, as data: what is measured, and what comes of it."""

import dataclasses
import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr

from largeprompt import __version__, concentration
from largeprompt._device import Device
from largeprompt._precision import is_float64
from largeprompt._progress import Progress
from largeprompt.attention import AbstractLayer
from largeprompt.concentration import bounds
from largeprompt.icl import LinearRegression
from largeprompt.measures import AbstractMeasure
from largeprompt.measures._worth import doubts

from ._laws import layer_from, measure_from, task_from
from ._lengths import lengths_from
from ._settings import Table, inlined, short, toml_lines
from ._weights import described

_KEYS = ("measure", "query", "layer", "L", "quantity", "replicates", "seed", "query_in_prompt", "bounds")
_TOKENS = {"kind": "gaussian", "cov": "identity", "dim": 5}
_START = {"init": "pytorch", "seed": 0}
_LEVELS = ("q05", "q50", "q95")
_BEFORE = {"L": "lengths", "quantity": "quantities"}


@dataclasses.dataclass(frozen=True, eq=False)
class Study:
    """One measurement as data: tokens, queries and a layer as tables, prompt lengths, and the quantities compared.

    `measure` describes a law of tokens, or with kind = "regression" a task, whose risks are then compared; `query` is
    the law of queries, by default that of tokens. `bounds` asks for the paper's bounds beside the measurement.
    """

    measure: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(_TOKENS))
    query: Mapping[str, Any] | None = None
    layer: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(_START))
    lengths: Any = "10:10000:log"
    quantities: Any = None
    replicates: int = 1000
    seed: int = 0
    query_in_prompt: bool = False
    bounds: bool = True
    tokens: AbstractMeasure | LinearRegression = dataclasses.field(init=False, repr=False)
    queries: AbstractMeasure | None = dataclasses.field(init=False, repr=False)
    attention: AbstractLayer = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        table = Table("", vars(self))
        is_task = isinstance(self.measure, Mapping) and self.measure.get("kind") == "regression"
        if is_task and self.query is not None:
            raise ValueError(f"query is {short(self.query)}; a regression has its own, given by measure.query_sigma")
        tokens = task_from(self.measure) if is_task else measure_from(self.measure)
        queries = None if self.query is None else measure_from(self.query, where="query", dim=tokens.dim)
        found = {
            "tokens": tokens,
            "queries": queries,
            "attention": layer_from(self.layer, tokens.dim),
            "lengths": lengths_from(self.lengths),
            "quantities": _quantities(self.quantities, is_task),
            "replicates": table.count("replicates", at_least=2, below=10**7 + 1),
            "seed": table.count("seed", at_least=0, below=2**32),
            "query_in_prompt": table.truth("query_in_prompt"),
            "bounds": table.truth("bounds"),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def settings(self) -> dict[str, Any]:
        """The study as plain data, under the names that a settings file gives them."""
        found = {name: getattr(self, _BEFORE.get(name, name)) for name in _KEYS}
        return {name: value for name, value in found.items() if value is not None}

    def as_toml(self) -> str:
        """A file that makes this study, with the arrays of other files in it."""
        return "".join(f"{line}\n" for line in toml_lines(self.settings))

    @property
    def layer_in_words(self) -> str:
        """The layer's matrices and the factor of its scores."""
        return described(self.attention, self.layer.get("kind", "softmax"), "scale" in self.layer)

    def run(self, progress: Progress | None = None, *, device: Device = "auto") -> xr.Dataset:
        """Measure, predict and bound.

        `device` is where the measuring is done, and no part of the study: the numbers are the same to rounding.
        """
        if not is_float64():
            raise ValueError("studies run in float64; call largeprompt.use_float64() first")
        began, progress = time.perf_counter(), progress or Progress()
        of_prompts, of_prediction = jax.random.split(jax.random.key(self.seed))
        subject: Any = (self.attention, self.tokens, self.queries, self.lengths, self.quantities, of_prompts)
        options: Any = {"replicates": self.replicates, "query_in_prompt": self.query_in_prompt}
        with warnings.catch_warnings():  # what cannot be trusted is marked as such
            warnings.filterwarnings("ignore", message=".*the mean cannot be trusted")
            measured: Any = concentration.deviation(*subject, **options, device=device, progress=progress)
        curves, numbers = {}, {}
        with progress.task("predicting", len(self.quantities)) as advance:
            for quantity in self.quantities:
                predicted, method, note = self._predicted(quantity, of_prediction)
                bound, name, refusal = self._bounded(quantity)
                curves[quantity] = _measured(measured[quantity]) | {
                    "predicted": _array(predicted, "mean_square", len(self.lengths)),
                    "predicted_stderr": _array(predicted, "stderr", len(self.lengths)),
                    "bound_log10": bound,
                }
                numbers[quantity] = dataclasses.asdict(concentration.compare(measured[quantity], predicted)) | {
                    "constant": _number(predicted, "constant"),
                    "constant_stderr": _number(predicted, "constant_stderr"),
                    **_regime(predicted),
                    "exact": predicted is not None and predicted.exact,
                    "method": method,
                    "note": note,
                    "sampler": measured[quantity].method,
                    "bound_name": name,
                    "bound_refusal": refusal,
                }
                advance(1, f"predicted the {quantity}")
        versions = f"largeprompt {__version__}, jax {jax.__version__}, numpy {np.__version__}"
        return xr.Dataset(
            {name: (("quantity", "L"), np.stack([curves[q][name] for q in curves])) for name in _names(curves)}
            | {name: ("quantity", np.asarray([numbers[q][name] for q in numbers])) for name in _names(numbers)},
            coords={"quantity": list(self.quantities), "L": np.asarray(self.lengths, np.int32)},
            attrs={
                "paper": "arXiv:2512.11784, Propositions 3.1 and 3.4, Theorem 4.3",
                "replicates": self.replicates,
                "seed": self.seed,
                "toml": self.as_toml(),
                "layer": self.layer_in_words,
                "score_scale": getattr(self.attention, "scale", 1.0),
                "seconds": time.perf_counter() - began,
                "versions": versions,
            },
        )

    def _predicted(self, quantity: str, key: Any) -> tuple[Any, str, str]:
        """The prediction, or None; how it is made, or why there is none; and what it warns of."""
        subject = (self.attention, self.tokens, self.queries, self.lengths)
        with doubts() as notes:
            try:
                found = concentration.predict(*subject, quantity, key, query_in_prompt=self.query_in_prompt)
            except ValueError as error:
                return None, f"none, {error}", ""
        return found, found.method, "; ".join(notes)

    def _bounded(self, quantity: str) -> tuple[np.ndarray, str, str]:
        """The paper's bound at each length as a power of ten, its name, and why it was refused where it was."""
        found, name, refusal = np.full(len(self.lengths), math.nan), "", ""
        for i, L in enumerate(self.lengths if self.bounds else ()):
            try:
                bound = bounds.bound(
                    self.attention, self.tokens, self.queries, L, quantity, query_in_prompt=self.query_in_prompt
                )
                found[i], name = bound.log10, bound.name
            except ValueError as error:
                refusal = refusal or str(error)
        return found, name, refusal if self.bounds else "not asked for"


def _measured(found: Any) -> dict[str, np.ndarray]:
    """The curves of a measured quantity; of risks also the gap itself."""
    names = ("stderr", "low", "high", "effective", "needed", *(() if found.gap is None else ("gap", "gap_stderr")))
    curves = {"measured": _array(found, "mean_square")} | {name: _array(found, name) for name in names}
    curves |= dict(zip(_LEVELS, np.asarray(found.quantiles, float).T, strict=True))
    return curves | {"trusted": np.asarray(found.trusted, bool)}


def _regime(predicted: Any) -> dict[str, Any]:
    regime = None if predicted is None else predicted.regime
    words = {"regime": "" if regime is None else regime.sentence, "regime_name": "" if regime is None else regime.name}
    return {name: _number(regime, name) for name in ("exponent", "onset", "spread", "dominated")} | words


def _array(found: Any, name: str, size: int = 0) -> np.ndarray:
    return np.full(size, math.nan) if found is None else np.asarray(getattr(found, name), float)


def _number(found: Any, name: str) -> float:
    return math.nan if found is None else float(getattr(found, name))


def _names(rows: dict[str, dict[str, Any]]) -> list[str]:
    return list(next(iter(rows.values())))


def study_from(settings: Mapping[str, Any], folder: Path | str = ".") -> Study:
    """The study of some settings, as a TOML file holds them; files that they name lie in the folder."""
    Table("", settings).holds(*_KEYS)
    return Study(**{_BEFORE.get(name, name): inlined(name, value, folder) for name, value in settings.items()})


def _quantities(value: Any, is_task: bool) -> tuple[str, ...]:
    if value is None:
        return concentration.OF_RISK if is_task else ("output", "gradient")
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"quantity is {short(value)}; it must be names such as output,gradient")
    names = tuple(dict.fromkeys(name.strip() for name in names))
    known = [name for name in concentration.QUANTITIES if (name in concentration.OF_RISK) == is_task]
    for name in names:
        if name not in known:
            of = "a regression" if is_task else "a law of tokens"
            raise ValueError(f"quantity has {name!r}; of {of} it must be among {', '.join(known)}")
    return names
