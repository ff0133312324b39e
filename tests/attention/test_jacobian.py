"""Closed-form derivatives against automatic differentiation and finite differences, over measures and layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import largeprompt as lp

D = 3
U, V = 0.4 * catalogue.matrix(0, D, D), catalogue.matrix(1, 2, D)
K, Q, W = (catalogue.matrix(seed, *shape) for seed, shape in ((2, (4, D)), (3, (4, D)), (4, (2, D))))
z = catalogue.matrix(6, D)
LAYERS = catalogue.LAYERS
three_dimensional = {name: mu for name, mu in catalogue.MEASURES.items() if mu.dim == D}
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
# what heads add to their (U, V) forms, and other weights to one kind of them, does not depend on the measure; exact
# averages of such weights, and their derivatives, are tested by themselves, those by quadrature here
PAIRS = [
    pytest.param(layer, mu, id=f"{name}-{law}")
    for name, layer in LAYERS.items()
    for law, mu in three_dimensional.items()
    if name in ("softmax", "linear")
    or law in ("gaussian", "empirical")
    or (name == "sigmoid, normalised" and not mu._averages_exactly())
]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    """A short fixed sample is as good a law as a long one."""
    monkeypatch.setattr("largeprompt.measures._measure._SAMPLE", 2**9)


def parameters(layer):
    """The arrays of a layer, in the order of the fields of its Jacobian."""
    if isinstance(layer, lp.MultiHead):
        return [array for head in layer.heads for array in parameters(head)]
    names = ("K", "Q", "V", "O") if isinstance(layer, lp.Head) else ("U", "V")
    return [getattr(layer, name) for name in names if getattr(layer, name) is not None]


def with_parameters(layer, arrays):
    return eqx.tree_at(parameters, layer, arrays)


@eqx.filter_jit
def compiled_jacobian(layer, mu):
    return layer.jacobian(mu, z)


def closed_form(layer, mu):
    """The leaves of the Jacobian, parameters first, the query last."""
    jacobian = compiled_jacobian(layer, mu)
    if isinstance(layer, lp.MultiHead):
        each = [leaf for part in jacobian.heads for leaf in jax.tree.leaves(part)[:-1]]
        return [*each, jacobian.z]
    return jax.tree.leaves(jacobian)


@pytest.mark.parametrize(("layer", "mu"), PAIRS)
def test_jacobians_equal_automatic_differentiation(layer, mu):
    def output(arrays, z):
        return with_parameters(layer, arrays)._output(mu, z)

    automatic = jax.jit(jax.jacrev(output, argnums=(0, 1)))(parameters(layer), jnp.asarray(z))
    for ours, theirs in zip(closed_form(layer, mu), jax.tree.leaves(automatic), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@each_layer
def test_jacobians_equal_finite_differences(layer):
    mu, h = lp.Sphere(2.0, D), 1e-6
    arrays = [*map(np.asarray, parameters(layer)), z]
    output = jax.jit(lambda arrays: with_parameters(layer, arrays[:-1])._output(mu, arrays[-1]))
    for i, ours in enumerate(map(np.asarray, closed_form(layer, mu))):
        for index in np.ndindex(arrays[i].shape):
            step = np.zeros(arrays[i].shape)
            step[index] = h
            up, down = ([a if j != i else a + sign * step for j, a in enumerate(arrays)] for sign in (1, -1))
            difference = (np.asarray(output(up)) - np.asarray(output(down))) / (2 * h)
            np.testing.assert_allclose(ours[(slice(None), *index)], difference, rtol=1e-6, atol=1e-7)


def test_the_chain_rule_carries_the_derivative_in_u_to_k_and_q():
    """End of Section 3, one output at a time as the paper writes it."""
    head = lp.Head(K, Q, W, scale=0.3)
    mu = lp.Cube([1.0, 2.0, 0.5])
    dU = head.merged().jacobian(mu, z).U
    dK, dQ = lp.chain_rule(dU, head.K, head.Q, head.scale)
    for i in range(2):
        np.testing.assert_allclose(dK[i], 0.3 * Q @ dU[i].T, rtol=1e-13)
        np.testing.assert_allclose(dQ[i], 0.3 * K @ dU[i], rtol=1e-13)
    np.testing.assert_allclose(head.jacobian(mu, z).K, dK, rtol=1e-13)
    np.testing.assert_allclose(head.jacobian(mu, z).Q, dQ, rtol=1e-13)


def test_the_empirical_gradient_in_u_is_the_weighted_sum_over_tokens():
    """∂T_i/∂U = Σ_l a_l (V_i·z_l - T_i) z_l z^T, written out token by token."""
    Z = catalogue.matrix(7, 11, D)
    weights = np.exp(Z @ U @ z)
    weights /= weights.sum()
    attention = lp.SoftmaxAttention(U, V)
    output = np.asarray(attention(lp.Empirical(Z), z))
    expected = [
        sum(a * (V[i] @ t - output[i]) * np.outer(t, z) for a, t in zip(weights, Z, strict=True)) for i in range(2)
    ]
    np.testing.assert_allclose(attention.jacobian(lp.Empirical(Z), z).U, expected, rtol=1e-12, atol=1e-14)
