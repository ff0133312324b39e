"""Every way to a risk against prompts simulated in NumPy, and against integrals written here."""

import math
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad
from scipy.stats import chi

import largeprompt as lp
from catalogue import matrix
from icl_catalogue import TASKS, aligned, excess, limit_excess, mild, simulated, weights, zero_risk
from largeprompt.attention import WeightMoments
from largeprompt.icl import (
    LinearRegression,
    identity,
    kms,
    quadratic_form_averages,
    risk,
    risk_expansion,
    risk_function,
    risk_rate,
)
from significance import assert_close_in_sigmas, assert_mean_is

SOFTMAX, LINEAR = lp.SoftmaxAttention, lp.LinearAttention
KMS = TASKS["anisotropic"]
ANY = 1.0  # a tolerance that the first draws meet


def assert_risk_of(found, excess: np.ndarray, task: LinearRegression) -> None:
    """`found` is the risk of predicting 0 and the mean excess of simulated prompts over it."""
    assert_mean_is(excess, float(found.value) - zero_risk(task), float(found.stderr))


# Closed forms


@pytest.mark.parametrize(
    ("name", "L"),
    [(name, 7) for name in TASKS]
    + [(name, L) for name in ("anisotropic", "two targets, other queries", "singular") for L in (1, 2, 50)],
)
def test_linear_attention_has_the_risk_of_simulated_prompts(name, L):
    task, n = TASKS[name], 30_000
    U, V = weights(10, task)
    for inside in (False, True):
        found = risk(LINEAR(U, V), task, L, query_in_prompt=inside)
        assert found.exact
        assert_risk_of(found, excess(LINEAR, U, V, task, L, n, inside=inside), task)


@pytest.mark.parametrize("name", TASKS)
def test_infinite_prompts_have_one_risk_for_both_attentions(name):
    task, n = TASKS[name], 30_000
    U, V = weights(12, task, size=0.3)
    found = risk(SOFTMAX(U, V), task, math.inf)
    assert found.exact
    assert_risk_of(found, limit_excess(U, V, task, n), task)
    for layer in (LINEAR(U, V), SOFTMAX(U, V)):
        for inside in (False, True):
            np.testing.assert_allclose(risk(layer, task, math.inf, query_in_prompt=inside).value, found.value, 1e-13)


def test_long_prompts_of_linear_attention_reach_the_infinite_one():
    U, V = weights(12, KMS)
    limit = risk(LINEAR(U, V), KMS, math.inf).value
    np.testing.assert_allclose(risk(LINEAR(U, V), KMS, 10**14).value, limit, rtol=1e-12)
    inside = risk(LINEAR(U, V), KMS, 10**14, query_in_prompt=True).value
    np.testing.assert_allclose(inside, limit, rtol=1e-12)


# Softmax attention at finite length


@pytest.mark.parametrize("L", [1, 2, 7, 50])
@pytest.mark.parametrize("name", ["anisotropic", "two targets, other queries", "singular"])
def test_softmax_attention_has_the_risk_of_simulated_prompts(name, L):
    task, n = TASKS[name], 40_000
    U, V = weights(14, task, size=0.25)
    found = risk(SOFTMAX(U, V), task, L, rtol=2e-3)
    assert float(found.stderr) < 2e-3 * float(found.value)
    assert_risk_of(found, excess(SOFTMAX, U, V, task, L, n), task)


def test_softmax_attention_that_reads_the_query_too_has_the_risk_of_simulated_prompts():
    n, L, U, V = 60_000, 5, 0.5 * np.eye(3), np.array([[2.0, -1.0, 1.0]])
    found, without = (risk(SOFTMAX(U, V), KMS, L, rtol=ANY, query_in_prompt=inside) for inside in (True, False))
    assert_risk_of(found, excess(SOFTMAX, U, V, KMS, L, n, inside=True), KMS)
    assert abs(found.value - without.value) > 5 * math.hypot(float(found.stderr), float(without.stderr))


@pytest.mark.parametrize("L", [2, 9, 60])
@pytest.mark.parametrize("name", ["anisotropic", "two targets, other queries", "singular"])
def test_aligned_layers_have_one_risk_by_quadrature_by_nodes_and_by_simulation(name, L):
    task, n = TASKS[name], 60_000
    r = matrix(21, task.targets, task.targets)
    layer = SOFTMAX(*aligned(0.6 * matrix(20, 2, 2), r, task))
    found = risk(layer, task, L)
    assert found.exact
    nodes: Any = risk_function(SOFTMAX(*weights(3, task)), task, L, draws=2**14)
    assert "quasi" in nodes.method
    evaluated = eqx.filter_jit(lambda function, layer: function.value_and_error(layer))
    value, error = min((evaluated(nodes.with_control(i), layer) for i in (0, 1)), key=lambda found: float(found[1]))
    assert error < 2e-3 * value
    assert_close_in_sigmas(value, found.value, error)
    assert_risk_of(found, excess(SOFTMAX, layer.U, layer.V, task, L, n), task)


