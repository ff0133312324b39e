"""How training goes: Figures 3, 4, 7 and 8."""

import itertools
import math
from collections.abc import Callable

import numpy as np
from scipy.signal import find_peaks

from largeprompt.lab import VERDICTS, Run
from largeprompt.paper.pieces import Needed, Results
from largeprompt.paper.settings import ANISOTROPIC, COVARIANCES, ISOTROPIC, MEMBERS, Settings

from ._claim import Check, Claim, Finding, not_settled
from ._statistics import mean_of_counts, mean_over_seeds

_EARLY = 10_000  # step, a fiftieth of the paper's training
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


def _runs(settings: Settings, covariance: str, lengths: tuple[int, ...]) -> dict[int, tuple[Run, ...]]:
    """All seeds that are trained at each length."""
    return {L: settings.runs(covariance, (L,), settings.seeds_at(covariance, L)) for L in lengths}


def _rungs(settings: Settings) -> tuple[int, ...]:
    """The shortest prompts, those of about 100 tokens, and the longest."""
    lengths = settings.paths
    return tuple(dict.fromkeys([lengths[0], min(lengths, key=lambda L: abs(L - 100)), lengths[-1]]))


def _needs(covariances: tuple[str, ...], lengths: Callable[[Settings], tuple[int, ...]]) -> Callable:
    def needs(settings: Settings) -> tuple[Needed, ...]:
        found = [_runs(settings, covariance, lengths(settings)) for covariance in covariances]
        return tuple(run for by_length in found for runs in by_length.values() for run in runs)

    return needs


def _apart(settings: Settings, covariance: str, results: Results) -> dict[int, np.ndarray]:
    """log₁₀ ‖θ_soft − θ_lin‖² along training, of each seed at the lengths compared."""
    runs = _runs(settings, covariance, _rungs(settings))
    with np.errstate(divide="ignore"):  # at the start they are the same
        return {L: np.stack([2 * np.log10(results[run].distance.values) for run in of_L]) for L, of_L in runs.items()}


def _difference(long: np.ndarray, short: np.ndarray) -> tuple[float, float]:
    """Mean over the seeds that both have."""
    n = min(len(long), len(short))
    return mean_over_seeds(long[:n] - short[:n])


def _closer(settings: Settings, covariance: str, results: Results, when: tuple[str, ...]) -> tuple[Check, ...]:
    """From the shortest prompts to those of about 100 tokens, and on to the longest: does the distance fall?"""
    apart, rungs = _apart(settings, covariance, results), _rungs(settings)
    steps = settings.record.steps(settings.steps)
    at = {"early": int(np.argmin(np.abs(steps - min(_EARLY, settings.steps / 2)))), "last": len(steps) - 1}
    checks = []
    for name in when:
        for short, long in itertools.pairwise(rungs):
            change, error = _difference(apart[long][:, at[name]], apart[short][:, at[name]])
            label = f"{name} step ({steps[at[name]]}): log₁₀ of ‖θ_soft − θ_lin‖² at L = {long} over L = {short}"
            checks.append(Check(label, change, "<", 0.0, error, resolution=2.0))
    return tuple(checks)


def _c5(settings: Settings, results: Results) -> Finding:
    checks = _closer(settings, ISOTROPIC, results, ("last", "early"))
    early = Finding(tuple(check for check in checks if check.label.startswith("early"))).verdict
    remark = (
        f"Early in training: {early}. At the end it need not be: the two attentions have different optima at every "
        "finite length, far apart along a valley of the risk, and some runs are trapped."
    )
    return Finding(checks, remark)


