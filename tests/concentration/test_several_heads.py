"""Sums of heads: their errors go together, and everything that is predicted for one head is right for several."""

import jax
import numpy as np
import pytest

import largeprompt as lp
from catalogue import covariance, matrix
from largeprompt import icl
from largeprompt.concentration import deviation, output_bias, output_covariance, predict, prompt_length_for, rates
from significance import assert_close_in_sigmas

D, P = 3, 2
KEY = jax.random.key(0)
Z = np.array([[0.5, -0.4, 0.3], [0.2, 0.1, -0.6]])


def head(seed: int, kind: str = "softmax", size: float = 0.6) -> lp.Head:
    K, Q, V, O = (matrix(10 * seed + i, 2, n) for i, n in enumerate((D, D, D, P)))
    return lp.Head(size * K, size * Q, V, O.T, kind="softmax" if kind == "softmax" else "linear")


def several(*kinds: str) -> lp.MultiHead:
    return lp.MultiHead([head(i, kind) for i, kind in enumerate(kinds)])


KINDS = [("softmax", "softmax"), ("linear", "linear"), ("linear", "softmax", "softmax")]
MIXED = several("softmax", "linear", "softmax")
# one head, written as the sum of two that share its K and Q
WHOLE = head(3)
SPLIT = lp.MultiHead([lp.Head(WHOLE.K, WHOLE.Q, s * WHOLE.V, WHOLE.O) for s in (0.3, 0.7)])


def influences(one: lp.Head, atoms: np.ndarray, masses: np.ndarray, z: np.ndarray) -> np.ndarray:
    """What each atom moves the output of a head by, to first order in its weight."""
    merged = one.merged()
    U, V = np.asarray(merged.U), np.asarray(merged.V)
    u = U @ z
    if one.kind == "linear":
        read = atoms * (atoms @ u)[:, None]
        return (read - masses @ read) @ V.T
    weights = np.exp(atoms @ u) / (masses @ np.exp(atoms @ u))
    return weights[:, None] * (atoms - (masses * weights) @ atoms) @ V.T


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_limit_covariance_is_that_of_the_added_influences(kinds):
    layer, atoms, masses = several(*kinds), matrix(1, 6, D), np.array([0.3, 0.1, 0.2, 0.1, 0.15, 0.15])
    mu = lp.Empirical(atoms, masses)
    each = [influences(one, atoms, masses, Z[0]) for one in layer.heads]
    added = sum(each)
    expected = (masses[:, None] * added).T @ added
    np.testing.assert_allclose(output_covariance(layer, mu, Z[0]), expected, rtol=1e-9)
    constants = rates(layer, mu, Z[0])
    np.testing.assert_allclose(constants.output, np.trace(expected), rtol=1e-9)
    alone = [rates(one, mu, Z[0]) for one in layer.heads]
    np.testing.assert_allclose(constants.U, sum(float(one.U) for one in alone), rtol=1e-9)
    np.testing.assert_allclose(
        output_bias(layer, mu, Z[0]), sum(output_bias(one, mu, Z[0]) for one in layer.heads), rtol=1e-9
    )


def test_the_closed_mean_over_gaussian_queries_is_that_of_a_quadrature():
    layer = lp.MultiHead([head(0, size=0.3), head(1, size=0.3)])
    mu, S = lp.Gaussian(matrix(2, D), covariance(3, D)), np.diag([0.5, 0.3, 0.2])
    x, w = np.polynomial.hermite_e.hermegauss(10)
    grid = np.stack(np.meshgrid(x, x, x, indexing="ij"), axis=-1).reshape(-1, D) * np.sqrt(np.diag(S))
    weights = np.einsum("i,j,k->ijk", w, w, w).ravel()
    nodes = lp.Empirical(grid, weights / weights.sum())
    closed, summed = (predict(layer, mu, nu, 100, "output") for nu in (lp.Gaussian(np.zeros(D), S), nodes))
    assert "closed form" in closed.method
    np.testing.assert_allclose(closed.constant, summed.constant, rtol=1e-6)


def test_deviations_of_a_mixed_sum_are_the_predicted_ones():
    """At a length at which c/L is good to a few per cent."""
    layer, mu = several("softmax", "linear"), lp.Affine(np.eye(D), matrix(6, D), lp.Rademacher([1.0, 0.7, 1.3]))
    L, asked = 500, ("output", "gradient")
    measured = deviation(layer, mu, Z, [L], asked, KEY, replicates=1200)
    predicted = predict(layer, mu, Z, [L], asked)
    for name in asked:
        error = np.hypot(measured[name].stderr, 0.03 * predicted[name].mean_square)
        assert_close_in_sigmas(measured[name].mean_square, predicted[name].mean_square, error)
    # the heads' errors are far from independent
    alone = sum(predict(one, mu, Z, [L], "output").constant for one in layer.heads)
    assert abs(alone / predicted["output"].constant - 1) > 0.1


