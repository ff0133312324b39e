"""A task of your own: copy this file, change the class, run it. Each line that it prints compares two numbers."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp

import largeprompt as lp
from largeprompt.icl import AbstractTask, Instance, risk


class OwnNoise(AbstractTask):
    """y = w·x + η, where the variance of η is 0.01 in half of the prompts and 1 in the others."""

    d: int = eqx.field(static=True)

    @property
    def dim(self) -> int:
        return self.d + 1

    @property
    def targets(self) -> int:
        return 1

    def _draw(self, key) -> Instance:
        """One prompt's law of tokens (x, y), its query (x, 0) and the label that the query should get."""
        of_w, of_x, of_noise, of_y = jax.random.split(key, 4)
        w, x = jax.random.normal(of_w, (self.d,)), jax.random.normal(of_x, (self.d,))
        variance = jnp.where(jax.random.bernoulli(of_noise), 0.01, 1.0)
        cov = jnp.block([[jnp.eye(self.d), w[:, None]], [w[None], (w @ w + variance)[None, None]]])
        y = w @ x + jnp.sqrt(variance) * jax.random.normal(of_y)
        return Instance(lp.Gaussian(jnp.zeros(self.dim), cov), jnp.append(x, 0.0), y[None])


def simulated(layer, task, L, prompts) -> tuple[float, float]:
    """The mean loss over prompts drawn here, and its standard error."""

    def loss(key):
        of_instance, of_prompt = jax.random.split(key)
        drawn = task.draw(of_instance).prompt(of_prompt, L)  # at L = inf the law itself
        return jnp.sum((layer(drawn.measure, drawn.query) - drawn.target) ** 2) / 2

    losses = jax.lax.map(loss, jax.random.split(jax.random.key(7), prompts), batch_size=1024)
    return float(losses.mean()), float(losses.std() / math.sqrt(prompts))


def main() -> None:
    """Compare what the package finds with what is known by hand and with a loop over prompts."""
    lp.use_float64()
    task = OwnNoise(2)
    U, V = jnp.diag(jnp.array([0.5, 0.5, 0.0])), jnp.array([[0.0, 0.0, 1.0]])
    softmax, sigmoid = lp.SoftmaxAttention(U, V), lp.Head(U, jnp.eye(3), V, kind="sigmoid")

    # a layer that answers 0 has the risk E y²/2
    found = risk(lp.SoftmaxAttention(U, 0 * V), task, 5, rtol=0.2, max_draws=512)
    print(f"the risk of answering 0: {found.value:.4f} = {(2 + 0.505) / 2:.4f} ± {5 * found.stderr:.4f}")

    # any kind of attention, at a finite length and at infinity, against a loop over prompts
    for layer, L in ((softmax, 5), (softmax, math.inf), (sigmoid, 5)):
        found, (mean, error) = risk(layer, task, L, rtol=0.2, max_draws=512), simulated(layer, task, L, 512)
        print(f"{layer.kind}, L = {L}: {found.value:.4f} = {mean:.4f} ± {5 * math.hypot(found.stderr, error):.4f}")
        assert found.reason == "no formula is known for a task of type OwnNoise"


if __name__ == "__main__":
    main()
