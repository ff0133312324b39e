"""Lemmas D.1 and D.2: what sub-Gaussian tokens do to limits and to maxima."""

import math

import numpy as np
from scipy.special import gammaincc, gammaln

from ._bound import Bound, Length, Logs, Number, dimension, log_length, logarithm, real


def log_maximum_constant(p: int, D: int) -> float:
    r"""ln of $C_p = 64^{p/2}(1 + \tfrac p2 c_p)$, $c_p = \Gamma(\tfrac p2, x_0)e^{x_0}x_0^{-p/2}$ with $x_0 = 4D$.

    The proof of Lemma D.2 integrates from $B^{2/p}/16 \ge 4D$ on, where $\Gamma(\tfrac p2,x)e^xx^{-p/2}$ is largest at
    the left end; its own $x_0 = 1/16$ would make $C_8$ a million times larger.
    """
    x0, a = 4.0 * D, p / 2
    log_c = math.log(gammaincc(a, x0)) + gammaln(a) + x0 - a * math.log(x0) if D < 100 else _log_c_far(a, x0)
    return a * math.log(64) + math.log1p(a * math.exp(log_c))


def _log_c_far(a: float, x0: float) -> float:
    """ln ∫(1+u/x)^{a-1}e^{-u}du/x by Gauss-Laguerre, where e^{x} and Γ(a, x) leave the range of floats."""
    u, weights = np.polynomial.laguerre.laggauss(60)
    return math.log(float(weights @ (1 + u / x0) ** (a - 1))) - math.log(x0)


def log_maximum(log_L: float, sigma: Logs, D: int, p: int) -> Logs:
    """ln of the bound of Lemma D.2 on E max‖z_l‖^p."""
    return p * np.log(sigma) + log_maximum_constant(p, D) + math.log(D ** (p / 2) + log_L ** (p / 2))


def lemma_d1(u: Number, sigma: float) -> Bound:
    r"""Equation (22): $\|\nabla\Lambda(u)\| \le 2\sigma^2\|u\|$ for centred σ sub-Gaussian tokens, `u` the norm."""
    terms = {"2σ²‖u‖": math.log(2) + 2 * logarithm(real("sigma", sigma)) + logarithm(real("u", u))}
    return Bound.of("Equation (22)", terms, ("tokens centred and σ sub-Gaussian",))


def lemma_d1_output(*, sigma: Number, U: Number, V: Number, D: int) -> Bound:
    r"""Lemma D.1: $\|T[\mu]\|_{L^4(\nu)} \le 4\sigma^2\|V\|\|U\|\sqrt D$, `U` and `V` the operator norms."""
    logs = [logarithm(real(name, x)) for name, x in (("sigma", sigma), ("sigma", sigma), ("V", V), ("U", U))]
    terms = {"4σ²‖V‖‖U‖√D": math.log(4) + sum(logs) + math.log(dimension(D)) / 2}
    return Bound.of("Lemma D.1", terms, ("tokens centred and σ sub-Gaussian", "queries 1 sub-Gaussian"))


def lemma_d2_tail(t: Number, *, sigma: Number, D: int) -> Bound:
    r"""Lemma D.2.1: $P(\|z\|\ge t) \le e^{2D - t^2/(16\sigma^2)}$."""
    sigma = real("sigma", sigma)
    if sigma == 0:
        raise ValueError("sigma is 0; a token that is constant has no tail to bound")
    terms = {"exp(2D - t²/16σ²)": 2.0 * dimension(D) - (real("t", t) / sigma) ** 2 / 16}
    return Bound.of("Lemma D.2 (1)", terms, ("tokens centred and σ sub-Gaussian",))


def lemma_d2_maximum(L: Length, *, p: int, sigma: Number, D: int) -> Bound:
    r"""Lemma D.2.2: $E\max_l\|z_l\|^p \le \sigma^p C_p(D^{p/2} + \ln^{p/2}L)$ for $p\ge2$, $C_p$ explicit."""
    l, D, p = log_length(L), dimension(D), int(real("p", p, at_least=2))
    scale = p * logarithm(real("sigma", sigma)) + log_maximum_constant(p, D)
    terms = {"dimension": scale + p / 2 * math.log(D), "length": scale + p / 2 * logarithm(l)}
    return Bound.of("Lemma D.2 (2)", terms, ("tokens centred and σ sub-Gaussian",))