def test_linear_heads_are_predicted_exactly_at_every_length():
    layer, mu = several("linear", "linear"), lp.Gaussian(matrix(6, D), covariance(7, D))
    predicted = predict(layer, mu, Z, [2], "output")
    assert predicted.exact
    measured = deviation(layer, mu, Z, [2], "output", KEY, replicates=4000)
    assert_close_in_sigmas(measured.mean_square, predicted.mean_square, measured.stderr)


@pytest.mark.filterwarnings("ignore:.* tokens stand in for a law known by its sampler")
def test_a_head_split_in_two_is_the_head():
    mu = lp.Gaussian(np.zeros(D), covariance(8, D))
    one, two = (predict(layer, mu, Z, [50], "output") for layer in (WHOLE, SPLIT))
    np.testing.assert_allclose(two.constant, one.constant, rtol=1e-9)
    assert two.regime.spread == one.regime.spread
    measured = deviation(SPLIT, mu, Z, [50], "output", KEY, replicates=1500)
    assert_close_in_sigmas(measured.mean_square, one.mean_square, measured.stderr)
    tokens = lp.Empirical(matrix(9, 60, D) ** 3)
    np.testing.assert_allclose(*(lp.relative_nonlinearity(layer, tokens, Z) for layer in (WHOLE, SPLIT)), rtol=1e-9)
    law = lp.FromSampler(lambda key, n: jax.random.laplace(key, (n, D)), D, KEY, size=3000)
    np.testing.assert_allclose(*(lp.output_stderr(layer, law, Z[0]) for layer in (WHOLE, SPLIT)), rtol=1e-9)


def test_linear_heads_have_no_nonlinearity():
    assert float(lp.relative_nonlinearity(several("linear", "linear"), lp.Cube([1.0, 2.0, 1.0]), Z)) == 0


def test_the_gap_of_risks_of_several_heads_is_measured():
    """Against the exact gap of the one head that they are."""
    task, L = icl.LinearRegression(np.diag([1.0, 0.5]), noise=0.2), 20
    one = lp.Head(0.5 * np.eye(D), np.diag([1.0, 1.0, 0.0]), [[0.0, 0.0, 1.0]])
    two = lp.MultiHead([lp.Head(one.K, one.Q, s * one.V) for s in (0.3, 0.7)])
    found = deviation(two, task, None, [L], ("risk", "risk-gradient"), KEY, replicates=1500)
    exact = predict(one, task, None, [L], "risk")
    assert found["risk"].gap is not None
    assert found["risk"].gap_stderr is not None
    assert exact.gap is not None
    assert_close_in_sigmas(found["risk"].gap, exact.gap, found["risk"].gap_stderr)
    length = prompt_length_for(0.1, two, task, quantity="risk", replicates=1500)
    assert length.method == "measured"
    assert np.isnan(length.lasting)
    at = predict(one, task, None, [int(length.L)], "risk")
    assert at.gap is not None
    assert abs(at.gap[0]) < 0.12


def test_lengths_for_several_heads_follow_their_own_law():
    mu = lp.Gaussian(np.zeros(D), covariance(8, D))
    found = prompt_length_for(0.1, SPLIT, mu, Z, key=KEY, replicates=400)
    constant = predict(SPLIT, mu, Z, 1, "output").constant
    assert np.ceil(constant / 0.01) == found.L == found.lasting
    assert found.checked
    assert found.unchecked_reason == ""
    assert_close_in_sigmas(found.measured, 0.01, np.hypot(found.measured_stderr, 3e-4))
    assert "MultiHead" in found.bound_refusal


def test_with_the_query_in_the_prompt_heads_see_the_same_prompt():
    """Of a law of one atom, all that differs from the limit is the query's own token."""
    atom = matrix(11, D)
    mu, L = lp.Empirical(atom[None]), 4
    found = deviation(MIXED, mu, Z[:1], [L], "output", KEY, replicates=40, query_in_prompt=True)
    prompt = lp.Empirical(np.concatenate([np.tile(atom, (L, 1)), Z[:1]]))
    off = MIXED(prompt, Z[0]) - MIXED(mu, Z[0])
    np.testing.assert_allclose(found.mean_square, float(off @ off), rtol=1e-9)
