"""Attention of a kind of one's own: right wherever asking it is enough, refused where softmax or linear is needed."""

import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import largeprompt as lp
from catalogue import covariance, f, matrix
from largeprompt import attention, concentration, dynamics, engine, icl
from largeprompt.concentration import bounds, deviation, predict, prompt_length_for
from largeprompt.engine._training_arrays import refusal
from refusals import assert_refused
from significance import assert_close_in_sigmas

lp.use_float64()
D, P = 3, 1
U, V = 0.3 * matrix(1, D, D), matrix(2, P, D)
MU = lp.Gaussian(0.3 * matrix(3, D), covariance(4, D))
TASK = icl.LinearRegression(np.diag([1.0, 0.5]), noise=0.2)
Z = matrix(5, 2, D)
KEY = jax.random.key(0)


class Uniform(attention.AbstractAttention):
    """Reads the mean of a prompt, whatever the query."""

    def reading(self, mu, u):
        return mu._mean()

    def reading_slope(self, mu, u):
        return jnp.zeros((self.dim, self.dim), u.dtype)


class Difference(attention.AbstractAttention):
    """The difference of two softmaxes, known by what it reads alone."""

    def reading(self, mu, u):
        return mu.tilt(u).mean() - mu.tilt(u / 2).mean() / 2


class Sharper(lp.SoftmaxAttention):
    """Softmax of twice the scores."""

    def reading(self, mu, u):
        return mu._tilt(2 * u)._mean()

    def reading_slope(self, mu, u):
        return 2 * mu._tilt(2 * u)._cov()


class Weaker(lp.LinearAttention):
    """Half of what linear attention reads."""

    def reading(self, mu, u):
        return self.reading_slope(mu, u) @ u

    def reading_slope(self, mu, u):
        return (mu._cov() + jnp.outer(mu._mean(), mu._mean())) / 2


class Turned(attention.AbstractAttention):
    """Softmax whose reading is turned, so that its slope is not symmetric."""

    def reading(self, mu, u):
        return jnp.roll(mu._tilt(u)._mean(), 1)

    def reading_slope(self, mu, u):
        return jnp.roll(mu._tilt(u)._cov(), 1, axis=0)


class Unchanged(lp.SoftmaxAttention):
    """Softmax under another name."""


class OwnHead(lp.Head):
    """A head that puts out the negative."""

    def _output(self, mu, z):
        return -super()._output(mu, z)


class Bare(attention.AbstractLayer):
    """A layer known by what it puts out alone: softmax of twice the scores."""

    U: Float[Array, "D D"]
    V: Float[Array, "p D"]

    @property
    def dim(self) -> int:
        return self.U.shape[0]

    @property
    def outputs(self) -> int:
        return self.V.shape[0]

    def _output(self, mu, z):
        return self.V @ mu._tilt(2 * self.U @ z)._mean()

    def _jacobian(self, mu, z):
        return Sharper(self.U, self.V)._jacobian(mu, z)


OWN: dict[str, attention.AbstractLayer] = {
    "uniform": Uniform(U, V),
    "difference": Difference(U, V),
    "sharper softmax": Sharper(U, V),
    "weaker linear": Weaker(U, V),
    "unchanged softmax": Unchanged(U, V),
    "bare": Bare(jnp.asarray(U), jnp.asarray(V)),
    "turned": Turned(U, V),
    "own head": f(OwnHead)(matrix(6, 2, D), 0.2 * matrix(7, 2, D), V),
}
OWN["several, one of its own"] = lp.MultiHead([lp.Head(U, np.eye(D), V), f(OWN["own head"])])

# the layers of a known kind that put out the same
TWINS = {
    "sharper softmax": lp.SoftmaxAttention(2 * U, V),
    "weaker linear": lp.LinearAttention(U / 2, V),
    "unchanged softmax": lp.SoftmaxAttention(U, V),
    "bare": lp.SoftmaxAttention(2 * U, V),
    "turned": lp.SoftmaxAttention(U, np.roll(V, -1, axis=1)),
    "own head": lp.SoftmaxAttention(matrix(6, 2, D).T @ (0.2 * matrix(7, 2, D)), -V),
}
# what a Jacobian in U is more than the twin's
SLOPES = {"sharper softmax": 4.0, "weaker linear": 0.25, "unchanged softmax": 1.0, "bare": 4.0, "turned": 1.0}

