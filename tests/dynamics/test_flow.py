"""Laws of every gradient flow, and of the solver written for them."""

import math
from typing import ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.integrate import solve_ivp

import catalogue
import largeprompt as lp
from largeprompt._progress import Progress
from largeprompt.dynamics import flow_ladder, gradient_flow, structured_start
from largeprompt.dynamics._chebyshev import Chebyshev
from largeprompt.dynamics._conserved import conserved_quantities
from largeprompt.icl import (
    LinearRegression,
    RegressionOn,
    identity,
    kms,
    norm,
    optimal_softmax,
    risk,
    risk_function,
    risk_gradient,
)
from largeprompt.icl._risk._abstract import pooled
from significance import assert_close_in_sigmas

TASK = LinearRegression.experiment(kms(3))
HEAD = lp.Head.pytorch_default(jax.random.key(1), 4)
LAYERS = {
    "softmax, K Q V O": HEAD,
    "linear, K Q V O": lp.Head(HEAD.K, HEAD.Q, HEAD.V, HEAD.O, 0.5, "linear"),
    "linear, K Q V": lp.Head(HEAD.K, HEAD.Q, HEAD.V, kind="linear"),
    "structured": structured_start(TASK, 0.3),
}
TIMES = np.linspace(0, 20, 21)


def distance(layer, other) -> float:
    """Of all their parameters."""
    pairs = zip(jax.tree.leaves(layer), jax.tree.leaves(other), strict=True)
    return math.sqrt(sum(np.sum((np.asarray(one) - np.asarray(two)) ** 2) for one, two in pairs))


@pytest.mark.parametrize(
    ("name", "L"),
    [(name, 8) for name in LAYERS if name != "linear, K Q V"]
    + [("softmax, K Q V O", math.inf), ("structured", math.inf)],
)
def test_risk_falls_and_what_is_conserved_stays(name, L):
    layer = LAYERS[name]
    flow = gradient_flow(layer, TASK, L, TIMES, draws=2**9, rtol=1e-8, atol=1e-10, solver="explicit")
    assert flow.ending == "completed"
    assert np.all(np.diff(flow.risk) <= 1e-9)
    assert distance(flow.layer(0), layer) == 0
    conserved = flow.conserved
    assert conserved or (isinstance(layer, lp.SoftmaxAttention) and L == 8)
    for value in conserved.values():
        assert np.ptp(value, axis=0).max() < 1e-6


@pytest.mark.parametrize("seed", [5, 19])
def test_the_control_variate_cannot_lead_a_flow_below_every_risk(seed):
    """With R_∞ as control variate to the end, the averages over these nodes fall without bound by t = 100."""
    start = lp.Head.pytorch_default(jax.random.key(seed), 4)
    flow = gradient_flow(start, TASK, 8, 10 * TIMES, draws=2**9, rtol=1e-8, atol=1e-10, solver="explicit")
    assert flow.ending == "completed"
    assert float(flow.risk.min()) > 0
    assert np.all(np.diff(flow.risk) <= 1e-9)
    assert distance(flow.layer(0), start) == 0


@pytest.mark.parametrize(("kind", "L"), [("softmax", 8), ("softmax", math.inf), ("linear", 8)])
def test_the_block_structure_is_preserved(kind, L):
    start = structured_start(TASK, 0.3, kind=kind)
    # a nearly structured start is followed by the general field: the blocks that were 0 stay what they were
    moved = jax.tree.map(lambda leaf: leaf + 1e-13, start)
    flow = gradient_flow(moved, TASK, L, [10.0], draws=2**9)
    assert float(jnp.abs(flow.last.U[3, :3]).max()) < 1e-11
    assert float(jnp.abs(flow.last.V[0, :3]).max()) < 1e-11
    if kind == "linear" or math.inf == L:  # otherwise the two would average over different nodes
        aligned = gradient_flow(start, TASK, L, [10.0], draws=2**9)
        assert distance(flow.last, aligned.last) < 1e-6


