"""The lemmas of Appendices C and D with their constants: they dominate what they bound, and are what was derived."""

import math

import jax
import numpy as np
import pytest
from scipy.special import gamma, gammaincc
from scipy.stats import chi2

import catalogue
import largeprompt as lp
from largeprompt.attention import WeightMoments
from largeprompt.concentration import bounds
from refusals import assert_refused

D = 6
LENGTHS = (1, 2, 3, 10, 100, 10_000, 10**6)


def test_every_bound_of_one_query_dominates_the_exact_error_of_gaussian_prompts():
    """E‖V(Σa z − Γu)‖² = ‖VΓu‖²(2Q − (1 − K₂)) + Q tr VΓVᵀ over dimensions, covariances, queries and lengths."""
    least = math.inf
    for dim, seed in ((1, 0), (2, 1), (6, 2), (20, 3)):
        Gamma, V = catalogue.covariance(seed, dim), catalogue.matrix(10 + seed, 2, dim)
        sigma, C_f, VGV = math.sqrt(np.linalg.eigvalsh(Gamma)[-1]), np.linalg.norm(V, 2), V @ Gamma @ V.T
        F = math.sqrt(np.trace(VGV) ** 2 + 2 * np.sum(VGV**2))
        direction = catalogue.matrix(20 + seed, dim)
        for size in (0.0, 0.1, 0.5, 1.0, 2.0):
            u = size * direction / np.linalg.norm(direction)
            for L in LENGTHS:
                Q, _, _, lost = map(float, WeightMoments(L).shares(u @ Gamma @ u))
                exact = np.sum((V @ Gamma @ u) ** 2) * (2 * Q - lost) + Q * np.trace(VGV)
                ours = bounds.one_term(L, Uz=size, sigma=sigma, F=F)
                least = min(least, ours.orders_above(exact))
                if L >= 2:
                    one = bounds.lemma_c4(L, Uz=size, sigma=sigma, C_f=C_f, p=1, D=dim, F=F)
                    uniform = bounds.lemma_c4(L, Uz=size, sigma=sigma, C_f=C_f, p=1, D=dim)
                    assert ours.log < one.log <= uniform.log
    assert 1.8 < least < 2.2  # 75 F/E‖f‖²: nothing else is lost where the score is flat


def test_the_error_that_eats_the_printed_lemma_respects_the_corrected_one():
    """f = 300 z on N(0, 1) at z = 0: the mean square is 90 000/L."""
    assert bounds.one_term(1, Uz=0, sigma=1, F=300**2 * math.sqrt(3)).value > 90_000
    assert bounds.lemma_c4(2, Uz=0, sigma=1, C_f=300, p=1, D=1).value > 45_000


SIMULATED = {
    "rademacher": lp.Rademacher(np.ones(3)),
    "cube": lp.Cube([1.0, 0.5, 2.0]),
    "sphere": lp.Sphere(1.5, 3),
    "mixture": lp.Mixture(
        [0.5, 0.5], [lp.Gaussian([1.0, 0.0, 0.0], 0.25 * np.eye(3)), lp.Gaussian([-1.0, 0.0, 0.0], np.eye(3))]
    ),
}


@pytest.mark.parametrize("name", SIMULATED)
def test_powers_and_probabilities_of_simulated_errors_are_below_their_bounds(name):
    """Second and fourth powers of f = id and f = (v·z)z, and the quantiles of Lemma C.1 and Corollary C.3."""
    mu, n, v = SIMULATED[name], 2000, np.array([0.6, 0.0, 0.8])
    sigma = float(mu.subgaussian())
    many = np.asarray(mu.sample(jax.random.key(1), 200_000))
    for L in (2, 30):
        tokens = np.asarray(mu.sample(jax.random.key(2), n * L)).reshape(n, L, 3)
        for size in (0.2, 1.0):
            u = size * np.array([0.8, -0.6, 0.0])
            weights, limit_weights = np.exp(tokens @ u), np.exp(many @ u)
            weights /= weights.sum(axis=1, keepdims=True)
            limit_weights /= limit_weights.sum()
            for p, f in ((1, lambda z: z), (2, lambda z: (z @ v)[..., None] * z)):
                off = np.einsum("nl,nli->ni", weights, f(tokens)) - limit_weights @ f(many)
                squares = np.sum(off**2, axis=1)
                F = math.sqrt(np.mean(np.sum(f(many) ** 2, axis=1) ** 2))
                common = {"Uz": size, "sigma": sigma}
                assert squares.mean() < bounds.one_term(L, F=F, **common).value
                assert squares.mean() < bounds.lemma_c4(L, C_f=1, p=p, D=3, F=F, **common).value
                if p == 1:
                    assert np.mean(squares**2) < bounds.lemma_c7(L, C_f=1, D=3, F=F, **common).value
                for delta in (0.01, 0.1, 0.2):
                    above = bounds.lemma_c1(L, delta=delta, F=F, **common).value
                    assert np.mean(squares > above) < 4 * delta
                    above = bounds.corollary_c3(L, delta=delta, F=F, **common).value
                    assert np.mean(squares > above) < delta