REFUSED: dict[str, Any] = {
    "predict a risk": lambda layer: predict(layer, TASK, None, [10], "risk"),
    "pushforward": lambda layer: lp.pushforward(layer, MU),
    "depth": lambda layer: (
        lp.depth([eqx.tree_at(lambda one: one.V, layer, jnp.eye(D))], MU)
        if hasattr(layer, "V")
        else lp.pushforward(layer, MU)
    ),
    "same_prompt_gap, first": lambda layer: icl.same_prompt_gap(layer, lp.LinearAttention(U, V), TASK, 10),
    "same_prompt_gap, second": lambda layer: icl.same_prompt_gap(lp.SoftmaxAttention(U, V), layer, TASK, 10),
    "initial_gaps": lambda layer: icl.initial_gaps(lp.SoftmaxAttention(U, V), layer, TASK, 10),
    "bound": lambda layer: bounds.bound(layer, MU, lp.Gaussian(np.zeros(D), np.eye(D)), 10),
    "bound of a risk": lambda layer: bounds.bound(layer, TASK, None, 10, "risk"),
    "one_term_over_queries": lambda layer: bounds.one_term_over_queries(layer, MU, MU, 10),
    "moment_constants": lambda layer: bounds.moment_constants(layer, MU, MU),
    "fused training": lambda layer: engine.FusedTrainer(dynamics.Training(TASK, 10), (layer,)),
    "merged_form": attention.merged_form,
    "softmax_form": attention.softmax_form,
}

# what is known for every sum of heads
OF_HEADS: dict[str, Any] = {
    "predict": lambda layer: predict(layer, MU, Z, [10], "output"),
    "rates": lambda layer: concentration.rates(layer, MU, Z[0]),
    "output_covariance": lambda layer: concentration.output_covariance(layer, MU, Z[0]),
    "output_bias": lambda layer: concentration.output_bias(layer, MU, Z[0]),
    "spread": lambda layer: concentration.spread(layer, MU, MU),
    "risk_rate": lambda layer: icl.risk_rate(layer, TASK),
    "risk_expansion": lambda layer: icl.risk_expansion(layer, TASK, 10),
}


@pytest.mark.parametrize("name", ["bare", "own head", "several, one of its own"])
def test_what_is_known_for_sums_of_heads_refuses_other_layers_in_one_line(name):
    for call in OF_HEADS.values():
        assert_refused(lambda call=call: call(OWN[name]), type(OWN[name]).__name__)


@pytest.mark.parametrize("name", [name for name in SLOPES if attention.heads_of(OWN[name]) is not None])
def test_constants_of_a_kind_of_its_own_are_those_of_its_twin(name):
    """By averages over tokens of what automatic differentiation finds."""
    layer, twin = OWN[name], TWINS[name]
    found, there = (concentration.rates(one, MU, Z[0]) for one in (layer, twin))
    assert_close_in_sigmas(found.output, there.output, found.stderr[0])
    assert_close_in_sigmas(found.V, there.V, found.stderr[1])
    assert_close_in_sigmas(found.U, SLOPES[name] * there.U, found.stderr[2])
    predicted, known = (predict(one, MU, Z, [40], "output") for one in (layer, twin))
    assert 0 < predicted.constant_stderr < 0.1 * predicted.constant
    assert_close_in_sigmas(predicted.constant, known.constant, predicted.constant_stderr)
    assert predicted.regime.name == "1/L"
    scale = float(there.output)
    own, other = (concentration.output_bias(one, MU, Z[0]) for one in (layer, twin))
    np.testing.assert_allclose(own, other, atol=0.2 * scale**0.5)
    own, other = (concentration.output_covariance(one, MU, Z[0]) for one in (layer, twin))
    np.testing.assert_allclose(own, other, rtol=0.2, atol=0.05 * scale)


