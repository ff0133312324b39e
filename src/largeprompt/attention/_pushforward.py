from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.measures import AbstractMeasure, Empirical, Gaussian, as_measure

from ._forms import described, heads_of, kind_of
from ._layer import AbstractLayer


def _affine_map(layer: AbstractLayer, mu: Gaussian) -> tuple[Float[Array, "p D"], Float[Array, " p"]]:
    """A and b with T[μ](z) = Az + b: on a Gaussian prompt softmax and linear heads, and their sums, are affine."""
    if not _is_affine(layer):
        raise ValueError(
            f"the layer is {described(layer)}; only softmax and linear attention and sums of such heads are affine on "
            "Gaussians (push a sample through: pushforward with a key, or particles)"
        )
    origin = jnp.zeros(layer.dim, mu.m.dtype)
    return layer.jacobian(mu, origin).z, layer(mu, origin)


def _is_affine(layer: AbstractLayer) -> bool:
    return all(kind_of(head) is not None for head in heads_of(layer) or (layer,))


def pushforward(
    layer: AbstractLayer,
    mu: AbstractMeasure,
    nu: AbstractMeasure | None = None,
    *,
    key: PRNGKeyArray | None = None,
    n: int = 10_000,
) -> Gaussian | Empirical:
    r"""The law of $T[\mu](z)$ for $z\sim\nu$ (by default $\nu=\mu$).

    Exact where both are Gaussian and the layer is softmax or linear attention or a sum of such heads: then
    $T[\mu](z) = b + Az$ (softmax: $b = Vm$, $A = V\Gamma U$), and $\mathcal N(n, S)$ goes to
    $\mathcal N(b + An, ASA^\top)$. For every other layer and law, with a `key`, the outputs of `n` queries drawn from
    $\nu$. Paper: Lemma 2.1.
    """
    nu = mu if nu is None else nu
    if key is not None and not (_is_affine(layer) and isinstance(mu, Gaussian) and isinstance(nu, Gaussian)):
        queries = as_measure("nu", nu, layer.dim).sample(key, checks.count("n", n))
        return Empirical(layer.map(mu, queries))
    for name, law in (("mu", mu), ("nu", nu)):
        _refuse_what_is_not_gaussian(name, law, layer.dim)
    A, b = _affine_map(layer, cast(Gaussian, mu))
    return _image(A, b, cast(Gaussian, nu))


def _image(A: Float[Array, "p D"], b: Float[Array, " p"], nu: Gaussian) -> Gaussian:
    return Gaussian(b + A @ nu.m, A @ nu.Gamma @ A.T)


def depth(layers: Sequence[AbstractLayer], mu: Gaussian, *, residual: bool = False) -> list[Gaussian]:
    r"""The laws $\mu_0,\mu_1,\dots$ of the tokens of an infinite Gaussian prompt, layer after layer.

    $\mu_{k+1} = (T_k[\mu_k])_\#\mu_k$, or with `residual` the law of $z + T_k[\mu_k](z)$.
    Paper: Lemma 2.1, applied again and again.
    """
    _refuse_what_is_not_gaussian("mu", mu)
    laws = [mu]
    for k, layer in enumerate(layers):
        _refuse_another_dimension(k, layer)
        try:
            A, b = _affine_map(layer, mu)
            A = A + jnp.eye(layer.dim, dtype=A.dtype) if residual else A
            mu = _image(A, b, mu)
        except ValueError as error:
            raise ValueError(f"layers[{k}]: {error}") from None
        laws.append(mu)
    return laws


def _refuse_what_is_not_gaussian(name: str, law: AbstractMeasure, dim: int | None = None) -> None:
    if not isinstance(as_measure(name, law, dim), Gaussian):
        raise ValueError(
            f"{name} is of type {type(law).__name__}; only Gaussians have a pushforward in closed form "
            "(push a sample through: pushforward with a key, or particles)"
        )


def _refuse_another_dimension(k: int, layer: AbstractLayer) -> None:
    if layer.outputs != layer.dim:
        raise ValueError(f"layers[{k}] sends dimension {layer.dim} to {layer.outputs}; depth needs them equal")


def particles(
    layers: Sequence[AbstractLayer], mu: AbstractMeasure, key: PRNGKeyArray, n: int, *, residual: bool = False
) -> list[Empirical]:
    """The laws of the tokens of a prompt of `n` tokens, layer after layer, for any law and any layers.

    Each layer sends every token through the prompt that they form.
    """
    laws = [Empirical(as_measure("mu", mu).sample(key, checks.count("n", n)))]
    for k, layer in enumerate(layers):
        _refuse_another_dimension(k, layer)
        points = layer.map(laws[-1], laws[-1].points)
        laws.append(Empirical(laws[-1].points + points if residual else points))
    return laws