def test_sums_of_heavy_vectors_are_within_chebyshevs_bound():
    rng, L, delta = np.random.default_rng(3), 20, 0.05
    draws = rng.pareto(2.5, size=(4000, L, 2))
    u = 2 * 2 / (1.5 * 0.5)  # E of a squared Lomax variable of index 2.5, twice
    sums = np.linalg.norm((draws - 1 / 1.5).sum(axis=1), axis=1)
    assert np.mean(sums > bounds.lemma_c2(L, delta=delta, u=u).value) < 2 * delta


@pytest.mark.parametrize("name", [name for name, mu in catalogue.MEASURES.items() if name != "from sampler"])
def test_the_gradient_of_the_cumulant_generating_function_is_within_lemma_d1(name):
    mu = catalogue.MEASURES[name]
    for size in (0.1, 1.0, 4.0):
        theta = catalogue.theta_for(mu, size=size)
        gradient = np.linalg.norm(mu.tilt(theta).mean() - mu.mean())
        assert gradient <= bounds.lemma_d1(size, float(mu.subgaussian())).value + 1e-12


def test_the_l4_norm_of_the_output_is_within_lemma_d1():
    """For Gaussians E‖VΓUz‖⁴ = (tr B)² + 2 tr B², B = VΓU(VΓU)ᵀ."""
    for seed in range(5):
        Gamma, U, V = (
            catalogue.covariance(seed, 4),
            catalogue.matrix(seed + 10, 4, 4),
            catalogue.matrix(seed + 20, 2, 4),
        )
        B = V @ Gamma @ U @ (V @ Gamma @ U).T
        norm = (np.trace(B) ** 2 + 2 * np.sum(B**2)) ** 0.25
        sigma = math.sqrt(np.linalg.eigvalsh(Gamma)[-1])
        above = bounds.lemma_d1_output(sigma=sigma, U=np.linalg.norm(U, 2), V=np.linalg.norm(V, 2), D=4)
        assert norm < above.value < 100 * norm


def test_tails_and_maxima_of_gaussian_norms_are_within_lemma_d2():
    for dim in (1, 5, 40):
        for t in np.linspace(0, 30, 31):
            assert chi2.logsf(t**2 / 4, dim) <= bounds.lemma_d2_tail(float(t), sigma=2.0, D=dim).log + 1e-12
        for L in (1, 10, 10_000):
            grid = np.linspace(0, 40, 400_001)
            for p in (2, 4, 8):  # E max‖z‖^p by parts, sigma = 1
                survival = -np.expm1(L * np.log1p(-np.minimum(chi2.sf(grid**2, dim), 1 - 1e-16)))
                exact = np.trapezoid(survival * p * grid ** (p - 1), grid)
                assert exact < bounds.lemma_d2_maximum(L, p=p, sigma=1, D=dim).value


