"""How training goes: Figures 3, 4, 7 and 8."""

import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.signal import find_peaks

from largeprompt.lab import VERDICTS
from largeprompt.paper.figures import FIGURES
from largeprompt.paper.figures.figure_3 import early_step
from largeprompt.paper.pieces import Results
from largeprompt.paper.settings import MEMBERS, Settings

from ._claim import Check, Claim, Finding, mean_over_seeds, not_settled
from ._trained import needs_of

_LEFT = 0.01  # of the whole fall, at which a run counts as having converged
_DECADES, _GRID = 3.7, 75  # the last decades of steps, in which risks fall, and points on them
_PROMINENT = 0.1  # of the highest speed: what counts as a fall of its own
_ENOUGH = 100_000  # steps, twice those by which the paper sees its runs converge
_LATE = 1000  # the step from which falls back are counted: before it the distance is all noise


def _long_enough(judge: Callable[[Settings, Results], Finding]) -> Callable[[Settings, Results], Finding]:
    """Training that has only begun settles nothing."""

    def judged(settings: Settings, results: Results) -> Finding:
        if settings.steps < _ENOUGH:
            return not_settled(f"{settings.steps} steps are too few; it takes {_ENOUGH}.")
        return judge(settings, results)

    return judged


def _closer(key: str, settings: Settings, results: Results, steps: tuple[str, ...]) -> tuple[Check, ...]:
    """From the shortest prompts to those of about 100 tokens, and on to the longest: does the distance fall?"""
    data = FIGURES[key].dataset(settings, results)
    at = {"early": early_step(data), "last": float(data.step[-1])}
    middle = int(data.L.sel(L=100, method="nearest"))
    rungs = list(dict.fromkeys([int(data.L[0]), middle, int(data.L[-1])]))
    checks = []
    for name in steps:
        apart = np.log10(data.apart.sel(step=at[name]))
        for short, long in itertools.pairwise(rungs):
            change, error = mean_over_seeds(apart.sel(L=long).values - apart.sel(L=short).values)
            label = f"{name} step ({at[name]:.0f}): log₁₀ of ‖θ_soft − θ_lin‖² at L = {long} over L = {short}"
            checks.append(Check(label, change, "<", 0.0, error, resolution=2.0))
    return tuple(checks)


def _c5(settings: Settings, results: Results) -> Finding:
    checks = _closer("3", settings, results, ("last", "early"))
    early = Finding(tuple(check for check in checks if check.label.startswith("early"))).verdict
    remark = (
        f"Early in training: {early}. At the end it need not be: the two attentions have different optima at every "
        "finite length, far apart along a valley of the risk, and some runs are trapped."
    )
    return Finding(checks, remark)


def _fall_steps(risk: np.ndarray, steps: np.ndarray) -> float:
    """The first recorded step by which the fall of the risk is done, up to a hundredth; unknown of a diverged run."""
    low = risk[-1] + _LEFT * (risk[0] - risk[-1])
    return float(steps[np.argmax(risk <= low)]) if np.isfinite(risk).all() else math.nan


def _falls(risk: np.ndarray, steps: np.ndarray) -> float:
    """In how many separate stretches, over the logarithm of steps, the risk falls; unknown of a diverged run."""
    if not np.isfinite(risk).all():
        return math.nan
    at = np.linspace(math.log10(steps[-1]) - _DECADES, math.log10(steps[-1]), _GRID)
    speed = -np.gradient(np.interp(at, np.log10(np.maximum(steps, 1)), risk))
    peaks, _ = find_peaks(np.concatenate([[0.0], speed, [0.0]]), prominence=_PROMINENT * speed.max())
    return float(len(peaks))


def _c6(settings: Settings, results: Results) -> Finding:
    data = FIGURES["4"].dataset(settings, results)
    checks = []
    for member in MEMBERS:
        for L in data.L.values:
            taken = [_fall_steps(risk, data.step.values) for risk in data.risk.sel(member=member, L=L).values]
            centre, error = mean_over_seeds(taken)
            label = f"{member}, L = {L}: step by which 99 % of the fall is done"
            checks.append(Check(label, centre, "<", 50_000.0, error))
    checks.sort(key=lambda check: check.margin / max(check.error, 1e-9))
    ends = [f"{int((data.verdict == end).sum())} {end}" for end in VERDICTS if (data.verdict == end).any()]
    return Finding(tuple(checks), f"Of all runs, whatever they fall to: {', '.join(ends)}.")


