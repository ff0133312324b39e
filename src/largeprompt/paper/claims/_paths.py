"""How training goes: Figures 3, 4, 7 and 8."""

import itertools
import math
from collections.abc import Callable

import numpy as np

from largeprompt.paper.figures import FIGURES
from largeprompt.paper.figures.figure_3 import early_step
from largeprompt.paper.settings import Settings

from ._claim import Check, Claim, Finding, Results, not_settled
from ._trained import needs_of

_FALL = 0.95  # of the whole, at which a run counts as having converged
_ENOUGH = 100_000  # steps, twice those by which the paper sees its runs converge
_LATE = 1000  # the step from which falls back are counted: before it the distance is all noise


def _long_enough(judge: Callable[[Settings, Results], Finding]) -> Callable[[Settings, Results], Finding]:
    """Training that has only begun settles nothing."""

    def judged(settings: Settings, results: Results) -> Finding:
        if settings.steps < _ENOUGH:
            return not_settled(f"{settings.steps} steps are too few; it takes {_ENOUGH}.")
        return judge(settings, results)

    return judged


def _mean(values: np.ndarray) -> tuple[float, float]:
    """Mean over seeds and its standard error, which one seed does not have."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf


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
            change, error = _mean(apart.sel(L=long).values - apart.sel(L=short).values)
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


def _fall_steps(risk: np.ndarray, steps: np.ndarray, share: float) -> float:
    """The first recorded step by which a share of the whole fall of the risk is done."""
    low = risk[-1] + (1 - share) * (risk[0] - risk[-1])
    return float(steps[np.argmax(risk <= low)])


def _courses(key: str, settings: Settings, results: Results) -> list[tuple[str, int, str, np.ndarray, np.ndarray]]:
    data = FIGURES[key].dataset(settings, results)
    return [
        (str(member), int(L), str(verdict), risk, data.step.values)
        for member in data.member.values
        for L in data.L.values
        for verdict, risk in zip(
            data.verdict.sel(member=member, L=L).values, data.risk.sel(member=member, L=L).values, strict=True
        )
    ]


def _c6(settings: Settings, results: Results) -> Finding:
    runs = _courses("4", settings, results)
    checks, late = [], 0
    for member, L in dict.fromkeys((member, L) for member, L, *_ in runs):
        own = [run for run in runs if run[:2] == (member, L) and run[2] == "converged"]
        steps = np.asarray([_fall_steps(risk, at, _FALL) for *_, risk, at in own])
        late += int((steps > 50_000).sum())
        if len(steps):
            centre, error = _mean(steps)
            label = f"{member}, L = {L}: step by which 95 % of the fall is done"
            checks.append(Check(label, centre, "<", 50_000.0, 0.0 if math.isinf(error) else error))
    checks.sort(key=lambda check: check.margin)
    failed = sum(run[2] in ("trapped", "diverged") for run in runs)
    remark = (
        f"Of {len(runs)} runs {late} that converged took longer; {failed} were trapped or diverged and are left out."
    )
    return Finding(tuple(checks), remark)


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
        centre, error = _mean(values)
        checks.append(Check(name, centre, ">", 0.0, error, resolution=1.0))
    checks += _closer("7", settings, results, ("early",))
    return Finding(tuple(checks), f"Falls from step {_LATE} on; means over {isotropic.sizes['seed']} seeds.")


def _c10(settings: Settings, results: Results) -> Finding:
    stretch: dict[str, list[float]] = {}
    for key in ("4", "8"):
        for *_, risk, steps in _courses(key, settings, results):
            half, most = (max(_fall_steps(risk, steps, share), 1.0) for share in (0.5, _FALL))
            stretch.setdefault(key, []).append(math.log10(most / half))
    (one, one_error), (other, other_error) = (_mean(np.asarray(stretch[key])) for key in ("4", "8"))
    label = "decades of steps from 50 % to 95 % of the fall, anisotropic − isotropic"
    check = Check(label, other - one, ">", 0.0, math.hypot(one_error, other_error), resolution=1.0)
    return Finding(
        (check,), f"Isotropic {one:.2f}, anisotropic {other:.2f}: plateaus one after another stretch the fall."
    )


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
    ),
    Claim(
        "C6",
        "Appendix A.2.1, Figure 4",
        "With isotropic covariates training converges before 50 000 steps.",
        "Step by which 95 % of the fall of the risk is done, mean over the seeds that converge, the latest first.",
        needs_of("4"),
        _long_enough(_c6),
        ("4",),
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
    ),
    Claim(
        "C10",
        "Appendix A.2.2, Figure 8",
        "With anisotropic covariates the risk falls more irregularly along training.",
        "How long the risk takes from half of its fall to 95 % of it, in decades of steps, over all runs shown.",
        needs_of("4", "8"),
        _long_enough(_c10),
        ("4", "8"),
    ),
)
