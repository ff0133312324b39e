"""What a run records on its way: risks, norms, distances and parameters after chosen steps."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from largeprompt._compiled import optimised_jit
from largeprompt._precision import cached
from largeprompt.attention import AbstractLayer
from largeprompt.dynamics import Layers, State
from largeprompt.icl import AbstractRisk, risk_function
from largeprompt.icl._risk._abstract import is_formula

from ._run import Record, Run
from ._weights import Matrices, circuits, matrices

_evaluating, _setting_up = threading.Lock(), threading.Lock()  # runs side by side share one compilation
_TOGETHER = (1, 16, 64)  # layers whose risk is evaluated at once: few numbers of them, since each is compiled
_TOGETHER_ON_GPU = (512, 64, 16, 1)  # the first of these for which there is room


class States(NamedTuple):
    """States of a run after some steps; every array of the layers has these steps first."""

    steps: np.ndarray
    layers: Layers
    diverged: tuple[int | None, ...]


def one_state(state: State) -> States:
    """One state as an array of one."""
    layers = jax.tree.map(lambda leaf: np.asarray(leaf)[None] if eqx.is_array(leaf) else leaf, state.layers)
    return States(np.array([state.step]), layers, state.diverged)


class History:
    """What has been recorded of a run so far: for each quantity one array, recorded steps first, then members."""

    def __init__(self, run: Run, start: State):
        self.run, self._start = run, [matrices(layer) for layer in start.layers]
        self.setting = _setting(run)
        self._steps = run.record.steps(run.steps)
        self._blocks: list[dict[str, np.ndarray]] = []
        self._count = 0

    @property
    def due(self) -> int | None:
        """The next step to record, if one is left."""
        return int(self._steps[self._count]) if self._count < len(self._steps) else None

    @property
    def all_due(self) -> np.ndarray:
        """Every step that is left to record."""
        return self._steps[self._count :]

    @property
    def risk(self) -> tuple[float, ...]:
        """The latest risk of each member."""
        return tuple(float(value) for value in self._blocks[-1]["risk"][-1]) if self._blocks else ()

    @property
    def steps(self) -> np.ndarray:
        """The steps recorded so far."""
        return self._steps[: self._count]

    def add(self, state: State) -> None:
        """Record a state."""
        states = one_state(state)
        ((risk, stderr),) = risks_of([self], [states])
        self.extend(states, risk, stderr)

    def extend(self, states: States, risk: np.ndarray, stderr: np.ndarray) -> None:
        """Record some states with the risks of their members; after a divergence all is NaN."""
        n, what = len(states.steps), self.run.record.what
        assert np.array_equal(states.steps, self.all_due[:n])
        if n == 0:
            return
        found, named = [], [self._matrices(layer) for layer in states.layers]
        for i, (layer, own) in enumerate(zip(states.layers, named, strict=True)):
            block = {"risk": risk[:, i], "risk_stderr": stderr[:, i]}
            if "norms" in what:
                block["norms"] = np.stack([_norm(matrix) for matrix in own.values()], axis=1)
            if "distances" in what:
                block["from_start"] = _distance(own, self._start[i])
            if "parameters" in what:
                block |= own
            if "circuits" in what:
                block |= circuits(layer, self.run.heads)
            gone = _gone(states, i)
            found.append({name: _without(gone, values) for name, values in block.items()})
        rows = {name: np.stack([one[name] for one in found], axis=1) for name in found[0]}
        if "distances" in what and len(found) == 2:
            rows["distance"] = _without(_gone(states, 0) | _gone(states, 1), _distance(*named))
        self._blocks.append(rows)
        self._count += n

    def _matrices(self, layers: Any) -> Matrices:
        """The matrices of many layers with those first, not the heads."""
        named = matrices(layers)
        return named if self.run.heads == 1 else {name: np.moveaxis(stack, 0, 1) for name, stack in named.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """All rows, the recorded steps as first axis."""
        if not self._blocks:
            return {}
        if len(self._blocks) > 1:
            joined = {name: np.concatenate([block[name] for block in self._blocks]) for name in self._blocks[0]}
            self._blocks = [joined]
        return self._blocks[0]

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Take up rows that were recorded before."""
        self._count = len(next(iter(arrays.values()))) if arrays else 0
        self._blocks = [arrays] if self._count else []