def _retreat(curves: np.ndarray) -> np.ndarray:
    """By how many decades, in all, each curve falls back from where it was."""
    return -np.minimum(np.diff(np.log10(curves), axis=-1), 0).sum(axis=-1)


def _c9(settings: Settings, results: Results) -> Finding:
    isotropic, anisotropic = (FIGURES[key].dataset(settings, results) for key in ("3", "7"))
    late = anisotropic.step >= min(_LATE, float(anisotropic.step[-1]) / 2)
    backs = [_retreat(data.apart.isel(step=np.flatnonzero(late)).values) for data in (isotropic, anisotropic)]
    short, long = int(isotropic.L[0]), int(isotropic.L[-1])
    label = "decades by which ‖θ_soft − θ_lin‖² falls back"
    differences = {
        f"{label} at L = {short}, anisotropic − isotropic": backs[1][0] - backs[0][0],
        f"{label}, anisotropic, L = {short} − L = {long}": backs[1][0] - backs[1][-1],
    }
    checks = []
    for name, values in differences.items():
        centre, error = mean_over_seeds(values)
        checks.append(Check(name, centre, ">", 0.0, error, resolution=1.0))
    checks += _closer("7", settings, results, ("early",))
    return Finding(tuple(checks), f"Falls from step {_LATE} on; means over {isotropic.sizes['seed']} seeds.")


def _c10(settings: Settings, results: Results) -> Finding:
    means = []
    for key in ("4", "8"):
        data = FIGURES[key].dataset(settings, results)
        falls = np.apply_along_axis(_falls, -1, data.risk.values, data.step.values)
        means.append(falls.mean(axis=(0, 1)))  # over attentions and lengths
    difference, error = mean_over_seeds(means[1] - means[0])
    label = "number of separate falls of a run, anisotropic − isotropic, mean over attentions and lengths"
    told = f"Isotropic {means[0].mean():.2f}, anisotropic {means[1].mean():.2f} falls with a plateau between."
    return Finding((Check(label, difference, ">", 0.0, error, resolution=1.0),), told)


CLAIMS = (
    Claim(
        "C5",
        "Section 6, Figure 3",
        "Trained from the same weights on the same tokens, the parameters of softmax and linear attention lie closer "
        "the longer the prompts.",
        "Ratio of ‖θ_soft − θ_lin‖² between lengths, mean of its logarithm over seeds: below 1 from the shortest "
        "prompts to the middle ones and on to the longest, at the end of training and early in it.",
        needs_of("3"),
        _long_enough(_c5),
        ("3",),
        seeds=3,
    ),
    Claim(
        "C6",
        "Appendix A.2.1, Figure 4",
        "With isotropic covariates training converges before 50 000 steps.",
        "Step by which 99 % of the fall of the risk is done, mean over all seeds, for each attention and length.",
        needs_of("4"),
        _long_enough(_c6),
        ("4",),
        seeds=3,
    ),
    Claim(
        "C9",
        "Appendix A.2.2, Figure 7",
        "With anisotropic covariates the distance of the two attentions evolves more erratically, above all for short "
        "prompts, and more regularly for long ones; still they lie closer the longer the prompts.",
        "Sum of all falls of log₁₀ ‖θ_soft − θ_lin‖² along training, compared at the shortest length between "
        "covariances, and between the shortest and the longest; the ratios of C5, early in training.",
        needs_of("3", "7"),
        _long_enough(_c9),
        ("3", "7"),
        seeds=3,
    ),
    Claim(
        "C10",
        "Appendix A.2.2, Figure 8",
        "With anisotropic covariates the risk falls more irregularly along training.",
        "Separate falls of the risk over the logarithm of steps (peaks of its speed, a tenth of the highest or more), "
        "anisotropic less isotropic from the same seeds, mean over attentions and lengths, then over seeds.",
        needs_of("4", "8"),
        _long_enough(_c10),
        ("4", "8"),
        seeds=3,
    ),
)