def test_explicit_solvers_follow_the_flow_that_scipy_follows():
    """The stabilised one at any time, from its dense output."""
    layer = LAYERS["linear, K Q V O"]
    stabilised = gradient_flow(layer, TASK, 8, TIMES, rtol=1e-7, atol=1e-9, dense=True)
    explicit = gradient_flow(layer, TASK, 8, TIMES, draws=2**9, rtol=1e-8, atol=1e-10, solver="explicit")
    flat, unravel = ravel_pytree(layer)
    field = jax.jit(lambda theta: -ravel_pytree(risk_gradient(unravel(theta), TASK, 8).layer)[0])
    at = np.array([0.5, 1.0, 7.5, 19.5, 20.0])
    truth = solve_ivp(lambda t, y: np.asarray(field(y)), (0, 20), np.asarray(flat), "LSODA", at, rtol=1e-10, atol=1e-12)
    for i, t in enumerate(at):
        there = unravel(jnp.asarray(truth.y[:, i]))
        if t in TIMES:
            assert distance(stabilised.layer(int(t)), there) < 2e-5
            assert distance(explicit.layer(int(t)), there) < 2e-5
        assert distance(stabilised.at(float(t)), there) < 1e-4
    with pytest.raises(ValueError, match="t is 21; the flow was followed up to 20"):
        stabilised.at(21.0)
    with pytest.raises(ValueError, match="ask gradient_flow for dense=True"):
        explicit.at(1.0)


def test_the_stabilised_solver_is_of_second_order():
    """Halving a fixed step divides the error by four."""
    term = diffrax.ODETerm(lambda t, y, args: jnp.stack([-y[0] * y[1], y[0] ** 2 - 50 * y[1]]))
    y0 = jnp.array([1.0, 0.5])
    exact = diffrax.diffeqsolve(
        term, diffrax.Dopri8(), 0.0, 1.0, 1e-3, y0, stepsize_controller=diffrax.PIDController(1e-12, 1e-12)
    ).ys

    def error(dt):
        reached = jnp.asarray(diffrax.diffeqsolve(term, Chebyshev(), 0.0, 1.0, dt, y0).ys)
        return float(jnp.linalg.norm(reached - jnp.asarray(exact)))

    steps = np.array([1 / 64, 1 / 128, 1 / 256])
    slope = np.polyfit(np.log(steps), np.log([error(dt) for dt in steps]), 1)[0]
    assert 1.8 < slope < 2.3


def test_the_stabilised_solver_takes_steps_far_beyond_the_fastest_time_scale():
    rates = jnp.array([1e4, 10.0, 0.1])
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: -rates * (y - 1)),
        Chebyshev(),
        0.0,
        100.0,
        1e-4,
        jnp.zeros(3),
        stepsize_controller=diffrax.PIDController(1e-5, 1e-7),
    )
    np.testing.assert_allclose(jnp.asarray(solution.ys)[0], 1, rtol=1e-4)
    assert int(solution.stats["num_steps"]) < 1500  # an ordinary explicit method needs 300,000