def test_the_constant_of_the_maximum_is_that_of_incomplete_gamma_functions():
    for p, dim in ((4, 5), (8, 5), (8, 6), (2, 1)):
        a, x0 = p / 2, 4.0 * dim
        c = gammaincc(a, x0) * gamma(a) * math.exp(x0) * x0**-a
        constant = 64**a * (1 + a * c)
        ours = bounds.lemma_d2_maximum(math.e, p=p, sigma=1, D=dim).value
        np.testing.assert_allclose(ours, constant * (dim**a + 1), rtol=1e-12)
    near, far = (bounds.lemma_d2_maximum(2, p=8, sigma=1, D=dim).log - 4 * math.log(dim) for dim in (99, 100))
    assert abs(near - far) < 1e-3  # two ways to compute it meet


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("L", [2, 50, 300])
def test_lemma_c6_is_its_formula(p, L):
    """Term by term, written out as it was derived; σ, ‖U‖, C_f and the moments all away from 1."""
    sigma, U, C_f, c, g2, g4, l = 1.3, 0.4, 1.7, 11.0, 2.5, 9.0, math.log(L)
    a = 4 * D if p == 1 else math.sqrt(768) * D**2
    F = C_f**2 * sigma ** (2 * p) * a
    T1 = 216 * F * g2 * l / L ** (1 / 3)
    large = 1 + (p == 2) * math.sqrt(L * a / 4) / 16
    decay = math.exp(-((L / 4) ** (1 / p) - L ** (1 / (3 * p))) * a ** (1 / p) / 16)
    T2 = 2 * L * p * 16**p * sigma ** (2 * p) * C_f**2 * math.exp(2 * D) * large * decay * g2
    x0 = 4.0 * D
    C = 64 ** (2 * p) * (1 + 2 * p * gammaincc(2 * p, x0) * gamma(2 * p) * math.exp(x0) * x0 ** (-2 * p))
    bracket = sigma ** (2 * p) * math.sqrt(2 * g4 * C_f**4 * C * (D ** (2 * p) + l ** (2 * p)))
    bracket += math.sqrt(2 * c) * sigma ** (4 * p)
    T3 = 2 * bracket * math.exp(D) * L ** (-1 / (192 * sigma**2 * U**2))
    ours = bounds.lemma_c6(L, sigma=sigma, U=U, C_f=C_f, p=p, D=D, c=c, g2=g2, g4=g4)
    for name, term in {"T1": T1, "T2": T2, "T3": T3}.items():
        np.testing.assert_allclose(ours.terms[name], math.log(term), rtol=1e-10, atol=1e-9)
    np.testing.assert_allclose(ours.log, math.log(T1 + T2 + T3), rtol=1e-12)


@pytest.mark.parametrize("L", [1, 50, 3000])
def test_lemma_c9_is_its_formula(L):
    sigma, U, C_f, c, g4, g8, l, a = 1.3, 0.4, 1.7, 11.0, 2.5, 9.0, math.log(L), 4 * D
    F = C_f**2 * sigma**2 * a
    T1 = 216 * F**2 * g4 / L ** (1 / 6)
    T2 = 16**3 * sigma**4 * L * C_f**4 * math.exp(2 * D) * (1 + math.sqrt(L) * a / (32 * math.sqrt(2))) * g4
    T2 *= math.exp(-(math.sqrt(L) / (2 * math.sqrt(2)) - L ** (1 / 6)) * a / 16)
    C = 64**4 * (1 + 4 * gammaincc(4, 4 * D) * gamma(4) * math.exp(4 * D) * (4 * D) ** -4.0)
    bracket = sigma**4 * math.sqrt(2 * g8 * C_f**8 * C * (D**4 + l**4)) + math.sqrt(2 * c) * sigma**8
    T3 = 8 * bracket * math.exp(D) * L ** (-1 / (384 * sigma**2 * U**2))
    ours = bounds.lemma_c9(L, sigma=sigma, U=U, C_f=C_f, D=D, c=c, g4=g4, g8=g8)
    np.testing.assert_allclose(list(ours.terms.values()), np.log([T1, T2, T3]), rtol=1e-10, atol=1e-9)


