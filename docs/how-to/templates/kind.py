"""A kind of attention of your own: copy this file, change the classes, run it. Every line printed compares numbers."""

from typing import ClassVar

import jax
import jax.numpy as jnp

import largeprompt as lp
from largeprompt.attention import AbstractAttention, AbstractElementwise


class SoftplusAttention(AbstractElementwise):
    r"""Weights $\varphi(s) = \log(1+e^s)$: where weights are a function of the score, this is all there is to say."""

    kind: ClassVar[str] = "softplus"
    breaks: ClassVar[tuple[float, ...]] = (-16.0, -4.0, 4.0, 16.0)  # scores where it bends, has a kink or jumps

    def weight(self, s):
        return jax.nn.softplus(s)


class DifferentialAttention(AbstractAttention):
    """Any other kind says what it reads off a prompt: here the difference of two softmaxes, one of half the scores."""

    kind: ClassVar[str] = "differential"
    exponential: ClassVar[bool] = True  # its weights grow like e^s

    def reading(self, mu, u):
        return mu.tilt(u).mean() - mu.tilt(u / 2).mean() / 2


def simulated(layer, mu, z, L: int, prompts: int) -> tuple[float, float]:
    """L E‖T_L − T‖² over prompts, and its standard error."""
    limit = layer(mu, z)

    def square(key):
        return L * jnp.sum((layer(mu.prompt(key, L), z) - limit) ** 2)

    squares = jax.lax.map(square, jax.random.split(jax.random.key(0), prompts), batch_size=256)
    return float(squares.mean()), float(squares.std() / prompts**0.5)


def main() -> None:
    """Compare each kind with what must be the same."""
    lp.use_float64()
    U, V = jnp.array([[0.5, 0.2], [-0.1, 0.4]]), jnp.array([[1.0, 0.5]])
    mu, z = lp.Gaussian([0.3, -0.2], [[1.0, 0.3], [0.3, 0.6]]), jnp.array([0.8, -0.6])
    u = U @ z
    for layer in (SoftplusAttention(U, V), DifferentialAttention(U, V)):
        head = lp.Head(jnp.eye(2), U, V, kind=layer.kind)  # found by its name
        print(f"{layer.kind}, as a head: {head(mu, z)[0]:.12f} = {layer(mu, z)[0]:.12f} ± 1e-12")

        slope = jax.grad(lambda U, layer=layer: type(layer)(U, V)(mu, z)[0])(U)
        print(f"{layer.kind}, ∂T/∂U: {layer.jacobian(mu, z).U[0, 0, 1]:.10f} = {slope[0, 1]:.10f} ± 1e-8")

        constant = jnp.trace(V @ layer.error_covariance(mu, u, layer, u) @ V.T)
        measured, error = simulated(layer, mu, z, L=300, prompts=4000)
        allowed = 5 * error + 0.05 * float(constant)  # the law holds up to 1/L, and a sample may give the constant
        print(f"{layer.kind}, L E‖T_L − T‖²: {constant:.4f} = {measured:.4f} ± {allowed:.4f}")


if __name__ == "__main__":
    main()