@pytest.mark.parametrize("name", OWN)
def test_what_is_known_for_softmax_or_linear_alone_refuses_other_kinds_in_one_line(name):
    layer = OWN[name]
    calls = list(REFUSED.values())
    if isinstance(layer, lp.SoftmaxAttention | lp.LinearAttention):  # else refused by their signatures already
        calls += [lambda layer: dynamics.flow_limit(TASK, layer), lambda layer: bounds.theorem_4_3(TASK, layer, 0.1)]
    for call in calls:
        assert_refused(lambda call=call: call(layer), type(layer).__name__)


def test_a_kind_known_by_its_reading_has_all_else():
    """Against two softmaxes added up, whose forms are closed; errors over the atoms of a prompt are exact."""
    layer, z = OWN["difference"], Z[0]
    assert isinstance(layer, attention.AbstractAttention)
    one, two = lp.SoftmaxAttention(U, V), lp.SoftmaxAttention(U / 2, -V / 2)
    prompt = lp.Empirical(matrix(9, 60, D))
    jacobian = eqx.filter_jit(lambda layer, mu: layer.jacobian(mu, z).U)
    for mu in (MU, prompt):
        np.testing.assert_allclose(layer(mu, z), one(mu, z) + two(mu, z), rtol=1e-12)
        both = np.asarray(jacobian(one, mu)) + np.asarray(jacobian(two, mu)) / 2
        np.testing.assert_allclose(jacobian(layer, mu), both, rtol=1e-10, atol=1e-12)
    u, tokens = jnp.asarray(U @ z), jnp.asarray(matrix(10, 5, D))
    halves = [(one, u, 1.0), (two, u / 2, -0.5)]
    influence = eqx.filter_jit(lambda head, v: head.influence(MU, v, tokens))
    expected = sum(sign * np.asarray(influence(head, v)) for head, v, sign in halves)
    np.testing.assert_allclose(influence(layer, u), expected, rtol=1e-9, atol=1e-12)
    bias = eqx.filter_jit(lambda head, v: head.reading_bias(prompt, v))
    expected = sum(sign * np.asarray(bias(head, v)) for head, v, sign in halves)
    np.testing.assert_allclose(bias(layer, u), expected, rtol=1e-9)
    covariance_of = eqx.filter_jit(lambda mu, g, v, h, w: g.error_covariance(mu, v, h, w))
    for mu, rtol, atol in ((prompt, 1e-9, 0.0), (MU, 0.2, 0.05)):  # the latter is sampled
        assert layer.errors_are_exact(mu) is (mu is prompt)
        expected = sum(s * t * np.asarray(covariance_of(mu, g, v, h, w)) for g, v, s in halves for h, w, t in halves)
        np.testing.assert_allclose(covariance_of(mu, layer, u, layer, u), expected, rtol=rtol, atol=atol)
    square = eqx.tree_at(lambda one: one.V, layer, jnp.eye(D))
    assert lp.particles([square], MU, KEY, 20)[-1].points.shape == (20, D)
    assert lp.pushforward(square, MU, key=KEY, n=30).dim == D
    assert float(lp.relative_nonlinearity(layer, MU, Z)) < 1e-12  # affine on a Gaussian, as softmax is


def test_a_subclass_of_softmax_that_reads_something_else_has_none_of_its_closed_forms():
    sharper, twin = Sharper(U, V), lp.SoftmaxAttention(2 * U, V)
    u, prompt = jnp.asarray(U @ Z[0]), lp.Empirical(matrix(9, 60, D))
    np.testing.assert_allclose(
        sharper.error_covariance(prompt, u, sharper, u), twin.error_covariance(prompt, 2 * u, twin, 2 * u), rtol=1e-9
    )
    np.testing.assert_allclose(sharper.reading_bias(prompt, u), twin.reading_bias(prompt, 2 * u), rtol=1e-9)
    assert not sharper.errors_are_exact(MU)
    assert attention.kind_of(sharper) is None


def test_two_kinds_of_one_name_are_refused():
    with pytest.raises(ValueError, match="kind 'softmax' is largeprompt"):

        class Other(attention.AbstractAttention):
            """Not softmax."""

            kind = "softmax"

            def reading(self, mu, u):
                return u


