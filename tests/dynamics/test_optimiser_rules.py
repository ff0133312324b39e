"""Momentum and Adam: their rules against PyTorch's, the reference's steps against the rules, and what is refused."""

import dataclasses

import equinox as eqx
import jax
import numpy as np
import pytest

import largeprompt as lp
from catalogue import matrix
from largeprompt.dynamics import SGD, AbstractOptimiser, Adam, Momentum, ReferenceTrainer, Training, optimiser_named
from largeprompt.dynamics._sgd import batch_gradient
from largeprompt.icl import LinearRegression, kms
from refusals import assert_refused
from significance import assert_mean_is

KMS = LinearRegression(kms(2, 0.5), 0.1)
OPTIMISERS = [Momentum(0.8), Adam(0.7, 0.9, 1e-3)]


def pair() -> tuple[lp.SoftmaxAttention, lp.LinearAttention]:
    U, V = 0.5 * matrix(0, 3, 3), matrix(1, 1, 3)
    return lp.SoftmaxAttention(U, V), lp.LinearAttention(-U, V)


def flat(layers) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(layers)])


def replayed(optimiser: AbstractOptimiser, gradients: np.ndarray, rate: float) -> np.ndarray:
    """Where parameters that begin at 0 are after each step."""
    weights, moments, way = np.zeros(gradients.shape[1]), (np.zeros(gradients.shape[1]),) * optimiser.moments, []
    for t, gradient in enumerate(gradients, 1):
        direction, moments = optimiser.direction(gradient, moments, t)
        weights = weights - rate * direction
        way.append(weights)
    return np.array(way)


@pytest.mark.parametrize(
    ("optimiser", "name", "options"),
    [
        (SGD(), "SGD", {}),
        (Momentum(0.9), "SGD", {"momentum": 0.9}),
        (Adam(), "Adam", {}),
        (Adam(0.5, 0.99, 1e-2), "Adam", {"betas": (0.5, 0.99), "eps": 1e-2}),
    ],
    ids=str,
)
def test_steps_are_those_of_pytorch(optimiser, name, options):
    torch = pytest.importorskip("torch")
    gradients = np.random.default_rng(0).normal(size=(60, 4)) * [1.0, 1e-3, 30.0, 0.0]
    weights = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    descent, way = getattr(torch.optim, name)([weights], lr=0.03, **options), []
    for gradient in gradients:
        weights.grad = torch.from_numpy(gradient.copy())
        descent.step()
        way.append(weights.detach().numpy().copy())
    np.testing.assert_allclose(replayed(optimiser, gradients, 0.03), way, rtol=1e-12, atol=1e-15)


@eqx.filter_jit
def gradient_at(training, layers, step):
    return batch_gradient(training, layers, jax.random.fold_in(jax.random.key(3), step))


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_the_reference_makes_the_steps_of_its_rule_and_in_pieces_the_same_bits(optimiser):
    training = Training(KMS, 4, batch=5, rate=0.07, loss_factor=2.0, seed=3, optimiser=optimiser)
    trainer = ReferenceTrainer(training, pair())
    state, gradients, ways = trainer.start(), [], []
    for step in range(4):
        gradients.append(flat(gradient_at(training, state.layers, step)))
        state = trainer.advance(state, step + 1)
        ways.append(flat(state.layers) - flat(pair()))
    np.testing.assert_allclose(ways, replayed(optimiser, np.array(gradients), 0.07), rtol=1e-10, atol=1e-13)
    whole = trainer.advance(trainer.start(), 4)
    np.testing.assert_array_equal(flat(state.layers), flat(whole.layers))
    np.testing.assert_array_equal(flat(state.moments), flat(whole.moments))
    assert len(state.moments) == optimiser.moments
    assert isinstance(state.moments[0][0], lp.SoftmaxAttention)


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_a_layer_that_diverges_with_moments_stays(optimiser):
    trainer = ReferenceTrainer(Training(KMS, 4, batch=5, rate=1e12, optimiser=optimiser), pair())
    state = trainer.advance(trainer.start(), 3)
    assert state.diverged == (0, 0)
    np.testing.assert_array_equal(flat(state.layers), flat(pair()))