@pytest.mark.parametrize(("rate", "power"), [(10.0, 3), (1000.0, 5)])
def test_a_step_whose_stages_overflow_is_tried_again_shorter(rate, power):
    """At rest errors are rounding and steps grow until they are unstable; a power of the state overflows there."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: -rate * y - y**power),
        Chebyshev(),
        0.0,
        2e5 / rate,
        1e-3 / rate,
        jnp.array([1e-10, 5e-11]),
        stepsize_controller=diffrax.PIDController(1e-7, 1e-9),
        max_steps=1000,
    )
    assert float(jnp.asarray(solution.ts)[-1]) == 2e5 / rate


def test_a_finite_softmax_flow_from_the_structured_start_ends_at_the_best_layer():
    task = LinearRegression.experiment(identity(3))
    flow = gradient_flow(structured_start(task, 0.3), task, 20, [300.0], rtol=1e-4)  # its end is a minimum
    best = optimal_softmax(task, 20)
    exact = float(risk(flow.last, task, 20).value)
    assert 0 <= exact - float(best.risk.value) < 1e-5
    assert "quadrature" in flow.method
    assert float(flow.risk_stderr[-1]) == 0
    assert float(flow.risk[-1]) == pytest.approx(exact, rel=1e-12)


def test_the_ladder_of_lengths_comes_down_to_the_infinite_flow():
    """Lemma E.1: at a fixed time the distance falls with L, like 1/L early on. Theorem 4.3: so does the final risk."""

    class Heard(Progress):
        notes: ClassVar[list[str]] = []

        def step(self, name: str, done: float, note: str = "") -> None:
            self.notes.append(note)

    start, Ls = structured_start(TASK, 0.3), [10, 100, 1000]
    ladder = flow_ladder(start, TASK, Ls, [0.1, 30.0], progress=Heard(), rtol=1e-4)  # distances are 1e-4 and more
    assert [note.split(":")[0] for note in Heard.notes] == ["L = inf", "L = 10", "L = 100", "L = 1000"]
    slope = np.polyfit(np.log(ladder.Ls), np.log(ladder.distance[:, 0]), 1)[0]
    assert -1.1 < slope < -0.9
    assert np.all(np.diff(ladder.excess) < 0)
    assert 0 < float(ladder.excess[-1]) < 2e-2


def test_any_task_and_layer_can_be_followed():
    task = RegressionOn(lp.Rademacher([1.0, 1.0]), noise=0.1)
    layer = lp.MultiHead.pytorch_default(jax.random.key(0), 3, 2, head_dim=2)
    flow = gradient_flow(layer, task, 6, [0.0, 2.0], jax.random.key(5), draws=256)
    assert "Monte Carlo over 256 instances" in flow.method
    assert float(flow.risk[1]) < float(flow.risk[0])
    assert float(flow.risk_stderr[1]) > 0
    assert all(np.ptp(value, axis=0).max() < 1e-4 for value in flow.conserved.values())


def test_a_diverging_flow_says_where():
    """A loss without a floor, −½‖ŷ‖²: linear attention runs to infinity in finite time."""
    task = TASK.with_loss(lambda prediction, target: -jnp.sum(prediction**2) / 2)
    layer = lp.LinearAttention(HEAD.merged().U, HEAD.merged().V)
    flow = gradient_flow(layer, task, 4, np.linspace(0.1, 100, 100), draws=16, solver="explicit", max_steps=4000)
    assert flow.ending == "diverged"
    assert 0.1 < flow.ended_at < 100
    assert len(flow.risk) == len(flow.times) < 100
    assert np.all(np.isfinite(flow.risk))
    assert float(flow.times[-1]) == flow.ended_at
    assert float(norm(flow.last)) > 1e3


def test_a_flow_out_of_steps_says_so():
    flow = gradient_flow(HEAD.merged(), TASK, math.inf, [0.1, 1000.0], max_steps=30, dense=True)
    assert flow.ending == "out of steps"
    assert float(flow.times[0]) == 0.1 < flow.ended_at < 1000
    assert len(flow.times) == len(flow.risk) == 2
    assert float(flow.risk[1]) < float(flow.risk[0])
    never = gradient_flow(HEAD.merged(), TASK, math.inf, [999.0, 1000.0], max_steps=30, dense=True)
    assert never.ending == "out of steps"
    assert len(never.times) == 1
    with pytest.raises(ValueError, match="there is no dense output"):
        never.at(0.001)


def test_nothing_is_called_conserved_that_is_not():
    task = RegressionOn(lp.Gaussian([1.0, 1.0], np.eye(2)), 0.1)
    layer = lp.SoftmaxAttention(0.3 * np.eye(3), [[0.0, 0.0, 1.0]])
    assert conserved_quantities(jax.tree.map(lambda leaf: leaf[None], layer), task, math.inf) == {}


def test_a_start_that_is_too_far_is_named():
    with pytest.raises(ValueError, match=r"weights of norm 4e\+09; a flow must start below 1e\+08"):
        gradient_flow(lp.LinearAttention(1e9 * np.ones((4, 4)), np.zeros((1, 4))), TASK, 8, [1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": [1.0, 1.0]}, r"times\[1\] is 1, not above 1; times must increase"),
        ({"times": [2.0, 1.0]}, r"times\[1\] is 1, not above 2"),
        ({"times": [-1.0, 1.0]}, r"times\[0\] is -1; a flow starts at 0"),
        ({"times": [0.0]}, "times end at 0"),
        ({"times": [1.0, math.inf]}, r"times\[1\] is inf"),
        ({"times": []}, "must not be empty"),
        ({"L": 0}, "L is 0"),
        ({"L": -3}, "L is -3"),
        ({"solver": "euler"}, "solver is 'euler'"),
        ({"rtol": 0.0}, "rtol is 0; it must be at least 1e-14"),
        ({"draws": 0}, "draws is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"task": "regression"}, "task is of type str"),
        ({"layer": lp.SoftmaxAttention(np.eye(3), np.eye(3))}, "the layer reads tokens of dimension 3"),
    ],
)
def test_bad_input_is_refused_in_one_line(change, message, as_a_stranger):
    arguments = {"layer": HEAD, "task": TASK, "L": 8, "times": [1.0]} | change
    with pytest.raises(ValueError, match=message) as raised:
        gradient_flow(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Theta": np.eye(3)}, r"‖ΘΘᵀ‖_F = 1.73205; Assumption 5.1 asks for 1"),
        ({"Theta": np.eye(2)}, "Theta has shape"),
        ({"alpha": 0.0}, "alpha is 0, a saddle"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"kind": "both"}, "kind is 'both'"),
    ],
)
def test_a_wrong_start_is_refused(change, message, as_a_stranger):
    with pytest.raises(ValueError, match=message):
        structured_start(**({"task": TASK, "alpha": 0.3} | change))


def test_a_direction_that_the_covariates_never_reach_is_refused():
    task = LinearRegression(catalogue.covariance(1, 3, rank=2))
    null = np.linalg.svd(np.asarray(task.Sigma))[0][:, 2:]
    with pytest.raises(ValueError, match="ΣΘ = 0"):
        structured_start(task, 0.3, null)


@pytest.mark.parametrize("kind", ["relu", "normalised-sigmoid"])
def test_flows_of_other_kinds_bring_the_risk_down_at_infinite_length(kind):
    layer = lp.Head.pytorch_default(jax.random.key(1), TASK.dim, outputs=1, kind=kind)
    flow = gradient_flow(layer, TASK, math.inf, [0.0, 1.0, 3.0], draws=64)
    assert flow.ending == "completed"
    assert kind in flow.reason
    assert np.all(np.diff(flow.risk) < 0)
    assert np.ptp(flow.conserved["K Kᵀ − Q Qᵀ"], axis=0).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "L"), [("softmax, K Q V O", 3), ("linear, K Q V", 3), ("structured", lp.Lengths.prefixes(4))]
)
def test_flows_with_the_query_in_the_prompt_go_down_the_risk_of_simulated_prompts(name, L):
    flow = gradient_flow(LAYERS[name], TASK, L, [0.0, 1.0, 5.0], draws=2**9, query_in_prompt=True, rtol=1e-7)
    assert flow.ending == "completed"
    assert np.all(np.diff(flow.risk) < 0)
    for value in flow.conserved.values():
        assert np.ptp(value, axis=0).max() < 1e-5
    assert not flow.method.startswith("Monte Carlo")
    function = risk_function(flow.last, TASK, L, query_in_prompt=True, method="sampled", draws=2**17)
    (sampled, slope), (stderr, of_slope) = pooled(function, flow.last, "average_with_gradient")
    assert_close_in_sigmas(sampled, flow.risk[-1], np.hypot(stderr, flow.risk_stderr[-1]))
    norms = [float(norm(part)) for part in (slope, of_slope)]
    assert abs(norms[0] - float(flow.gradient_norm[-1])) < 5 * norms[1] + float(flow.gradient_stderr[-1])


def test_a_flow_of_heads_stops_where_their_table_ends():
    K, label = np.eye(1, 2), np.eye(2)[1:]
    start, task = (
        lp.MultiHead([lp.Head(K, 2 * K, 0.6 * label), lp.Head(K, 1.8 * K, 0.3 * label)]),
        LinearRegression(np.eye(1)),
    )
    flow = gradient_flow(start, task, 2, [0.0, 100.0], draws=2**7)
    assert flow.ending == "outside the table"
    assert 0 < flow.ended_at < 100
    assert "standard deviations above 8" in risk_function(flow.last, task, 2, draws=2**7).reason