def risks_of(histories: Sequence[History], states: Sequence[States], gpu: Any = None) -> list[np.ndarray]:
    """Risks and standard errors of states of several runs, for each an array of both, then steps, then members.

    Those that share a task, a length and a shape are evaluated together, by JAX's default device or by the GPU given.
    """
    values = [np.zeros((2, len(some.steps), len(some.layers))) for some in states]
    groups: dict[Run, list[int]] = {}
    for i, (history, some) in enumerate(zip(histories, states, strict=True)):
        if len(some.steps):
            groups.setdefault(history.setting, []).append(i)
    for setting, members in groups.items():
        for member in range(len(setting.members)):
            layers = [states[i].layers[member] for i in members]
            stack = jax.tree.map(_joined, *layers)
            found = _evaluated_on(gpu, setting, member, stack, sum(len(states[i].steps) for i in members))
            at = 0
            for i in members:
                n = len(states[i].steps)
                values[i][:, :, member] = found[:, at : at + n]
                at += n
    return values


def warm_up(setting: Run, gpu: Any) -> None:
    """Compile what evaluates many risks of a setting at once, for the GPU given."""
    start = one_state(State(0, setting.layers(), ()))
    for member, layer in enumerate(start.layers):
        _evaluated_on(gpu, setting, member, layer, 1)


def _evaluated_on(gpu: Any, setting: Run, member: int, stack: AbstractLayer, n: int) -> np.ndarray:
    with _evaluating, jax.default_device(gpu) if gpu else contextlib.nullcontext():
        functions = risks(setting) if gpu is None else _on_gpu(setting, gpu)
        return _evaluated(
            functions[member], stack, n, _TOGETHER if gpu is None else (_most_on_gpu(functions[member], gpu),)
        )


def _most_on_gpu(function: AbstractRisk, gpu: Any) -> int:
    """How many layers at once: what they take for a while is about twice the numbers of the function for each."""
    there = (gpu.memory_stats() or {}).get("bytes_limit", 2**32)
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(function, eqx.is_array)))
    return next((n for n in _TOGETHER_ON_GPU if 4 * n * own <= there), 1)


def _joined(*leaves: Any) -> Any:
    return np.concatenate(leaves) if eqx.is_array(leaves[0]) else leaves[0]


def _evaluated(function: AbstractRisk, stack: AbstractLayer, n: int, together: tuple[int, ...]) -> np.ndarray:
    """Risks and standard errors of a stack of n layers, in groups of one size."""
    size = 1 if function.streamed else next((size for size in together if size >= n), together[-1])
    found = []
    for first in range(0, n, size):
        value, error = _values_and_errors(function, _part(stack, np.minimum(np.arange(first, first + size), n - 1)))
        found.append(np.stack([np.broadcast_to(np.asarray(one, float), size) for one in (value, error)]))
    return np.concatenate(found, axis=1)[:, :n]


def _part(stack: AbstractLayer, taken: np.ndarray) -> AbstractLayer:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[taken]) if eqx.is_array(leaf) else leaf, stack)


@functools.partial(optimised_jit, unless=is_formula)
def _values_and_errors(function: AbstractRisk, layers: AbstractLayer) -> Any:
    return eqx.filter_vmap(lambda layer: function.value_and_error(layer))(layers)


def _setting(run: Run) -> Run:
    """What the risk of a run depends on."""
    same: Any = {"steps": 0, "rate": 1.0, "loss_factor": 1.0, "batch": 1, "weight_seed": 0, "data_seed": 0}
    return dataclasses.replace(run, optimiser="sgd", record=Record(draws=run.record.draws), **same)


def risks(setting: Run) -> list[AbstractRisk]:
    """The risk of each member as a function, set up once for each setting."""
    with _setting_up:
        return _risks(setting)


@cached(maxsize=512)
def _risks(setting: Run) -> list[AbstractRisk]:
    task, draws = setting.task(), setting.record.draws
    return [risk_function(_generic(layer), task, setting.L, draws=draws) for layer in setting.layers()]


@cached(maxsize=512)
def _on_gpu(setting: Run, gpu: Any) -> list[AbstractRisk]:
    with jax.default_device(jax.devices("cpu")[0]):  # many small operations
        functions = risks(setting)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, gpu) if eqx.is_array(leaf) else leaf, functions)


def _generic(layer: Any) -> AbstractLayer:
    # P = C = 0 holds along a gradient flow but not under the noise of SGD: the function must not count on it
    moved = {name: np.asarray(matrix) + 1e-3 for name, matrix in matrices(layer).items()}
    return jax.tree.map(jnp.asarray, layer.with_parameters(moved))


def _gone(states: States, i: int) -> np.ndarray:
    at = states.diverged[i]
    return states.steps > at if at is not None else np.zeros(len(states.steps), bool)


def _without(gone: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(gone.reshape(-1, *(1,) * (values.ndim - 1)), np.nan, values) if gone.any() else values


def _norm(matrix: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(matrix**2, axis=tuple(range(1, matrix.ndim))))


def _distance(one: Matrices, other: Matrices) -> np.ndarray:
    return np.sqrt(sum(_norm(one[name] - other[name]) ** 2 for name in one))
