"""Propositions 3.1 and 3.4 on layers and laws: they dominate exact and measured deviations; moments against samples."""

import math

import jax
import numpy as np
import pytest

import catalogue
import largeprompt as lp
from largeprompt.attention import WeightMoments
from largeprompt.concentration import bounds
from largeprompt.concentration.bounds._moments import _given_queries, fourth_moment_root, gaussian_components
from refusals import assert_refused
from significance import assert_mean_is

D = 3
I = np.eye(D)
GAUSSIAN = lp.Gaussian(np.zeros(D), catalogue.covariance(0, D))
QUERIES = lp.Gaussian(np.zeros(D), catalogue.covariance(1, D))
LAYER = lp.SoftmaxAttention(0.4 * catalogue.matrix(2, D, D), catalogue.matrix(3, 2, D))
K, Q, V = (0.5 * catalogue.matrix(seed, 2, D) for seed in (4, 5, 6))
HEAD = lp.Head(K, Q, V, catalogue.matrix(7, 2, 2), scale=0.7)
BIMODAL = lp.Mixture([0.25, 0.75], [lp.Gaussian([1.5, 0.0, 0.0], 0.5 * I), lp.Gaussian([-0.5, 0.0, 0.0], I)])
LAWS = {
    "rademacher": lp.Rademacher([1.0, 0.5, 1.5]),
    "cube": lp.Cube([1.0, 2.0, 0.5]),
    "sphere": lp.Sphere(1.5, D),
    "mixture": BIMODAL,
    "off centre": lp.Gaussian([2.0, -1.0, 0.5], 0.3 * I),
}
QUERY_LAWS = {"gaussian": QUERIES, "sphere": lp.Sphere(1.2, D)}
BOUNDED_QUERIES = [("rademacher", "sphere"), ("mixture", "sphere")]  # of bounded and of unbounded tokens


def exact_mean_square(layer, Gamma, S, L, nodes=400):
    """E‖V(Σa z − Γu)‖² over prompts exactly, over queries N(0, S) by a fixed sample, and its standard error."""
    z = np.random.default_rng(8).normal(size=(nodes, len(S))) @ np.linalg.cholesky(S).T
    u, V = z @ np.asarray(layer.U).T, np.asarray(layer.V)
    Q, _, _, lost = map(np.asarray, WeightMoments(L).shares(np.einsum("ni,ij,nj->n", u, Gamma, u)))
    along = np.sum((u @ Gamma @ V.T) ** 2, axis=1)
    values = along * (2 * Q - lost) + Q * np.trace(V @ Gamma @ V.T)
    return values.mean(), values.std() / math.sqrt(nodes)


@pytest.mark.parametrize("size", [0.2, 0.5, 1.0])
def test_proposition_3_1_dominates_the_exact_error_of_gaussian_prompts(size):
    """At D = 6, U = size·I, V = I: by 4 to 9 orders of magnitude, printed; the one-term bound by 2 where it exists."""
    dim, orders, sharp = 6, [], []
    layer = lp.SoftmaxAttention(size * np.eye(dim), np.eye(dim))
    law = lp.Gaussian(np.zeros(dim), np.eye(dim))
    for L in (2, 10, 1000, 10**6):
        exact, error = exact_mean_square(layer, np.eye(dim), np.eye(dim), L)
        forms = [bounds.output_bound(layer, law, law, L, form=form) for form in ("printed", "short", "balanced")]
        assert exact + 5 * error < forms[2].value <= forms[1].value <= forms[0].value
        orders.append(forms[0].orders_above(exact))
        if 8 * size**2 < 1:
            sharp.append(bounds.one_term_over_queries(layer, law, law, L).orders_above(exact))
    assert min(orders) > 4
    assert max(orders) < 13
    assert sharp == [] or max(sharp) < 3.5
    with pytest.raises(ValueError, match="below 1 it has a mean over queries") if size > 0.3 else _nothing():
        bounds.one_term_over_queries(layer, law, law, 10)


