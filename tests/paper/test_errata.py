"""Every erratum is recomputed, every correction is tried on examples its evidence does not use."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from jax.flatten_util import ravel_pytree
from scipy.integrate import quad

from largeprompt.attention import SoftmaxAttention, merged_form
from largeprompt.dynamics import _flow, flow_limit
from largeprompt.dynamics._flow import _solve
from largeprompt.icl import (
    LinearRegression,
    aligned_blocks,
    bayes_risk,
    blocks,
    from_blocks,
    identity,
    kms,
    optimal_linear,
    optimal_softmax,
    risk,
    risk_gradient,
)
from largeprompt.icl._risk._abstract import is_formula
from largeprompt.paper.errata import ERRATA, Comparison, Evidence, entries, evidence, markdown
from largeprompt.paper.errata import _concentration as concentration
from largeprompt.paper.errata import _in_context as in_context
from largeprompt.paper.errata import _queries as queries
from largeprompt.paper.errata import _regression as regression
from largeprompt.paper.errata import _training as training

# One worker: the evidence is computed once for all the tests of this file.
pytestmark = pytest.mark.xdist_group("errata")

# fmt: off
KEYS = (
    "E1", "E2", "E3", "E4", "E5", "E6", "G7", "G8", "G9", "E10", "T11",
    "T12", "T13", "G14", "E15", "T16", "G17", "G18", "T19", "G20", "G21",
)
# fmt: on
KINDS = {"E": "error", "G": "gap", "T": "typo"}
PAGE = Path(__file__).parents[2] / "docs" / "errata.md"


def solved(function, *settings):
    """Softmax flows, those of G20, take longer to run than to compile: they are worth XLA's optimiser."""
    jax.config.update("jax_disable_most_optimizations", is_formula(function, *settings))
    try:
        return _solve(function, *settings)
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def evidence_by_key():
    with mock.patch.object(_flow, "_solve", solved):
        return {erratum.key: erratum.evidence() for erratum in ERRATA}


@pytest.mark.parametrize("key", KEYS)
def test_numbers_refute_what_is_printed_and_support_the_correction(key, evidence_by_key):
    found = evidence_by_key[key]
    failed = [c for c in (*found.against, *found.repair) if not c.holds]
    assert not failed
    assert found.confirmed


def test_every_erratum_is_there_once():
    assert tuple(erratum.key for erratum in ERRATA) == KEYS


@pytest.mark.parametrize("erratum", ERRATA, ids=lambda erratum: erratum.key)
def test_the_letter_of_a_key_is_its_kind_and_no_text_is_missing(erratum):
    assert erratum.kind == KINDS[erratum.key[0]]
    assert all(getattr(erratum, name) for name in ("place", "summary", "printed", "why", "correction", "setting"))


def test_the_page_is_up_to_date(evidence_by_key):
    assert PAGE.read_text(encoding="utf-8") == markdown(evidence_by_key)


@pytest.mark.parametrize("erratum", ERRATA, ids=lambda erratum: erratum.key)
def test_a_gap_is_not_called_wrong(erratum):
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {erratum.key}\n")[1].split("\n## ")[0]
    assert ("**Wrong because.**" in section) == ("| printed fails |" in section) == (erratum.kind != "gap")
    assert ("**What is missing.**" in section) == ("| gap shown |" in section) == (erratum.kind == "gap")


def test_evidence_in_single_precision_is_refused():
    with jax.enable_x64(False), pytest.raises(ValueError, match="use_float64"):
        evidence()


def test_no_number_on_the_page_sits_on_a_rounding_edge(evidence_by_key):
    # Otherwise the page would depend on the last bit of the machine that renders it.
    for key, found in evidence_by_key.items():
        for comparison in (*found.against, *found.repair):
            for value in (comparison.x, comparison.y) if comparison.y != 0 else ():
                assert f"{value * (1 - 1e-9):.4g}" == f"{value * (1 + 1e-9):.4g}", (key, comparison)