@pytest.mark.parametrize("name", TWINS)
def test_the_deviation_of_an_output_is_that_of_the_layer_that_puts_out_the_same(name):
    found = deviation(OWN[name], MU, Z, [30], "output", KEY, replicates=1500)
    there = predict(TWINS[name], MU, Z, [30], "output")
    assert there.exact
    assert_close_in_sigmas(found.mean_square, there.mean_square, found.stderr)


@pytest.mark.parametrize("name", [name for name in SLOPES if name != "unchanged softmax"])
def test_deviations_of_jacobians_are_those_of_the_kind_itself(name):
    """The twin's are predicted by c/L, which at this length is good to some per cent."""
    found = deviation(OWN[name], MU, Z, [1000], ("V", "U", "gradient"), KEY, replicates=600)
    there = predict(TWINS[name], MU, Z, [1000], ("V", "U"))
    expected = {"V": there["V"].mean_square, "U": SLOPES[name] * there["U"].mean_square}
    expected["gradient"] = expected["U"] + expected["V"]
    for quantity, square in expected.items():
        off = np.hypot(found[quantity].stderr, 0.02 * square)
        assert_close_in_sigmas(found[quantity].mean_square, square, off)


def test_uniform_attention_deviates_by_the_variance_of_a_mean():
    """Exactly tr VΓVᵀ/L, and V alone among its parameters sees a prompt; with the query in it, that moves the mean."""
    L, layer = 50, OWN["uniform"]
    found = deviation(layer, MU, Z, [L], ("output", "V", "U", "gradient"), KEY, replicates=1500)
    trace = float(np.sum(V @ np.asarray(MU.Gamma) * V))
    assert_close_in_sigmas(found["output"].mean_square[0], trace / L, found["output"].stderr[0])
    assert_close_in_sigmas(found["gradient"].mean_square[0], P * np.trace(MU.Gamma) / L, found["gradient"].stderr[0])
    assert found["U"].mean_square[0] == 0
    within = deviation(layer, MU, Z[:1], [L], "output", KEY, replicates=1500, query_in_prompt=True)
    moved = float(np.sum((V @ (Z[0] - np.asarray(MU.m))) ** 2))
    assert_close_in_sigmas(within.mean_square[0], (L * trace + moved) / (L + 1) ** 2, within.stderr[0])


@pytest.mark.filterwarnings("ignore:.*the mean cannot be trusted")
@pytest.mark.parametrize("name", ["sharper softmax", "weaker linear", "bare"])
def test_risks_of_a_kind_of_its_own_are_sampled_and_not_taken_for_another(name):
    layer, twin = OWN[name], TWINS[name]
    for L in (5, math.inf):
        found, exact = icl.risk(layer, TASK, L, rtol=0.02), icl.risk(twin, TASK, L)
        assert "Monte Carlo" in found.method
        assert_close_in_sigmas(found.value, exact.value, np.hypot(found.stderr, exact.stderr))
    asked = ("risk", "risk-gradient") if name == "bare" else ("risk",)  # the gradients of a layer of any kind
    gap = deviation(layer, TASK, None, [5], asked, KEY, replicates=4000)
    there = predict(twin, TASK, None, [5], "risk")
    assert gap["risk"].gap is not None
    assert gap["risk"].gap_stderr is not None
    assert there.gap is not None
    assert_close_in_sigmas(gap["risk"].gap, there.gap, np.hypot(gap["risk"].gap_stderr, 1e-3 * abs(there.gap)))


def test_a_task_that_changes_a_regression_is_not_taken_for_it():
    class Doubled(icl.LinearRegression):
        """Judged by twice the loss."""

        def _loss(self, prediction, target):
            return 2 * super()._loss(prediction, target)

    task, layer = f(Doubled)(np.diag([1.0, 0.5]), noise=0.2), lp.SoftmaxAttention(U, V)
    found = icl.risk(layer, task, 5, rtol=0.02)
    assert_close_in_sigmas(found.value, 2 * icl.risk(layer, TASK, 5).value, found.stderr)
    for refused in (lambda: icl.optimal_linear(task, 5), lambda: icl.bayes_risk(task, 5)):
        with pytest.raises(ValueError, match="Doubled"):
            refused()
    assert "Doubled" in str(refusal(dynamics.Training(task, 5), (layer,)))


