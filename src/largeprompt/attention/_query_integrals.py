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
    rest: np.ndarray  # 1 − G
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
    n, centre = len(tokens.G), np.round(-(lam + tokens.start) / _STEP)
    index = centre.astype(int)[:, None] + np.arange(-_LEFT, _RIGHT)
    t = _STEP * index + (lam + tokens.start)[:, None]
    exponential = np.exp(t)
    kappa0 = np.exp(-exponential)
    kappa1 = kappa0 * exponential
    width = index.shape[1]
    first = np.clip(index[:, 0], -width, n) + width

    def near(kappa, values):
        """Over the window, beyond the grid 0."""
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(values, width), width)
        return _STEP * np.einsum("ij,ij->i", kappa, windows[first])

    def below(values):
        """With κ₀, which is 1 below the window."""
        before = np.concatenate([[0], np.cumsum(values)])[np.clip(index[:, 0], 0, n)]
        return _STEP * before + near(kappa0, values)

    # each to its own accuracy: beyond the grid G is 1 below and 0 above
    C = np.where(
        lam > tokens.mean_log, 1 - near(kappa1, tokens.rest) - _above(kappa1, index, n), near(kappa1, tokens.G)
    )
    found = near(kappa1, tokens.one), below(tokens.two), below(tokens.difference), below(tokens.square)
    return QueryIntegrals(C, *found, near(kappa1, tokens.difference))


def _above(kappa1: np.ndarray, index: np.ndarray, n: int) -> np.ndarray:
    """The part of ∫κ₁ beyond the upper end of the grid, where 1 − G is 1."""
    return _STEP * np.where(index >= n, kappa1, 0).sum(axis=1)
