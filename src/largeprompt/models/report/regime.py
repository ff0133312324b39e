"""What a head's numbers mean, in plain sentences."""

import math
from collections.abc import Mapping

from largeprompt.models._inspection import EPSILON
from largeprompt.models._statistics import HEAVIEST

LARGE, SINGLE, REFUSED = "large prompt", "one token decides", "refused"
LABELS = {
    LARGE: "no single token decides, and errors fall like 1/√L",
    SINGLE: "the variance of the scores is above ln L, so that at this length single tokens take much of the weight",
    REFUSED: f"the tail index k̂ of the weights is above {HEAVIEST:g}: no error is predicted",
}


def label(row: Mapping[str, float]) -> str:
    """The regime of a head in a word or two; empty for a head that is not there."""
    if math.isnan(row["seen"]):
        return ""
    if row["trusted"] != 1:
        return REFUSED
    return LARGE if row["score_threshold"] < 1 else SINGLE


def regime(row: Mapping[str, float]) -> str:
    """The regime of a head in sentences, from its numbers."""
    said = {LARGE: _large, SINGLE: _single, REFUSED: _refused}[label(row)](row)
    weighs = f"It weighs {row['effective']:.3g} of the {row['seen']:.0f} tokens that it sees."
    return " ".join([said, weighs, *_sinks(row), *_linear(row), *_position(row), *_measured(row)])


def _large(row: Mapping[str, float]) -> str:
    return (
        f"Large-prompt regime: no single token decides (the variance of its scores, {row['score_variance']:.3g}, is "
        f"below ln L = {math.log(max(row['seen'], 2.0)):.3g}). {_error(row)}"
    )


def _single(row: Mapping[str, float]) -> str:
    return (
        f"One token decides: the variance of its scores, {row['score_variance']:.3g}, is above "
        f"ln L = {math.log(max(row['seen'], 2.0)):.3g}, so that the token of the largest score takes much of the "
        f"weight at this length. {_error(row)}"
    )


def _error(row: Mapping[str, float]) -> str:
    error = f"Over redraws of the prompt its output varies by {_percent(row['relative_error'])} of its size"
    return f"{error}; for {_percent(EPSILON)} it needs about {row['length']:,.0f} tokens."


def _refused(row: Mapping[str, float]) -> str:
    if math.isnan(row["tail"]):
        return "Refused: too few tokens are left beside its sinks for a tail index, so no error is predicted."
    return (
        f"Refused: the tail index k̂ of its weights is {row['tail']:.2f}, above {HEAVIEST:g}. A few tokens carry its "
        "output, and which ones changes from prompt to prompt, so no error is predicted."
    )


def _sinks(row: Mapping[str, float]) -> list[str]:
    if not row["sinks"] > 0:
        return []
    where = "the first token" if row["first"] > 0.9 * row["sinks"] else "tokens that every query reads"
    return [f"Sinks take {_percent(row['sinks'])} of its weight ({where}); they are kept apart from the rest."]


def _linear(row: Mapping[str, float]) -> list[str]:
    if not row["linear_beside_sinks"] < 0.1:
        return []
    apart = ", its sinks kept apart" if row["sinks"] > 0 else ""
    return [f"It is within {_percent(row['linear_beside_sinks'])} of linear attention{apart}."]


def _position(row: Mapping[str, float]) -> list[str]:
    if not row["position"] > 0.5:
        return []
    return [f"Position alone explains {_percent(row['position'])} of the variance of its scores."]


def _measured(row: Mapping[str, float]) -> list[str]:
    ratio = row.get("measured_over_predicted", math.nan)
    if not ratio > 0:
        return []
    return [f"On unseen text its error is {ratio:.2f} times the one predicted."]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"
