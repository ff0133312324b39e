"""Every wrong input of a task or a risk is a ValueError of one line that names the value."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from catalogue import f
from largeprompt.icl import (
    AbstractTask,
    Instance,
    LinearRegression,
    LogisticLabel,
    NoisyLink,
    RegressionOn,
    SingleIndex,
    diagonal,
    gradient_descent,
    identity,
    kms,
    optimal_in_family,
    optimal_linear,
    optimal_softmax,
    risk,
    risk_expansion,
    risk_function,
    risk_gradient,
    risk_rate,
    spiked,
)
from largeprompt.icl._gaps import same_prompt_gap

pytestmark = pytest.mark.usefixtures("as_a_stranger")

I2, I3 = np.eye(2), np.eye(3)
KEY = jax.random.key(0)
TASK = LinearRegression(I2, 0.1)
CUBE = RegressionOn(lp.Cube([1.0, 1.0]), 0.1)
SOFTMAX, LINEAR = lp.SoftmaxAttention(I3, I3[2:]), lp.LinearAttention(I3, I3[2:])


class Broken(AbstractTask):
    """A task whose instances are whatever it is given."""

    instance: Any

    @property
    def dim(self) -> int:
        return 2

    @property
    def targets(self) -> int:
        return 1

    def _draw(self, key):
        return self.instance


GAUSSIAN = lp.Gaussian(np.zeros(2), I2)

CASES = {
    "a Sigma not PSD": (lambda: LinearRegression([[1, 2], [2, 1]]), "Sigma has the eigenvalue -1;"),
    "a Sigma not square": (lambda: LinearRegression(np.ones((2, 3))), "Sigma has shape (2, 3)"),
    "a Sigma not symmetric": (lambda: LinearRegression([[1, 0.5], [0, 1]]), "Sigma is not symmetric"),
    "a Sigma of NaN": (lambda: LinearRegression([[np.nan]]), "Sigma[0, 0] is nan"),
    "a Sigma of one number": (lambda: LinearRegression(2.0), "Sigma has shape ()"),
    "an empty Sigma": (lambda: LinearRegression(np.ones((0, 0))), "Sigma has shape (0, 0); it must not be empty"),
    "words for Sigma": (lambda: LinearRegression(f("identity")), "Sigma has entries of type"),
    "a negative noise": (lambda: LinearRegression(I2, -0.1), "noise is -0.1; it must be at least 0"),
    "an infinite noise": (lambda: LinearRegression(I2, np.inf), "noise is inf"),
    "a NaN noise": (lambda: RegressionOn(GAUSSIAN, np.nan), "noise is nan"),
    "an Omega of the wrong size": (lambda: LinearRegression(I2, 0.1, I3), "Omega has shape (3, 3); it must be (2, 2)"),
    "an Omega not PSD": (lambda: RegressionOn(GAUSSIAN, 0.1, -I2), "Omega has the eigenvalue -1"),
    "a query_Sigma of the wrong size": (
        lambda: LinearRegression(I2, query_Sigma=I3),
        "query_Sigma has shape (3, 3); it must be (2, 2)",
    ),
    "no targets": (lambda: LinearRegression(I2, targets=0), "targets is 0; it must be at least 1"),
    "half a target": (lambda: LinearRegression(I2, targets=f(1.5)), "targets is 1.5; it must be a whole number"),
    "an experiment on a Sigma not square": (
        lambda: LinearRegression.experiment(np.ones((2, 3))),
        "Sigma has shape (2, 3)",
    ),
    "covariates that are a matrix": (
        lambda: RegressionOn(f(I2)),
        "covariates is of type ndarray; it must be",
    ),
    "queries of another dimension": (
        lambda: RegressionOn(GAUSSIAN, queries=lp.Sphere(1.0, 3)),
        "queries has tokens of dimension 3",
    ),
    "identity of no dimension": (lambda: identity(0), "d is 0; it must be at least 1"),
    "rho above 1": (lambda: kms(3, 1.5), "rho is 1.5; it must lie between -1 and 1"),
    "rho of NaN": (lambda: kms(3, np.nan), "rho is nan"),
    "a negative variance": (lambda: diagonal([1.0, -2.0]), "variances[1] is -2; every entry must be at least 0"),
    "a spike below -1": (lambda: spiked(3, -1.5), "spike is -1.5; it must be at least -1"),
    "a spike nowhere": (lambda: spiked(2, 1.0, [0.0, 0.0]), "direction is 0; it must point somewhere"),
    "a spike of another dimension": (lambda: spiked(2, 1.0, [1.0]), "direction has shape (1,); it must be (2)"),
    "a length of 0": (lambda: risk(SOFTMAX, TASK, 0), "L is 0; a prompt length is a whole number of at least 1"),
    "a negative length": (lambda: risk(LINEAR, TASK, -3), "L is -3;"),
    "a length of 2.5": (lambda: risk_gradient(SOFTMAX, TASK, 2.5), "L is 2.5;"),
    "a NaN length": (lambda: optimal_linear(TASK, np.nan), "L is nan;"),
    "a length of minus infinity": (lambda: optimal_softmax(TASK, -np.inf), "L is -inf;"),
    "a length in words": (lambda: gradient_descent(TASK, f("long")), "L is 'long';"),
    "a length that is true": (lambda: risk_function(LINEAR, TASK, f(True)), "L is True;"),
    "an expansion at length 0": (lambda: risk_expansion(SOFTMAX, TASK, 0), "L is 0;"),
    "a layer of another token dimension": (
        lambda: risk(lp.SoftmaxAttention(I2, I2[:1]), TASK, 3),
        "the layer reads tokens of dimension 2; the task has tokens of dimension 3",
    ),
    "a layer of two outputs": (
        lambda: risk(lp.LinearAttention(I3, I3[:2]), TASK, 3),
        "the layer has 2 outputs; it must have 1, or 3 of which the last count",
    ),
    "a layer that is a matrix": (
        lambda: risk(f(I3), TASK, 3),
        "the layer is of type ndarray; it must be an attention layer",
    ),
    "the gradient of a number": (lambda: risk_gradient(f(1.0), TASK, 3), "the layer is of type float"),
    "a task that is a matrix": (lambda: risk(SOFTMAX, f(I2), 3), "task is of type ndarray; it must be a task"),
    "the optimum of a cube": (
        lambda: optimal_linear(f(CUBE), 3),
        "task is of type RegressionOn; this is known for LinearRegression only",
    ),
    "the softmax optimum of a cube": (lambda: optimal_softmax(f(CUBE), 3), "this is known for LinearRegression only"),
    "gradient descent on nothing": (lambda: gradient_descent(f(None), 3), "task is of type NoneType"),
    "the rate over one instance": (lambda: risk_rate(SOFTMAX, CUBE, draws=1), "draws is 1; it must be at least 2"),
    "the rate of a matrix": (lambda: risk_rate(SOFTMAX, f(I2)), "task is of type ndarray; it must be a task"),
    "a link that is a number": (lambda: NoisyLink(f(2.0)), "link is 2.0; it must be a function of scores"),
    "a link that sums": (lambda: NoisyLink(f(jnp.sum)), "link returns shape () for 2 scores"),
    "a link of NumPy": (lambda: NoisyLink(f(np.sin)), "link cannot be traced by JAX"),
    "a negative variance of labels": (lambda: NoisyLink(jnp.sin, -1.0), "noise is -1; it must be at least 0"),
    "a label that is a function": (
        lambda: SingleIndex(f(jnp.sin), GAUSSIAN, GAUSSIAN),
        "label is of type",
    ),
    "directions of another dimension": (
        lambda: SingleIndex(LogisticLabel(), GAUSSIAN, lp.Sphere(1.0, 3)),
        "directions has tokens of dimension 3; they must be of dimension 2",
    ),
    "the sub-Gaussian constant of any labels": (
        lambda: SingleIndex(LogisticLabel(), GAUSSIAN, GAUSSIAN).draw(KEY).measure.subgaussian(),
        "no sub-Gaussian constant is known",
    ),
    "a sample of tilted labels": (
        lambda: SingleIndex(LogisticLabel(), GAUSSIAN, GAUSSIAN).draw(KEY).measure.tilt(np.ones(3)).sample(KEY, 2),
        "only the untilted one can be sampled",
    ),
    "a start that is a matrix": (
        lambda: optimal_in_family(lambda p: SOFTMAX, I2, TASK, 5),
        "start has shape (2, 2)",
    ),
    "a loss that is a number": (lambda: TASK.with_loss(f(3.0)), "loss is 3.0; it must be a function"),
    "a loss that is a vector": (
        lambda: TASK.with_loss(lambda p, y: (p - y) ** 2),
        "loss(prediction, target) has shape (1,); it must be one number",
    ),
    "a loss of one argument": (lambda: TASK.with_loss(f(lambda p: p @ p)), "loss"),
    "a loss that returns two things": (lambda: TASK.with_loss(f(lambda p, y: (p @ p, y @ y))), "loss"),
    "a loss written with numpy": (lambda: TASK.with_loss(f(lambda p, y: float(np.sum(p - y)))), "loss"),
    "an integer for a key": (lambda: risk(SOFTMAX, TASK, 3, f(0)), "key is 0; it must be a JAX key"),
    "a list for a key": (lambda: TASK.draw(f([0, 1])), "key is [0, 1]; it must be a JAX key"),
    "a method unknown": (
        lambda: risk(SOFTMAX, TASK, 3, method=f("exact")),
        "method is 'exact'; it must be 'auto' or 'sampled'",
    ),
    "a negative rtol": (lambda: risk(SOFTMAX, TASK, 3, rtol=-0.1), "rtol is -0.1; it must be at least 0"),
    "a NaN rtol": (lambda: risk_gradient(SOFTMAX, TASK, 3, rtol=np.nan), "rtol is nan"),
    "one draw": (lambda: risk(SOFTMAX, TASK, 3, max_draws=1), "max_draws is 1; it must be at least 2"),
    "no draws": (lambda: risk_function(SOFTMAX, TASK, 3, draws=0), "draws is 0; it must be at least 2"),
    "a preconditioner of the wrong size": (
        lambda: gradient_descent(TASK, 3, preconditioner=I3),
        "preconditioner has shape (3, 3); it must be (2, 2)",
    ),
    "a NaN step": (lambda: gradient_descent(TASK, 3, step=np.nan), "step is nan"),
    "an instance that is a pair": (lambda: Broken((1, 2)).draw(KEY), "_draw(key) returned a tuple"),
    "an instance of another dimension": (
        lambda: Broken(Instance(lp.Sphere(1.0, 3), jnp.zeros(2), jnp.zeros(1))).draw(KEY),
        "the measure of an instance has tokens of dimension 3",
    ),
    "an instance whose query is too long": (
        lambda: Broken(Instance(GAUSSIAN, jnp.zeros(3), jnp.zeros(1))).draw(KEY),
        "the query of an instance has shape (3,); it must be (2)",
    ),
    "an instance of two targets": (
        lambda: Broken(Instance(GAUSSIAN, jnp.zeros(2), jnp.zeros(2))).draw(KEY),
        "the target of an instance has shape (2,); it must be (1)",
    ),
    "the risk on a broken task": (
        lambda: risk(lp.SoftmaxAttention(I2, I2[1:]), Broken((1, 2)), 3),
        "_draw(key) returned a tuple; it must return an Instance",
    ),
    "the risk on two targets that should be one": (
        lambda: risk(
            lp.SoftmaxAttention(I2, I2[1:]), Broken(Instance(GAUSSIAN, jnp.zeros(2), jnp.zeros(2))), 3, rtol=1.0
        ),
        "the target of an instance has shape (2,); it must be (1)",
    ),
    "weights that overflow": (
        lambda: risk(lp.LinearAttention(1e200 * I3, 1e200 * I3), TASK, 3),
        "the risk overflows float64",
    ),
    "aligned weights that overflow": (
        lambda: risk(lp.SoftmaxAttention(1e200 * np.diag([1, 1, 0]), 1e200 * I3[2:]), TASK, 3),
        "the risk overflows float64",
    ),
    "a gap of a cube": (lambda: same_prompt_gap(SOFTMAX, LINEAR, f(CUBE), 3), "known for LinearRegression only"),
    "a gap at length 0": (lambda: same_prompt_gap(SOFTMAX, LINEAR, TASK, 0), "L is 0;"),
    "a gap of two softmax layers": (
        lambda: same_prompt_gap(SOFTMAX, SOFTMAX, TASK, 3),
        "the layer is softmax attention; this holds of linear attention only",
    ),
    "a gap over one draw": (lambda: same_prompt_gap(SOFTMAX, LINEAR, TASK, 3, draws=1), "draws is 1"),
}


@pytest.mark.parametrize(("call", "message"), list(CASES.values()), ids=list(CASES))
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_lengths_of_every_type_are_taken():
    values = {float(risk(LINEAR, TASK, f(L)).value) for L in (3, 3.0, np.int64(3), np.float64(3), jnp.asarray(3))}
    assert len(values) == 1


def test_shapes_are_judged_under_tracing_too():
    with pytest.raises(ValueError, match=r"Sigma has shape \(2, 3\)"):
        jax.jit(lambda S: LinearRegression(S).tau1)(jnp.ones((2, 3)))
