"""The errata of the paper as data: each recomputes numbers that refute what is printed and support its correction."""

from collections.abc import Mapping

import jax.numpy as jnp

from largeprompt.paper.errata import _concentration, _flow_limits, _in_context, _queries, _regression, _training
from largeprompt.paper.errata._erratum import Comparison as Comparison
from largeprompt.paper.errata._erratum import Erratum as Erratum
from largeprompt.paper.errata._erratum import Evidence as Evidence
from largeprompt.paper.errata._page import prose as prose
from largeprompt.paper.errata._page import render

ERRATA: tuple[Erratum, ...] = tuple(
    sorted(
        (
            *_concentration.ERRATA,
            *_queries.ERRATA,
            *_in_context.ERRATA,
            *_regression.ERRATA,
            *_flow_limits.ERRATA,
            *_training.ERRATA,
        ),
        key=lambda erratum: int(erratum.key[1:]),
    )
)
"""Every erratum, numbered in one sequence; the letter is the kind (error, gap, typo)."""


def evidence() -> dict[str, Evidence]:
    """The evidence of every erratum, recomputed: about a minute, most of it compilation."""
    if jnp.zeros(()).dtype != jnp.float64:
        raise ValueError("JAX computes in float32, too coarse for this evidence; call largeprompt.use_float64() first")
    return {erratum.key: erratum.evidence() for erratum in ERRATA}


def markdown(evidence_by_key: Mapping[str, Evidence]) -> str:
    """The page docs/errata.md, from the given evidence."""
    return render(ERRATA, evidence_by_key)
