"""Concentration: Propositions 3.1 and 3.4, for every law of tokens that is measured."""

import math
from collections.abc import Iterable

import numpy as np
import xarray as xr

from largeprompt.paper.figures.laws import decades_above, measured_laws
from largeprompt.paper.pieces import Needed, Weights
from largeprompt.paper.settings import Settings

from ._claim import ERRORS, VERDICTS, Check, Claim, Finding, Results

_FASTEST = -1 / 3  # the exponent of the printed bounds is min(1/3, c/σ²): none falls faster
_DECAY = 0.2  # error of a slope from which on 1 and 1/3 are not told apart
_SLOPE, _RATIO = 0.1, 0.1  # how near slope and level must be to what is predicted
_NAMES = {"output": "output", **{name: f"∇_{name}" for name in "VUKQ"}}


def _worst(checks: Iterable[Check]) -> Check:
    """The one that decides, among alike ones."""
    return max(checks, key=lambda check: (VERDICTS.index(check.verdict), ERRORS * check.error - check.margin))


def _lines(data: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    """The curves, by quantity and law, each with what to call it."""
    return [
        (f"{_NAMES[str(name)]}, {law}", data.sel(quantity=name, law=law))
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
            error, target = float(line.slope_stderr), float(line.predicted_slope)
            options = {"tolerance": _SLOPE, "resolution": _SLOPE}
            slopes.append(
                Check(f"{name}: slope against the one predicted", float(line.slope), "=", target, error, **options)
            )
            options = {"tolerance": _RATIO, "resolution": _RATIO}
            ratio, error = float(line.ratio), float(line.ratio_stderr)
            ratios.append(Check(f"{name}: measured over predicted", ratio, "=", 1.0, error, **options))
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
    told = [f"The bounds lie 10^{above.min():.1f} to 10^{above.max():.1f} above what is measured."]
    for name, line in _lines(data):
        if str(line.regime_name.values) != "1/L" and math.isfinite(float(line.slope)):
            slope = f"{float(line.slope):.3f} ± {float(line.slope_stderr):.3f}"
            told.append(f"{name}: {slope}, slower than 1/L, for large L {-float(line.exponent):.3f}.")
    left_out = [name for name, line in _lines(data) if not _is_predicted(line)]
    if left_out:
        told.append(
            f"Not held against the sharp law, which sets in for longer prompts or not at all: {'; '.join(left_out)}."
        )
    return " ".join(told)


def _needs_laws(settings: Settings) -> tuple[Needed, ...]:
    return (measured_laws(settings),)


def _t3(settings: Settings, results: Results) -> Finding:
    data = results[measured_laws(settings)].sel(quantity=["output"])
    remark = "Eq. (1) holds a factor ln L and so needs L ≥ 2 (errata E6); its constants depend on μ (G9)."
    return Finding(_checks(data, "output"), f"{_remark(data)} {remark}", _room(data))


def _weights(settings: Settings) -> Weights:
    return Weights(settings.law_lengths, settings.law_prompts)


def _t4(settings: Settings, results: Results) -> Finding:
    laws, weights = results[measured_laws(settings)], results[_weights(settings)]
    groups = [laws.sel(quantity=["V"]), laws.sel(quantity=["U"]), weights.sel(quantity=["K", "Q"])]
    checks = [_checks(data, _NAMES[str(data.quantity.values[0])]) for data in groups]
    flat = [check for group in zip(*checks, strict=True) for check in group]
    remarks = (f"{_NAMES[str(data.quantity.values[0])]}: {_remark(data)}" for data in groups)
    return Finding(tuple(flat), " ".join(remarks), min(map(_room, groups)))


_DECIDES = (
    "Mean squared deviation from the infinite prompt over fresh prompts and queries, at each length, for each law of "
    "tokens: the explicit bound lies above it with three errors; it falls faster than L^{−1/3}, which no printed bound "
    "does; its slope and level over the longer half of the lengths are those that this library's sharp law predicts. "
    "Shown of each is the law that comes nearest to failing."
)
CLAIMS = (
    Claim(
        "T3",
        "Proposition 3.1",
        "On sub-Gaussian tokens and queries the output of softmax attention on L tokens tends to that on their law: "
        "E‖T[μ̂_L] − T[μ]‖² ≤ c₁σ⁶ ln L / L^{c₂/σ²}.",
        _DECIDES,
        _needs_laws,
        _t3,
        ("laws",),
        role="bound",
    ),
    Claim(
        "T4",
        "Proposition 3.4",
        "So do its derivatives in V and U, with bounds c₁σ⁶ ln L / L^{c₂/σ²} and c₁σ¹² ln² L / L^{c₂/σ²}, and through "
        "the chain rule those in K and Q.",
        _DECIDES + " ∇_K and ∇_Q on standard Gaussian tokens.",
        lambda settings: (*_needs_laws(settings), _weights(settings)),
        _t4,
        ("laws",),
        role="bound",
    ),
)