def test_flows_and_training_of_another_kind_go_by_its_own_output():
    layer = f(OWN["weaker linear"])
    flow = dynamics.gradient_flow(layer, TASK, 5, [0.05], draws=256)
    end = icl.risk(lp.LinearAttention(flow.last.U / 2, flow.last.V), TASK, 5)
    assert_close_in_sigmas(flow.risk[-1], end.value, flow.risk_stderr[-1])
    assert flow.conserved == {}
    for name in ("uniform", "sharper softmax", "unchanged softmax"):
        assert dynamics.conserved_quantities(OWN[name], TASK, math.inf) == {}
    assert dynamics.conserved_quantities(OWN["own head"], TASK, math.inf) == {}
    trainer = engine.trainer_for(dynamics.Training(TASK, 5), (layer,))
    assert trainer.name == "reference"


@pytest.mark.parametrize("name", ["uniform", "sharper softmax", "bare", "several, one of its own"])
def test_lengths_for_another_kind_are_predicted_or_measured(name):
    found = prompt_length_for(0.5, OWN[name], MU, Z, key=KEY, replicates=300)
    assert found.method.startswith("measured" if attention.heads_of(OWN[name]) is None else "c/L")
    assert found.checked
    assert found.measured <= 0.25 + 5 * found.measured_stderr
    assert type(OWN[name]).__name__ in found.bound_refusal
    assert ("only measured" in found.regime.sentence) is found.method.startswith("measured")
    if name == "uniform":
        L = float(np.sum(V @ np.asarray(MU.Gamma) * V)) / 0.25
        assert 0.7 * L - 1 < found.L < 1.4 * L + 1


def test_a_length_that_measuring_does_not_reach_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("largeprompt.concentration._length._SEARCHED", 2**12)
    with pytest.raises(ValueError, match=re.escape("ask for a larger epsilon")):
        prompt_length_for(1e-6, OWN["bare"], MU, Z, replicates=100)


def test_prompts_too_long_to_hold_and_quantities_that_a_layer_has_not_are_refused():
    with pytest.raises(ValueError, match="Uniform are held whole, which goes up to L = "):
        deviation(OWN["uniform"], MU, Z, [10**9], "output", KEY)
    with pytest.raises(ValueError, match="'K'; this layer has output, V, U, gradient"):
        deviation(OWN["bare"], MU, Z, [10], "K", KEY)


@pytest.mark.parametrize("name", TWINS)
def test_nonlinearity_and_particles_are_those_of_the_output(name):
    tokens = lp.Empirical(matrix(8, 50, D) ** 3)
    layer, twin = OWN[name], TWINS[name]
    own, other = (float(lp.relative_nonlinearity(one, tokens, Z)) for one in (layer, twin))
    np.testing.assert_allclose(own, other, atol=1e-10)
    if not isinstance(layer, lp.Head | Turned):  # whose twins have another V
        layer, twin = (eqx.tree_at(lambda one: one.V, one, jnp.eye(D)) for one in (layer, twin))
        own, other = (lp.particles([one], MU, KEY, 20)[-1].points for one in (layer, twin))
        np.testing.assert_allclose(own, other, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.* tokens stand in for a law known by its sampler")
@pytest.mark.parametrize("name", TWINS)
def test_the_error_of_a_sampled_law_is_that_of_the_output(name):
    law = lp.FromSampler(lambda key, n: jax.random.laplace(key, (n, D)), D, KEY, size=2000)
    own, other = (lp.output_stderr(one, law, Z[0]) for one in (OWN[name], TWINS[name]))
    np.testing.assert_allclose(own, other, rtol=1e-9)
    mean = lp.output_stderr(OWN["uniform"], law, Z[0])
    np.testing.assert_allclose(mean, np.sqrt(np.sum(V @ np.asarray(law.cov()) * V, axis=1) / 2000), rtol=1e-9)