def test_lemmas_c4_and_c7_are_their_formulas():
    sigma, Uz, C_f, L, p = 1.3, 0.5, 1.7, 40, 2
    s, a2, a1 = sigma**2 * Uz**2, math.sqrt(768) * D**2, 4 * D
    first = 216 * math.exp(4 * s) * C_f**2 * sigma**4 * a2 * math.log(L) / L
    second = 2 * L * 2 * 256 * sigma**4 * C_f**2 * math.exp(2 * D) * (1 + math.sqrt(L * a2 / 4) / 16)
    second *= math.exp(-(math.sqrt(L / 4) - math.exp(s)) * math.sqrt(a2) / 16)
    ours = bounds.lemma_c4(L, Uz=Uz, sigma=sigma, C_f=C_f, p=p, D=D)
    np.testing.assert_allclose(list(ours.terms.values()), np.log([first, second]), rtol=1e-12)
    F = C_f**2 * sigma**2 * a1
    first = 216 * math.exp(4 * s) * F**2 / math.sqrt(L)
    second = 16**3 * sigma**4 * L * C_f**4 * math.exp(2 * D) * (1 + math.sqrt(L) * a1 / (32 * math.sqrt(2)))
    second *= math.exp(-(math.sqrt(L) / (2 * math.sqrt(2)) - math.exp(2 * s)) * a1 / 16)
    ours = bounds.lemma_c7(L, Uz=Uz, sigma=sigma, C_f=C_f, D=D)
    np.testing.assert_allclose(list(ours.terms.values()), np.log([first, second]), rtol=1e-12)


def test_the_balanced_form_is_the_least_over_splits_and_decays_faster():
    common = {"sigma": 1.5, "C_f": 2.0, "p": 1, "D": D, "c": 30.0, "F": 5.0}
    for U in (0.0, 0.01, 0.125, 0.5, 3.0):
        logs = [
            [bounds.lemma_c6(L, U=U, form=form, **common).log for form in ("printed", "short", "balanced")]
            for L in map(bounds.LogLength, (1.0, 10.0, 1e3, 1e6))
        ]
        assert np.all(np.diff(logs, axis=1) <= 1e-9)
        slope = (logs[3][2] - bounds.lemma_c6(L=bounds.LogLength(2e6), U=U, form="balanced", **common).log) / 1e6
        assert abs(slope - 1 / (1 + 128 * 1.5**2 * U**2)) < 1e-5
        assert slope >= min(1 / 3, 1 / (192 * 1.5**2 * max(U, 1e-9) ** 2)) - 1e-5


def test_the_balanced_form_of_the_fourth_power_decays_faster():
    common = {"sigma": 1.5, "C_f": 2.0, "D": D, "c": 30.0}
    for U in (0.0, 0.01, 0.125, 0.5, 3.0):
        printed, balanced = (
            [bounds.lemma_c9(L=bounds.LogLength(l), U=U, form=form, **common).log for l in (0.0, 3.0, 1e3, 1e6, 2e6)]
            for form in ("printed", "balanced")
        )
        assert all(b <= a for a, b in zip(printed, balanced, strict=True))
        slope = (balanced[3] - balanced[4]) / 1e6
        assert abs(slope - 1 / (2 + 256 * 1.5**2 * U**2)) < 1e-5


def test_the_product_bound_is_its_formula():
    one, other = (bounds.lemma_c9(100, sigma=1, U=0.3, C_f=C, D=2, c=1) for C in (1.0, 2.0))
    ours = bounds.product_bound(one, other, X4=3.0, Y4=5.0)
    wanted = 2 * math.sqrt(8 * (3 + one.value) * other.value) + 2 * math.sqrt(5 * one.value)
    np.testing.assert_allclose(ours.value, wanted, rtol=1e-12)


def test_bounds_are_of_the_degree_of_f_in_f():
    """f → λf multiplies squares by λ² and fourth powers by λ⁴, also where both are astronomic."""
    for L in (3, 10**9):
        for scale, shift in ((7.0, math.log(7.0)), (1e-30, math.log(1e-30))):
            one, other = (
                [
                    bounds.one_term(L, Uz=1, sigma=2, F=3 * k**2),
                    bounds.lemma_c4(L, Uz=1, sigma=2, C_f=k, p=2, D=D, F=3 * k**2),
                    bounds.lemma_c6(L, U=1, sigma=2, C_f=k, p=2, D=D, c=k**4),
                    bounds.lemma_c7(L, Uz=1, sigma=2, C_f=k, D=D),
                    bounds.lemma_c9(L, U=1, sigma=2, C_f=k, D=D, c=k**8),
                ]
                for k in (1.0, scale)
            )
            for a, b, degree in zip(one, other, (2, 2, 2, 4, 4), strict=True):
                np.testing.assert_allclose(b.log - a.log, degree * shift, rtol=1e-9)


