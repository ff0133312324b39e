"""The update of single weights in the compiled loops: plain descent, or with the moments of momentum and Adam."""

import inspect
from typing import NamedTuple

import numpy as np

from largeprompt.dynamics import SGD, Adam, Momentum, Training
from largeprompt.dynamics._optimiser import adam, heavy_ball

from ._target import tuned
from ._within import within

# sums in any order, but nothing that supposes numbers finite: this is where one that is not is noticed
on_matrices = within(fastmath={"contract", "reassoc", "nsz"})
u = np.uintp  # an index that does not count from the end
# unwrapped: around a function there may be a checker of its signature, which is nothing to compile
_heavy_ball, _adam = (on_matrices(inspect.unwrap(rule)) for rule in (heavy_ball, adam))
OPTIMISERS = (SGD, Momentum, Adam)


def coefficients(training: Training) -> np.ndarray:
    """What an update with moments computes with: γ, the factor of the sum of gradients over a batch, β₁, β₂ and ε."""
    optimiser = training.optimiser
    own = (optimiser.beta, 0.0, 1.0) if isinstance(optimiser, Momentum) else (0.0, 0.0, 1.0)
    if isinstance(optimiser, Adam):
        own = optimiser.beta1, optimiser.beta2, optimiser.epsilon
    return np.array([training.rate, training.loss_factor / training.batch, *own])


class Rule(NamedTuple):
    """How the weights of one layer move at one step of an optimiser that carries moments."""

    moments: np.ndarray  # of all weights, those of the second order after those of the first
    begin: int  # where those of the layer begin
    size: int  # how many there are of each order
    rate: float
    unit: float
    beta1: float
    beta2: float
    epsilon: float
    unbias1: float
    unbias2: float


@on_matrices
def rule_at(step, coefficients, moments, begin, size):
    """The rule of a step, which counts from 0."""
    tuned()
    t = float(step) + 1.0
    rate, unit, beta1 = coefficients[u(0)], coefficients[u(1)], coefficients[u(2)]
    beta2, epsilon = coefficients[u(3)], coefficients[u(4)]
    return Rule(moments, begin, size, rate, unit, beta1, beta2, epsilon, 1.0 - beta1**t, 1.0 - beta2**t)


@on_matrices
def change(factor, slope, rate, rule, at):
    """What a step takes from a weight; the sum of its gradients is factor · slope, its place in the layer `at`.

    Plain descent, whose rule is None, has the rate for such sums over a batch.
    """
    tuned()
    if rule is None:
        return rate * factor * slope
    first, gradient = u(rule.begin + at), rule.unit * factor * slope
    second = u(rule.begin + at + rule.size)
    if len(rule.moments) == rule.size:
        direction = _heavy_ball(gradient, rule.moments[first], rule.beta1)
        rule.moments[first] = direction
    else:
        direction, rule.moments[first], rule.moments[second] = _adam(
            gradient,
            rule.moments[first],
            rule.moments[second],
            rule.beta1,
            rule.beta2,
            rule.epsilon,
            rule.unbias1,
            rule.unbias2,
        )
    return rule.rate * direction
