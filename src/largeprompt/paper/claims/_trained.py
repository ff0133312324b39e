"""What trained layers reach: Figures 2 and 6, the starts that miss the optimum, and the time of a run."""

import math
from collections.abc import Callable

import numpy as np
import xarray as xr

from largeprompt.lab import VERDICTS
from largeprompt.paper.figures import FIGURES
from largeprompt.paper.pieces import Needed, Results, Speed
from largeprompt.paper.settings import ANISOTROPIC, COVARIANCES, ISOTROPIC, MEMBERS, Settings

from ._claim import Check, Claim, Finding
from ._statistics import mean_of_counts, widened, worst

_OF: dict[str, str] = dict(zip(COVARIANCES, ("2", "6"), strict=True))
_NAMES: dict[str, str] = dict(zip(COVARIANCES, ("isotropic", "anisotropic"), strict=True))
_ABOVE: dict[str, str] = {"floor": "the noise s²/2", "Bayes": "the Bayes risk of that length"}
_MANY = 10  # seeds: fewer cannot settle a share at one length
_OPEN = ["unfinished", "settled"]  # whether such a run is at the optimum is not known
_LONG, _NEAR = 300, 0.002  # prompts from which the risk is near to a + b/L, and how near a must be to the noise


def needs_of(*figures: str) -> Callable[[Settings], tuple[Needed, ...]]:
    """What some figures need."""
    return lambda settings: tuple(need for key in figures for need in FIGURES[key].needs(settings))


def _ends(covariance: str, settings: Settings, results: Results) -> xr.Dataset:
    return FIGURES[_OF[covariance]].dataset(settings, results)