@pytest.mark.parametrize(
    ("x", "relation", "y", "holds"),
    [
        (1.0, "<", 2.0, True),
        (2.0, "<", 1.0, False),
        (2.0, ">", 1.0, True),
        (1.0, ">", 1.0, False),
        (1.0, "=", 1.0 + 1e-9, True),
        (1.0, "=", 1.001, False),
        (1e-9, "=", 0.0, True),
        (1e-3, "=", 0.0, False),
        (math.nan, "<", 1.0, False),
        (math.nan, "=", math.nan, False),
    ],
)
def test_a_comparison_is_decided_by_its_numbers(x, relation, y, holds):
    assert Comparison("x", x, relation, y, "y").holds is holds


def test_one_failed_comparison_or_an_empty_list_unmakes_the_evidence():
    true, false = Comparison("x", 1.0, "<", 2.0, "y"), Comparison("x", 2.0, "<", 1.0, "y")
    assert Evidence((true,), (true,)).confirmed
    assert not Evidence((true, false), (true,)).confirmed
    assert not Evidence((true,), (false,)).confirmed
    assert not Evidence((), (true,)).confirmed
    assert not Evidence((true,), ()).confirmed


def test_entries_of_the_ledger_say_what_the_evidence_says(tmp_path):
    def doctored(against_holds: bool) -> dict:
        against = Comparison("x", 1.0, "<" if against_holds else ">", 2.0, "y")
        return dataclasses.asdict(Evidence((against,), (Comparison("z", 3.0, "=", 3.0, ""),)))

    kept = {erratum.key: doctored(erratum.key != "E1") for erratum in ERRATA}
    path = tmp_path / "errata.nc"
    xr.Dataset(attrs={"evidence": json.dumps(kept, ensure_ascii=False)}).to_netcdf(path, engine="scipy")
    found = entries(xr.load_dataset(path, engine="scipy"))
    assert [entry["key"] for entry in found] == [erratum.key for erratum in ERRATA]
    assert [entry["key"] for entry in found if not entry["confirmed"]] == ["E1"]
    first = found[0]
    assert first["against"] == [{"left": "x", "x": 1.0, "relation": ">", "y": 2.0, "right": "y", "holds": False}]
    assert set(first) == {
        "key", "kind", "place", "summary", "printed", "why", "correction", "setting", "against", "repair", "confirmed",
    }  # fmt: skip
    assert json.dumps(found)


# The one-term bound, in place of Lemmas C.1, C.3 and C.4 (E6, G7, G8, G9).


def exact_error(atoms, probabilities, images, u, L):
    """E‖R_L/S_L − R/S‖² for a measure on a few points of the line, by enumeration of all prompts."""
    tilt = np.exp(u * atoms)
    limit = (probabilities * tilt) @ images / (probabilities @ tilt)
    total = 0.0
    for prompt in itertools.product(range(len(atoms)), repeat=L):
        k = list(prompt)
        total += np.prod(probabilities[k]) * (tilt[k] @ images[k] / tilt[k].sum() - limit) ** 2
    return total


