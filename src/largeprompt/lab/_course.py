import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from largeprompt.attention import AbstractLayer
from largeprompt.dynamics import State
from largeprompt.icl import AbstractRisk, risk_function

from ._run import Run
from ._weights import Matrices, circuits, matrices, with_matrices

_evaluating = threading.Lock()  # runs side by side share one compilation


class Course:
    """What has been recorded of a run so far: for each quantity one array, members first, then recorded steps."""

    def __init__(self, run: Run, start: State):
        self._run, self._start = run, [matrices(layer) for layer in start.layers]
        self._steps = run.record.steps(run.steps)
        self._rows: list[dict[str, np.ndarray]] = []
        self._risks: list[AbstractRisk] | None = None

    @property
    def due(self) -> int | None:
        """The next step to record, if one is left."""
        return int(self._steps[len(self._rows)]) if len(self._rows) < len(self._steps) else None

    @property
    def risk(self) -> tuple[float, ...]:
        """The latest risk of each member."""
        return tuple(float(value) for value in self._rows[-1]["risk"]) if self._rows else ()

    @property
    def steps(self) -> np.ndarray:
        """The steps recorded so far."""
        return self._steps[: len(self._rows)]

    def add(self, state: State) -> None:
        """Record a state; of a member that has diverged nothing is known any more."""
        assert state.step == self.due
        found = [self._quantities(i, layer) for i, layer in enumerate(state.layers)]
        for i, at in enumerate(state.diverged):
            if at is not None:
                found[i] = {name: np.full_like(value, np.nan) for name, value in found[i].items()}
        row = {name: np.stack([one[name] for one in found]) for name in found[0]}
        if "distances" in self._run.record.what and len(found) == 2:
            apart = _distance(*(matrices(layer) for layer in state.layers))
            row["distance"] = np.asarray(np.nan if any(at is not None for at in state.diverged) else apart)
        self._rows.append(row)

    def _quantities(self, i: int, layer: AbstractLayer) -> Matrices:
        named, what = matrices(layer), self._run.record.what
        value, stderr = self._risk(i, layer)
        row = {"risk": value, "risk_stderr": stderr}
        if "norms" in what:
            row["norms"] = np.asarray([np.linalg.norm(matrix) for matrix in named.values()])
        if "distances" in what:
            row["from_start"] = np.asarray(_distance(named, self._start[i]))
        if "parameters" in what:
            row |= named
        return row | (circuits(layer) if "circuits" in what else {})

    def _risk(self, i: int, layer: AbstractLayer) -> tuple[np.ndarray, np.ndarray]:
        with _evaluating:
            if self._risks is None:
                self._risks = risks(self._run)
            found = _value_and_error(self._risks[i], jax.tree.map(jnp.asarray, layer))
            value, stderr = (np.asarray(part, float) for part in found)
        return value, stderr

    def arrays(self) -> dict[str, np.ndarray]:
        """All rows, the recorded steps as first axis."""
        return {name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]} if self._rows else {}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Go on after rows recorded before."""
        length = len(next(iter(arrays.values()))) if arrays else 0
        self._rows = [{name: array[i] for name, array in arrays.items()} for i in range(length)]


def risks(run: Run) -> list[AbstractRisk]:
    """The risk of each member as a function, set up once a run."""
    task, draws = run.task(), run.record.draws
    return [risk_function(_generic(layer), task, run.L, draws=draws) for layer in run.layers()]


def _generic(layer: AbstractLayer) -> AbstractLayer:
    # P = C = 0 holds along a gradient flow but not under the noise of SGD: the function must not count on it
    moved = {name: np.asarray(matrix) + 1e-3 for name, matrix in matrices(layer).items()}
    return jax.tree.map(jnp.asarray, with_matrices(layer, moved))


@eqx.filter_jit
def _value_and_error(function: AbstractRisk, layer: AbstractLayer) -> Any:
    return function.value_and_error(layer)


def _distance(one: Matrices, other: Matrices) -> float:
    return float(np.sqrt(sum(float(np.sum((one[name] - other[name]) ** 2)) for name in one)))
