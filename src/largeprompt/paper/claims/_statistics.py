r"""Errors that contain what varies, also where numbers tie.

A check decides at `ERRORS` standard errors, one chance in 740 for a normal law. So that this is the rate for few seeds
too, errors are widened until they are as rare:

- a mean of *continuous* numbers over $n$ seeds by Student's law. One seed, or seeds that agree to the last digit, leave
  it unknown; numbers that are read off a grid vary at least as much as rounding to it.
- a mean of *counts* (falls of a run, starts that fail), which tie, has the error that it would have if the target
  were true: the root of the mean square about the target, over $\sqrt n$. Wilson's error of a share is of this kind.
  $n$ equal seeds then lie $\sqrt n$ errors from the target, and settle nothing below ten. It is at least one step of
  one seed. Numbers of one seed at several lengths count as one.
- the worst of $m$ numbers is judged by errors that are as rare among $m$ as three are for one (Bonferroni).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import norm
from scipy.stats import t as student

from ._claim import ERRORS, Check


@functools.cache
def widened(n: int) -> float:
    """By how much the error of a mean over n seeds is widened: three of it are then as rare as for many."""
    return float(student.isf(norm.sf(ERRORS), n - 1)) / ERRORS if n > 1 else math.inf


def mean_over_seeds(values: Any, rounding: float = 0.0) -> tuple[float, float]:
    """The mean of continuous numbers, one for each seed, and its error; `rounding` is the grid they are read off."""
    values = np.asarray(values, float)
    n = len(values)
    if n == 0 or not np.isfinite(values).all():
        return math.nan, math.inf
    spread = max(float(values.std(ddof=1)), rounding / math.sqrt(12)) if n > 1 else 0.0
    return float(values.mean()), widened(n) * spread / math.sqrt(n) if spread > 0 else math.inf


def mean_of_counts(
    values: Float[np.ndarray, "s *rest"], target: float, step: float, unknown: float = 0.0
) -> tuple[float, float]:
    """The mean of counts or shares that are multiples of `step`, with the error that it has if `target` is true.

    Rows are seeds; what was not run is NaN. A share `unknown` of them could be anything within a step.
    """
    values = np.asarray(values, float).reshape(len(values), -1)
    values = values[np.isfinite(values).any(axis=1)]
    n, total = len(values), int(np.isfinite(values).sum())
    if n < 2:
        return float(np.nanmean(values)) if n else math.nan, math.inf
    of_seeds = np.nansum(values - target, axis=1)
    about_target = max(float(np.linalg.norm(of_seeds)) / total, step / n)
    return target + float(of_seeds.sum()) / total, math.hypot(about_target, unknown * step)


@functools.cache
def _among(m: int) -> float:
    """By how much an error is widened, so that three of it are as rare among m numbers as for one."""
    return float(norm.isf(norm.sf(ERRORS) / m)) / ERRORS


def worst(
    label: str,
    values: Float[np.ndarray, " m"],
    errors: Float[np.ndarray, " m"],
    names: Sequence[Any],
    relation: Any = ">",
    target: float = 0.0,
) -> Check:
    """That all values are on one side of a target: the one that is least so, in errors. All must be known."""
    if len(values) == 0 or np.isnan(values).any():
        return Check(label, math.nan, relation, target, math.inf)
    wider = np.asarray(errors, float) * _among(len(values))
    margins = (np.asarray(values) - target) * (1 if relation == ">" else -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        i = int(np.nanargmin(np.where(wider > 0, margins / wider, np.sign(margins) * math.inf)))
    return Check(f"{label}, worst at {names[i]}", float(values[i]), relation, target, float(wider[i]))
