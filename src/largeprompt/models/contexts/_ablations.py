"""Outputs of a context with sentences left out or weighed, and their gradients: texts of one length run together."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from largeprompt.models.sensitivity._outputs import gradients_at, nobody, outputs_at

from ._prompt import ContextPrompt

BACKWARD = 2  # forward passes that a backward pass costs

_Advance = Callable[..., None]


def ablations(
    prompt: ContextPrompt, subsets: Bool[np.ndarray, "n g"], *, batch: int = 16, advance: _Advance = nobody
) -> Float[np.ndarray, " n"]:
    """The first output with some sentences left out: one number for each row, which is true for those that stay."""
    weights, back = _by_length(prompt, subsets.astype(float))
    return outputs_at(prompt, weights, batch, advance)[back, 0]


def slopes(
    prompt: ContextPrompt, weights: Float[np.ndarray, "n g"], *, batch: int = 8, advance: _Advance = nobody
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n g"]]:
    """The first output at each row of weights, and its derivatives in the log-weights, which are 0 at weight 0."""
    ordered, back = _by_length(prompt, weights)
    values, gradients = gradients_at(prompt, ordered, batch, lambda amount=1.0: advance((1 + BACKWARD) * amount))
    prompt.passes += BACKWARD * len(weights)
    return values[back, 0], gradients[back, 0]


def _by_length(prompt: ContextPrompt, weights: np.ndarray) -> tuple[np.ndarray, Any]:
    """Rows from the fewest tokens to the most, so that little of a batch is padding; and the way back."""
    order = np.argsort(prompt.tokens(weights), kind="stable")
    return weights[order], np.argsort(order)
