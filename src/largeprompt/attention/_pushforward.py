from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt.measures import AbstractMeasure, Empirical, Gaussian, as_measure

from ._forms import known_heads
from ._layer import AbstractLayer


def _affine_map(layer: AbstractLayer, mu: Gaussian) -> tuple[Float[Array, "p D"], Float[Array, " p"]]:
    """A and b with T[μ](z) = Az + b: on a Gaussian prompt softmax and linear heads, and their sums, are affine."""
    if known_heads(layer) is None:
        raise ValueError(
            f"the layer is of type {type(layer).__name__}; only softmax and linear attention and sums of such heads "
            "are known to be affine on Gaussians (push a sample through with particles instead)"
        )
    origin = jnp.zeros(layer.dim, mu.m.dtype)
    return layer.jacobian(mu, origin).z, layer(mu, origin)


def pushforward(layer: AbstractLayer, mu: Gaussian, nu: Gaussian | None = None) -> Gaussian:
    r"""The law of $T[\mu](z)$ for $z\sim\nu$ (by default $\nu=\mu$), both Gaussian.

    For softmax and linear attention and sums of such heads; `particles` serves every other layer and law. Then
    $T[\mu](z) = b + Az$ (softmax: $b = Vm$, $A = V\Gamma U$), and $\mathcal N(n, S)$ goes to
    $\mathcal N(b + An, ASA^\top)$. Paper: Lemma 2.1.
    """
    nu = mu if nu is None else nu
    for name, law in (("mu", mu), ("nu", nu)):
        _refuse_what_is_not_gaussian(name, law, layer.dim)
    A, b = _affine_map(layer, mu)
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
            mu = Gaussian(b + A @ mu.m, A @ mu.Gamma @ A.T)
        except ValueError as error:
            raise ValueError(f"layers[{k}]: {error}") from None
        laws.append(mu)
    return laws


def _refuse_what_is_not_gaussian(name: str, law: AbstractMeasure, dim: int | None = None) -> None:
    if not isinstance(as_measure(name, law, dim), Gaussian):
        raise ValueError(
            f"{name} is of type {type(law).__name__}; only Gaussians have a pushforward in closed form "
            "(push a sample through with particles instead)"
        )


def _refuse_another_dimension(k: int, layer: AbstractLayer) -> None:
    if layer.outputs != layer.dim:
        raise ValueError(f"layers[{k}] sends dimension {layer.dim} to {layer.outputs}; depth needs them equal")


def particles(
    layers: Sequence[AbstractLayer], mu: AbstractMeasure, key: PRNGKeyArray, n: int, *, residual: bool = False
) -> list[Empirical]:
    """The same for any law, any layers and a prompt of `n` tokens.

    Each layer sends every token through the prompt that they form.
    """
    laws = [Empirical(as_measure("mu", mu).sample(key, checks.count("n", n)))]
    for k, layer in enumerate(layers):
        _refuse_another_dimension(k, layer)
        points = layer.map(laws[-1], laws[-1].points)
        laws.append(Empirical(laws[-1].points + points if residual else points))
    return laws
