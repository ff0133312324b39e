"""The reference trainer: its gradients against those of the risk, its steps against the rule, any task and any loss."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from catalogue import matrix
from largeprompt.dynamics import ReferenceTrainer, Training
from largeprompt.dynamics._sgd import batch_gradient
from largeprompt.icl import LinearRegression, RegressionOn, kms, risk, risk_gradient
from largeprompt.icl._prompt import _with_second_moment
from significance import assert_mean_is, assert_same_moments

KMS = LinearRegression(kms(2, 0.5), 0.1)


def flat(layers) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(layers)])


def pair() -> tuple[lp.SoftmaxAttention, lp.LinearAttention]:
    U, V = 0.5 * matrix(0, 3, 3), matrix(1, 1, 3)
    return lp.SoftmaxAttention(U, V), lp.LinearAttention(-U, V)


@eqx.filter_jit
def gradients(training, layers, keys):
    return jax.vmap(lambda key: batch_gradient(training, layers, key))(keys)


@pytest.mark.parametrize("L", [4, math.inf])
def test_the_mean_gradient_is_that_of_the_risk(L):
    training, layers = Training(KMS, L, batch=16), pair()
    found = gradients(training, layers, jax.random.split(jax.random.key(0), 2000))
    for samples, layer in zip(found, layers, strict=True):
        exact = risk_gradient(layer, KMS, L, rtol=0.02)
        for samples_of, truth, error in zip(*map(jax.tree.leaves, (samples, exact.layer, exact.stderr)), strict=True):
            assert_mean_is(np.asarray(samples_of), truth, error)


def test_a_step_goes_down_the_batch_gradient():
    training, layers = Training(KMS, 4, batch=5, rate=0.07, loss_factor=2.0, seed=3), pair()
    trainer = ReferenceTrainer(training, layers)
    state = trainer.start()
    np.testing.assert_array_equal(flat(state.layers), flat(layers))
    for step in range(3):
        key = jax.random.fold_in(jax.random.key(3), step)
        gradient = jax.tree.map(lambda leaf: leaf[0], gradients(training, state.layers, key[None]))
        after = trainer.advance(state, step + 1)
        np.testing.assert_allclose(
            flat(after.layers), flat(state.layers) - 0.07 * flat(gradient), rtol=1e-13, atol=1e-14
        )
        assert (after.step, after.diverged) == (step + 1, (None, None))
        state = after
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state.layers))


def test_the_gradient_of_a_batch_is_the_mean_over_its_prompts_and_the_loss_factor_multiplies_it():
    key, layers = jax.random.key(5), pair()
    of = {b: flat(gradients(Training(KMS, 4, batch=b), layers, key[None])) for b in (2, 3)}
    halves = flat(gradients(Training(KMS, 4, batch=3, loss_factor=0.5), layers, key[None]))
    np.testing.assert_allclose(halves, of[3] / 2, rtol=1e-13)
    # a prompt more adds what it adds, a matrix of rank one in U
    added = (3 * of[3] - 2 * of[2])[:9].reshape(3, 3)
    assert np.linalg.matrix_rank(added, tol=1e-12) == 1


def test_layers_side_by_side_see_the_prompts_they_see_alone():
    key, layers, training = jax.random.key(6), pair(), Training(KMS, 4, batch=3)
    both = gradients(training, layers, key[None])
    for layer, beside in zip(layers, both, strict=True):
        np.testing.assert_allclose(flat(gradients(training, (layer,), key[None])), flat(beside), rtol=1e-12)


def test_a_run_in_pieces_ends_where_one_in_one_go_does():
    trainer = ReferenceTrainer(Training(KMS, 4, batch=5, rate=0.07, loss_factor=2.0, seed=3), pair())
    whole = trainer.advance(trainer.start(), 12)
    for cuts in ([12], [1, 1, 11], [5]):
        state = trainer.start()
        for stop in (*cuts, 12):
            state = trainer.advance(state, stop)
        np.testing.assert_array_equal(flat(state.layers), flat(whole.layers))


def test_any_loss_on_any_task_goes_down():
    """Covariates of signs, and a loss that grows like the error itself."""
    task = RegressionOn(lp.Rademacher([1.0, 2.0]), 0.01).with_loss(lambda p, y: jnp.sum(jnp.sqrt(1 + (p - y) ** 2)))
    layers = (lp.Head.pytorch_default(jax.random.key(1), 3, outputs=1, kind="linear"),)
    trainer = ReferenceTrainer(Training(task, 20, batch=32, rate=0.02), layers)
    after = trainer.advance(trainer.start(), 100)

    @eqx.filter_jit
    def loss(layers, keys):
        def one(key):
            drawn = task.draw(key)
            return task._loss(layers[0]._output(drawn.prompt(key, 20).measure, drawn.query), drawn.target)

        return jax.vmap(one)(keys).mean()

    keys = jax.random.split(jax.random.key(2), 4000)
    assert float(loss(after.layers, keys)) < 0.9 * float(loss(layers, keys))


def test_linear_attention_reads_a_prompt_too_long_to_be_held():
    layers = (pair()[1],)
    trainers = {L: ReferenceTrainer(Training(KMS, L, batch=5, rate=0.07), layers) for L in (10**12, math.inf)}
    ends = {L: flat(trainer.advance(trainer.start(), 5).layers) for L, trainer in trainers.items()}
    np.testing.assert_allclose(ends[10**12], ends[math.inf], rtol=1e-4)
    assert np.abs(ends[10**12] - ends[math.inf]).max() > 1e-9


def test_other_layers_refuse_such_a_prompt_in_one_line():
    class Halved(lp.LinearAttention):
        def reading(self, mu, u):
            return super().reading(mu, u) / 2

    message = r"^L is 1e\+12; a prompt of that many tokens takes 9.6e\+04 GB, and this machine has .* GB; use L = inf"
    for layer in (*pair()[:1], Halved(jnp.eye(3), jnp.ones((1, 3)))):
        with pytest.raises(ValueError, match=message):
            ReferenceTrainer(Training(KMS, 10**12), (layer,))
    heads = lp.MultiHead([lp.Head(np.eye(3), np.eye(3), np.ones((1, 3)))] * 2)
    with pytest.raises(ValueError, match=message):
        risk(heads, KMS, 10**12)


def test_the_second_moment_of_a_long_prompt_has_the_law_of_that_of_its_tokens():
    L = 5
    mu = lp.Gaussian([0.5, -1.0], [[1.0, 0.4], [0.4, 0.5]])
    keys = jax.random.split(jax.random.key(3), 20_000)

    def entries(prompt):
        return prompt.second_moment()[jnp.array([0, 0, 1]), jnp.array([0, 1, 1])]

    drawn = jax.jit(jax.vmap(lambda key: entries(_with_second_moment(mu, key, L))))(keys)
    tokens = jax.jit(jax.vmap(lambda key: entries(mu.prompt(key, L))))(jax.random.split(jax.random.key(4), 20_000))
    assert_same_moments(np.asarray(drawn), np.asarray(tokens))
    assert_mean_is(np.asarray(drawn), np.array([1.25, -0.1, 1.5]))


def test_the_reference_trains_sigmoid_and_relu_attention_beside_softmax():
    layers = tuple(
        lp.Head.pytorch_default(jax.random.key(0), 3, outputs=1, kind=kind) for kind in ("sigmoid", "relu", "softmax")
    )
    task = LinearRegression(kms(2))
    trainer = ReferenceTrainer(Training(task, 8, batch=64, rate=0.1), layers)
    trained = trainer.advance(trainer.start(), 60)
    assert trained.diverged == (None, None, None)
    for before, after in zip(layers, trained.layers, strict=True):
        assert risk(after, task, 8, rtol=0.05).value < risk(before, task, 8, rtol=0.05).value
