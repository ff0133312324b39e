"""Figure of laws, claims T3 and T4: how fast do output and gradients converge, law by law (Propositions 3.1 and 3.4)?

Measured, predicted and bounded, for one head at the paper's default initialisation. Its scores have the usual factor
1/√D, but for the last law, where they have the paper's factor 1: there the mean over queries of the constants is
infinite, and the decay slower than 1/L.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from largeprompt.attention import Head, softmax_form
from largeprompt.lab import Progress, Study
from largeprompt.paper.chart import COLOURS, Chart, Panel, Series
from largeprompt.paper.choice import Choice
from largeprompt.paper.claims import ERRORS, VERDICTS, Check, Finding, claim, equal
from largeprompt.paper.experiment import Computation, Measurement, join


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Laws of tokens, lengths, and prompts for each law and length."""

    laws: tuple[str, ...]
    law_prompts: int
    law_lengths: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10_000)


SIZES = {
    "smoke": Sizes(("Gaussian", "Rademacher", "KMS, unscaled"), 100, (20, 60)),
    "quick": Sizes(("Gaussian", "KMS", "mixture", "Rademacher", "KMS, unscaled"), 600),
    "paper": Sizes(("Gaussian", "KMS", "mixture", "Rademacher", "cube", "sphere", "KMS, unscaled"), 2000),
}
QUANTITIES = ("output", "V", "U")
UNSCALED = "KMS, unscaled"
LAWS = ("Gaussian", "KMS", "mixture", "Rademacher", "cube", "sphere", UNSCALED)
MORE = 10  # times as many prompts where tails are heavy or gradients compared: Gaussian prompts are cheap


@dataclasses.dataclass(frozen=True)
class AbstractStudies(Computation):
    """Studies of one head on several laws: `prompts` drawn for each length, token dimension, seed of all."""

    lengths: tuple[int, ...]
    prompts: int
    dim: int = 6
    seed: int = 0

    @property
    def studies(self) -> dict[str, Study]:
        """The study of each law, by its name."""
        raise NotImplementedError

    def _compute(self, progress: Progress) -> xr.Dataset:
        """By law, quantity and length; each law with the settings of its study."""
        parts = {name: study.run(progress) for name, study in self.studies.items()}
        first = next(iter(parts.values())).attrs
        data = xr.concat(parts.values(), "law", combine_attrs="drop").assign_coords(law=list(parts))
        data["toml"] = "law", [part.attrs["toml"] for part in parts.values()]
        data["prompts"] = "law", np.asarray([part.attrs["replicates"] for part in parts.values()], np.int32)
        return data.assign_attrs(dim=self.dim, seed=self.seed, paper=first["paper"], versions=first["versions"])


@dataclasses.dataclass(frozen=True)
class Laws(AbstractStudies):
    """Output, ∇_V and ∇_U on tokens of several laws, by name. Paper: Propositions 3.1 and 3.4."""

    words: ClassVar[str] = "convergence by law of tokens"

    laws: tuple[str, ...] = LAWS

    @property
    def seconds(self) -> float:
        streamed = len(set(self.laws) - {"Gaussian", "KMS", UNSCALED})  # compiled again for each, and drawn whole
        return 8 + streamed * (8 + 8e-7 * self.prompts * sum(self.lengths))

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

    words: ClassVar[str] = "convergence of the gradients in K and Q"

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


NAMES = {"output": "output T", **{name: f"gradient ∇_{name} T" for name in "VUKQ"}}
_MARKS = ("o", "s", "D", "^", "v", "o", "s")
_BARS = 2  # standard errors on each side


class Convergence(Measurement):
    """Mean squared deviations from the infinite prompt by length: measured, predicted without a fit, and bounded."""

    drawn: ClassVar[bool] = True
    words: ClassVar[str] = "Convergence to the infinite prompt, by law of tokens"
    advice: ClassVar[str] = (
        "Points lie on the predicted lines, which are not fitted: 1/L for every law, but slower where scores are "
        "not divided by √D and spread past the threshold. The paper's bounds lie many powers of ten above."
    )

    def chart(self, data: xr.Dataset) -> Chart:
        return Chart(tuple(_panel(data.sel(quantity=name)) for name in data.quantity.values), share_y=False)

    def summary(self, data: xr.Dataset) -> list[str]:
        lines = [_rates_of(data.sel(quantity=name)) for name in data.quantity.values]
        for law in data.law.values:
            here = data.sel(law=law).isel(quantity=0)
            if str(here.regime_name.values) != "1/L":
                lines.append(f"{law}: {here.regime.item()}.")
        doubtful = int(data.trusted.size - data.trusted.astype(bool).sum())
        few, many = int(data.prompts.min()), int(data.prompts.max())
        prompts = f"{few}" if few == many else f"{few} to {many}"
        lines.append(
            f"{prompts} prompts a law and length, slopes and ratios over the longer half of the lengths; {doubtful} of "
            f"{data.trusted.size} points have tails too heavy for their error bars."
        )
        return lines