def at_convergence(data: xr.Dataset, member: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean final risk of the runs that converged, at each length, with its error.

    Failed starts are left out, as the paper runs them again. The error has two parts. Between seeds: the spread of
    converged runs, alike at all lengths and so pooled over them, by Student's law. Common to seeds: what is left to the
    exact least risk, below which no run can end, so that it contains what longer training and better starts could
    change; or the standard error of the recorded risk, with which that is measured, if it is larger. A length without a
    converged run is unknown.
    """
    here = data.sel(member=member)
    risk = here.risk.where(here.verdict == "converged")
    counts, mean = risk.count("seed").values, risk.mean("seed")
    seeds = int(np.maximum(counts - 1, 0).sum()) + 1  # as many as a pooled spread is worth
    if seeds == 1:
        return mean.values, np.full(len(mean), math.inf)
    spread = math.sqrt(float(((risk - mean) ** 2).sum()) / (seeds - 1))
    between = widened(seeds) * spread / np.sqrt(np.maximum(counts, 1))
    nodes = here.risk_stderr.where(here.verdict == "converged").mean("seed").values
    left = np.abs(mean.values - here[f"{member}_optimum"].values)
    return mean.values, np.hypot(between, np.maximum(nodes, left))


def _lengths(data: xr.Dataset) -> list[str]:
    return [f"L = {L}" for L in data.L.values]


def _order(data: xr.Dataset) -> tuple[Check, ...]:
    lengths = _lengths(data)
    (soft, soft_error), (linear, linear_error) = (at_convergence(data, member) for member in MEMBERS)
    gap, error = soft - linear, np.hypot(soft_error, linear_error)
    falls, fall_errors = gap[:-1] - gap[1:], np.hypot(error[:-1], error[1:])
    return (
        worst("softmax − linear", gap, error, lengths),
        worst("fall of softmax − linear to the next length", falls, fall_errors, lengths),
        worst("linear − Bayes", linear - data.Bayes.values, linear_error, lengths),
    )


def _to_the_floor(data: xr.Dataset) -> tuple[Check, ...]:
    """The intercept of a + b/L through the two longest lengths."""
    checks = []
    for member in MEMBERS:
        risk, error = (values[-2:] for values in at_convergence(data, member))
        short, long = (float(L) for L in data.L.values[-2:])
        weights = np.asarray([-short, long]) / (long - short)
        intercept = float(weights @ risk) if long >= _LONG else math.nan
        label = f"{member}: a of a + b/L through L = {short:.0f} and {long:.0f}"
        off = float(np.linalg.norm(weights * error))
        checks.append(Check(label, intercept, "=", float(data.floor), off, tolerance=_NEAR, resolution=_NEAR))
    return tuple(checks)


def _about(data: xr.Dataset) -> str:
    """Which runs the numbers are of."""
    counts = [
        f"{member} {int((data.verdict.sel(member=member) == end).sum())} {end}"
        for member in MEMBERS
        for end in VERDICTS
        if (data.verdict.sel(member=member) == end).any()
    ]
    return f"Means over the runs that converged; of all runs: {', '.join(counts)}."


def _c3(settings: Settings, results: Results) -> Finding:
    data = _ends(ISOTROPIC, settings, results)
    pairs = (data.risk.sel(member="softmax") - data.risk.sel(member="linear")).values
    against, n = int((pairs < 0).sum()), int(np.isfinite(pairs).sum())
    remark = f"{_about(data)} Seed by seed softmax ends below linear in {against} of {n} pairs, linear being trapped."
    return Finding(_order(data), remark)


def _c4(settings: Settings, results: Results) -> Finding:
    data = _ends(ISOTROPIC, settings, results)
    return Finding(_to_the_floor(data), _about(data))


def _c7(settings: Settings, results: Results) -> Finding:
    data = _ends(ANISOTROPIC, settings, results)
    return Finding((*_to_the_floor(data), *_order(data)), _about(data))


def _excess(settings: Settings, results: Results, member: str, above: str) -> tuple[np.ndarray, ...]:
    """The logarithm of the risk above a level, isotropic and anisotropic, by length, each with its error."""
    found = []
    for covariance in COVARIANCES:
        data = _ends(covariance, settings, results)
        risk, error = at_convergence(data, member)
        excess = risk - data[above].values
        found += [np.log(np.where(excess > 0, excess, math.nan)), error / np.abs(excess)]
    return tuple(found)


def _c8(settings: Settings, results: Results) -> Finding:
    checks, told = [], []
    short, long = settings.lengths[0], settings.lengths[-1]
    for above, name in _ABOVE.items():
        for member in MEMBERS:
            base, base_error, other, error = _excess(settings, results, member, above)
            falls = [float(values[0] - values[-1]) for values in (base, other)]
            off = float(np.linalg.norm([base_error[0], base_error[-1], error[0], error[-1]]))
            label = f"{member}: fall of the risk above {name} from L = {short} to {long}, isotropic over anisotropic"
            ratio = math.exp(falls[0] - falls[1])
            checks.append(Check(label, ratio, ">", 1.0, ratio * off))
            told.append(f"{member}, above {name}: {math.exp(falls[0]):.3g}-fold against {math.exp(falls[1]):.3g}-fold")
    return Finding(tuple(checks), f"Isotropic against anisotropic: {'; '.join(told)}. What this means is C12's matter.")


def _c12(settings: Settings, results: Results) -> Finding:
    checks, told = [], []
    for member in MEMBERS:
        base, base_error, other, error = _excess(settings, results, member, "Bayes")
        ratios, off = other - base, np.hypot(base_error, error)
        mean, mean_error = float(ratios.mean()), float(np.linalg.norm(off)) / len(off)
        label = f"{member}: risk above Bayes, anisotropic over isotropic, geometric mean over lengths"
        checks.append(Check(label, math.exp(mean), ">", 1.0, math.exp(mean) * mean_error))
        told.append(f"{member} {math.exp(ratios[0]):.3f} and {math.exp(ratios[-1]):.3f}")
    ends = f"L = {settings.lengths[0]} and {settings.lengths[-1]}"
    return Finding(
        tuple(checks),
        f"The ratio at {ends}: {', '.join(told)}. Of the exact least risks it is below 1 from L = 6 on, and tends to 1 "
        "(G21): the anisotropic risk decays more slowly because it starts lower. What takes longer is training.",
    )


def _c11(settings: Settings, results: Results) -> Finding:
    checks, counts = [], []
    for covariance in COVARIANCES:
        data = _ends(covariance, settings, results)
        run, left = (data.verdict != "").all("member"), data.verdict.isin(_OPEN).any("member")
        failed = data.verdict.isin(["trapped", "diverged"])
        more = failed.sel(member="linear").astype(float) - failed.sel(member="softmax")
        more = more.where(~left, 0.0).where(run)  # such a pair shows nothing
        unknown = float((left & run).sum() / run.sum())
        share, error = mean_of_counts(more.transpose("seed", "L").values, 0.0, 1.0, unknown)
        n = int(run.any("L").sum())
        label = f"{_NAMES[covariance]}: share of failed runs, linear − softmax, mean over {n} seeds and their lengths"
        checks.append(Check(label, share, ">", 0.0, error))
        told = ", ".join(f"{member} {int(failed.sel(member=member).where(run).sum())}" for member in MEMBERS[::-1])
        counts.append(
            f"{_NAMES[covariance]}: {told} of {int(run.sum())}, {int((left & run).sum())} unfinished or settled"
        )
    return Finding(tuple(checks), f"Failed is trapped or diverged; {'; '.join(counts)} pairs.")


def _t14(settings: Settings, results: Results) -> Finding:
    checks = []
    for covariance in COVARIANCES:
        data = _ends(covariance, settings, results)
        for member in MEMBERS:
            ends = data.verdict.sel(member=member).transpose("seed", "L").values
            who = f"{_NAMES[covariance]}, {member}"
            for i, L in enumerate(data.L.values):
                if (ends[:, i] != "").sum() >= _MANY:
                    checks.append(_share(f"{who}, L = {L}", ends[:, [i]]))
            checks.append(_share(f"{who}, all L", ends))
    checks.sort(key=lambda check: check.margin / check.error)
    shares = [check.measured for check in checks]
    return Finding(
        tuple(checks),
        f"Shares from {min(shares):.2f} to {max(shares):.2f}; a run that is unfinished or settled counts half.",
    )


def _share(who: str, ends: np.ndarray) -> Check:
    """Of the runs that reach the optimum, by seed and length; those that were not run are empty."""
    run, left = ends != "", np.isin(ends, _OPEN)
    reached = np.where(run, np.where(left, 0.5, ends == "converged"), math.nan)
    share, error = mean_of_counts(reached, 0.5, 1.0, float(left.sum() / run.sum()) / 2)
    starts = int(run.any(axis=1).sum())
    return Check(f"{who}: share of runs from {starts} starts that reach the optimum", share, ">", 0.5, error)


def _t15(settings: Settings, results: Results) -> Finding:
    data = results[Speed(settings.lengths[-1])]
    label = f"minutes of one core for 500 000 steps at L = {int(data.L)}, both attentions"
    check = Check(label, float(data.minutes), "<", 30.0, float(data.stderr))
    return Finding(
        (check,),
        f"{30 / float(data.minutes):.0f} times less than the paper says. This is another program on another machine: "
        "it says what a reader may expect, and nothing about the paper's laptop.",
    )


_ERROR = (
    "The error has the spread between seeds and what is left to the exact least risk, which longer training and better "
    "starts could change."
)
CLAIMS = (
    Claim(
        "C3",
        "Section 6, Figure 2",
        "At convergence linear attention beats softmax at every prompt length, neither beats ridge regression, and the "
        "gap between the two narrows as prompts grow.",
        "The mean final risk of the runs that converged at each length; the worst margin over lengths, in errors. "
        f"{_ERROR} Linear attention above Bayes is a theorem, and checks the runs.",
        needs_of("2"),
        _c3,
        ("2",),
        seeds=2,
    ),
    Claim(
        "C4",
        "Section 6, Figure 2",
        "As prompts grow both attentions reach the level of the label noise, s²/2.",
        "The intercept a of a + b/L through the mean risks of converged runs at the two longest lengths, within 0.002 "
        f"of s²/2. {_ERROR}",
        needs_of("2"),
        _c4,
        ("2",),
        seeds=2,
    ),
    Claim(
        "C7",
        "Appendix A.2.2, Figure 6",
        "Anisotropic covariates behave alike: both attentions approach the Bayes optimum as prompts grow, with the gap "
        "and the order of the isotropic case.",
        "As for C3 and C4, with the Kac-Murdock-Szegö covariance.",
        needs_of("6"),
        _c7,
        ("6",),
        seeds=2,
    ),
    Claim(
        "C8",
        "Appendix A.2.2, Figure 6",
        "With anisotropic covariates the risk converges more slowly to the Bayes optimum as prompts grow.",
        "By what factor the mean risk of converged runs, above the noise and above the Bayes risk of the same length, "
        f"falls from the shortest prompts to the longest: isotropic over anisotropic, above 1. {_ERROR}",
        needs_of("2", "6"),
        _c8,
        ("2", "6"),
        seeds=2,
    ),
    Claim(
        "C11",
        "Appendix A.2",
        "Softmax attention trains more stably than linear attention, which fails from some random starts.",
        "Share of runs trapped or diverged, linear minus softmax from the same starts on the same tokens, mean over "
        "all runs. The error is over seeds, and that which it would have if both were alike; pairs unfinished or "
        "settled count as alike, and widen it.",
        needs_of("2", "6"),
        _c11,
        ("2", "6"),
        seeds=10,
    ),
    Claim(
        "C12",
        "Appendix A.2.2, last paragraph",
        "With anisotropic covariates longer prompts may be required for a performance comparable to the isotropic one.",
        "Mean risk of converged runs above the Bayes risk of the same length, anisotropic over isotropic, geometric "
        f"mean over lengths: above 1. {_ERROR}",
        needs_of("2", "6"),
        _c12,
        ("2", "6"),
        seeds=2,
    ),
    Claim(
        "T14",
        "Section 5, after Assumption 5.1",
        "The structured start of Assumption 5.1 is not necessary in practice: default starts reach the optimum too.",
        "For each covariance and attention the share of runs that converged, at lengths with ten or more seeds and "
        "over all lengths: more than half, by the error that half would have over these seeds.",
        needs_of("2", "6"),
        _t14,
        ("2", "6"),
        seeds=10,
    ),
    Claim(
        "T15",
        "Appendix A.1",
        "A run of one architecture at one length takes about 30 minutes on a laptop.",
        "Minutes that one core of this machine takes for the whole protocol at the longest prompts, both attentions "
        "together: less than 30.",
        lambda settings: (Speed(settings.lengths[-1]),),
        _t15,
        role="context",
    ),
)
