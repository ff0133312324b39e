r"""Moments of the softmax weights of L Gaussian scores and one given score λ, that of the query, as integrals.

As in `_weight_integrals`, with $e^{-s\omega_q}$, $\omega_q = e^\lambda$, from the query: write $t = \tau+\lambda$,
$\kappa_j = e^{jt-e^t}$ and $G(\phi) = E\,\phi^\ell$, the generating function of the length, $\phi^L$ for one length.
With $c$ the weight of the query and $s_j = \sum_l a_l^j$ over the tokens, $s_1 = 1-c$,
$$E\,c = \int\kappa_1G\,d\tau,\quad E\,cs_1 = \int\kappa_1G'P_1\,d\tau,\quad Q = \int\kappa_0G'P_2\,d\tau,\quad
  E[s_1-s_2] = \int\kappa_0G'P_{12}\,d\tau,\quad E\,c(s_1-2s_2) = \int\kappa_1G'P_{12}\,d\tau,$$
$$K_2 = (E\,m_1^2-Q)/\nu = \int\kappa_0\big[G'R + G''P_{12}^2\big]d\tau ,$$
where $P_{12} = P_1-P_2 = E[s\omega g\,e^{-s\omega}]/\beta$ and
$R = 4P_2-5P_3+P_4 = (E[(s\omega g)^2e^{-s\omega}]-P_2)/\nu$ by Stein's identity: the second forms do not cancel once
β is large. The κ's fall over a width of 1 whatever β is, so that the step in τ stays as small.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ._weight_integrals import _STEP, _TAIL, _averages, _longest_log, _steps

_LEFT, _RIGHT = math.ceil(_TAIL / _STEP), math.ceil((math.log(_TAIL) + 0.5) / _STEP)  # where κ₁ counts, in steps
_EULER = 0.5772156649015329


class QueryIntegrals(NamedTuple):
    """At one β, for each λ: E c, E c(1−c), Q = E s₂, E[s₁ − s₂], K₂ and X = E c(s₁ − 2s₂)."""

    C: np.ndarray
    spread: np.ndarray
    Q: np.ndarray
    kept: np.ndarray
    K2: np.ndarray
    X: np.ndarray


class TokenIntegrals(NamedTuple):
    """What the tokens contribute at one β, whatever λ is, on a grid in τ from `start` on."""

    start: float
    mean_log: float  # E log Σω
    G: np.ndarray
    rest: np.ndarray  # 1 − G, which is 1 beyond the grid
    one: np.ndarray  # G′P₁
    two: np.ndarray  # G′P₂
    difference: np.ndarray  # G′P₁₂
    square: np.ndarray  # G′R + G″P₁₂²


@functools.lru_cache(maxsize=512)
def _fine(beta: float, log_longest: float) -> tuple[float, np.ndarray]:
    tau = _steps(beta, log_longest, _STEP)
    return float(tau[0]), _averages(beta, tau, _STEP, log_longest)


def token_integrals(beta: float, lengths: np.ndarray, shares: np.ndarray) -> TokenIntegrals:
    """For a law of lengths, or the nodes of its rule."""
    start, (log_phi, P1, P2, P3, P4, G1, G2) = _fine(float(beta), _longest_log(math.log(max(lengths[-1], 1))))
    G, rest, first, second = np.zeros((4, len(log_phi)))
    for length, share in zip(lengths, shares, strict=True):
        G += share * np.exp(length * log_phi)
        rest -= share * np.expm1(length * log_phi)
        # no power below 0: where there is one, the factor is 0
        first += share * length * np.exp(max(length - 1, 0.0) * log_phi)
        second += share * length * max(length - 1, 0.0) * np.exp(max(length - 2, 0.0) * log_phi)
    P12, R = (G1 / beta, (G2 - P2) / beta**2) if beta > 1 else (P1 - P2, 4 * P2 - 5 * P3 + P4)
    # φ₀^L is the survival function of log e − log Σω with e exponential
    mean_log = -_EULER - (start - _STEP / 2 + _STEP * float(G.sum()))
    return TokenIntegrals(start, mean_log, G, rest, first * P1, first * P2, first * P12, first * R + second * P12**2)


def query_integrals(tokens: TokenIntegrals, lam: np.ndarray) -> QueryIntegrals:
    """At the β of the tokens, for each λ."""
    n, width = len(tokens.G), _LEFT + _RIGHT
    first = np.round(-(lam + tokens.start) / _STEP).astype(int) - _LEFT  # of the window of each λ
    exponential = np.exp(_STEP * (first[:, None] + np.arange(width)) + (lam + tokens.start)[:, None])
    kappa0 = np.exp(-exponential)
    kappa1 = kappa0 * exponential

    def near(kappa, *values, beyond=0.0):
        padded = np.zeros((len(values), n + 2 * width))
        padded[:, width : width + n], padded[:, width + n :] = values, beyond
        windows = sliding_window_view(padded, width, axis=1)[:, np.clip(first, -width, n) + width]
        return _STEP * np.einsum("ij,fij->fi", kappa, windows)

    def below(*values):
        """With κ₀, which is 1 below the window."""
        before = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)[:, np.clip(first, 0, n)]
        return _STEP * before + near(kappa0, *values)

    G, spread, X = near(kappa1, tokens.G, tokens.one, tokens.difference)
    (rest,) = near(kappa1, tokens.rest, beyond=1.0)
    # each to its own accuracy
    C = np.where(lam > tokens.mean_log, 1 - rest, G)
    Q, kept, K2 = below(tokens.two, tokens.difference, tokens.square)
    return QueryIntegrals(C, spread, Q, kept, K2, X)