@pytest.mark.parametrize("L", [2, 9, 60, 10**6])
def test_an_aligned_risk_is_a_two_dimensional_integral(L):
    """(2.23) by a product rule in place of the series of chi-squares."""
    task, A, r = TASKS["other queries"], 0.8 * mild(22), 1.3
    values, vectors = np.linalg.eigh(np.asarray(task.query_Sigma))
    node, weight = hermegauss(150)
    x = (vectors * np.sqrt(values)) @ np.stack(np.meshgrid(node, node)).reshape(2, -1)
    weight = np.outer(weight, weight).ravel() / (2 * np.pi)
    h = np.asarray(task.Sigma) @ A @ x
    Q, K2 = (np.asarray(m) for m in WeightMoments(L).shares(np.sum((A @ x) * h, axis=0))[::2])
    Oh, s2 = np.asarray(task.Omega) @ h, float(task.noise)
    total = np.trace(np.asarray(task.Sigma @ task.Omega)) + s2
    inner = r**2 * np.sum(Oh * h, axis=0) * K2 + r**2 * total * Q - 2 * r * np.sum(Oh * x, axis=0) * (1 - Q)
    expected = (weight @ inner + np.trace(np.asarray(task.query_Sigma @ task.Omega)) + s2) / 2
    np.testing.assert_allclose(risk(SOFTMAX(*aligned(A, r, task)), task, L).value, expected, rtol=1e-9)


@pytest.mark.parametrize("Sigma", [(1.0, 1e-5), (20.0, 1.0, 0.99, 0.98)])
def test_the_risk_of_an_aligned_layer_is_exact_however_uneven_its_scores(Sigma):
    task, n, L = LinearRegression(np.diag(Sigma), 0.1, kms(len(Sigma))), 60_000, 9
    layer = SOFTMAX(*aligned(0.6 * np.eye(len(Sigma)), 1.3, task))
    found = risk(layer, task, L)
    assert found.exact
    assert_risk_of(found, excess(SOFTMAX, layer.U, layer.V, task, L, n), task)


@pytest.mark.parametrize(("L", "omega"), [(1, 0.7), (3, 2.0), (40, 0.5), (1000, 0.3), (40, 0.0)])
def test_an_isotropic_aligned_risk_is_an_integral_over_the_norm_of_the_query(L, omega):
    d, s2, r, task = 5, 0.1, 1.7, LinearRegression.experiment(identity(5))
    moments = WeightMoments(L)

    def inner(rho: float) -> float:
        Q, K2 = (float(m) for m in moments.shares(omega**2 * rho**2)[::2])
        square = omega**2 * rho**2 / d
        return r**2 * square * K2 + r**2 * (1 + s2) * Q - 2 * r * omega * rho**2 / d * (1 - Q)

    integral, _ = quad(lambda rho: inner(rho) * chi.pdf(rho, d), 0, 12, epsabs=1e-11, epsrel=1e-10, limit=100)
    layer = SOFTMAX(*aligned(omega * np.eye(d), r, task))
    np.testing.assert_allclose(risk(layer, task, L).value, (1 + s2 + integral) / 2, rtol=1e-8)


# Long prompts of softmax attention


def rate_by_quadrature(P, r, A, task: LinearRegression) -> float:
    """½ E e^ν [a − b² + 2bt] of (2.31), over x and w by a product rule; C = 0."""
    node, weight = hermegauss(30)
    grid = np.stack(np.meshgrid(*[node] * 4)).reshape(4, -1)
    weight = np.prod(np.stack(np.meshgrid(*[weight] * 4)).reshape(4, -1), axis=0) / (2 * np.pi) ** 2
    roots = [np.linalg.cholesky(np.asarray(m)) for m in (task.query_Sigma, task.Omega)]
    x, w = roots[0] @ grid[:2], roots[1] @ grid[2:]
    Sigma, s2 = np.asarray(task.Sigma), float(task.noise)
    h, Sw = Sigma @ A @ x, Sigma @ w
    nu, b = np.sum((A @ x) * h, axis=0), P @ h + r * np.sum(w * h, axis=0)
    a = P @ Sigma @ P + 2 * r * P @ Sw + r**2 * (np.sum(w * Sw, axis=0) + s2)
    return float(weight @ (np.exp(nu) * (a - b**2 + 2 * b * np.sum(w * x, axis=0)))) / 2


