"""Trained at one length, used at another: risks of layers on prompts and tasks that they were not trained for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import equinox as eqx
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractTable, axes, heat_map, length_text
from largeprompt._progress import Progress
from largeprompt.attention import AbstractLayer, Kind, kind_of

from ._optimal_linear import optimal_linear
from ._optimal_softmax import optimal_softmax
from ._regression import LinearRegression
from ._risk._estimates import risk
from ._task import AbstractTask, as_predictor, as_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import Dataset

Length = int | float
Layers = Mapping[str, Mapping[Any, AbstractLayer]]  # by name and length of training
_OPTIMA = {"softmax": optimal_softmax, "linear": optimal_linear}
RATIO = "risk over the least risk of the test"
_ROUNDING = 1e-12  # of the risk: an excess below it is none


class Generalisation(AbstractTable):
    r"""Risks by attention, length of training, test and length of test, beside the least risk of each test.

    `optimum` is that of one head of the same attention at the length of the test, on its task; NaN where it is not
    known. A layer that was not given has the risk NaN.
    """

    attention: tuple[str, ...] = eqx.field(static=True)
    trained_at: tuple[Length, ...] = eqx.field(static=True)
    tests: tuple[str, ...] = eqx.field(static=True)
    tested_at: tuple[Length, ...] = eqx.field(static=True)
    risk: Float[np.ndarray, "a t k l"]
    stderr: Float[np.ndarray, "a t k l"]
    optimum: Float[np.ndarray, "a k l"]

    @property
    def excess(self) -> Float[np.ndarray, "a t k l"]:
        """The risk above the least one of the test."""
        return self.risk - self.optimum[:, None]

    @property
    def ratio(self) -> Float[np.ndarray, "a t k l"]:
        """The risk over the least one of the test: 1 for a layer that is best there, also where both are 0."""
        best, least = self.excess <= _ROUNDING * np.abs(self.risk), self.optimum[:, None]
        nothing = least <= _ROUNDING * np.abs(self.risk)  # but for rounding
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(best, 1.0, np.where(nothing, np.inf, self.risk / least))

    def to_dataset(self) -> "Dataset":
        import xarray as xr  # a second of imports that only a reader of results needs

        dims, best = ("attention", "trained_at", "test", "tested_at"), ("attention", "test", "tested_at")
        lengths = {name: np.asarray(getattr(self, name), float) for name in ("trained_at", "tested_at")}
        names = {"attention": list(self.attention), "test": list(self.tests)}
        found = {name: (dims, getattr(self, name)) for name in ("risk", "excess", "ratio")}
        found |= {"risk_stderr": (dims, self.stderr), "optimum": (best, self.optimum)}
        return xr.Dataset(found, names | lengths, {"risk": "half the mean squared error"})

    def plot(self, ax: "Axes | None" = None, attention: str | None = None, test: str | None = None) -> "Axes":
        """Draw the map of one attention on one test: the risk over the least one there, or the risk itself."""
        i, k = _place("attention", attention, self.attention), _place("test", test, self.tests)
        values, what = self.ratio[i, :, k], RATIO
        if np.isnan(self.optimum[i, k]).all():
            values, what = self.risk[i, :, k], "risk"
        ax = axes(ax)
        rows, columns = ([length_text(L) for L in lengths] for lengths in (self.trained_at, self.tested_at))
        image = heat_map(ax, values, rows, columns)
        title = ", ".join(name for name in (self.attention[i], self.tests[k]) if name)
        ax.set(xlabel="length of the test", ylabel="length of training", title=title)
        ax.figure.colorbar(image, ax=ax, label=what)
        return ax

    def _rows(self) -> tuple[str, list[str], list[list[str]]]:
        shown, what = self.ratio, RATIO
        if np.isnan(self.optimum).any():
            shown, what = self.risk, "risk"
        named = self.tests != ("",)
        rows = [
            [name, length_text(trained), *([test] if named else []), *(f"{value:.4g}" for value in shown[i, j, k])]
            for i, name in enumerate(self.attention)
            for k, test in enumerate(self.tests)
            for j, trained in enumerate(self.trained_at)
            if not np.isnan(self.risk[i, j, k]).all()
        ]
        names = ["attention", "trained at", *(["test"] if named else []), *map(length_text, self.tested_at)]
        return f"Generalisation ({what})", names, rows


def _place(what: str, name: str | None, names: Sequence[str]) -> int:
    """Where a name stands; without one, the first."""
    if name is not None and name not in names:
        raise ValueError(f"{what} is {name!r}; it must be one of {', '.join(names)}")
    return 0 if name is None else names.index(name)


def optimal_layers(
    task: LinearRegression, lengths: Iterable[Length], attention: Iterable[str] = ("softmax", "linear")
) -> dict[str, dict[Length, AbstractLayer]]:
    """The best layers of each length, by attention: what training at these lengths can reach."""
    lengths = [checks.prompt_length(L) for L in lengths]
    for kind in (attention := list(attention)):
        if kind not in _OPTIMA:
            raise ValueError(f"attention is {kind!r}; it must be {' or '.join(get_args(Kind))}")
    return {kind: {L: _OPTIMA[kind](task, L).attention for L in lengths} for kind in attention}


def generalisation(
    layers: Layers,
    tests: AbstractTask | Mapping[str, AbstractTask],
    lengths: Iterable[Length],
    key: PRNGKeyArray | None = None,
    *,
    rtol: float = 1e-3,
    progress: Progress | None = None,
) -> Generalisation:
    """Risks of `layers`, by name and length of training, on prompts of other `lengths` and of one or more `tests`.

    A test is a task: other noise, covariances, queries or coefficients make another one. Risks are those of `risk`,
    exact where that is. `layers` are those of `optimal_layers`, the ends of flows or of runs, or any others; those of
    one name are of one kind of attention.
    """
    if not isinstance(tests, AbstractTask | Mapping):
        raise ValueError(f"tests is of type {type(tests).__name__}; it must be a task, or tasks by name")
    named = {name: as_task(task) for name, task in tests.items()} if isinstance(tests, Mapping) else {"": tests}
    tested = _increasing("lengths", lengths)
    kinds = {name: _kind(name, given, named) for name, given in layers.items()}
    if not named or not layers:
        raise ValueError(f"there are {len(layers)} names of layers and {len(named)} tests; there must be one of each")
    trained = _increasing("the lengths of training", {L for given in layers.values() for L in given})
    shape = (len(layers), len(trained), len(named), len(tested))
    risks, errors, optima = np.full(shape, np.nan), np.full(shape, np.nan), np.full((shape[0], *shape[2:]), np.nan)
    with (progress or Progress()).task("risks", len(named) * len(tested)) as advance:
        for k, task in enumerate(named.values()):
            for m, L in enumerate(tested):
                for i, (name, given) in enumerate(layers.items()):
                    if kinds[name] in _OPTIMA and type(task) is LinearRegression:
                        optima[i, k, m] = float(_OPTIMA[kinds[name]](task, L).risk.value)
                    for length, layer in given.items():
                        found = risk(layer, task, L, key, rtol=rtol)
                        place = i, trained.index(checks.prompt_length(length)), k, m
                        risks[place], errors[place] = float(found.value), float(found.stderr)
                advance(1, f"L = {length_text(L)}")
    return Generalisation(tuple(map(str, layers)), trained, tuple(map(str, named)), tested, risks, errors, optima)


def _increasing(name: str, lengths: Iterable[Length]) -> tuple[Length, ...]:
    """Prompt lengths from the shortest to the longest, each once."""
    found = tuple(sorted({checks.prompt_length(L) for L in lengths}))
    if not found:
        raise ValueError(f"{name} is empty; there must be at least one length")
    return found


def _kind(name: str, given: object, tests: Mapping[str, AbstractTask]) -> str:
    """The kind of the layers of one name, empty where it has no optimum; every layer must fit every test."""
    if not isinstance(given, Mapping):
        raise ValueError(f"layers[{name!r}] is a {type(given).__name__}; it must map lengths of training to layers")
    kinds = {kind_of(as_predictor(layer, task)) or "" for layer in given.values() for task in tests.values()}
    if len(kinds) > 1:
        raise ValueError(f"layers[{name!r}] are of several kinds of attention; give each kind a name of its own")
    return next(iter(kinds), "")
