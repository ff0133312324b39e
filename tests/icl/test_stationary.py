"""The spurious minima of one-layer attention: found, certified, and compared with the law of their excess risk."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from catalogue import f
from icl_catalogue import FLAT, KMS
from largeprompt.icl import (
    LinearRegression,
    blocks,
    diagonal,
    identity,
    kms,
    optimal_linear,
    predicted_excess,
    stationary_points,
)
from largeprompt.icl._risk._closed_form import gaussian_risk
from largeprompt.icl._risk._heads_closed_form import HeadsInClosedForm
from largeprompt.icl._stationary import _search
from largeprompt.icl._stationary._symmetries import apart, flat, from_flat, stacked, tangents

PAIR = LinearRegression(identity(2), 0.1, identity(2) / 2, targets=2)
EXCESS = {100: 0.103159, 1000: 0.038786, 10**4: 0.012569, 10**6: 0.001264}


def local_minima(task, L, starts=0):
    points = stationary_points(task, L, "linear", starts=starts)
    return [point for point in points if point.kind == "local minimum"]


@pytest.fixture(scope="module")
def spurious_of_flat():
    """At L = 100."""
    (point,) = local_minima(FLAT, 100)
    return point


@pytest.fixture(scope="module")
def spurious_of_pair():
    """At L = 200."""
    (point,) = local_minima(PAIR, 200)
    return point


@pytest.mark.parametrize("L", EXCESS)
def test_linear_attention_has_a_strict_local_minimum_that_is_not_global(L, spurious_of_flat):
    (point,) = local_minima(FLAT, L) if L != 100 else (spurious_of_flat,)
    assert float(point.excess) == pytest.approx(EXCESS[L], abs=5.1e-7)
    assert float(point.gradient_norm) < 1e-10
    assert float(point.hessian_eigenvalues[0]) >= -1e-10
    # the scale between U and V, and the sphere of directions
    assert point.zero_modes == point.symmetries == 1 + 4
    assert float(point.hessian_eigenvalues[5]) > 1e-4


def test_excess_of_spurious_minima_tends_to_the_formula():
    ratios = [EXCESS[L] / float(predicted_excess(FLAT, L)) for L in EXCESS]
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(1, abs=1e-3)
    assert float(predicted_excess(FLAT, 1000)) == pytest.approx(0.2 * math.sqrt(2 * 5 * 4 / 1000), rel=1e-12)


@pytest.mark.parametrize(("d", "excess"), [(2, 0.0306), (4, 0.0376)])
def test_spurious_minima_exist_from_dimension_two(d, excess):
    (point,) = local_minima(LinearRegression.experiment(identity(d)), 1000)
    assert float(point.excess) == pytest.approx(excess, abs=5.1e-5)
    assert point.zero_modes == point.symmetries == d


def test_dimension_one_has_no_spurious_minimum():
    task = LinearRegression(identity(1), 0.1)
    points = stationary_points(task, 1000, "linear", starts=2)
    # y x x_q is read as well by scoring labels and reading covariates
    assert [point.kind for point in points] == 2 * ["global minimum"]
    assert sorted(float(jnp.abs(blocks(f(point.attention), task).P[0, 0])) > 0.5 for point in points) == [False, True]
    assert float(predicted_excess(task, 1000)) == 0


def test_a_perturbed_spurious_minimum_falls_back(spurious_of_flat):
    point = spurious_of_flat
    x = flat(blocks(point.attention, FLAT))
    noise = np.random.default_rng(0).normal(size=x.size)
    value = jax.jit(jax.value_and_grad(lambda x: gaussian_risk(from_flat(x, 5, 1), FLAT, 100)))
    found = minimize(lambda x: tuple(map(np.asarray, value(x))), x + 0.05 * noise / np.linalg.norm(noise), jac=True)
    assert found.fun == pytest.approx(float(point.risk.value), rel=1e-8)


@pytest.mark.parametrize("task", [FLAT, KMS], ids=["isotropic", "kms"])
def test_global_minimum_is_certified(task):
    first = stationary_points(task, 100, "linear", starts=1)[0]
    assert first.kind == "global minimum"
    assert float(first.risk.value) == pytest.approx(float(optimal_linear(task, 100).risk.value), rel=1e-12)
    assert first.zero_modes == first.symmetries == 1
    assert first.risk.exact


def test_random_starts_of_the_default_initialisation_reach_the_spurious_minimum():
    points = stationary_points(FLAT, 100, "linear", jax.random.key(1), starts=8)
    assert [point.kind for point in points] == ["global minimum", "local minimum"]


def test_kms_has_one_spurious_minimum_and_a_saddle_for_every_other_axis():
    points = stationary_points(KMS, 1000, "linear", starts=0)
    assert [point.kind for point in points] == ["global minimum", "local minimum", *4 * ["saddle"]]
    excess = [float(point.excess) for point in points[1:]]
    # training stays near the saddles for a time of order 3000: their curvature is above -4e-4
    np.testing.assert_allclose(excess, [0.035042, 0.038338, 0.042185, 0.045227, 0.046852], atol=5.1e-7)
    negative = [int(np.count_nonzero(np.asarray(p.hessian_eigenvalues) < -1e-10)) for p in points]
    assert negative == [0, 0, 1, 2, 3, 4]
    assert all(float(p.hessian_eigenvalues[0]) > -4e-4 for p in points)


def test_spurious_minima_of_kms_come_and_go_with_the_length():
    assert [round(float(p.excess), 6) for p in local_minima(KMS, 10)] == [0.142131]
    assert local_minima(KMS, 100) == []


def test_other_queries_single_out_the_extreme_axes():
    task = LinearRegression(diagonal([1.0, 2.0, 0.5]), 0.1, query_Sigma=diagonal([1.0, 0.6, 4.0]))
    lowest, highest = local_minima(task, 10**8)
    # of q(T-q) over q = 0.3, 1, 8 with T = 9.3: at 0.3, and again at 8 > T/2
    rho2 = float(task.rho2)
    for point, q in ((lowest, 0.3), (highest, 8.0)):
        assert float(point.excess) == pytest.approx(math.sqrt(2 * rho2 * q * (9.3 - q) / 10**8), rel=2e-3)
    assert float(lowest.excess) == pytest.approx(float(predicted_excess(task, 10**8)), rel=2e-3)


def test_infinite_prompts_leave_the_global_minimum_alone():
    (point,) = stationary_points(FLAT, math.inf, "linear", starts=2)
    assert point.kind == "global minimum"
    assert float(point.risk.value) == pytest.approx(0.05, abs=1e-12)
    assert float(predicted_excess(FLAT, math.inf)) == 0


def test_softmax_attention_has_a_spurious_minimum_too():
    points = stationary_points(FLAT, 1000, "softmax", starts=0, draws=2**9)
    assert [point.kind for point in points] == ["global minimum", "local minimum"]
    lowest, point = points
    assert abs(float(lowest.excess)) < 2e-4
    assert float(point.excess) == pytest.approx(0.0674, abs=1e-3)
    assert point.zero_modes == point.symmetries == 4  # no scale: the exponential fixes it
    assert float(point.gradient_norm) < 1e-10
    assert float(point.risk.stderr) < 1e-3


def test_several_outputs_have_a_spurious_minimum_too(spurious_of_pair):
    point = spurious_of_pair
    assert float(point.excess) == pytest.approx(0.339733, abs=5.1e-7)
    # the scale, the direction of the covariates and the output that is scored through it
    assert point.zero_modes == point.symmetries == 3


def test_random_starts_alone_reach_the_spurious_minimum_of_several_outputs(monkeypatch):
    monkeypatch.setattr(_search, "spurious_starts", lambda *_: [])
    (point,) = local_minima(PAIR, 200, starts=16)
    assert float(point.excess) == pytest.approx(0.339733, abs=5.1e-7)


def test_several_outputs_never_learn_a_direction_at_the_spurious_minimum():
    (point,) = local_minima(PAIR, 10**6)
    # κ = 3ρ₂ + 2ω(τ₁ + s²) − ω² with ω = ρ₂ = ½, τ₁ = 1
    assert float(predicted_excess(PAIR, 10**6)) == pytest.approx(0.25 + math.sqrt(2.35 / 10**6), rel=1e-12)
    assert float(point.excess) == pytest.approx(float(predicted_excess(PAIR, 10**6)), abs=1e-5)


def test_minima_of_equal_risk_are_told_apart_by_what_symmetries_leave_alone(spurious_of_pair):
    point = spurious_of_pair
    other = eqx.tree_at(lambda p: p.attention.U, point, point.attention.U)
    far = _search._Candidate(other, np.zeros(16), np.array([1.0, 2.0, 1.0, 1.0]), 0.0, 1e-6, np.zeros(16))
    near = far._replace(point=point, sizes=far.sizes + 1e-9)
    assert near.same_as(far)
    assert not near._replace(sizes=far.sizes + 0.1).same_as(far)


def test_units_of_covariates_labels_and_queries_do_not_matter():
    task = LinearRegression(diagonal([1.0, 2.0]), 0.1, identity(2) / 2)
    # x in units of 1e-4, y in units of 1e-3, queries ten times as far out
    other = LinearRegression(1e8 * task.Sigma, 1e5, 1e-2 * task.Omega, 1e10 * task.Sigma)
    points, others = (stationary_points(t, 1000, "linear", starts=0) for t in (task, other))
    assert [p.kind for p in points] == [p.kind for p in others]
    assert len(points) == 3
    for point, same in zip(points, others, strict=True):
        assert float(same.excess) == pytest.approx(1e8 * float(point.excess), rel=1e-6, abs=1e-3)


def test_rotations_that_keep_only_the_product_of_covariances_are_symmetries():
    # w·x has the same law along every direction once x is white, though Σ and Ω are not multiples of I
    task = LinearRegression(diagonal([1.0, 4.0]), 0.1, diagonal([0.5, 0.125]))
    (point,) = local_minima(task, 1000)
    assert point.zero_modes == point.symmetries == 2
    isotropic = LinearRegression(identity(2), 0.1, identity(2) / 2)
    assert float(point.excess) == pytest.approx(float(local_minima(isotropic, 1000)[0].excess), rel=1e-9)


def test_the_optimum_is_listed_even_where_its_gradient_does_not_vanish(monkeypatch):
    monkeypatch.setattr(_search, "_STATIONARY", -1.0)
    (point,) = stationary_points(PAIR, 200, "linear", starts=0)
    assert point.kind == "undecided"
    assert float(point.excess) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_task_in_float32_is_refused_in_one_line(kind, as_a_stranger):
    with jax.enable_x64(False):
        task = LinearRegression(identity(2), 0.1)
        with pytest.raises(
            ValueError, match=r"^task is in float32; stationary points need float64: .*use_float64\(\)$"
        ):
            stationary_points(task, 100, f(kind))


@pytest.mark.parametrize(
    "task",
    [
        FLAT,
        LinearRegression(kms(3), 0.2, targets=2),
        LinearRegression(diagonal([1.0, 1.0, 0.0]), 0.1, query_Sigma=diagonal([0.0, 1.0, 1.0]), targets=3),
    ],
    ids=["isotropic", "two targets", "singular"],
)
def test_symmetries_leave_the_risk_alone(task):
    d, k = task.d, task.targets
    x = np.random.default_rng(1).normal(size=d * d + 2 * d * k + k * k)
    basis = tangents([from_flat(x, d, k)], task, linear=True)
    gradient = jax.jit(jax.grad(lambda x: gaussian_risk(from_flat(x, d, k), task, 7)))(jnp.asarray(x))
    assert float(np.abs(basis.T @ gradient).max()) < 1e-10 * float(np.linalg.norm(gradient))


def test_bad_input_is_refused_in_one_line(as_a_stranger):
    with pytest.raises(ValueError, match=r"^kind is 'cosine'; it must be 'softmax' or 'linear'$"):
        stationary_points(FLAT, 10, f("cosine"))
    with pytest.raises(ValueError, match=r"^starts is -1; it must be at least 0$"):
        stationary_points(FLAT, 10, "linear", starts=-1)
    with pytest.raises(ValueError, match=r"^task has 2 targets; .* commute, d > 1 and the targets are few$"):
        predicted_excess(LinearRegression(kms(2), 0.1, identity(2), diagonal([1.0, 2.0]), targets=2), 10)
    with pytest.raises(ValueError, match=r"^Sigma is singular; .* known for an invertible Sigma$"):
        predicted_excess(LinearRegression(diagonal([1.0, 0.0])), 10)


def test_a_second_linear_head_turns_the_spurious_minimum_of_one_output_into_a_saddle():
    task = LinearRegression.experiment(identity(2))
    (alone,) = local_minima(task, 100)
    best, idle = stationary_points(task, 100, "linear", heads=2, starts=8)
    assert (best.kind, idle.kind) == ("global minimum", "saddle")
    assert float(best.risk.value) == pytest.approx(float(optimal_linear(task, 100).risk.value), rel=1e-12)
    assert float(idle.excess) == pytest.approx(float(alone.excess), rel=1e-9)
    assert float(idle.hessian_eigenvalues[0]) < -0.1
    assert idle.zero_modes == idle.symmetries == 7


def test_two_linear_heads_with_two_outputs_keep_a_spurious_minimum():
    best, spurious = stationary_points(PAIR, 1000, "linear", heads=2, starts=0)
    assert (best.kind, spurious.kind) == ("global minimum", "local minimum")
    assert float(spurious.excess) == pytest.approx(0.030539, abs=5.1e-7)
    # mixing the two heads 4, the direction of the covariates 1, of the targets 1
    assert spurious.zero_modes == spurious.symmetries == 6
    assert float(spurious.hessian_eigenvalues[6]) > 1e-3


def test_excess_of_as_many_heads_as_outputs_is_that_of_one_output():
    alone = LinearRegression(identity(2), 0.1, identity(2) / 2)
    assert float(predicted_excess(PAIR, 1000, heads=2)) == float(predicted_excess(alone, 1000))
    (point,) = [p for p in stationary_points(PAIR, 10**6, "linear", heads=2, starts=0) if p.kind == "local minimum"]
    assert float(point.excess) == pytest.approx(float(predicted_excess(PAIR, 10**6, heads=2)), rel=2e-3)
    assert float(predicted_excess(PAIR, 1000, heads=3)) == 0
    with pytest.raises(
        ValueError, match=r"^heads is 2; with 3 targets the excess is known for 1 head and for that many"
    ):
        predicted_excess(LinearRegression(identity(2), targets=3), 1000, heads=2)


@pytest.mark.parametrize("task", [KMS, LinearRegression(kms(2), 0.2, targets=2)], ids=["one target", "two targets"])
def test_symmetries_of_several_heads_leave_the_risk_alone(task):
    d, k, heads = task.d, task.targets, 3
    x = np.random.default_rng(2).normal(size=heads * (d * d + 2 * d * k + k * k))
    # two heads read the same: their scores may be exchanged
    x = x.reshape(heads, -1)
    x[1, -k * (d + k) :] = x[0, -k * (d + k) :]
    x = x.ravel()
    function = HeadsInClosedForm(task=task, L=jnp.asarray(7.0), reason="")
    basis = tangents(apart(x, d, k), task, linear=True)
    gradient = jax.jit(jax.grad(lambda x: function.of_heads(stacked(x, d, k))[0]))(jnp.asarray(x))
    assert basis.shape[1] >= heads**2
    assert float(np.abs(basis.T @ gradient).max()) < 1e-10 * float(np.linalg.norm(gradient))


def test_more_than_two_softmax_heads_are_refused(as_a_stranger):
    with pytest.raises(ValueError, match=r"^heads is 3; the least risk is known for 1 and 2 softmax heads$"):
        stationary_points(FLAT, 10, "softmax", heads=3)