class _nothing:
    def __enter__(self): ...

    def __exit__(self, *_): ...


def squared_deviations(layer, z, off_mean, off_slope):
    """Of the output and of every gradient, for each prompt, from the errors of m and of H at one query."""
    merged = layer if isinstance(layer, lp.SoftmaxAttention) else layer.merged()
    V, size = np.asarray(merged.V), z @ z
    slopes = np.einsum("ij,njk->nik", V, off_slope)  # row i is (Ĥ - H)V_i
    squares = {"output": np.sum((off_mean @ V.T) ** 2, axis=1), "U": np.sum(slopes**2, axis=(1, 2)) * size}
    if isinstance(layer, lp.SoftmaxAttention):
        return squares | {"V": len(V) * np.sum(off_mean**2, axis=1)}
    K, Q, O = (np.asarray(getattr(layer, name)) for name in "KQO")
    return squares | {
        "V": np.sum(O**2) * np.sum(off_mean**2, axis=1),
        "O": len(O) * np.sum((off_mean @ np.asarray(layer.V).T) ** 2, axis=1),
        "K": layer.scale**2 * np.sum((Q @ z) ** 2) * np.sum(slopes**2, axis=(1, 2)),
        "Q": layer.scale**2 * np.sum((slopes @ K.T) ** 2, axis=(1, 2)) * size,
    }


