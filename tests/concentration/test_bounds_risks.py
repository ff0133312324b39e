"""Lemmas E.1, E.2 and E.4, Corollaries E.3 and E.5 and Theorem 4.3 against exact risks, gradients and flows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import chi2

import catalogue
import largeprompt as lp
from largeprompt.concentration import bounds
from largeprompt.concentration.bounds._tasks import over_tasks, sizes
from largeprompt.dynamics import gradient_flow, structured_start
from largeprompt.icl import LinearRegression, kms, norm, risk, risk_function, risk_gradient
from refusals import assert_refused

D = 6
PAPER = LinearRegression.experiment(np.eye(5))
TASKS = {
    "isotropic": PAPER,
    "kms": LinearRegression.experiment(kms(5)),
    "shifted queries": LinearRegression(catalogue.covariance(0, 2), 0.2, np.diag([0.5, 1.0]), 3 * np.eye(2)),
    "two targets": LinearRegression(0.5 * np.eye(3), targets=2),
    "quiet": LinearRegression(0.1 * np.eye(2), 0.0, 0.3 * np.eye(2)),
}


def layers(task):
    """A random (U, V), the start of Assumption 5.1, and a head whose last outputs count."""
    dim = task.dim
    U, V = 0.3 * catalogue.matrix(1, dim, dim), catalogue.matrix(2, task.targets, dim)
    K, Q, W, O = (0.5 * catalogue.matrix(seed, dim, dim) for seed in (3, 4, 5, 6))
    return {
        "random": lp.SoftmaxAttention(U, V),
        "structured": structured_start(task, 0.4),
        "head": lp.Head(K, Q, W, O, scale=0.8),
    }


KINDS = {
    "isotropic": ("random",),
    "kms": ("structured",),
    "shifted queries": ("random",),
    "two targets": ("head",),
}


@pytest.mark.parametrize("name", KINDS)
def test_risks_and_their_gradients_are_within_their_bounds(name):
    task = TASKS[name]
    for layer in (layers(task)[kind] for kind in KINDS[name]):
        limit, slope = risk(layer, task, math.inf), risk_gradient(layer, task, math.inf)
        for L in (3, 1000):
            value, gradient = risk(layer, task, L, rtol=0.05), risk_gradient(layer, task, L, rtol=0.05)
            off = abs(float(value.value - limit.value)) + 5 * float(value.stderr)
            forms = [bounds.risk_bound(layer, task, L, form=form).value for form in ("balanced", "short", "printed")]
            assert off < forms[0] <= forms[1] <= forms[2] < math.inf
            difference = jax.tree.map(jnp.subtract, gradient.layer, slope.layer)
            off = float(norm(difference)) + 5 * float(norm(gradient.stderr))
            assert off < bounds.risk_gradient_bound(layer, task, L, form="balanced").value
            assert off < bounds.risk_gradient_bound(layer, task, L).value


def test_one_function_has_every_bound():
    layer = layers(PAPER)["random"]
    assert bounds.bound(layer, PAPER, None, 30, "risk") == bounds.risk_bound(layer, PAPER, 30)
    balanced = bounds.bound(layer, PAPER, None, 30, "risk-gradient", form="balanced")
    assert balanced == bounds.risk_gradient_bound(layer, PAPER, 30, form="balanced")
    far = bounds.LogLength(90.0)
    assert bounds.bound(layer, PAPER, None, far, "risk") == bounds.risk_bound(layer, PAPER, far)


def test_the_risk_bound_is_its_formula():
    """½Δ² + (2R_∞)^{1/2}Δ, with Δ² the mean of Equation (16) over χ²₅, by another quadrature."""
    layer, L = structured_start(PAPER, 0.5), 1000
    U, V, l = 0.5 / math.sqrt(5), 0.5, math.log(L)

    def integrand(x):
        sigma = math.sqrt(1.1 + x / 5)
        c = 4**4 * U**4 * D**2 * V**4
        return bounds.lemma_c6(L, sigma=sigma, U=U, C_f=V, p=1, D=D, c=c).value * chi2.pdf(x, 5)

    square = sum(quad(integrand, a, b, epsabs=0, epsrel=1e-10)[0] for a, b in ((0, 5), (5, 30), (30, 300)))
    wanted = square / 2 + math.sqrt(2 * float(risk(layer, PAPER, math.inf).value) * square)
    np.testing.assert_allclose(bounds.risk_bound(layer, PAPER, L).value, wanted, rtol=1e-8)
    np.testing.assert_allclose(bounds.risk_bound(layer, PAPER, L=bounds.LogLength(l)).value, wanted, rtol=1e-8)


def test_the_risk_gradient_bound_is_its_formula():
    layer, L = structured_start(PAPER, 0.5), 1000
    U, V = 0.5 / math.sqrt(5), 0.5
    x = [math.prod(5 + 2 * j for j in range(k)) for k in range(9)]  # E‖x‖^{2k} of N(0, I₅)
    y = [math.prod(6 + 2 * j for j in range(k)) for k in range(5)]
    M = {
        (p, q): 2.0 ** (p - 1) * (U**p * x[(p + q) // 2] + y[p // 2] * x[q // 2]) for p in (0, 4, 8) for q in (0, 4, 8)
    }

    def squares(chi):
        sigma = math.sqrt(1.1 + chi / 5)
        mean = bounds.lemma_c6(L, sigma=sigma, U=U, C_f=1, p=1, D=D, c=4**4 * U**4 * D**2).value
        second = bounds.lemma_c6(L, sigma=sigma, U=U, C_f=V, p=2, D=D, c=V**4 * M[8, 4], g2=5, g4=M[0, 4]).value
        X = bounds.lemma_c9(L, sigma=sigma, U=U, C_f=V, D=D, c=V**8 * M[8, 0])
        Y = bounds.lemma_c9(L, sigma=sigma, U=U, C_f=1, D=D, c=M[8, 8], g4=M[0, 4], g8=M[0, 8])
        product = bounds.product_bound(X, Y, X4=V**4 * sigma**8 * M[4, 0], Y4=sigma**8 * M[4, 4]).value
        return mean, 2 * second + 2 * product

    def over_w(i):
        return sum(
            quad(lambda chi: squares(chi)[i] * chi2.pdf(chi, 5), a, b, epsabs=0, epsrel=1e-6)[0]
            for a, b in ((0, 5), (5, 30), (30, 300))
        )

    mean, slope = over_w(0), over_w(1)
    delta, root = V * math.sqrt(mean), math.sqrt(2 * float(risk(layer, PAPER, math.inf).value))
    G2 = 1.1**2 + 2 * 1.1 * 1 + (1 + 2 * 5 / 25)
    wanted = math.sqrt(mean + slope) * (root + delta) + math.sqrt((U**2 + V**2) * G2 * 5) * delta
    np.testing.assert_allclose(bounds.risk_gradient_bound(layer, PAPER, L).value, wanted, rtol=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_the_mean_over_tasks_is_that_of_a_fine_grid(name):
    """Also where L^{-c/σ²} moves the mass to χ² of a thousand and more."""
    size = sizes(TASKS[name])
    for log_L in (1.0, 1e3, 1e6):
        for c in (1e-3, 0.3):

            def log_of_sigma(sigma, log_L=log_L, c=c):
                return np.logaddexp(12 * np.log(sigma) - c * log_L / sigma**2, -log_L / 3)

            centre = size.n + math.sqrt(2 * c * log_L / (size.Sigma * size.tasks))
            chi_squared = np.linspace(0, 6 * centre + 200, 400_001)[1:]
            logs = log_of_sigma(size.sigma(chi_squared)) + chi2.logpdf(chi_squared, size.n)
            brute = np.logaddexp.reduce(logs) + math.log(chi_squared[1] - chi_squared[0])
            np.testing.assert_allclose(over_tasks(size, log_of_sigma), brute, rtol=1e-6, atol=2e-4)


def test_a_task_without_spread_needs_no_mean():
    task = LinearRegression(np.eye(2), 0.5, np.zeros((2, 2)))
    assert over_tasks(sizes(task), lambda sigma: 3 * sigma) == pytest.approx(3 * math.sqrt(1.5))


def test_suprema_over_a_ball_dominate_its_layers():
    for task in (PAPER, TASKS["two targets"]):
        for seed in range(3):
            U, V = catalogue.matrix(seed, task.dim, task.dim), catalogue.matrix(seed + 10, task.targets, task.dim)
            layer = lp.SoftmaxAttention(U, V)
            rho = float(norm(layer)) / 2
            for log_L in (3.0, 300.0, 3e6):
                for above, ours in ((bounds.g1, bounds.risk_bound), (bounds.g2, bounds.risk_gradient_bound)):
                    L = bounds.LogLength(log_L)
                    assert above(task, L, rho=rho).log >= ours(layer, task, L).log


def test_suprema_vanish_with_the_length():
    logs = [bounds.g2(PAPER, rho=1.5, L=bounds.LogLength(log_L)).log for log_L in (1e6, 1e8, 1e10)]
    assert logs[0] > logs[1] > logs[2]
    assert logs[2] < -1000
    tight = [bounds.g2(PAPER, rho=1.5, L=bounds.LogLength(log_L), form="balanced").log for log_L in (1e6, 1e8, 1e10)]
    assert all(a <= b for a, b in zip(tight, logs, strict=True))


@pytest.mark.parametrize("name", ["isotropic", "kms", "shifted queries", "two targets"])
def test_the_hessian_and_gradient_of_the_limit_risk_are_within_their_constants(name):
    task = TASKS[name]
    zero = lp.SoftmaxAttention(np.zeros((task.dim, task.dim)), catalogue.matrix(0, task.targets, task.dim))
    function = risk_function(zero, task, math.inf)
    n = task.dim**2

    def value(flat):
        layer = lp.SoftmaxAttention(flat[:n].reshape(task.dim, -1), flat[n:].reshape(task.targets, -1))
        return function.value_and_gradient(layer)[0]

    hessian, gradient = jax.jit(jax.hessian(value)), jax.jit(jax.grad(value))
    for rho in (0.3, 1.0):
        constants = bounds.smoothness(task, rho)
        steepest = stiffest = 0.0
        for seed in range(6):
            flat = catalogue.matrix(seed, n + task.targets * task.dim)
            flat *= 2 * rho / np.linalg.norm(flat)
            stiffest = max(stiffest, float(np.linalg.norm(hessian(flat), 2)))
            steepest = max(steepest, float(np.linalg.norm(gradient(flat))))
        assert stiffest < constants.beta
        assert steepest < constants.kappa


@functools.cache
def _flows(L):
    start = structured_start(LinearRegression.experiment(np.eye(2)), 0.05)
    times = np.array([0.01, 0.1, 1.0])
    finite, infinite = (gradient_flow(start, LinearRegression.experiment(np.eye(2)), n, times) for n in (L, math.inf))
    gaps = [float(norm(jax.tree.map(jnp.subtract, finite.layer(i), infinite.layer(i)))) for i in range(len(times))]
    return times, gaps, max(float(norm(infinite.layer(i))) for i in range(len(times)))


def test_flows_of_finite_prompts_stay_within_groenwalls_bound():
    task = LinearRegression.experiment(np.eye(2))
    times, gaps, radius = _flows(100)
    for t, gap in zip(times, gaps, strict=True):
        ours = bounds.trajectory_bound(task, 100, t=t, rho=radius)
        sharp, plain = ours.terms.values()
        assert 0 < gap < math.exp(sharp) <= math.exp(plain)
        assert ours.log == math.inf
        assert "Equation (27) fails at this length: nothing is proved" in ours.assumptions
    proved = bounds.trajectory_bound(task, L=bounds.LogLength(1e5), t=0.1, rho=radius)
    assert proved.log == proved.terms["g₂(e^{βt} - 1)/β"] < math.log(radius)
    assert bounds.trajectory_bound(task, 100, t=0, rho=1).log == -math.inf


def test_theorem_4_3_gives_the_least_length_that_its_conditions_allow():
    task = LinearRegression.experiment(np.eye(2), noise=0.0)
    start = structured_start(task, 0.5)
    ours = bounds.theorem_4_3(task, start, 0.1)
    flow = gradient_flow(start, task, math.inf, np.array([ours.T / 4, ours.T / 2, ours.T]))
    assert flow.risk[1] > ours.limit + 0.1 >= flow.risk[2]
    assert ours.rho >= max(float(norm(start)), *(float(norm(flow.layer(i))) for i in range(3)))
    assert ours.rho < 1.2 * float(norm(flow.last))
    constants = bounds.smoothness(task, ours.rho)
    assert (constants.beta, constants.kappa) == (ours.beta, ours.kappa)

    def slack(log_L):
        gap = bounds.g2(task, rho=ours.rho, L=bounds.LogLength(log_L)).log + math.log(ours.T) + ours.beta * ours.T
        off = np.logaddexp(bounds.g1(task, rho=ours.rho, L=bounds.LogLength(log_L)).log, math.log(ours.kappa) + gap)
        return max(gap - math.log(ours.rho), off - math.log(0.1))

    assert slack(ours.log_L * (1 + 1e-9)) <= 0 < slack(ours.log_L * (1 - 1e-6))
    assert 1e4 < ours.log_L < 1e12  # ln L, not L


REFUSED = {
    "the layer is linear attention": lambda: bounds.risk_bound(structured_start(PAPER, 0.4, kind="linear"), PAPER, 9),
    "this is known for LinearRegression only": lambda: bounds.g1(
        catalogue.f(lp.icl.RegressionOn(lp.Sphere(1.0, 2))), 9, rho=1
    ),
    "rho is -1; it must be a finite number": lambda: bounds.g2(PAPER, 9, rho=-1),
    "L is 1; the bound holds from L = 2 on": lambda: bounds.g1(PAPER, 1, rho=1),
    "the task has tokens of dimension 6": lambda: bounds.risk_bound(
        lp.SoftmaxAttention(np.eye(2), np.eye(2)), PAPER, 9
    ),
    "epsilon is 0; the theorem is for every epsilon above 0": lambda: bounds.theorem_4_3(
        PAPER, catalogue.f(structured_start(PAPER, 0.4)), 0
    ),
    "of a task the quantity must be 'risk' or 'risk-gradient'": lambda: bounds.bound(
        layers(PAPER)["random"], PAPER, None, 9
    ),
    "for risks it must be a task": lambda: bounds.bound(layers(PAPER)["random"], lp.Sphere(1.0, 6), None, 9, "risk"),
    "a query outside of its prompt": lambda: bounds.bound(
        layers(PAPER)["random"], PAPER, None, 9, "risk", query_in_prompt=True
    ),
    "init is not a start of Assumption 5.1": lambda: bounds.theorem_4_3(PAPER, layers(PAPER)["random"], 0.1),
}


@pytest.mark.usefixtures("as_a_stranger")
@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_qualify_is_refused(message):
    assert_refused(REFUSED[message], message)
