"""Errata of Section 6 and Appendix A: what training reaches from the default start, and what the optimum is worth."""

import math
from typing import Literal

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from largeprompt.attention import AbstractAttention, Head, LinearAttention, merged_form
from largeprompt.dynamics import gradient_flow, structured_start
from largeprompt.icl import (
    LinearRegression,
    bayes_risk,
    blocks,
    from_blocks,
    identity,
    kms,
    optimal_linear,
    optimal_softmax,
    risk_function,
    risk_gradient,
)
from largeprompt.paper.errata._evidence import Numbers
from largeprompt.paper.errata._regression import follow

HORIZON = 500.0
"""Flow time of the experiments: 500 000 steps of size 10⁻³."""

LIMIT = 0.05
"""s2/2, the limit of every risk of the experiments."""

TRAPPED = 0.005
"""Excess risk above which a run counts as not having reached the optimum."""


SOFTMAX_STARTS, SOFTMAX_NODES = 12, 512
"""Starts of softmax attention that are followed, and the nodes of (w, x) over which its risk is averaged."""


def default_start(seed: int, d: int = 5, kind: Literal["linear", "softmax"] = "linear") -> Head:
    """K, Q, V and the row of O that predicts, uniform on ±(d+1)^{−1/2}: PyTorch's default linear layers."""
    D = d + 1
    theta = np.random.default_rng(seed).uniform(-1, 1, 3 * D * D + D) / math.sqrt(D)
    K, Q, V = theta[: 3 * D * D].reshape(3, D, D)
    return Head(K, Q, V, theta[None, 3 * D * D :], kind=kind)


def hessian_spectrum(layer: AbstractAttention, task: LinearRegression, L: int) -> Float[np.ndarray, " n"]:
    """Eigenvalues of ∇²R_L in (A, c, p, r)."""
    function = risk_function(layer, task, L)
    theta, shaped = ravel_pytree(blocks(layer, task))

    def value(theta):
        return function.value_and_error(from_blocks(shaped(theta), LinearAttention))[0]

    return np.linalg.eigvalsh(jax.jit(jax.hessian(value))(theta))


def G20() -> Numbers:
    task, L = LinearRegression.experiment(identity(5)), 1000
    best = float(optimal_linear(task, L).risk.value)
    flows = [gradient_flow(default_start(seed), task, L, [HORIZON]) for seed in range(20)]
    excess = np.array([float(flow.risk[-1]) - best for flow in flows])
    trapped = excess > TRAPPED
    trap = merged_form(flows[int(np.argmax(trapped))].last)
    spectrum, parts = hessian_spectrum(trap, task, L), blocks(trap, task)
    reading = float(parts.R[0, 0]) * np.asarray(parts.A)
    reversed_direction = float(np.linalg.eigvalsh((reading + reading.T) / 2)[0])
    structured = follow(structured_start(task, 0.5, kind="linear"), task, L, [HORIZON])
    softmax = _softmax_ends(task, L)
    softmax_excess = softmax[:, 1] - softmax[:, 1].min()
    caught = softmax_excess > TRAPPED
    falling = (softmax[:, 0] - softmax[:, 1])[caught] / softmax_excess[caught]
    return [
        (float(caught.sum()), SOFTMAX_STARTS / 4),
        (float(softmax_excess[caught].min()), TRAPPED),
        (float(falling.max()), 0.0),
        (float(trapped.sum()), 5.0),
        (float(excess[trapped].min()), TRAPPED),
        (float(risk_gradient(trap, task, L).norm()), 0.0),
        (min(float(spectrum[0]), 0.0), 0.0),
        (reversed_direction, 0.0),
        (float(spectrum[5]), 1e-2),
    ], [
        (float(structured.risk[-1]), best),
        (float(excess[~trapped].max()), 0.0),
        (float(softmax_excess[~caught].max()), 0.0),
    ]


def _softmax_ends(task: LinearRegression, L: int) -> Float[np.ndarray, "s 2"]:
    """Risks at half the time of the experiments and at its end, along softmax flows from default starts."""
    starts = [default_start(seed, kind="softmax") for seed in range(SOFTMAX_STARTS)]
    # the risks are then right to 1e-6, and are asked about to 1e-3
    flows = [gradient_flow(start, task, L, [HORIZON / 2, HORIZON], draws=SOFTMAX_NODES, rtol=1e-4) for start in starts]
    return np.array([np.asarray(flow.risk) for flow in flows])


def G21() -> Numbers:
    tasks = [LinearRegression.experiment(Sigma) for Sigma in (kms(5), identity(5))]
    lengths, shown = (*range(1, 11), 20, 50, 100, 200, 500, 1000), (10, 1000)
    bayes = np.array([[float(bayes_risk(task, L).value) for L in lengths] for task in tasks])
    linear = np.array([[float(optimal_linear(task, L).risk.value) for L in lengths] for task in tasks])
    optima = [[optimal_softmax(task, L) for L in shown] for task in tasks]
    softmax = np.array([[float(optimum.risk.value) for optimum in row] for row in optima])
    short, bayes_shown = np.array(lengths) <= 5, bayes[:, [lengths.index(L) for L in shown]]
    # rows are covariances: KMS over isotropic
    linear_ratio, softmax_ratio, bayes_ratio, linear_gap, softmax_gap = (
        above[0] / above[1]
        for above in (linear - LIMIT, softmax - LIMIT, bayes - LIMIT, linear - bayes, softmax - bayes_shown)
    )
    linear_shown = linear[:, [lengths.index(L) for L in shown]]
    ends = {"linear": linear_shown, "softmax": softmax, "Bayes": bayes_shown}
    falls = {
        who: (short - LIMIT) / (long - LIMIT) for who, (short, long) in ((who, risk.T) for who, risk in ends.items())
    }
    far = 10**9
    rate, isotropic_rate = (far * (float(optimal_linear(task, far).risk.value) - LIMIT) for task in tasks)
    softmax_rate, isotropic_softmax_rate = (float(row[0].rate) for row in optima)
    return [
        (linear_ratio.max(), 1.0),
        (linear_ratio[lengths.index(10)], 0.95),
        (softmax_ratio[0], 0.95),
        (softmax_ratio[1], 1.0),
        (bayes_ratio.max(), 1.0),
        (linear_gap[~short].max(), 1.0),
        (softmax_gap[0], 0.95),
        (softmax_gap[1], 1.0),
    ], [
        *((fall[1], fall[0]) for fall in falls.values()),
        (rate, 3.25),
        (isotropic_rate, 3.25),
        (softmax_rate, isotropic_softmax_rate),
        (linear_gap[short].min(), 1.0),
    ]