def measured_laws(choice: Choice) -> Laws:
    """What the preset measures."""
    sizes = SIZES[choice.preset]
    return Laws(sizes.law_lengths, sizes.law_prompts, laws=sizes.laws)


def _weights(choice: Choice) -> Weights:
    sizes = SIZES[choice.preset]
    return Weights(sizes.law_lengths, sizes.law_prompts)


def _panel(data: xr.Dataset) -> Panel:
    L, series = data.L.values, []
    for law, colour, mark in zip(data.law.values, COLOURS, _MARKS, strict=False):
        here = data.sel(law=law)
        off = _BARS * here.stderr.values
        low, high = here.measured.values - off, here.measured.values + off
        low = np.where(low > 0, low, here.measured.values * 1e-3)  # the axis is logarithmic
        series.append(Series(str(law), L, here.measured.values, "measured", colour, low, high, line=False, mark=mark))
        expected = np.where(np.isfinite(here.predicted.values), here.predicted.values, np.nan)
        series.append(Series("predicted", L, expected, "theory", colour, width=1.0))
        bound = 10.0**here.bound_log10.values
        series.append(Series("the paper's bound", L, bound, "bound", colour, dash="dot", width=1.0))
    title = NAMES[str(data.quantity.values)]
    return Panel(title, "prompt length L", "mean squared deviation", tuple(series))


def decades_above(data: xr.Dataset, errors: float = 0.0) -> xr.DataArray:
    """By how many powers of ten the bound exceeds the measurement, raised by some standard errors."""
    return data.bound_log10 - np.log10(data.measured + errors * data.stderr)


def _rates_of(data: xr.Dataset) -> str:
    parts = [
        f"{law} {_slope(float(here.slope))} ± {float(here.slope_stderr):.3f}{_expected(float(here.predicted_slope))}"
        for law, here in ((law, data.sel(law=law)) for law in data.law.values)
        if math.isfinite(float(here.slope))
    ]
    slopes = f"slopes {join(parts)}" if parts else "no slope is known"
    ratios = data.ratio.values[np.isfinite(data.ratio.values)]
    ratio = f"; measured over predicted {_range(ratios, '{:.3f}')}" if len(ratios) else ""
    above = decades_above(data).values
    above = above[np.isfinite(above)]
    bound = f"; bound over measured {_range(above, '10^{:.1f}')}" if len(above) else ""
    return f"{NAMES[str(data.quantity.values)]}: {slopes}{ratio}{bound}."


def _range(values: np.ndarray, form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(end) for end in (values.min(), values.max())))


