"""Flows of long prompts from the structured start: Theorem 4.3, Lemma E.1, Theorem 5.2."""

import math

import numpy as np
import xarray as xr

from largeprompt.paper.figures import FIGURES
from largeprompt.paper.figures.flows import excesses, fall
from largeprompt.paper.figures.words import covariates, listed
from largeprompt.paper.settings import Settings

from ._claim import Check, Claim, Finding, Results, not_settled

_NEAR = 1e-3  # how near risks must be to count as one: 2 % of the floor, 0.2 % of the risk of predicting nothing
_NODES = 0.03  # relative error of a distance that fixed nodes of the query leave: 2^12 of them at most 0.02
_EARLIER = (1000, 100, 10)  # parts of the time followed up to which trajectories are compared


def _ladders(settings: Settings, results: Results) -> list[tuple[str, xr.Dataset]]:
    """Those of each covariance, with what to call it."""
    data = FIGURES["flows"].dataset(settings, results)
    return [(covariates(str(name)), data.sel(covariance=name)) for name in data.covariance.values]


def _too_short(ladders: list[tuple[str, xr.Dataset]]) -> Finding | None:
    """For a time or a ladder that cannot stand for its limit."""
    left = max(float(data.infinite[-1] - data.floor) for _, data in ladders)
    if left > _NEAR:
        end = float(ladders[0][1].t[-1])
        return not_settled(f"Flows to t = {end:g} are too short: the infinite prompt's has {left:.3g} yet to fall.")
    rungs = ladders[0][1].sizes["L"]
    return None if rungs > 1 else not_settled(f"A ladder of {rungs} length tells no trend.")


def _t7(settings: Settings, results: Results) -> Finding:
    ladders = _ladders(settings, results)
    if short := _too_short(ladders):
        return short
    rises, exponents, told = [], [], []
    for name, data in ladders:
        L, (excess, error) = data.L.values, excesses(data)
        step = int(np.argmax(np.diff(excess)))
        where = f"{name}: change of the final risk, above the infinite flow's, from L = {L[step]} to {L[step + 1]}"
        off = math.hypot(error[step], error[step + 1])
        rises.append(Check(where, float(np.diff(excess)[step]), "<", 0.0, off))
        if fit := fall(data):  # a risk at most that of the infinite flow has no rate, and is no failure
            where = f"{name}: exponent in L of the final risk above the infinite flow's, from L = {L[-2]} to {L[-1]}"
            exponents.append(Check(where, fit.slope, "<", 0.0, fit.stderr))
        values = [f"{value:.2e} ± {off:.0e}" for value, off in zip(excess, error, strict=True)]
        told.append(f"{name}: excess {listed(values)} at L = {listed([str(length) for length in L])}.")
    told.append("Risks never rise along a flow: at the last time they lie above the limit that the theorem bounds.")
    return Finding((*exponents, *rises), " ".join(told))


def _t8(settings: Settings, results: Results) -> Finding:
    ladders = _ladders(settings, results)
    L = ladders[0][1].L.values
    if len(L) < 2:
        return not_settled(f"A ladder of {len(L)} length tells no trend.")
    checks, told = [], []
    for name, data in ladders:
        for part in _EARLIER:
            end = float(data.t.sel(t=float(data.t[-1]) / part, method="nearest"))
            short, long = (float(data.distance.isel(L=i).sel(t=slice(0, end)).max()) for i in (-2, -1))
            where = f"{name}, t ≤ {end:.3g}: log₁₀ of the largest distance at L = {L[-1]} over that at L = {L[-2]}"
            checks.append(Check(where, math.log10(long / short), "<", 0.0, math.sqrt(2) * _NODES / math.log(10)))
        late = listed([f"{float(value):.2f}" for value in data.distance.isel(t=-1)])
        told.append(f"{name}: distances {late} at t = {float(data.t[-1]):g}.")
    told.append(
        "At a fixed L the distance grows with t: the minimiser at L tokens lies elsewhere in the valley rA = Σ⁻¹, and "
        "is reached after a time of order L. The limits in t and in L do not commute for parameters, which the paper "
        "leaves open after Theorem 4.3; they do for the risk."
    )
    return Finding(tuple(checks), " ".join(told))


def _at_infinity(L: np.ndarray, risk: np.ndarray, error: np.ndarray) -> tuple[float, float]:
    """What risks that are linear in 1/L for long prompts tend to; the error has what a bend in 1/L would change."""

    def through(last: int) -> tuple[float, float]:
        x = 1 / L[-last:].astype(float)
        weights = [math.prod(other / (other - own) for other in x if other != own) for own in x]
        return float(np.dot(weights, risk[-last:])), float(np.linalg.norm(weights * error[-last:]))

    value, spread = through(2)
    return value, math.hypot(spread, value - through(3)[0]) if len(L) > 2 else spread


def _t9(settings: Settings, results: Results) -> Finding:
    ladders = _ladders(settings, results)
    if short := _too_short(ladders):
        return short
    checks = []
    for name, data in ladders:
        end, floor = data.isel(t=-1), float(data.floor)
        value, error = _at_infinity(data.L.values, end.risk.values, end.stderr.values)
        where = f"{name}: final risk extrapolated to L = ∞"
        checks.append(Check(where, value, "=", floor, error, tolerance=_NEAR, resolution=_NEAR))
    for name, data in ladders:
        where = f"{name}: final risk of the infinite-prompt flow"
        checks.append(Check(where, float(data.infinite[-1]), "=", float(data.floor), tolerance=_NEAR))
    alpha = float(ladders[0][1].alpha)
    remark = (
        f"With label noise of variance s² the Bayes risk is s²/2 (erratum T16); α = {alpha:g} lies in the printed "
        "range, which is not needed (G14). Extrapolated in 1/L from the two longest prompts; the error has what a "
        "third changes."
    )
    return Finding(tuple(checks), remark)


def _needs(settings: Settings):
    return FIGURES["flows"].needs(settings)


CLAIMS = (
    Claim(
        key="T7",
        place="Theorem 4.3",
        statement="For every ε, gradient flow on long enough prompts ends at a risk at most ε above that at which the "
        "infinite-prompt flow ends.",
        measured="Risks of softmax flows from Assumption 5.1 at the last time, above that of the infinite prompt, "
        "along a ladder of lengths and for both covariances: they fall from each length to the next.",
        needs=_needs,
        judge=_t7,
        figures=("flows",),
    ),
    Claim(
        key="T8",
        place="Lemma E.1",
        statement="On every interval [0, T] the parameters of the finite-prompt flow tend to those of the "
        "infinite-prompt flow as L grows.",
        measured="Largest distance of the parameters on [0, T], for three T, at the longest prompts of the ladder "
        "against those before.",
        needs=_needs,
        judge=_t8,
        figures=("flows",),
    ),
    Claim(
        key="T9",
        place="Theorem 5.2",
        statement="From Assumption 5.1 the risk at which softmax attention ends on in-context linear regression tends "
        "to the Bayes risk of the infinite prompt as L grows.",
        measured="Final risks along the ladder, extrapolated to L = ∞, and that of the infinite-prompt flow, against "
        "s²/2.",
        needs=_needs,
        judge=_t9,
        figures=("flows",),
    ),
)
