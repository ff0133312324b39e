"""A token law of your own: copy this file, change the class, run it. Each line that it prints compares two numbers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import largeprompt as lp


class Poisson(lp.AbstractMeasure):
    r"""Independent counts of given rates: $\Lambda(\theta) = \sum_i \lambda_i(e^{\theta_i}-1)$."""

    rates: Float[Array, " D"]

    def __init__(self, rates):
        self.rates = jnp.asarray(rates, float)

    @property
    def dim(self) -> int:
        return self.rates.shape[0]

    # The methods with an underscore compute; the public ones, `cgf`, `tilt` and so on, check and then call them.

    def _cgf(self, theta: Float[Array, " D"]) -> Float[Array, ""]:
        return jnp.sum(self.rates * jnp.expm1(theta))

    def _tilt(self, theta: Float[Array, " D"]) -> "Poisson":
        """A tilt of counts is counts again, of rates λe^θ."""
        return Poisson(self.rates * jnp.exp(theta))

    def _mean(self) -> Float[Array, " D"]:
        return self.rates

    def _cov(self) -> Float[Array, "D D"]:
        return jnp.diag(self.rates)

    def _sample(self, key: PRNGKeyArray, n: int) -> Float[Array, "n D"]:
        return jax.random.poisson(key, self.rates, (n, self.dim)).astype(self.rates.dtype)

    def _subgaussian(self) -> Float[Array, ""]:
        raise ValueError("counts have no sub-Gaussian constant: their tails are those of an exponential")

    # Not needed, but known: `_radius` and `_tails` say how far the tokens reach, `_expectation` and `_quartic` average
    # functions of one score. Without them a fixed sample serves, with its standard error.


def main() -> None:
    """Compare the law with what must be the same."""
    lp.use_float64()
    mu, theta = Poisson([2.0, 0.5]), jnp.array([0.4, -0.3])

    gradient = jax.grad(mu.cgf)(theta)
    for i, name in enumerate(("first", "second")):
        print(f"{name} mean of a tilt, slope of Λ: {mu.tilt(theta).mean()[i]:.12f} = {gradient[i]:.12f} ± 1e-10")

    layer, query = lp.SoftmaxAttention(U=0.5 * jnp.eye(2), V=jnp.eye(2)), jnp.array([0.8, -0.6])
    prompt = mu.prompt(jax.random.key(0), L=100_000)
    print(f"output on the law, on a long prompt: {layer(mu, query)[0]:.5f} = {layer(prompt, query)[0]:.5f} ± 0.1")

    found = mu.expectation(jax.nn.sigmoid, query)
    values = jax.nn.sigmoid(mu.sample(jax.random.key(1), 100_000) @ query)
    error = 5 * float(jnp.hypot(found.stderr, values.std() / 100_000**0.5))
    print(f"mean sigmoid of the scores, over a sample: {found.value:.5f} = {values.mean():.5f} ± {error:.5f}")


if __name__ == "__main__":
    main()
