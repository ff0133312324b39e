"""Laws of tokens, layers and tasks as tables of settings, and one line for whatever is wrong with one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from largeprompt import lab
from largeprompt.attention import Head, LinearAttention, SoftmaxAttention
from largeprompt.icl import LinearRegression, kms
from largeprompt.measures import Affine, Cube, Empirical, Gaussian, Mixture, Product, Rademacher, Sphere
from refusals import refusal

TOKENS = [[1.0, 0.0], [0.0, 2.0], [-1.0, -2.0]]


POINT = {"kind": "gaussian", "mean": [1.0, 2.0], "cov": [[0.0, 0.0], [0.0, 0.0]]}


DISC = {"kind": "sphere", "radius": 2.0, "dim": 2}


LAWS: list[tuple[dict[str, Any], Any]] = [
    ({"kind": "gaussian", "dim": 3}, Gaussian(jnp.zeros(3), jnp.eye(3))),
    ({"kind": "gaussian", "cov": "kms:0.5", "dim": 3}, Gaussian(jnp.zeros(3), kms(3, 0.5))),
    ({"kind": "gaussian", "cov": "diagonal:1,4", "mean": [1, -1]}, Gaussian([1.0, -1.0], [[1.0, 0.0], [0.0, 4.0]])),
    ({"kind": "gaussian", "cov": [[2, 1], [1, 2]]}, Gaussian([0.0, 0.0], [[2.0, 1.0], [1.0, 2.0]])),
    ({"kind": "rademacher", "scale": [1, 2]}, Rademacher([1.0, 2.0])),
    ({"kind": "rademacher", "scale": 3, "dim": 2}, Rademacher([3.0, 3.0])),
    ({"kind": "rademacher", "scale": 3}, Rademacher([3.0])),
    ({"kind": "rademacher", "dim": 2}, Rademacher([1.0, 1.0])),
    ({"kind": "cube", "half_width": [1.5, 0.5]}, Cube([1.5, 0.5])),
    ({"kind": "cube", "dim": 2}, Cube([math.sqrt(3)] * 2)),
    ({"kind": "sphere", "radius": 2, "dim": 3}, Sphere(2.0, 3)),
    ({"kind": "sphere", "dim": 4}, Sphere(2.0, 4)),
    ({"kind": "empirical", "tokens": TOKENS}, Empirical(TOKENS)),
    ({"kind": "empirical", "tokens": TOKENS, "weights": [0.5, 0.25, 0.25]}, Empirical(TOKENS, [0.5, 0.25, 0.25])),
    (
        {"kind": "affine", "A": [[1, 1], [0, 2], [3, 0]], "b": [1, 0, 0], "of": DISC},
        Affine([[1.0, 1.0], [0.0, 2.0], [3.0, 0.0]], [1.0, 0.0, 0.0], Sphere(2.0, 2)),
    ),
    (
        {"kind": "product", "factors": [DISC, {"kind": "rademacher", "scale": [1]}]},
        Product(Sphere(2.0, 2), Rademacher([1.0])),
    ),
    (
        {
            "kind": "mixture",
            "weights": [0.25, 0.75],
            "components": [POINT, {"kind": "mixture", "weights": [0.5, 0.5], "components": [POINT, DISC]}],
        },
        Mixture(
            [0.25, 0.75],
            [
                Gaussian([1.0, 2.0], jnp.zeros((2, 2))),
                Mixture([0.5, 0.5], [Gaussian([1.0, 2.0], jnp.zeros((2, 2))), Sphere(2.0, 2)]),
            ],
        ),
    ),
]


def agree(found, wanted):
    """The same kind with the same numbers."""
    assert type(found) is type(wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-15)


@pytest.mark.parametrize(("table", "wanted"), LAWS, ids=[table["kind"] for table, _ in LAWS])
def test_a_table_stands_for_a_law(table, wanted):
    agree(lab.measure_from(table), wanted)


@pytest.mark.parametrize("kind", ["rademacher", "cube", "sphere"])
def test_a_bounded_law_takes_the_covariance_asked_for(kind):
    mu = lab.measure_from({"kind": kind, "cov": "kms:0.5", "dim": 3})
    np.testing.assert_allclose(mu.cov(), kms(3, 0.5), atol=1e-13)
    assert math.isfinite(float(mu.radius()))


WRONG_LAWS = [
    (5, "measure is 5; it must be a table"),
    ({}, "measure.kind is missing; measure has nothing"),
    ({"kind": "cauchy"}, "measure.kind is 'cauchy'; it must be one of gaussian, mixture, rademacher, cube, sphere"),
    ({"kind": ["gaussian"]}, "measure.kind is ['gaussian']; it must be one of"),
    ({"kind": "gaussian", "dim": 2, "sigma": 1}, "measure.sigma = 1 is not a setting; they are kind, mean, cov, dim"),
    ({"kind": "gaussian"}, "measure.dim is missing; cov = 'identity' does not say the dimension"),
    ({"kind": "gaussian", "dim": 0}, "measure.dim is 0; it must be at least 1"),
    ({"kind": "gaussian", "dim": "two"}, "measure.dim is 'two'; it must be a whole number"),
    ({"kind": "gaussian", "cov": "toeplitz", "dim": 2}, "measure.cov: the covariance is 'toeplitz'; for d = 2"),
    ({"kind": "gaussian", "cov": "kms:2", "dim": 2}, "measure.cov: rho is 2; it must lie between -1 and 1"),
    ({"kind": "gaussian", "cov": True, "dim": 2}, "measure.cov is True; it must be a matrix of numbers"),
    ({"kind": "gaussian", "cov": 2.0, "dim": 2}, "measure.cov has shape (); it must be (any, any)"),
    ({"kind": "gaussian", "cov": [[1, 2], [2, 1]]}, "measure.cov has the eigenvalue -1"),
    ({"kind": "gaussian", "cov": [[1, 2], [0, 1]]}, "measure.cov is not symmetric"),
    ({"kind": "gaussian", "cov": [[1, 0], [0]]}, "measure.cov is not an array"),
    ({"kind": "gaussian", "cov": [[1, 0], [0, 1]], "dim": 3}, "measure.cov has shape (2, 2); it must be (3, 3)"),
    ({"kind": "gaussian", "mean": [1, 2], "dim": 3}, "measure.mean has 2 entries; dim is 3"),
    ({"kind": "gaussian", "mean": [1, math.inf]}, "measure.mean[1] is inf; every entry must be finite"),
    ({"kind": "gaussian", "mean": "far", "dim": 2}, "measure.mean is 'far'; it must be a list of numbers"),
    ({"kind": "gaussian", "mean": [1, True]}, "measure.mean is [1, True]; it must be a list of numbers"),
    ({"kind": "rademacher"}, "measure.dim is missing"),
    ({"kind": "rademacher", "scale": -1}, "measure.scale[0] is -1; every entry must be at least 0"),
    ({"kind": "rademacher", "scale": [1, [2]]}, "measure.scale is not an array"),
    ({"kind": "rademacher", "scale": "big"}, "measure.scale is 'big'; it must be a finite number"),
    ({"kind": "rademacher", "scale": [1, 2], "dim": 3}, "measure.scale has 2 entries; dim is 3"),
    ({"kind": "rademacher", "scale": 1, "cov": "identity", "dim": 2}, "measure has scale and cov; it must have one"),
    ({"kind": "cube", "half_width": [1, -2]}, "measure.half_width[1] is -2; every entry must be at least 0"),
    ({"kind": "cube", "half_width": math.nan}, "measure.half_width is nan; it must be a finite number"),
    ({"kind": "sphere", "radius": 1}, "measure.dim is missing; the radius does not say the dimension"),
    ({"kind": "sphere", "radius": -1, "dim": 2}, "measure.radius is -1; it must be a number of at least 0"),
    ({"kind": "sphere", "radius": 1, "dim": 2.5}, "measure.dim is 2.5; it must be a whole number"),
    ({"kind": "sphere", "radius": 1, "dim": 2, "cov": "kms"}, "measure has radius and cov; it must have one of them"),
    ({"kind": "empirical"}, "measure.tokens is missing; measure has kind"),
    ({"kind": "empirical", "tokens": [1, 2]}, "measure.tokens has shape (2,); it must be (any, any)"),
    ({"kind": "empirical", "tokens": "prompt.txt"}, "measure.tokens is 'prompt.txt'; it must be a matrix of numbers"),
    ({"kind": "empirical", "tokens": TOKENS, "weights": [1, 0]}, "measure.weights has shape (2,); it must be (3)"),
    ({"kind": "empirical", "tokens": TOKENS, "weights": [1, 1, 1]}, "measure.weights sums to 3; it must sum to 1"),
    ({"kind": "affine", "b": [0], "of": DISC}, "measure.A is missing"),
    ({"kind": "affine", "A": [[1, 2]], "b": [0, 0], "of": DISC}, "measure.b has shape (2,); it must be (1)"),
    ({"kind": "affine", "A": [[1, 2, 3]], "of": DISC}, "measure.A has shape (1, 3); it must be (any, 2)"),
    ({"kind": "affine", "A": [[1, 2]], "of": "sphere"}, "measure.of is 'sphere'; it must be a table"),
    ({"kind": "product", "factors": []}, "measure.factors is []; it must be a list of tables"),
    ({"kind": "product", "factors": [DISC, {"kind": "disc"}]}, "measure.factors[1].kind is 'disc'"),
    ({"kind": "mixture", "weights": [1], "components": DISC}, "measure.components is {'kind': 'sphere'"),
    (
        {"kind": "mixture", "weights": [0.5, 0.5], "components": [POINT, DISC | {"radius": -2}]},
        "measure.components[1].radius is -2; it must be a number of at least 0",
    ),
    (
        {"kind": "mixture", "weights": [0.5, 0.4], "components": [POINT, DISC]},
        "measure.weights sums to 0.9; it must sum to 1",
    ),
    (
        {"kind": "mixture", "weights": [0.5, 0.5], "components": [POINT, DISC | {"dim": 3}]},
        "measure.components have dimensions [2, 3]; there must be at least one, all of one dimension",
    ),
    ({"kind": "empirical", "tokens": "missing.npz"}, "missing.npz"),
    (
        {"kind": "empirical", "file": "laws.txt"},
        "measure.file is 'laws.txt'; it must be the name of an .npz or .npy file",
    ),
]


@pytest.mark.parametrize(("table", "message"), WRONG_LAWS, ids=[message[:50] for _, message in WRONG_LAWS])
def test_what_is_wrong_with_a_law_is_one_line_that_says_where(table, message, tmp_path):
    assert message in refusal(lab.measure_from, table, tmp_path)


def test_a_table_stands_for_a_layer(tmp_path):
    key = jax.random.key(3)
    agree(lab.layer_from({"init": "pytorch", "seed": 3}, 4), Head.pytorch_default(key, 4))
    drawn = lab.layer_from({"init": "pytorch", "seed": 3, "head_dim": 2, "outputs": 1, "scale": 0.5}, 4)
    agree(drawn, Head.pytorch_default(key, 4, head_dim=2, outputs=1, scale=0.5))
    agree(lab.layer_from({"init": "identity", "scale": 0.3}, 2), SoftmaxAttention(0.3 * np.eye(2), np.eye(2)))
    linear = lab.layer_from({"U": [[1, 2], [3, 4]], "V": [[1, 0]], "kind": "linear"}, 2)
    agree(linear, LinearAttention([[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0]]))
    K, Q, V, O = [[1.0, 2.0]], [[0.0, 1.0]], np.eye(2), [[1.0, 1.0]]
    agree(lab.layer_from({"K": K, "Q": Q, "V": V, "O": O, "scale": 2}, 2), Head(K, Q, V, O, 2.0))
    np.savez(tmp_path / "weights.npz", K=K, Q=Q, V=V)
    agree(lab.layer_from({"file": "weights.npz", "kind": "linear"}, 2, tmp_path), Head(K, Q, V, kind="linear"))
    agree(lab.layer_from({"K": K, "Q": Q, "V": "weights.npz"}, 2, tmp_path), Head(K, Q, V))


WRONG_LAYERS = [
    ("pytorch", "layer is 'pytorch'; it must be a table"),
    ({}, "layer has nothing; it must have init, or U and V, or K, Q and V"),
    ({"V": [[1, 0]]}, "layer has V; it must have init, or U and V"),
    ({"init": "xavier"}, "layer.init is 'xavier'; it must be one of pytorch, identity"),
    ({"init": "identity", "scale": "big"}, "layer.scale is 'big'; it must be a finite number"),
    ({"init": "identity", "scale": math.inf}, "layer.scale is inf; it must be a finite number"),
    ({"init": "identity", "seed": 3}, "layer.seed = 3 is not a setting; they are init, scale, kind"),
    ({"init": "pytorch", "seed": -1}, "layer.seed is -1; it must be at least 0"),
    ({"init": "pytorch", "seed": 2**32}, "layer.seed is 4294967296; it must be below 2**32"),
    ({"init": "pytorch", "outputs": 0}, "layer.outputs is 0; it must be at least 1"),
    ({"init": "pytorch", "kind": "cosine"}, "layer.kind is 'cosine'; it must be one of "),
    ({"U": [[1, 0], [0, 1]]}, "layer.V is missing; layer has U"),
    ({"U": [[1]], "V": [[1, 0]]}, "layer.U has shape (1, 1); it must be (2, 2)"),
    ({"U": [[1, 0], [0, 1]], "V": [[1, 0, 0]]}, "layer.V has shape (1, 3); it must be (any, 2)"),
    (
        {"U": [[1, 0], [0, 1]], "V": [[1, 0]], "scale": 2},
        "layer.scale is 2; a layer given by U and V has none, U holds it",
    ),
    ({"K": [[1, 0]], "Q": [[1, 0], [0, 1]], "V": [[1, 0]]}, "layer.Q has shape (2, 2); it must be (1, 2)"),
    ({"K": [[1, 0]], "Q": [[1, 0]], "V": [[1, 0]], "O": [[1, 1]]}, "layer.O has shape (1, 2); it must be (any, 1)"),
    ({"K": [[1, 0]], "Q": [[1, 0]], "V": [[1, 0]], "bias": 1}, "layer.bias = 1 is not a setting"),
    ({"file": "missing.npz"}, "missing.npz"),
    ({"file": 3}, "layer.file is 3; it must be the name of an .npz or .npy file"),
]


@pytest.mark.parametrize(("table", "message"), WRONG_LAYERS, ids=[message[:50] for _, message in WRONG_LAYERS])
def test_what_is_wrong_with_a_layer_is_one_line_that_says_where(table, message):
    assert message in refusal(lab.layer_from, table, 2)


def test_a_table_stands_for_a_regression():
    task = lab.task_from({"kind": "regression", "sigma": "kms:0.5", "d": 3})
    agree(task, LinearRegression.experiment(kms(3, 0.5)))
    table = {"kind": "regression", "sigma": [[2, 0], [0, 1]], "noise": 0, "omega": "identity", "query_sigma": "kms"}
    agree(lab.task_from(table), LinearRegression([[2.0, 0.0], [0.0, 1.0]], 0.0, np.eye(2), kms(2, 0.5)))


WRONG_TASKS = [
    ({"kind": "regression"}, "measure.d is missing; sigma = 'identity' does not say the dimension"),
    ({"kind": "regression", "d": 2, "noise": -1}, "measure.noise is -1; it must be a number of at least 0"),
    ({"kind": "regression", "d": 2, "omega": [[1]]}, "measure.omega has shape (1, 1); it must be (2, 2)"),
    ({"kind": "regression", "d": 2, "dim": 3}, "measure.dim = 3 is not a setting; they are kind, sigma, d, noise"),
    ({"kind": "classification"}, "measure.kind is 'classification'; it must be one of regression"),
]


@pytest.mark.parametrize(("table", "message"), WRONG_TASKS, ids=[message[:50] for _, message in WRONG_TASKS])
def test_what_is_wrong_with_a_task_is_one_line_that_says_where(table, message):
    assert message in refusal(lab.task_from, table)