def _fall_steps(risk: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    """The step by which the fall of the risk is done, up to a hundredth, and how far apart steps are recorded there.

    Between recorded steps risks are taken to be linear. Unknown of a diverged run.
    """
    if not np.isfinite(risk).all():
        return math.nan, math.nan
    low = risk[-1] + _LEFT * (risk[0] - risk[-1])
    after = max(int(np.argmax(risk <= low)), 1)
    (left, right), (before, now) = risk[after - 1 : after + 1], steps[after - 1 : after + 1]
    share = (left - low) / (left - right) if left > right else 1.0
    return float(before + min(max(share, 0.0), 1.0) * (now - before)), float(now - before)


def _falls(risk: np.ndarray, steps: np.ndarray) -> float:
    """In how many separate stretches, over the logarithm of steps, the risk falls; unknown of a diverged run."""
    if not np.isfinite(risk).all():
        return math.nan
    at = np.linspace(math.log10(steps[-1]) - _DECADES, math.log10(steps[-1]), _GRID)
    speed = -np.gradient(np.interp(at, np.log10(np.maximum(steps, 1)), risk))
    peaks, _ = find_peaks(np.concatenate([[0.0], speed, [0.0]]), prominence=_PROMINENT * speed.max())
    return float(len(peaks))


def _c6(settings: Settings, results: Results) -> Finding:
    checks, ends = [], []
    for L, runs in _runs(settings, ISOTROPIC, settings.courses).items():
        for member in MEMBERS:
            courses = [results[run].sel(member=member) for run in runs]
            falls = np.asarray([_fall_steps(one.risk.values, one.step.values) for one in courses])
            centre, error = mean_over_seeds(falls[:, 0], rounding=float(falls[:, 1].max()))
            label = f"{member}, L = {L}: step by which 99 % of the fall is done, mean over {len(runs)} seeds"
            checks.append(Check(label, centre, "<", 50_000.0, error))
            ends += [str(one.verdict.values) for one in courses]
    checks.sort(key=lambda check: check.margin / max(check.error, 1e-9))
    told = [f"{ends.count(end)} {end}" for end in VERDICTS if end in ends]
    return Finding(tuple(checks), f"Of all runs, whatever they fall to: {', '.join(told)}.")


def _retreat(curves: np.ndarray) -> np.ndarray:
    """By how many decades, in all, each curve falls back from where it was."""
    return -np.minimum(np.diff(curves, axis=-1), 0).sum(axis=-1)


def _c9(settings: Settings, results: Results) -> Finding:
    late = settings.record.steps(settings.steps) >= _LATE
    isotropic, anisotropic = (
        {L: _retreat(curves[:, late]) for L, curves in _apart(settings, covariance, results).items()}
        for covariance in COVARIANCES
    )
    short, *_, long = _rungs(settings)
    label = "decades by which ‖θ_soft − θ_lin‖² falls back"
    differences = {
        f"{label} at L = {short}, anisotropic − isotropic": _difference(anisotropic[short], isotropic[short]),
        f"{label}, anisotropic, L = {short} − L = {long}": _difference(anisotropic[short], anisotropic[long]),
    }
    checks = [Check(name, value, ">", 0.0, error, resolution=1.0) for name, (value, error) in differences.items()]
    checks += _closer(settings, ANISOTROPIC, results, ("early",))
    seeds = ", ".join(f"{len(values)} at L = {L}" for L, values in anisotropic.items())
    return Finding(tuple(checks), f"Falls from step {_LATE} on; seeds: {seeds}.")


def _c10(settings: Settings, results: Results) -> Finding:
    most = max(settings.seeds_at(covariance, L) for covariance in COVARIANCES for L in settings.courses)
    counts = np.full((len(COVARIANCES), most, len(settings.courses)), math.nan)
    for i, covariance in enumerate(COVARIANCES):
        for j, runs in enumerate(_runs(settings, covariance, settings.courses).values()):
            for k, one in enumerate(results[run] for run in runs):
                counts[i, k, j] = np.mean([_falls(risk, one.step.values) for risk in one.risk.values])
            if np.isnan(counts[i, : len(runs), j]).any():
                return not_settled(f"A run at L = {settings.courses[j]} diverged.")
    more = counts[1] - counts[0]
    difference, error = mean_of_counts(more, 0.0, 1 / len(MEMBERS))
    pairs, seeds = int(np.isfinite(more).sum()), int(np.isfinite(more).any(axis=1).sum())
    label = f"separate falls of a run, anisotropic − isotropic, mean over {pairs} pairs from {seeds} seeds"
    told = ", ".join(
        f"{np.nanmean(counts[1, :, j]):.1f} against {np.nanmean(counts[0, :, j]):.1f} at L = {L}"
        for j, L in enumerate(settings.courses)
    )
    return Finding(
        (Check(label, difference, ">", 0.0, error),),
        f"Falls with a plateau between, anisotropic against isotropic: {told}.",
    )


CLAIMS = (
    Claim(
        "C5",
        "Section 6, Figure 3",
        "Trained from the same weights on the same tokens, the parameters of softmax and linear attention lie closer "
        "the longer the prompts.",
        "Ratio of ‖θ_soft − θ_lin‖² between lengths, mean of its logarithm over seeds: below 1 from the shortest "
        "prompts to the middle ones and on to the longest, at the end of training and early in it.",
        _needs((ISOTROPIC,), _rungs),
        _long_enough(_c5),
        ("3",),
        seeds=3,
    ),
    Claim(
        "C6",
        "Appendix A.2.1, Figure 4",
        "With isotropic covariates training converges before 50 000 steps.",
        "Step by which 99 % of the fall of the risk is done, mean over all seeds, for each attention and length. The "
        "error is over seeds, and has the distance of recorded steps.",
        _needs((ISOTROPIC,), lambda settings: settings.courses),
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
        _needs(COVARIANCES, _rungs),
        _long_enough(_c9),
        ("3", "7"),
        seeds=3,
    ),
    Claim(
        "C10",
        "Appendix A.2.2, Figure 8",
        "With anisotropic covariates the risk falls more irregularly along training.",
        "Separate falls of the risk over the logarithm of steps (peaks of its speed, a tenth of the highest or more), "
        "anisotropic less isotropic from the same seeds, mean over attentions, lengths and seeds. Its error is over "
        "seeds, and that which it would have if both were alike: fewer than ten seeds cannot settle it.",
        _needs(COVARIANCES, lambda settings: settings.courses),
        _long_enough(_c10),
        ("4", "8"),
        seeds=10,
    ),
)