@pytest.mark.parametrize("L", [1, 2, 5])
@pytest.mark.parametrize("u", [0.0, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("seed", range(4))
def test_one_term_bound_dominates_exact_errors(seed, u, L):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet([0.4, 0.4, 0.4])
    atoms = rng.normal(size=3)
    atoms -= probabilities @ atoms
    images = 10 ** rng.uniform(-2, 2, 3) * rng.choice([-1, 1], 3)
    # Hoeffding: a centred variable in an interval of length ℓ is ℓ/2 sub-Gaussian.
    s = (np.ptp(atoms) / 2 * u) ** 2
    bound = concentration.one_term_bound(float(L), s, float(probabilities @ images**4))
    assert exact_error(atoms, probabilities, images, u, L) <= bound


def test_one_term_constant_is_the_largest_value_of_the_bracket():
    L = np.linspace(1.0, 400.0, 2000)[:, None]
    x = L * np.linspace(1e-3, 1.0, 2000)
    first, second = x**2 * np.exp(-x / 16) / np.sqrt(L), x * np.exp(-x / 8)
    assert first.max() <= concentration.BAD_EVENT_PEAK
    assert first.max() == pytest.approx(concentration.BAD_EVENT_PEAK, rel=1e-3)
    assert 16 + 2 * (first + second).max() <= concentration.ONE_TERM_CONSTANT < 75


@pytest.mark.parametrize("lam", [0.1, 3.0, 1e3])
def test_lemma_c4_is_homogeneous_with_the_square_of_c_f_only(lam):
    def term(scale, power):
        return concentration.lemma_c4(1.0, 0.0, scale, 3 * scale**4, power)

    assert term(lam, 2) == pytest.approx(lam**2 * term(1.0, 2))
    assert term(lam, 1) != pytest.approx(lam**2 * term(1.0, 1))


@pytest.mark.parametrize("beta", [0.0, 0.7, 2.0])
def test_two_token_error_is_the_double_gaussian_integral(beta):
    g, w = np.polynomial.hermite_e.hermegauss(100)
    mean = (g[:, None] * np.exp(beta * (g[:, None] - g)) + g) / (np.exp(beta * (g[:, None] - g)) + 1)
    brute = w @ (mean - beta) ** 2 @ w / (2 * math.pi)
    assert concentration.two_token_error(beta) == pytest.approx(brute, rel=1e-5)


def test_truncated_inverse_moment_agrees_with_its_integral():
    # ‖w‖² is chi-squared with 4 degrees of freedom, of density s e^{−s/2}/4.
    brute, _ = quad(lambda s: s**-2 * s * math.exp(-s / 2) / 4, 0.09, 200)
    assert concentration.inverse_moment(0.3) == pytest.approx(brute, rel=1e-7)


# Queries and gradients (E5, T11, G17).


@pytest.mark.parametrize("U", [0.0, 0.3, 1.0, 5.0])
def test_eq_20_with_one_denominator_holds_for_gaussians(U):
    z, w = np.polynomial.hermite_e.hermegauss(40)
    tilted_fourth = np.array([np.sum(w * (U * q + z) ** 4) for q in z]) / w.sum()
    right = w @ tilted_fourth / w.sum()
    assert right == pytest.approx(queries.eq20_right(U), rel=1e-9)
    assert w @ (U * z) ** 4 / w.sum() <= right


@pytest.mark.parametrize("seed", range(3))
def test_gradient_in_u_is_the_outer_product_formula(seed):
    rng = np.random.default_rng(seed)
    arguments = rng.normal(size=(7, 3)), rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=3)
    measured = queries.difference_quotient(*arguments)
    np.testing.assert_allclose(queries.outer_product_gradient(*arguments), measured, atol=1e-8)


@pytest.mark.parametrize("d", [1, 2, 5])
def test_query_exponent_never_exceeds_one_half_when_queries_are_tokens(d):
    rng = np.random.default_rng(d)
    exponents = [queries.query_exponent(10 ** rng.uniform(-1, 1) * rng.normal(size=(d, d))) for _ in range(200)]
    assert max(exponents) <= 0.5 + 1e-12


def test_query_in_the_prompt_costs_what_the_lower_bound_says():
    gamma, omega, L, prompts = 0.01, math.sqrt(10.0), 100, 20_000
    rng = np.random.default_rng(0)
    z = rng.normal(size=prompts)
    tokens = np.hstack([math.sqrt(gamma) * rng.normal(size=(prompts, L)), z[:, None]])
    scores = omega * z[:, None] * tokens
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = ((weights * tokens).sum(axis=1) / weights.sum(axis=1) - gamma * omega * z) ** 2
    standard_error = error.std() / math.sqrt(prompts)
    assert error.mean() + 5 * standard_error > queries.with_query(float(L), gamma, omega)
    assert error.mean() - 5 * standard_error > queries.without_query(float(L), gamma, omega)


# Risks and gradients at finite L (E2, E3, E4, T19).


@pytest.mark.parametrize("A", [-2.0, 0.1, 0.9, 3.0])
@pytest.mark.parametrize("p", [0.2, 5.0])
def test_difference_of_risks_is_bounded_without_the_labels(A, p):
    finite, infinite, deviation = in_context.labelless_risks(A, p)
    assert abs(finite - infinite) <= 0.5 * deviation**2 + math.sqrt(2 * infinite) * deviation


@pytest.mark.parametrize("seed", range(6))
def test_gaussian_moments_scale_with_the_square_of_sigma(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.choice([1, 5]))
    root = rng.normal(size=(d, d))
    Sigma = root @ root.T / np.linalg.norm(root @ root.T, 2)
    w, U, V = 10 ** rng.uniform(-1, 1) * rng.normal(size=d), *rng.normal(size=(2, d + 1, d + 1))
    Gamma = np.asarray(LinearRegression(Sigma).token_covariance(jnp.asarray(w)[None]))
    B = (V @ Gamma @ U)[:, :d]
    C = B @ Sigma @ B.T
    fourth = (np.trace(C) ** 2 + 2 * np.trace(C @ C)) ** 0.25
    scale = 2 * math.sqrt(d) * np.linalg.norm(V, 2) * np.linalg.norm(U, 2)
    assert fourth <= scale * np.linalg.norm(Gamma, 2)


@pytest.mark.parametrize("power", [0.0, 3.0, 6.0])
def test_pareto_means_agree_with_their_integrals(power):
    rate, log_L = 1.3, 7.0
    brute, _ = quad(lambda s: 7 * s ** (power - 8) * math.exp(-rate * log_L / s), 1, np.inf)
    assert in_context.pareto_mean(power, 2.0, rate, log_L) == pytest.approx(log_L**2 * brute, rel=1e-6)


def test_regression_means_agree_with_chi_squared_moments():
    d = 5
    assert in_context.regression_mean(0.0, 0.0, 0.0, 1.0) == pytest.approx(1.0, rel=1e-7)
    assert in_context.regression_mean(2.0, 0.0, 0.0, 1.0) == pytest.approx(1 + 2 * d + d * (d + 2), rel=1e-7)


@pytest.mark.parametrize("t", [0.1, 0.3, 1.0])
def test_trajectories_stay_within_the_bound_with_the_limit_smoothness(t):
    distance, bound = in_context.trajectory_gap(t, 0.7, 2.0)
    assert 0 < distance <= bound


# The regression model (E1, G14, E15, T16, G18).


@pytest.mark.parametrize("seed", range(20))
def test_token_covariance_is_below_its_corrected_scale(seed):
    rng = np.random.default_rng(seed)
    d, s2 = int(rng.choice([1, 5])), float(rng.choice([0.0, 0.1, 2.0]))
    root = rng.normal(size=(d, d))
    Sigma, w = 10 ** rng.uniform(-2, 1) * root @ root.T, 10 ** rng.uniform(-1, 1) * rng.normal(size=d)
    task = LinearRegression(Sigma, s2)
    assert regression.token_norm(w, task) <= regression.token_scale(w, task) * (1 + 1e-12)


# The flows below have the shapes of those of the evidence, whose solver is compiled already.


@pytest.mark.parametrize("alpha", [0.05, 2.0, 30.0])
def test_infinite_prompt_flow_reaches_its_limit_from_every_scale(alpha):
    task = LinearRegression(kms(5) / 2)
    direction = np.array([1.0, -1.0, 0.5, 0.0, 0.0]) / 1.5
    start = regression.aligned(alpha * np.outer(direction, direction), alpha, task)
    end, expected = regression.follow(start, task, math.inf, [3000.0]).last, flow_limit(task, start)
    np.testing.assert_allclose(merged_form(end).U, expected.U, atol=1e-5)
    np.testing.assert_allclose(merged_form(end).V, expected.V, atol=1e-5)


def test_the_limit_of_the_flow_is_that_of_remark_5_3():
    task = LinearRegression.experiment(kms(5))
    parts = blocks(flow_limit(task, regression.aligned(np.eye(5) / math.sqrt(5), 1.0, task)), task)
    inverse = np.linalg.inv(kms(5))
    r = np.trace(inverse @ inverse) ** 0.25
    assert float(parts.R[0, 0]) == pytest.approx(r, rel=1e-12)
    np.testing.assert_allclose(parts.A, inverse / r, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("seed", range(2))
def test_corrected_pl_constant_holds_along_the_flow(seed, rank):
    rng = np.random.default_rng(seed)
    root, theta = rng.normal(size=(5, rank)), rng.normal(size=(5, 5))
    Sigma, P = root @ root.T, theta @ theta.T
    P /= np.linalg.norm(P)
    alpha = 0.5 / math.sqrt(np.linalg.norm(Sigma, 2))
    constant, task = regression.corrected_pl(Sigma, P, alpha), LinearRegression(Sigma)
    assert constant > 0
    start = regression.aligned(alpha * P, alpha, task)
    for layer in (start, *(regression.follow(start, task, math.inf, [t]).last for t in (0.01, 0.1, 1.0))):
        if float(risk(layer, task, math.inf).value) > 1e-9:
            assert regression.pl_ratio(layer, task) >= constant


@pytest.mark.parametrize("s2", [0.0, 0.1, 2.0])
def test_label_noise_adds_a_constant_at_the_limit(s2):
    task = LinearRegression(kms(5), s2, np.diag([1.0, 2.0, 0.5, 0.1, 0.7]))
    limit = flow_limit(task, regression.aligned(np.eye(5) / math.sqrt(5), 1.0, task))
    assert float(risk(limit, task, math.inf).value) == pytest.approx(s2 / 2, abs=1e-12)
    assert float(risk_gradient(limit, task, math.inf).norm()) < 1e-12


# Isotropic problems are the hardest of their trace (G21).


@pytest.mark.parametrize("least", [lambda *at: optimal_linear(*at).risk, bayes_risk], ids=["linear", "Bayes"])
@pytest.mark.parametrize("L", [1, 10, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_isotropy_is_the_hardest_covariance_of_its_trace(seed, L, least):
    spectrum = np.random.default_rng(seed).dirichlet(np.full(5, 0.5))
    anisotropic, isotropic = LinearRegression(np.diag(spectrum), 0.1), LinearRegression(np.eye(5) / 5, 0.1)
    assert float(least(anisotropic, L).value) <= float(least(isotropic, L).value) + 1e-15


def test_whitening_carries_the_isotropic_softmax_optimum_to_any_covariance():
    L, isotropic, anisotropic = 10, LinearRegression.experiment(identity(5)), LinearRegression.experiment(kms(5))
    best = optimal_softmax(isotropic, L)
    parts = blocks(best.attention, isotropic)
    image = aligned_blocks(parts.A @ jnp.linalg.inv(anisotropic.Sigma), parts.R[0, 0], anisotropic)
    carried = risk(from_blocks(image, SoftmaxAttention), anisotropic, L)
    assert float(carried.value) == pytest.approx(float(best.risk.value), rel=1e-9)


def test_default_starts_have_the_law_of_default_linear_layers():
    start = np.array([ravel_pytree(training.default_start(seed))[0] for seed in range(300)])
    assert start.shape == (300, 114)
    assert np.abs(start).max() <= 1 / math.sqrt(6)
    # The variance of a uniform law on ±6^{−1/2} is 1/18; its square deviates with standard deviation √(4/5)/18.
    assert abs(start.var() - 1 / 18) <= 5 * math.sqrt(4 / 5) / 18 / math.sqrt(start.size)
