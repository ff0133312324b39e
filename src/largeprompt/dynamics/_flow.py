import contextlib
import functools
import importlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._compiled import optimised_jit
from largeprompt._display import AbstractTable, dataset, named_arrays, time_axes
from largeprompt._typing import Numbers
from largeprompt.attention import AbstractLayer, Lengths
from largeprompt.icl import AbstractRisk, AbstractTask, norm, risk_function
from largeprompt.icl._risk._abstract import is_formula

from ._conserved import conserved_quantities

if TYPE_CHECKING:  # Diffrax takes a second to import: where a flow is solved
    from diffrax import Solution

    from largeprompt._display import Axes, Dataset

_FAR = 1e8  # a parameter norm from which a flow counts as diverged
Solver = Literal["stabilised", "explicit", "implicit"]
Ending = Literal["completed", "diverged", "out of steps", "outside the table"]
Layer = TypeVar("Layer", bound=AbstractLayer)
_tracing = threading.RLock()


class Trajectory(AbstractTable, Generic[Layer]):
    """A gradient flow, recorded: at `times[i]` the parameters are `layer(i)`.

    `risk_stderr` and `gradient_stderr` are the errors left by the nodes or instances that the vector field averages
    over, 0 where it is exact. A flow that could not be followed to the last time says so in `ending` and ends at the
    last state that the solver reached, at `ended_at`: "outside the table" if the scores of several heads have become
    wider than their joint moments are known for. A flow from `last` goes on with sampled prompts then.
    """

    times: Float[Array, " t"]
    layers: Layer
    risk: Float[Array, " t"]
    risk_stderr: Float[Array, " t"]
    gradient_norm: Float[Array, " t"]
    gradient_stderr: Float[Array, " t"]
    conserved: dict[str, Array]
    steps: int = eqx.field(static=True)
    ending: Ending = eqx.field(static=True)
    ended_at: float = eqx.field(static=True)
    method: str = eqx.field(static=True)
    reason: str = eqx.field(static=True)
    _dense: tuple[Any, Any, float] | None

    def layer(self, i: int) -> Layer:
        """The layer at `times[i]`."""
        return _row(self.layers, i)

    @property
    def last(self) -> Layer:
        """The layer at the last recorded time."""
        return self.layer(-1)

    def at(self, t: float) -> Layer:
        """The layer at any time up to the last, from the solver's dense output (`dense=True`)."""
        if self._dense is None:
            raise ValueError("there is no dense output: ask gradient_flow for dense=True, and for times it can reach")
        t = float(checks.number("t", t, at_least=0))
        if t > self.ended_at:
            raise ValueError(f"t is {t:g}; the flow was followed up to {self.ended_at:g}")
        interpolation, static, settled = self._dense
        return eqx.combine(interpolation.evaluate(min(t, settled)), static)

    def to_dataset(self) -> "Dataset":
        names = ("risk", "risk_stderr", "gradient_norm", "gradient_stderr")
        # ‖U‖² − ‖V‖² is no name that every file format can keep
        conserved = {f"conserved_{i}": value for i, value in enumerate(self.conserved.values())}
        data = dataset(
            "time",
            self.times,
            {name: getattr(self, name) for name in names} | conserved | named_arrays(self.layers),
            {"ending": self.ending, "ended_at": self.ended_at, "steps": self.steps, "method": self.method},
        )
        for name, meaning in zip(conserved, self.conserved, strict=True):
            data[name].attrs["long_name"] = meaning
        return data

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The risk along the flow."""
        ax = time_axes(ax, self.times, "risk")
        ax.plot(self.times, self.risk)
        return ax


def gradient_flow(
    layer: Layer,
    task: AbstractTask,
    L: int | float | Lengths,
    times: Numbers,
    key: PRNGKeyArray | None = None,
    *,
    draws: int = 2**12,
    query_in_prompt: bool = False,
    rtol: float = 1e-6,
    atol: float = 1e-8,
    solver: Solver = "stabilised",
    dense: bool = False,
    max_steps: int = 2**16,
) -> Trajectory[Layer]:
    r"""The gradient flow $\dot\theta = -\nabla R_L(\theta)$ from a layer, in its own parameters, recorded at `times`.

    On Gaussian regression the vector field is exact at `L = inf`, for linear attention, and for softmax attention in
    (U, V) that starts with P = C = 0. For other softmax attention at finite length it is exact over prompts, averaged
    over `draws` fixed nodes of $(W, x)$, with $R_\infty$ as control variate throughout or without it throughout. For
    any other task or layer, of any kind of attention, it is the average over `draws` fixed instances with their
    prompts. For a law of `Lengths` it is the flow of the average of their risks. With `query_in_prompt` the query is
    one of the tokens: linear attention is exact as before, one softmax head exact over prompts. Stiff flows of few
    parameters are faster with `solver="implicit"`. Paper: Equations (7) and (10).
    """
    record = increasing_times(times)
    if solver not in get_args(Solver):
        raise ValueError(f"solver is {solver!r}; it must be one of {', '.join(map(repr, get_args(Solver)))}")
    function = risk_function(layer, task, L, key, draws=draws, query_in_prompt=query_in_prompt)
    _refuse_a_start_too_far(layer)
    rtol, atol = float(checks.number("rtol", rtol, at_least=1e-14)), float(checks.number("atol", atol, at_least=1e-14))
    settings = (layer, record, rtol, atol, solver, dense, checks.count("max_steps", max_steps))
    solution = _solve(function, *settings)
    if _happened(solution, "misled"):
        # from the start again: a flow is that of one function, which it never raises
        function = function.without_control()
        solution = _solve(function, *settings)
    if int(solution.stats["num_accepted_steps"]) == 0:
        _, gradient = eqx.filter_jit(function.value_and_gradient)(layer)
        checks.result("the gradient at the start", norm(gradient))
    record, parameters, ending, reached = _ending(solution, record)
    static = eqx.filter(layer, eqx.is_inexact_array, inverse=True)
    layers = eqx.combine(parameters, static)
    risk, risk_error, size, size_error = _record(function, layers)
    return Trajectory(
        record,
        layers,
        risk,
        risk_error,
        size,
        size_error,
        conserved_quantities(layers, task, L),
        int(solution.stats["num_steps"]),
        ending,
        float(record[-1]),
        function.method,
        function.reason,
        (solution.interpolation, static, reached) if dense and ending == "completed" else None,
    )


def increasing_times(times: Numbers) -> Float[Array, " t"]:
    """`times` as an increasing vector from 0 or later to some time after 0."""
    recorded = checks.vector("times", times)
    t = np.asarray(recorded)
    if float(t[0]) < 0:
        raise ValueError(f"times[0] is {float(t[0]):g}; a flow starts at 0")
    falls = np.flatnonzero(np.diff(t) <= 0)
    if len(falls):
        i = int(falls[0]) + 1
        raise ValueError(f"times[{i}] is {float(t[i]):g}, not above {float(t[i - 1]):g}; times must increase")
    if float(t[-1]) == 0:
        raise ValueError("times end at 0; a flow must be followed for some time")
    return recorded


@functools.partial(optimised_jit, unless=is_formula)
def _solve(
    function: AbstractRisk, layer: AbstractLayer, times, rtol, atol, solver: Solver, dense: bool, max_steps: int
):
    import diffrax

    from ._chebyshev import Chebyshev

    parameters, static = eqx.partition(layer, eqx.is_inexact_array)

    @eqx.filter_jit  # traced once, wherever a solver calls it
    def velocity(t, parameters, function):
        _, gradient = function.value_and_gradient(eqx.combine(parameters, static))
        return jax.tree.map(jnp.negative, eqx.filter(gradient, eqx.is_inexact_array))

    end = times[-1]

    def is_far(t, y, args, **_):
        return norm(y) > _FAR

    def is_settled(t, y, args):
        # an implicit step's equations are all rounding where nothing moves any more
        return norm(velocity(t, y, args)) * (end - t) < atol / 10

    def after_the_start(event):
        # at the start, where Diffrax asks too, nothing of the kind has happened, and all that is asked compiles again
        def happens(t, y, args, **_):
            at_start = all(map(operator.is_, jax.tree.leaves(y), jax.tree.leaves(parameters)))
            return jnp.asarray(False) if at_start else event(t, y, args)

        return happens

    events: dict[str, Callable[..., Any]] = {"far": is_far}
    if solver == "implicit":
        events["settled"] = after_the_start(is_settled)
    if function.may_mislead:
        events["misled"] = after_the_start(lambda t, y, function: function.is_misled(eqx.combine(y, static)))
    if function.is_bounded:
        events["outside"] = after_the_start(lambda t, y, function: function.is_outside(eqx.combine(y, static)))
    solvers = {
        "stabilised": Chebyshev(),
        "explicit": diffrax.Tsit5(),
        "implicit": diffrax.Kvaerno5(root_finder=diffrax.VeryChord(rtol=rtol, atol=atol)),
    }
    with _without_callbacks():
        # unwrapped, as it is compiled here: y stays the same tree of arrays up to the first question
        return inspect.unwrap(diffrax.diffeqsolve)(
            diffrax.ODETerm(velocity),
            solvers[solver],
            t0=jnp.zeros_like(end),
            t1=end,
            dt0=1e-6
            * end,  # the controller lets it grow tenfold a step; to choose one, two more gradients would compile
            y0=parameters,
            args=function,
            saveat=diffrax.SaveAt(subs=[diffrax.SubSaveAt(ts=times), diffrax.SubSaveAt(t1=True)], dense=dense),
            stepsize_controller=diffrax.PIDController(rtol=rtol, atol=atol, dtmin=1e-13 * end, force_dtmin=False),
            event=diffrax.Event(events),
            max_steps=max_steps,
            throw=False,
            adjoint=diffrax.ForwardMode(),  # what is recorded is never differentiated backwards
        )


@contextlib.contextmanager
def _without_callbacks() -> Iterator[None]:
    """While a flow is traced, Diffrax checks no times: they are checked already, and JAX keeps no program on disk that
    calls Python back.
    """
    module, name = importlib.import_module("equinox._errors"), "EQX_ON_ERROR"
    with _tracing:
        before = getattr(module, name, None)
        setattr(module, name, "off")
        try:
            yield
        finally:
            setattr(module, name, before)


def _happened(solution: "Solution", event: str) -> bool:
    return bool((solution.event_mask or {}).get(event, False))


def _refuse_a_start_too_far(layer: AbstractLayer) -> None:
    size = float(norm(layer))
    if size > _FAR:
        raise ValueError(f"the layer has weights of norm {size:.3g}; a flow must start below {_FAR:g}")


def _ending(solution: "Solution", times: Float[Array, " t"]) -> tuple[Array, Any, Ending, float]:
    """The times reached, the parameters there, how the flow ended, and up to when the solver went."""
    assert solution.ys is not None
    assert solution.ts is not None
    recorded, last = solution.ys
    stopped = float(solution.ts[1][0])
    flat = np.concatenate([np.reshape(leaf, (len(times), -1)) for leaf in jax.tree.leaves(recorded)], axis=1)
    reached = np.isfinite(flat).all(axis=1)
    if reached.all():
        return times, recorded, "completed", stopped
    n = int(np.argmin(reached))  # ys are filled with inf from where the solver stopped
    if _happened(solution, "settled"):
        return times, jax.tree.map(lambda a, b: a.at[n:].set(b[0]), recorded, last), "completed", stopped
    from diffrax import RESULTS

    ending: Ending = "out of steps" if solution.result == RESULTS.max_steps_reached else "diverged"
    if _happened(solution, "outside"):
        ending = "outside the table"
    if n and stopped <= float(times[n - 1]):
        return times[:n], jax.tree.map(lambda leaf: leaf[:n], recorded), ending, stopped
    ended = jnp.append(times[:n], stopped)
    return ended, jax.tree.map(lambda a, b: jnp.concatenate([a[:n], b]), recorded, last), ending, stopped


@eqx.filter_jit
def _record(function: AbstractRisk, layers: AbstractLayer):
    """Risk, norm of its gradient, and their errors, at each recorded time."""
    arrays, static = eqx.partition(layers, eqx.is_inexact_array)

    def at_one_time(arrays):
        layer = eqx.combine(arrays, static)
        (value, gradient), (error, gradient_error) = function.average_with_gradient(layer).finished()
        return value, error, norm(gradient), norm(gradient_error)

    return jax.lax.map(at_one_time, arrays)


def _row(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, tree)