def _slope(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _expected(slope: float) -> str:
    return f" (predicted {_slope(slope)})" if math.isfinite(slope) else ""


LAWS_FIGURE = Convergence("laws", computation=measured_laws)
WEIGHTS = Measurement("gradients in K and Q", computation=_weights)
_FASTEST = -1 / 3  # the exponent of the printed bounds is min(1/3, c/σ²): none falls faster
_DECAY = 0.2  # error of a slope from which on 1 and 1/3 cannot be distinguished
_SLOPE, _RATIO = 0.1, 0.1  # how near slope and level must be to what is predicted
_SHORT = {"output": "output", **{name: f"∇_{name}" for name in "VUKQ"}}


def _worst(checks: Iterable[Check]) -> Check:
    """The one that decides, among alike ones."""
    return max(checks, key=lambda check: (VERDICTS.index(check.verdict), ERRORS * check.error - check.margin))


def _lines(data: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    """The curves, by quantity and law, each with what to call it."""
    return [
        (f"{_SHORT[str(name)]}, {law}", data.sel(quantity=name, law=law))
        for name in data.quantity.values
        for law in data.law.values
    ]


def _is_predicted(line: xr.Dataset) -> bool:
    """Whether there is a prediction at the lengths compared: exact, or an asymptote from its onset on."""
    compared = line.L.values[len(line.L) // 2 if len(line.L) > 3 else 0 :]
    near = bool(line.exact) or float(line.onset) <= compared.min()
    return near and math.isfinite(float(line.predicted_slope))


def _checks(data: xr.Dataset, what: str) -> tuple[Check, ...]:
    """The bound above the measurement, decay no slower than its own, and as sharply as is predicted."""
    lines = _lines(data)
    above = [
        Check(f"{name}: log₁₀ of bound over measured + 3 errors, least over L", _least(line), ">", 0.0)
        for name, line in lines
    ]
    decays = [
        Check(f"{name}: slope", float(line.slope), "<", _FASTEST, float(line.slope_stderr), resolution=_DECAY)
        for name, line in lines
    ]
    slopes, ratios = [], []
    for name, line in lines:
        if _is_predicted(line):
            slope = float(line.slope), float(line.predicted_slope), _SLOPE, float(line.slope_stderr)
            slopes.append(equal(f"{name}: slope against the one predicted", *slope))
            ratio = float(line.ratio), 1.0, _RATIO, float(line.ratio_stderr)
            ratios.append(equal(f"{name}: measured over predicted", *ratio))
    unknown = Check(f"{what}: no law of tokens has a sharp law at these lengths", math.nan, "=", 1.0)
    return tuple(_worst(group or [unknown]) for group in (above, decays, slopes, ratios))


def _least(line: xr.Dataset) -> float:
    """Of the decades between bound and measurement; NaN where a bound is missing."""
    return float(np.min(decades_above(line, ERRORS).values))


def _room(data: xr.Dataset) -> float:
    """The fewest decades between a bound and what is measured."""
    return float(decades_above(data).values.min())


def _remark(data: xr.Dataset) -> str:
    above = decades_above(data).values
    lines = [f"The bounds lie 10^{above.min():.1f} to 10^{above.max():.1f} above what is measured."]
    for name, line in _lines(data):
        if str(line.regime_name.values) != "1/L" and math.isfinite(float(line.slope)):
            slope = f"{float(line.slope):.3f} ± {float(line.slope_stderr):.3f}"
            lines.append(f"{name}: {slope}, slower than 1/L, for large L {-float(line.exponent):.3f}.")
    left_out = [name for name, line in _lines(data) if not _is_predicted(line)]
    if left_out:
        lines.append(
            f"Not held against the sharp law, which sets in for longer prompts or not at all: {'; '.join(left_out)}."
        )
    return " ".join(lines)


_DECIDES = (
    "Mean squared deviation from the infinite prompt over fresh prompts and queries, at each length, for each law of "
    "tokens: the explicit bound lies above it with three errors; it falls faster than L^{−1/3}, which no printed bound "
    "does; its slope and level over the longer half of the lengths are those that this library's sharp law predicts. "
    "Shown of each is the law that comes nearest to failing."
)


@claim("T3", "Proposition 3.1", LAWS_FIGURE, role="bound", rule=_DECIDES)
def _output(laws: xr.Dataset) -> Finding:
    """On sub-Gaussian tokens and queries the output of softmax attention on L tokens tends to that on their law:
    E‖T[μ̂_L] − T[μ]‖² ≤ c₁σ⁶ ln L / L^{c₂/σ²}.

    {rule}
    """
    data = laws.sel(quantity=["output"])
    remark = "Eq. (1) holds a factor ln L and so needs L ≥ 2 (errata E6); its constants depend on μ (G9)."
    return Finding(_checks(data, "output"), f"{_remark(data)} {remark}", _room(data))


@claim("T4", "Proposition 3.4", LAWS_FIGURE, WEIGHTS, role="bound", rule=_DECIDES)
def _gradients(laws: xr.Dataset, weights: xr.Dataset) -> Finding:
    """So do its derivatives in V and U, with bounds c₁σ⁶ ln L / L^{c₂/σ²} and c₁σ¹² ln² L / L^{c₂/σ²}, and through the
    chain rule those in K and Q.

    {rule} ∇_K and ∇_Q on standard Gaussian tokens.
    """
    groups = [laws.sel(quantity=["V"]), laws.sel(quantity=["U"]), weights.sel(quantity=["K", "Q"])]
    checks = [_checks(data, _SHORT[str(data.quantity.values[0])]) for data in groups]
    flat = [check for group in zip(*checks, strict=True) for check in group]
    remarks = (f"{_SHORT[str(data.quantity.values[0])]}: {_remark(data)}" for data in groups)
    return Finding(tuple(flat), " ".join(remarks), min(map(_room, groups)))