def test_the_gap_to_infinite_prompts_decays_as_the_rate_over_L():
    task = TASKS["other queries"]
    A, P, r = mild(23) / 4, np.array([0.4, -0.7]), 1.2
    U, V = aligned(A, r, task)
    V[0, :2] = P
    layer = SOFTMAX(U, V)
    rate = risk_rate(layer, task).value
    np.testing.assert_allclose(rate, rate_by_quadrature(P, r, A, task), rtol=1e-8)
    limit = risk(layer, task, math.inf).value
    found = risk(layer, task, 10**6)
    assert 1e6 * found.stderr < 0.05 * rate
    assert_close_in_sigmas(1e6 * (found.value - limit), rate, 1e6 * float(found.stderr) + 1e-4 * float(rate))
    np.testing.assert_allclose(risk(layer, task, 10**12).value, limit, rtol=1e-10)


def test_what_the_expansion_leaves_falls_as_one_over_L_squared():
    task = TASKS["other queries"]
    layer = SOFTMAX(*aligned(mild(23) / 8, 2.0, task))
    left = [float(risk(layer, task, L).value - risk_expansion(layer, task, L).value) for L in (10**3, 10**4, 10**5)]
    slopes = np.diff(np.log10(np.abs(left)))
    np.testing.assert_allclose(slopes, -2, atol=0.02)
    limit = risk(layer, task, math.inf).value
    np.testing.assert_allclose(risk_expansion(layer, task, math.inf).value, limit, rtol=1e-14)


def test_the_rate_is_infinite_for_layers_that_score_labels():
    U, V = aligned(0.1 * np.eye(2), 1.0, KMS)
    assert np.isfinite(risk_rate(SOFTMAX(U, V), KMS).value)
    U[2, 0] = 1e-3
    assert risk_rate(SOFTMAX(U, V), KMS).value == math.inf
    assert risk_expansion(SOFTMAX(U, V), KMS, 100).value == math.inf


def test_the_rate_is_infinite_from_the_threshold_on():
    task = LinearRegression(identity(2), 0.1)
    below, above = (SOFTMAX(*aligned(omega * np.eye(2), 1.0, task)) for omega in (0.707, 0.708))
    assert np.isfinite(risk_rate(below, task).value)
    assert risk_rate(above, task).value == math.inf
    assert risk_expansion(above, task, 10).value == math.inf


# How an average is taken


@pytest.mark.parametrize(("kind", "L"), [(SOFTMAX, 5), (LINEAR, 5), (SOFTMAX, math.inf)])
def test_sampling_agrees_with_the_exact_way(kind, L):
    layer = kind(*weights(14, KMS, size=0.3))
    sampled = risk(layer, KMS, L, jax.random.key(7), method="sampled", rtol=ANY)
    exact = risk(layer, KMS, L, rtol=2e-3)
    assert "Monte Carlo over" in sampled.method
    assert 0 < float(sampled.stderr) < 0.1 * float(sampled.value)
    assert_close_in_sigmas(sampled.value, exact.value, np.hypot(sampled.stderr, exact.stderr))


def test_the_same_call_gives_the_same_number_and_another_key_another():
    layer = SOFTMAX(*weights(14, KMS, size=0.3))
    one, again = (risk(layer, KMS, 5, rtol=0.1) for _ in range(2))
    other = risk(layer, KMS, 5, jax.random.key(1), rtol=0.1)
    assert one.value == again.value
    assert one.value != other.value
    assert_close_in_sigmas(one.value, other.value, np.hypot(one.stderr, other.stderr))


@pytest.mark.parametrize(("method", "rtol"), [("auto", 5e-4), ("sampled", 1e-2)])
def test_a_tighter_tolerance_is_met(method, rtol):
    layer = SOFTMAX(*weights(14, KMS, size=0.3))
    assert float(risk(layer, KMS, 5, rtol=ANY, method=method).stderr) > rtol
    found = risk(layer, KMS, 5, rtol=rtol, method=method)
    assert float(found.stderr) <= rtol * float(found.value)


def test_a_tolerance_out_of_reach_is_said():
    layer = SOFTMAX(*weights(14, KMS, size=0.3))
    with pytest.warns(UserWarning, match=r"after 64 draws, above rtol = 1e-06; raise max_draws or rtol"):
        found = risk(layer, KMS, 5, rtol=1e-6, max_draws=64)
    assert np.isfinite(found.value)


