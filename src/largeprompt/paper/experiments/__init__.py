"""What is asked of the paper, one question a module: its computation, dataset, chart, and the claims it settles."""

import dataclasses
from typing import Any

from largeprompt.paper.choice import Choice
from largeprompt.paper.claims import Claim
from largeprompt.paper.experiment import Experiment

from . import (
    diversity,
    failed_starts,
    figure_1,
    figure_2,
    figure_3,
    figure_4,
    flow_limits,
    flows,
    generalise,
    heads,
    laws,
    learned_scale,
    limits,
    speed,
    spurious,
)

_MODULES = (
    *(figure_1, figure_2, failed_starts, figure_3, figure_4, laws, flows, flow_limits, limits, speed),
    *(generalise, heads, diversity, learned_scale, spurious),
)


def _found(kind: type) -> list[Any]:
    """All experiments or claims of the modules."""
    return [value for module in _MODULES for value in vars(module).values() if isinstance(value, kind)]


FIGURES: dict[str, Experiment] = {
    experiment.key: experiment
    for experiment in sorted(_found(Experiment), key=lambda experiment: (experiment.key.isalpha(), experiment.key))
    if experiment.drawn
}
"""The experiments that are drawn, by key, in the paper's order: 1a … 8, then our own."""

CLAIMS: dict[str, Claim] = {
    claim.key: claim for claim in sorted(_found(Claim), key=lambda claim: (claim.key[0], int(claim.key[1:])))
}
"""By key: C1 … are what figures are said to show, T1 … what the theory says, S1 … our own, F1 and H1 … others."""


def settings(choice: Choice) -> dict[str, Any]:
    """All sizes of a reproduction, as plain data."""
    preset = choice.preset
    return {
        "preset": preset,
        **dataclasses.asdict(choice.protocol),
        "paths": figure_3.PATHS[preset],
        "courses": figure_4.COURSES[preset],
        "traps": figure_2.TRAPS[preset],
        **dataclasses.asdict(figure_1.SIZES[preset]),
        **dataclasses.asdict(laws.SIZES[preset]),
        **dataclasses.asdict(flows.SIZES[preset]),
        "flow_parameters": flow_limits.FLOW_PARAMETERS[preset],
        **dataclasses.asdict(diversity.SIZES[preset]),
        **dataclasses.asdict(heads.SIZES[preset]),
        **dataclasses.asdict(spurious.SIZES[preset]),
        "limit_queries": limits.QUERIES[preset],
        "limit_prompts": limits.PROMPTS[preset],
        "scale_draws": learned_scale.DRAWS[preset],
        "conventions": dataclasses.asdict(choice.conventions),
    }