def test_lengths_and_values_beyond_floats_are_numbers():
    for L in map(bounds.LogLength, (5000.0, 1e6, 1e12)):
        for form in ("printed", "short", "balanced"):
            ours = bounds.lemma_c6(L, sigma=3, U=2, C_f=1, p=2, D=D, c=1, form=form)
            assert math.isfinite(ours.log)
        assert bounds.lemma_c6(L, sigma=1, U=0, C_f=1, p=2, D=D, c=1).terms["T2"] < -1e290
        assert math.isfinite(bounds.lemma_c9(L, sigma=3, U=2, C_f=1, D=D, c=1).log)
        assert math.isfinite(bounds.lemma_c4(L, Uz=9, sigma=1, C_f=1, p=1, D=D).log)
    huge = bounds.one_term(10**400, Uz=40, sigma=1, F=1.0)
    assert huge.value == math.inf
    np.testing.assert_allclose(huge.log10, (math.log(75) + 4 * 1600) / math.log(10) - 400, rtol=1e-12)
    assert huge.vacuous_against(1e300)
    assert not bounds.one_term(10**400, Uz=1, sigma=1, F=1.0).vacuous_against(1e-300)
    assert bounds.lemma_c4(2, Uz=30, sigma=1, C_f=1, p=1, D=D).log == math.inf  # its logarithm leaves the floats too
    assert huge.orders_above(0.0) == math.inf


REFUSED = {
    "L is 1; the bound holds from L = 2 on": lambda: bounds.lemma_c4(1, Uz=0, sigma=1, C_f=1, p=1, D=1),
    "log L is 0.1; the bound holds from L = 2 on": lambda: bounds.lemma_c6(
        bounds.LogLength(0.1), sigma=1, U=1, C_f=1, p=1, D=1, c=1
    ),
    "L is 0; the bound holds from L = 1 on": lambda: bounds.one_term(0, Uz=0, sigma=1, F=1),
    "L is nan": lambda: bounds.one_term(math.nan, Uz=0, sigma=1, F=1),
    "L is inf; a bound is for finite prompts": lambda: bounds.one_term(math.inf, Uz=0, sigma=1, F=1),
    "delta is 1; it must lie strictly": lambda: bounds.lemma_c1(3, delta=1, Uz=0, sigma=1, F=1),
    "delta is 0; it must lie strictly": lambda: bounds.corollary_c3(3, delta=0, Uz=0, sigma=1, F=1),
    "sigma is 0.5; it must be a finite number of at least 1": lambda: bounds.lemma_c9(
        3, sigma=0.5, U=1, C_f=1, D=1, c=1
    ),
    "p is 3; the lemma knows": lambda: bounds.lemma_c4(3, Uz=0, sigma=1, C_f=1, p=3, D=1),
    "D is 1.5; it must be a whole": lambda: bounds.lemma_c4(3, Uz=0, sigma=1, C_f=1, p=1, D=catalogue.f(1.5)),
    "C_f is -1; it must be a finite": lambda: bounds.lemma_c7(3, Uz=0, sigma=1, C_f=-1, D=1),
    "Uz is inf; it must be a finite": lambda: bounds.one_term(3, Uz=math.inf, sigma=1, F=1),
    "form is 'long'; it must be one of": lambda: bounds.lemma_c6(
        3, sigma=1, U=1, C_f=1, p=1, D=1, c=1, form=catalogue.f("long")
    ),
    "p is 1; it must be a finite number of at least 2": lambda: bounds.lemma_d2_maximum(3, p=1, sigma=1, D=1),
    "sigma is 0; a token that is constant": lambda: bounds.lemma_d2_tail(1, sigma=0, D=1),
}


@pytest.mark.usefixtures("as_a_stranger")
@pytest.mark.parametrize("message", REFUSED)
def test_what_the_assumptions_exclude_is_refused(message):
    assert_refused(REFUSED[message], message)
