# temporary: the methods of kinds until they land in `attention`
import jax
import jax.numpy as jnp

import largeprompt.attention as A
from largeprompt.attention import AbstractAttention, LinearAttention, MultiHead, SoftmaxAttention, kind_of, merged_form


def heads_of(layer):
    parts = layer.heads if type(layer) is MultiHead else (layer,)
    if all(map(kind_of, parts)):
        return tuple(merged_form(part) for part in parts)
    return (layer,) if isinstance(layer, AbstractAttention) else None


def _softmax_pair(mu, u, v):
    both = mu._tilt(u + v)
    mean = both._mean()
    product = jnp.outer(mean - mu._tilt(u)._mean(), mean - mu._tilt(v)._mean())
    return jnp.exp(mu._cgf(u + v) - mu._cgf(u) - mu._cgf(v)) * (both._cov() + product)


def _second_moment(mu, s):
    tilted = mu._tilt(s)
    mean = tilted._mean()
    return jnp.exp(mu._cgf(s)) * (tilted._cov() + jnp.outer(mean, mean))


def error_covariance(one, mu, u, other, v, tokens=None):
    if kind_of(one) == kind_of(other) == "softmax":
        return _softmax_pair(mu, u, v)
    if kind_of(one) == "linear" and kind_of(other) == "softmax":
        return error_covariance(other, mu, v, one, u).T
    zero = jnp.zeros_like(u)
    if kind_of(one) == "softmax":
        tilted = mu._tilt(u)
        third = jax.jvp(lambda s: _second_moment(tilted, s), (zero,), (v,))[1]
        return third - jnp.outer(tilted._mean(), _second_moment(tilted, zero) @ v)
    along = lambda s: jax.jvp(lambda s: _second_moment(mu, s), (s,), (v,))[1]  # noqa: E731
    S = _second_moment(mu, zero)
    return jax.jvp(along, (zero,), (u,))[1] - jnp.outer(S @ u, S @ v)


def slope_error(self, mu, u, A, B, tokens=None):
    if kind_of(self) == "softmax":
        inflation, b, second, doubled = _twice_tilted(mu, u)
        H = mu._tilt(u)._cov()
        return inflation * (doubled._fourth(b, A, B) - 2 * jnp.sum((B @ H) * (second @ A)) + jnp.sum((B @ H) * (H @ A)))
    mean = mu._mean()
    second = mu._cov() + jnp.outer(mean, mean)
    return mu._fourth(mean, A, B) - jnp.sum((B @ second) * (second @ A))


def _twice_tilted(mu, theta):
    doubled = mu._tilt(2 * theta)
    b = doubled._mean() - mu._tilt(theta)._mean()
    return jnp.exp(mu._cgf(2 * theta) - 2 * mu._cgf(theta)), b, doubled._cov() + jnp.outer(b, b), doubled


def reading_bias(self, mu, u):
    if kind_of(self) == "linear":
        return jnp.zeros_like(u)
    inflation, b, _, _ = _twice_tilted(mu, u)
    return -inflation * b


A.heads_of = heads_of
AbstractAttention.exponential = False
SoftmaxAttention.exponential = True
for f in (error_covariance, slope_error, reading_bias):
    setattr(AbstractAttention, f.__name__, f)
AbstractAttention.errors_are_exact = lambda self, mu: True
