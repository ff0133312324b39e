"""C1 and C2: softmax and linear attention with the same weights, before training, come together as prompts grow."""

import itertools

import numpy as np
import xarray as xr

from largeprompt.paper.figures.at_start import agreement, gaps, long_slope, ratio_of_means
from largeprompt.paper.figures.figure_1a import FIGURES as OF_OUTPUTS
from largeprompt.paper.figures.figure_1b import FIGURES as OF_GRADIENTS
from largeprompt.paper.pieces import Needed
from largeprompt.paper.settings import COVARIANCES, Settings

from ._claim import Check, Claim, Finding, Results, not_settled
from ._statistics import widened, worst

LENGTHS, HEADS, RANGE = 4, 4, 100  # at least so many lengths and heads, the longest prompt so many times the shortest
SLOPE, SHARE, TOLERANCE = -0.5, 0.05, 0.15
_RULE = (
    f"Exact over prompts at {HEADS} default initialisations or more: the mean gap at the longest prompts over that at "
    f"the shortest is below {SHARE}; between successive lengths it falls (every ratio is below 1); its log-log "
    f"slope over the longer half of the lengths is below {SLOPE}; and the gap measured on sampled prompts is the exact "
    f"one within {TOLERANCE:.0%}. Errors are over initialisations, paired. That both have the same limit is T1 and T2."
)


def _needs(settings: Settings) -> tuple[Needed, ...]:
    return tuple(gaps(settings, covariance) for covariance in COVARIANCES)


def _judge(figures, settings: Settings, results: Results) -> Finding:
    lengths = settings.short_to_long
    if len(lengths) < LENGTHS or settings.heads < HEADS or max(lengths) < RANGE * min(lengths):
        return not_settled(
            f"{len(lengths)} lengths from {min(lengths)} to {max(lengths)} and {settings.heads} initialisations; it "
            f"takes {LENGTHS} lengths over a range of {RANGE} and {HEADS} initialisations"
        )
    found = [checks(figure.dataset(settings, results), figure.covariance) for figure in figures]
    return Finding(tuple(check for one in zip(*found, strict=True) for check in one))


def checks(data: xr.Dataset, covariance: str) -> list[Check]:
    """The checks of one gap at one covariance, from the dataset of its figure."""
    exact, L = data.exact.values, data.L.values
    wider = widened(len(exact))
    share, share_error = ratio_of_means(exact[:, -1], exact[:, 0])
    steps = np.asarray([ratio_of_means(exact[:, i + 1], exact[:, i]) for i in range(len(L) - 1)])
    between = [f"L = {short} to {long}" for short, long in itertools.pairwise(L)]
    slope, slope_error = long_slope(exact, L)
    ratio, error = agreement(data)
    return [
        Check(f"{covariance}: gap at L = {L[-1]} over that at {L[0]}", share, "<", SHARE, wider * share_error),
        worst(f"{covariance}: ratio of successive gaps", steps[:, 0], wider * steps[:, 1], between, "<", 1.0),
        Check(f"{covariance}: log-log slope from L = {L[len(L) // 2]} on", slope, "<", SLOPE, wider * slope_error),
        Check(
            f"{covariance}: measured over exact",
            ratio,
            "=",
            1.0,
            error,
            tolerance=TOLERANCE,
            resolution=TOLERANCE / 3,
        ),
    ]


def _claim(key: str, what: str, figures) -> Claim:
    names = tuple(figure.key for figure in figures)
    return Claim(
        key=key,
        place=f"Section 6, Figure {names[0]}; Appendix A.2.2, Figure {names[1]}",
        statement=f"With the same weights, at initialisation, the {what} of softmax and linear attention become "
        "increasingly close as L grows, and coincide in the limit.",
        measured=_RULE,
        needs=_needs,
        judge=lambda settings, results: _judge(figures, settings, results),
        figures=names,
    )


CLAIMS = (_claim("C1", "outputs", OF_OUTPUTS), _claim("C2", "gradients of the risk", OF_GRADIENTS))