@pytest.mark.parametrize(("law", "of_queries"), [*((law, "gaussian") for law in LAWS), *BOUNDED_QUERIES])
def test_propositions_3_1_and_3_4_dominate_measured_deviations(law, of_queries):
    """The output and the gradients in V and U of a layer, and in K, Q, V and O of a head."""
    mu, nu = LAWS[law], QUERY_LAWS[of_queries]
    n, queries = 100, np.asarray(nu.sample(jax.random.key(9), 12))
    prompts = np.asarray(mu.sample(jax.random.key(10), n * 40)).reshape(n, 40, D)
    limits_of = jax.jit(jax.vmap(lambda theta: (mu._tilt(theta)._mean(), mu._tilt(theta)._cov())))
    for layer, U in ((LAYER, LAYER.U), (HEAD, HEAD.merged().U)):
        thetas = queries @ np.asarray(U).T
        limits = [np.asarray(limit) for limit in limits_of(thetas)]
        for L in (2, 40):
            tokens, found = prompts[:, :L], []
            for z, theta, m, H in zip(queries, thetas, *limits, strict=True):
                weights = np.exp(tokens @ theta - np.max(tokens @ theta, axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                mean = np.einsum("nl,nli->ni", weights, tokens)
                cov = np.einsum("nl,nli,nlj->nij", weights, tokens, tokens) - np.einsum("ni,nj->nij", mean, mean)
                found.append(squared_deviations(layer, z, mean - m, cov - H))
            whole = 0.0
            for name in found[0]:
                values = np.array([squares[name].mean() for squares in found])
                above = bounds.bound(layer, mu, nu, L, catalogue.f(name))
                assert values.mean() + 5 * values.std() / math.sqrt(len(values)) < above.value
                assert above.log >= bounds.bound(layer, mu, nu, L, catalogue.f(name), form="balanced").log
                own = name != "output" and not (name == "U" and layer is HEAD)
                whole += above.value if own else 0.0
            np.testing.assert_allclose(bounds.bound(layer, mu, nu, L, "gradient").value, whole, rtol=1e-9)


def test_fourth_powers_and_products_over_queries_are_within_lemma_c9_and_equation_21():
    """X̂ = v·m̂ and Ŷ = m̂zᵀ of Gaussian prompts, with the exact moments of Assumption 3.3 for the constants."""
    rng, n, U, v = np.random.default_rng(20), 20_000, 0.3 * I, np.array([0.6, 0.0, 0.8])
    law = lp.Gaussian(np.zeros(D), I)
    M = bounds.moment_constants(lp.SoftmaxAttention(U, I), law, law).M
    for L in (2, 50):
        z, tokens = rng.normal(size=(n, D)), rng.normal(size=(n, L, D))
        weights = np.exp(np.einsum("nli,ni->nl", tokens, z @ U))
        mean = np.einsum("nl,nli->ni", weights / weights.sum(axis=1, keepdims=True), tokens)
        limit, size = z @ U, np.linalg.norm(z, axis=1)
        common = {"sigma": 1, "U": 0.3, "C_f": 1, "D": D}
        X = bounds.lemma_c9(L, c=M[8, 0], **common)
        Y = bounds.lemma_c9(L, c=M[8, 8], g4=M[0, 4], g8=M[0, 8], **common)
        product = bounds.product_bound(X, Y, X4=M[4, 0], Y4=M[4, 4])
        off = ((mean @ v)[:, None] * mean - (limit @ v)[:, None] * limit) * size[:, None]
        for values, above in (
            (((mean - limit) @ v) ** 4, X),
            ((np.linalg.norm(mean - limit, axis=1) * size) ** 4, Y),
            (np.sum(off**2, axis=1), product),
        ):
            assert values.mean() + 5 * values.std() / math.sqrt(n) < above.value


def test_the_bound_over_queries_dominates_bounded_and_shifted_queries():
    layer = lp.SoftmaxAttention(0.1 * catalogue.matrix(2, D, D), catalogue.matrix(3, 2, D))
    shifted = lp.Gaussian([0.3, 0.0, -0.2], 0.5 * I)
    for nu in (lp.Sphere(1.2, D), shifted):
        for L in (1, 50):
            z = np.asarray(nu.sample(jax.random.key(11), 4000))
            u, V, Gamma = z @ np.asarray(layer.U).T, np.asarray(layer.V), np.asarray(GAUSSIAN.cov())
            Q, _, _, lost = map(np.asarray, WeightMoments(L).shares(np.einsum("ni,ij,nj->n", u, Gamma, u)))
            values = np.sum((u @ Gamma @ V.T) ** 2, axis=1) * (2 * Q - lost) + Q * np.trace(V @ Gamma @ V.T)
            assert values.mean() < bounds.one_term_over_queries(layer, GAUSSIAN, nu, L).value < 1e4 * values.mean()
    sigma, F = float(GAUSSIAN.subgaussian()), fourth_moment_root(GAUSSIAN, np.asarray(layer.V.T @ layer.V))
    mean_tilt = np.exp(4 * sigma**2 * np.sum((z @ np.asarray(layer.U).T) ** 2, axis=1))
    ours = bounds.one_term_over_queries(layer, GAUSSIAN, shifted, 50).value
    assert_mean_is(mean_tilt, ours * 50 / (75 * F))


def test_gaussian_moments_of_assumption_3_3_are_exact():
    """Against samples, for all nine pairs, and in one dimension against the moments of a normal variable."""
    moments = bounds.moment_constants(LAYER, GAUSSIAN, QUERIES)
    assert moments.kind == "exact"
    rng, n = np.random.default_rng(12), 400_000
    z = rng.normal(size=(n, D)) @ np.linalg.cholesky(np.asarray(QUERIES.cov())).T
    Gamma = np.asarray(GAUSSIAN.cov())
    tokens = z @ (Gamma @ np.asarray(LAYER.U)).T + rng.normal(size=(n, D)) @ np.linalg.cholesky(Gamma).T
    for (p, q), value in moments.moments.items():
        assert_mean_is(np.linalg.norm(tokens, axis=1) ** p * np.linalg.norm(z, axis=1) ** q, value)
        np.testing.assert_allclose(moments.M[p, q], value / moments.sigma ** (2 * p))
    line = lp.Gaussian([0.0], [[1.0]])
    ours = bounds.moment_constants(lp.SoftmaxAttention([[2.0]], [[1.0]]), line, line).moments
    # Z₁ = 2z + Y: E Z₁⁴ = 3·25, E Z₁⁸ = 105·625, E Z₁⁴z⁴ = 16·105 + 24·15 + 9
    np.testing.assert_allclose([ours[4, 0], ours[8, 0], ours[4, 4], ours[0, 8]], [75, 105 * 625, 2049, 105], rtol=1e-12)


@pytest.mark.parametrize("name", ["rademacher", "cube", "sphere", "mixture"])
def test_other_moments_of_assumption_3_3_are_from_above(name):
    mu = LAWS[name]
    for nu in QUERY_LAWS.values():
        ours = bounds.moment_constants(LAYER, mu, nu)
        if name == "mixture" and isinstance(nu, lp.Gaussian):
            assert ours.kind == "estimated"
            continue
        assert ours.kind == "upper bound"
        z = np.asarray(nu.sample(jax.random.key(13), 1000))
        x = np.asarray(mu.sample(jax.random.key(14), 2000))
        weights = np.exp(z @ np.asarray(LAYER.U).T @ x.T)
        weights /= weights.sum(axis=1, keepdims=True)
        for (p, q), value in ours.moments.items():
            measured = (weights @ np.linalg.norm(x, axis=1) ** p) * np.linalg.norm(z, axis=1) ** q
            assert measured.mean() - 5 * measured.std() / math.sqrt(len(z)) < value * (1 + 1e-12)


def test_the_moments_of_tilted_mixtures_are_exact_given_the_query():
    components = gaussian_components(BIMODAL)
    assert components is not None
    for theta in 0.8 * catalogue.matrix(18, 3, D):
        tilted = np.linalg.norm(BIMODAL.tilt(theta).sample(jax.random.key(19), 100_000), axis=1)
        ours = _given_queries(components, theta[None])[:, 0]
        for k in range(5):
            assert_mean_is(tilted ** (2 * k), ours[k])


def test_fourth_moments_are_those_of_samples():
    B = catalogue.matrix(15, 2, D)
    for mu in LAWS.values():
        y = (np.asarray(mu.sample(jax.random.key(16), 100_000)) - np.asarray(mu.mean())) @ B.T
        assert_mean_is(np.sum(y**2, axis=1) ** 2, fourth_moment_root(mu, B.T @ B) ** 2)


def test_bounds_do_not_see_a_shift_of_the_tokens():
    for mu in (GAUSSIAN, LAWS["mixture"], lp.Empirical(catalogue.matrix(17, 30, D))):
        moved = lp.Affine(I, np.array([5.0, -2.0, 1.0]), mu)
        if isinstance(mu, lp.Gaussian):
            moved = lp.Gaussian(np.array([5.0, -2.0, 1.0]), mu.cov())
        one, other = (bounds.output_bound(LAYER, law, QUERIES, 100).log for law in (mu, moved))
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert "tokens centred first: deviations do not change" in bounds.output_bound(LAYER, moved, QUERIES, 9).assumptions


def test_queries_are_rescaled_exactly():
    """k·ν with U/k is the same problem: outputs agree, ∇_U grows by k²."""
    k = 3.0
    wide = lp.Gaussian(np.zeros(D), k**2 * np.asarray(QUERIES.cov()))
    narrow = lp.SoftmaxAttention(np.asarray(LAYER.U) / k, LAYER.V)
    for quantity, shift in (("output", 0.0), ("V", 0.0), ("U", 2 * math.log(k))):
        one = bounds.bound(LAYER, GAUSSIAN, QUERIES, 100, catalogue.f(quantity)).log
        other = bounds.bound(narrow, GAUSSIAN, wide, 100, catalogue.f(quantity)).log
        np.testing.assert_allclose(other, one + shift, rtol=1e-12)


def test_bounds_are_quadratic_in_the_values_and_merge_like_heads():
    louder = lp.SoftmaxAttention(LAYER.U, 10 * np.asarray(LAYER.V))
    for quantity, degree in (("output", 2), ("V", 0), ("U", 2)):
        one, other = (bounds.bound(layer, GAUSSIAN, QUERIES, 50, catalogue.f(quantity)) for layer in (LAYER, louder))
        np.testing.assert_allclose(other.log - one.log, degree * math.log(10), atol=1e-9)
    for quantity in ("output", "U"):
        one, other = (
            bounds.bound(layer, GAUSSIAN, QUERIES, 50, catalogue.f(quantity)) for layer in (HEAD, HEAD.merged())
        )
        np.testing.assert_allclose(one.log, other.log, rtol=1e-12)


def test_the_length_that_a_bound_needs_is_where_it_crosses():
    """ln L = 161, 1097 and 4664 at D = 6, U = .2 I, .5 I and I for 1e-2: numbers that no prompt will have."""
    law = lp.Gaussian(np.zeros(6), np.eye(6))
    for size, known in ((0.2, 161), (0.5, 1097), (1.0, 4664)):
        layer = lp.SoftmaxAttention(size * np.eye(6), np.eye(6))

        def printed(L, layer=layer):
            return bounds.output_bound(layer, law, law, L)

        log_L = bounds.length_for(printed, 1e-2)
        assert abs(log_L - known) < 1
        np.testing.assert_allclose(printed(bounds.LogLength(log_L)).value, 1e-2, rtol=1e-6)
    balanced = bounds.length_for(lambda L: bounds.output_bound(layer, law, law, L, form="balanced"), 1e-2)
    assert 0.6 < balanced / log_L < 0.7
    assert bounds.length_for(printed, 1e-2, largest=4000) == math.inf
    assert bounds.length_for(printed, 1e30) == math.log(2)
    assert math.isfinite(bounds.bound(layer, law, law, bounds.LogLength(5000.0), "gradient").log)


REFUSED = {
    "mu is known by its sampler only": lambda: bounds.output_bound(
        LAYER, catalogue.MEASURES["from sampler"], QUERIES, 10
    ),
    "nu has a mean of norm": lambda: bounds.output_bound(LAYER, GAUSSIAN, LAWS["off centre"], 10),
    "no sub-Gaussian constant follows": lambda: bounds.output_bound(
        lp.SoftmaxAttention(np.eye(2), np.eye(2)), lp.FromCGF(lambda t: t @ t / 2, 2), lp.Rademacher([1.0, 1.0]), 10
    ),
    "the tilted moments of Assumption 3.3 are known for bounded laws": lambda: bounds.gradient_bounds(
        LAYER, lp.Product(lp.Rademacher(1.0), lp.Gaussian(np.zeros(2), np.eye(2))), QUERIES, 10
    ),
    "quantity is 'W'; it must be one of": lambda: bounds.bound(LAYER, GAUSSIAN, QUERIES, 10, catalogue.f("W")),
    "quantity is 'K'; this layer has output, U, V, gradient": lambda: bounds.bound(LAYER, GAUSSIAN, QUERIES, 10, "K"),
    "L is 1; the bound holds from L = 2 on": lambda: bounds.output_bound(LAYER, GAUSSIAN, QUERIES, 1),
    "the layer is linear attention": lambda: bounds.output_bound(
        lp.LinearAttention(LAYER.U, LAYER.V), GAUSSIAN, QUERIES, 10
    ),
    "is known for Gaussian and bounded queries": lambda: bounds.one_term_over_queries(LAYER, GAUSSIAN, BIMODAL, 10),
    "mu has tokens of dimension 2": lambda: bounds.output_bound(LAYER, lp.Rademacher([1.0, 1.0]), QUERIES, 10),
}


@pytest.mark.usefixtures("as_a_stranger")
@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_qualify_is_refused(message):
    assert_refused(REFUSED[message], message)