def test_momentum_of_0_is_plain_descent():
    trainers = [
        ReferenceTrainer(Training(KMS, 4, batch=5, rate=0.07, optimiser=one), pair()) for one in (SGD(), Momentum(0.0))
    ]
    one, other = (flat(trainer.advance(trainer.start(), 5).layers) for trainer in trainers)
    np.testing.assert_allclose(one, other, rtol=1e-13)


def test_a_small_gradient_under_noise_moves_at_the_speed_that_is_stated():
    """For Adam the gradient of a prompt has size 1: that of a batch of 16 then has size 1/4."""
    drift, steps = 0.02, 4000
    noise = np.random.default_rng(1).normal(size=(steps, 400)) / 4
    for optimiser, bias in ((SGD(), 0.0), (Momentum(0.9), 0.0), (Adam(), 2e-2)):
        moved = -replayed(optimiser, drift + noise, 1.0)
        pace = (moved[-1] - moved[499]) / (steps - 500)  # once the means have forgotten the start
        assert_mean_is(pace, drift * optimiser.speed(16, 1.0), bias * drift * optimiser.speed(16, 1.0) / 5)


@pytest.mark.parametrize("optimiser", [SGD(), Momentum(), Momentum(1 / 3), Adam(), Adam(0.1, 0.2, 1e-5)], ids=str)
def test_the_name_of_an_optimiser_names_it(optimiser):
    assert optimiser_named(str(optimiser)) == optimiser


def test_numbers_that_are_left_out_have_their_defaults():
    assert optimiser_named("momentum") == Momentum(0.9)
    assert optimiser_named("adam") == Adam(0.9, 0.999, 1e-8)
    assert optimiser_named("adam:0.5") == Adam(0.5, 0.999, 1e-8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adamw", "optimiser is 'adamw'; it must be sgd, momentum or momentum:BETA, adam or adam:BETA1,BETA2,EPSILON"),
        ("sgd:0.9", "optimiser is 'sgd:0.9'; it must be sgd"),
        ("momentum:0.9,0.5", "it must be sgd"),
        ("momentum:high", "it must be sgd"),
        (0.9, "optimiser is 0.9; it must be sgd"),
        ("momentum:1", "optimiser is 'momentum:1': beta is 1; it must be at least 0 and below 1"),
        ("adam:0.9,-1", "beta2 is -1; it must be at least 0 and below 1"),
        ("adam:nan", "beta1 is nan"),
        ("adam:0.9,0.999,0", "epsilon is 0; it must be above 0"),
    ],
)
def test_what_is_no_optimiser_is_one_line(name, message, as_a_stranger):
    assert_refused(lambda: optimiser_named(name), message)


def test_a_training_refuses_a_name_for_an_optimiser(as_a_stranger):
    wrong: dict = {"optimiser": "adam"}
    assert_refused(lambda: Training(KMS, 4, **wrong), "optimiser is 'adam'; it must be an optimiser such as SGD()")


@dataclasses.dataclass(frozen=True)
class Signs(AbstractOptimiser):
    """An optimiser of a user's own."""

    moments = 0

    def direction(self, gradient, moments, t):
        return jax.numpy.sign(gradient), ()


def test_the_reference_runs_any_optimiser_and_the_fused_engine_refuses_it_by_name():
    from largeprompt import engine

    training = Training(KMS, 4, batch=5, rate=0.07, optimiser=Signs())
    trainer = engine.trainer_for(training, pair())
    assert trainer.name == "reference"
    moved = flat(trainer.advance(trainer.start(), 1).layers) - flat(pair())
    np.testing.assert_allclose(np.unique(np.abs(moved).round(12)), [0.0, 0.07])  # a query's label has no gradient
    message = (
        "the fused engine does not apply: the optimiser is Signs, not SGD, Momentum or Adam; use engine='reference'"
    )
    assert_refused(lambda: engine.trainer_for(training, pair(), engine="fused"), message)
