r"""Yeo and Johnson's power transform, with its exponent by the maximum of a weighted likelihood.

With $u = \log(1 + |x|)$, $s = \operatorname{sign} x$ and $p = \lambda$ for $x \ge 0$, $2 - \lambda$ for $x < 0$:

$$y_\lambda(x) = s\,u\,\varphi(pu), \qquad \varphi(t) = (e^t - 1)/t.$$

Per unit of weight, the likelihood $-\tfrac12 \log \mathrm{Var}\, y_\lambda + (\lambda - 1) \mathrm E[s u]$
is concave, so that Newton's steps inside a bracket find its maximum.
"""

import torch
from torch import Tensor

STEPS = 60  # at most; a bracket that is halved in each would end at rounding
NEAR, TERMS = 0.5, 12  # the series is used below this argument, with so many terms: exact to rounding


def transformed(x: Tensor, exponent: Tensor) -> Tensor:
    """The transform of `x` (b, N, f) with exponents (b, f)."""
    u, sign, p = _parts(x, exponent)
    return sign * u * _phi(p * u, 0)


def best_exponent(x: Tensor, weights: Tensor) -> Tensor:
    """The most likely exponent (b, f) of the values (b, n, f) under weights of the same shape; 1 for a constant column.

    Its derivative in the weights is that of the maximum: a last Newton step, which moves nothing, has it.
    """
    with torch.no_grad():
        exponent = _maximum(x, weights)
    slope, curvature = _derivatives(x, weights, exponent)
    return exponent - torch.where(curvature < 0, slope / curvature.detach(), 0)


def _maximum(x: Tensor, weights: Tensor) -> Tensor:
    exponent = torch.ones_like(weights[:, 0])
    low, high = torch.full_like(exponent, -torch.inf), torch.full_like(exponent, torch.inf)
    for _ in range(STEPS):
        slope, curvature = _derivatives(x, weights, exponent)
        low, high = torch.where(slope >= 0, exponent, low), torch.where(slope <= 0, exponent, high)
        step = torch.where(curvature < 0, -slope / curvature, 0).clamp(-2, 2)
        moved = exponent + step
        middle = torch.where(torch.isfinite(low + high), (low + high) / 2, moved)
        moved = torch.where((moved > low) & (moved < high), moved, middle)
        moved = torch.where(slope == 0, exponent, moved)
        if bool(((moved - exponent).abs() <= 1e-12 * (1 + exponent.abs())).all()):
            break
        exponent = moved
    return exponent


def _derivatives(x: Tensor, weights: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """The first two derivatives in λ of the likelihood per unit of weight; 0 for a constant column."""
    u, sign, p = _parts(x, exponent)
    shares = weights / weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    y, first, second = sign * u * _phi(p * u, 0), u**2 * _phi(p * u, 1), sign * u**3 * _phi(p * u, 2)

    def covariance(a: Tensor, b: Tensor) -> Tensor:
        return (shares * (a - (shares * a).sum(1, keepdim=True)) * (b - (shares * b).sum(1, keepdim=True))).sum(1)

    variance = covariance(y, y)
    varied = variance > 0
    variance = torch.where(varied, variance, 1)
    relative = 2 * covariance(y, first) / variance
    curvature = 2 * (covariance(first, first) + covariance(y, second)) / variance - relative**2
    slope = (shares * sign * u).sum(dim=1) - relative / 2
    return torch.where(varied, slope, 0), torch.where(varied, -curvature / 2, 0)


def _parts(x: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sign = torch.where(x < 0, -1.0, 1.0).to(x)
    exponent = exponent[:, None]
    return x.abs().log1p(), sign, torch.where(x < 0, 2 - exponent, exponent)


def _phi(t: Tensor, order: int) -> Tensor:
    r"""φ or its derivative of order 1 or 2, $\varphi^{(m)}(t) = \sum_k t^k / (k!\,(k + m + 1))$."""
    near = t.abs() < NEAR
    small, large = torch.where(near, t, 0), torch.where(near, 1, t)
    series, term = torch.zeros_like(t), torch.ones_like(t)
    for k in range(TERMS):
        series = series + term / (k + order + 1)
        term = term * small / (k + 1)
    far = torch.expm1(large) / large
    for m in range(order):
        far = (torch.exp(large) - (m + 1) * far) / large
    return torch.where(near, series, far)