# Layers of other shapes


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_a_scaled_head_and_its_merged_form_have_one_risk(kind):
    task = TASKS["two targets"]
    K, Q, V, O = (0.5 * matrix(30 + i, *shape) for i, shape in enumerate([(3, 4), (3, 4), (3, 4), (2, 3)]))
    head = lp.Head(K, Q, V, O, scale=0.5, kind=kind)
    merged = (SOFTMAX if kind == "softmax" else LINEAR)(0.5 * K.T @ Q, O @ V)
    for L in (6, math.inf):
        np.testing.assert_allclose(risk(head, task, L, rtol=0.1).value, risk(merged, task, L, rtol=0.1).value, 1e-12)


@pytest.mark.parametrize("kind", [SOFTMAX, LINEAR])
def test_the_last_outputs_are_the_prediction(kind):
    task = TASKS["two targets"]
    U, V = weights(14, task, size=0.3, outputs=task.dim)
    whole, last = kind(U, V), kind(U, V[-2:])
    assert risk(whole, task, 6, rtol=0.1).value == risk(last, task, 6, rtol=0.1).value


def test_the_last_outputs_are_the_prediction_on_sampled_prompts():
    U, V = weights(14, KMS, size=0.3, outputs=3)
    whole, last = (risk(SOFTMAX(U, W), KMS, 5, rtol=ANY, method="sampled") for W in (V, V[-1:]))
    np.testing.assert_allclose(whole.value, last.value, rtol=1e-12)


@pytest.mark.parametrize("size", [1e3, 1e100])
@pytest.mark.parametrize("kind", [SOFTMAX, LINEAR])
@pytest.mark.parametrize("L", [1, 30, math.inf])
@pytest.mark.filterwarnings("ignore:the standard error")
def test_huge_weights_have_a_finite_risk_or_one_line(kind, L, size):
    for U, V in (weights(14, KMS, size=size), aligned(size * np.eye(2), size, KMS)):
        message = ""
        try:
            found = risk(kind(U, V), KMS, L, max_draws=2**12)
        except ValueError as error:
            message = str(error)
        else:
            assert np.isfinite(found.value)
            assert np.isfinite(found.stderr)
            assert found.value > 0
        assert not message or ("overflows" in message and "\n" not in message and size > 1e3)


@pytest.mark.parametrize("size", [1e4, 1e8])
@pytest.mark.parametrize("P", [(0.0, 0.0), (0.3, -0.5)], ids=["aligned", "any"])
def test_sharp_scores_pick_one_token(P, size):
    """As U grows softmax attention copies the token of the largest score: R = ½E(v·z_best − y)²."""
    n, L, V = 60_000, 4, np.array([[*P, 0.8]])
    found = risk(SOFTMAX(aligned(size * np.eye(2), 0, KMS)[0], V), KMS, L, rtol=0.05)
    picked = []
    for batch in simulated(KMS, L, n):
        best = np.argmax(np.einsum("bld,bd->bl", batch.tokens[..., :2], batch.queries[:, :2]), axis=1)
        output = batch.tokens[np.arange(len(best)), best] @ V.T
        picked.append(np.sum(output * (output - 2 * batch.targets), axis=1) / 2)
    assert_risk_of(found, np.concatenate(picked), KMS)


FORMS: dict[str, list[float]] = {
    "one direction": [0.5],
    "nine orders of magnitude": [0.5, 0.3, 1e-3, 2e-4, 1e-9],
    "some of width 0": [0.5, 0.01, 0.0, 0.0],
    "wide": [1e6, 3.0, 0.3, 1e-6],
    "narrow": [1e-7, 3e-9],
    "many equal": [0.1] * 50,
    "one above many": [1.0] + [0.01] * 300,
    "many different": list(np.geomspace(1e-4, 1, 30)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_averages_over_a_quadratic_form_are_the_products_they_are(form):
    """E e^{-aν} = ∏(1+2aλ)^{-1/2}, and weighting by x_i² divides by 1 + 2aλ_i."""
    a, widths = np.array([0.1, 1.0])[:, None], np.array(form)
    means, squares, fourths = quadratic_form_averages(widths, lambda nu: np.exp(-a * nu), fourths=2)
    expected, divided = np.prod(1 + 2 * a * widths, axis=1) ** -0.5, 1 / (1 + 2 * a * widths)
    np.testing.assert_allclose(means, expected, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(squares, expected[:, None] * divided, rtol=1e-9, atol=1e-13)
    pairs = 1 + 2 * np.eye(len(form))
    products = expected[:, None, None] * divided[:, :, None] * divided[:, None] * pairs
    np.testing.assert_allclose(fourths, products, rtol=1e-9, atol=1e-12)
