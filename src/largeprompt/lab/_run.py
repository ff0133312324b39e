"""One training run as data: its settings, checked, what they stand for, and the key of its results."""

import dataclasses
import functools
import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, cast

import jax
import numpy as np

from largeprompt import _checks as checks
from largeprompt._precision import cached, is_float64
from largeprompt._typing import Numbers
from largeprompt.attention import AbstractLayer, Head, MultiHead, known_kinds
from largeprompt.dynamics import AbstractTrainer, Training, optimiser_named, structured_start
from largeprompt.icl import LinearRegression, covariance_named, held_tokens, refuse_beyond_memory

from ._lengths import length_from
from ._settings import COVARIANCES, Table, toml_lines
from ._weights import FORMS, given_layer

# Part of every key: raised when the same settings come to mean another run, or an engine to draw other numbers.
FORMAT = 2
ENGINES = ("auto", "fused", "reference")
PAIR = ("softmax", "linear")
QUANTITIES = ("norms", "distances", "parameters", "circuits")


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run records, and at which steps: the first, the last, log-spaced ones and every n-th.

    Always the risk, exact wherever a closed form exists; of `what` any of `norms` of the matrices, `distances` (of
    softmax to linear attention in a pair, and to the start), `parameters`, and `circuits` (U = s KᵀQ and OV). `draws`
    is the number of nodes or prompts where the risk must be averaged over some.
    """

    what: tuple[str, ...] = ("norms", "distances", "parameters")
    points: int = 100
    every: int | None = None
    draws: int = 2**15

    def __post_init__(self):
        what: Any = self.what
        names = (what,) if isinstance(what, str) else tuple(what)
        for name in names:
            if name not in QUANTITIES:
                raise ValueError(f"record.what is {name!r}; it must be among {', '.join(QUANTITIES)}")
        object.__setattr__(self, "what", tuple(name for name in QUANTITIES if name in names))
        object.__setattr__(self, "points", checks.count("record.points", self.points, at_least=0))
        object.__setattr__(self, "draws", checks.count("record.draws", self.draws, at_least=2))
        if self.every is not None:
            object.__setattr__(self, "every", checks.count("record.every", self.every))

    def steps(self, last: int) -> np.ndarray:
        """The steps at which a run of `last` steps is recorded, in order; 0 is the start."""
        spaced = np.geomspace(1, last, self.points).round() if self.points and last else np.empty(0)
        regular = np.arange(0, last, self.every) if self.every else np.empty(0)
        return np.unique(np.concatenate([[0, last], spaced, regular]).astype(np.int64))


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run as data; without arguments, the paper's setting at L = 100. Paper: Appendix A.

    `attention` is the name of any kind, or `pair`: softmax and linear attention from the same weights on the same
    tokens. `sigma`, `omega` and `query_sigma` are names (`kms:0.5`) or matrices; `omega` is I/d by default. `start` is
    `pytorch`, `structured:ALPHA` (Assumption 5.1) or arrays by name. Matrices and arrays are kept as nested tuples.
    `optimiser` is `sgd`, `momentum:BETA` or `adam:BETA1,BETA2,EPSILON`; numbers left out are filled in.
    """

    L: int | float = 100
    attention: str = "pair"
    sigma: str | Numbers = "identity"
    d: int | None = None
    noise: float = 0.1
    omega: str | Numbers | None = None
    query_sigma: str | Numbers | None = None
    parameters: str = "KQVO"
    heads: int = 1
    head_dim: int | None = None
    outputs: int | None = None
    score_scale: float = 1.0
    start: str | Mapping[str, Any] | tuple[tuple[str, Any], ...] = "pytorch"
    batch: int = 128
    rate: float = 1e-3
    optimiser: str = "sgd"
    loss_factor: float = 1.0
    steps: int = 500_000
    weight_seed: int = 0
    data_seed: int = 0
    engine: Literal["auto", "fused", "reference"] = "auto"
    record: Record = dataclasses.field(default_factory=Record)

    def __post_init__(self):
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in _validated(settings).items():
            object.__setattr__(self, name, value)
        self.task()
        layer = self._shared_start(draw=False)
        if layer is not None:
            object.__setattr__(self, "outputs", _agreed("outputs", self.outputs, layer.outputs))
        if layer is not None and self.parameters == "KQVO":
            object.__setattr__(self, "head_dim", _agreed("head_dim", self.head_dim, layer.parameters["K"].shape[-2]))
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.dim if self.dim % self.heads else self.dim // self.heads)
        if self.outputs is None:
            object.__setattr__(self, "outputs", self.dim)

    @property
    def dim(self) -> int:
        """Dimension of a token."""
        assert self.d is not None
        return self.d + 1

    @property
    def members(self) -> tuple[str, ...]:
        """The kinds of attention that are trained, side by side."""
        return PAIR if self.attention == "pair" else (self.attention,)

    def task(self) -> LinearRegression:
        """What is learned, in the precision of the moment."""
        assert self.d is not None
        given: Any = (self.sigma, self.noise, self.omega, self.query_sigma, self.d)  # matrices as nested tuples
        return _task(*given)

    def layers(self) -> tuple[Any, ...]:
        """The layers before the first step, one for each member."""
        if is_float64() not in self._layers:
            start = self._shared_start()
            assert start is not None
            self._layers[is_float64()] = tuple(start.with_kind(kind) for kind in self.members)
        return self._layers[is_float64()]

    @functools.cached_property
    def _layers(self) -> dict[bool, tuple[Any, ...]]:
        """By precision."""
        return {}

    def _shared_start(self, draw: bool = True) -> Any:
        """The layer that all members start from, of softmax attention; None where it is random and not to be drawn."""
        if isinstance(self.start, tuple):
            arrays = dict(self.start)
            if "alpha" in arrays:
                return _structured(self, arrays["alpha"], arrays.get("Theta"))
            return given_layer(arrays, self.parameters, self.dim, self.heads, self.score_scale)
        if str(self.start).startswith("structured:"):
            return _structured(self, float(str(self.start).partition(":")[2]), None)
        if not draw:
            return None
        options: Any = {"head_dim": self.head_dim, "outputs": self.outputs, "scale": self.score_scale}
        key = jax.random.key(self.weight_seed)
        if self.heads > 1:
            return MultiHead.pytorch_default(key, self.dim, self.heads, **options)
        head = Head.pytorch_default(key, self.dim, **options)
        return head.merged() if self.parameters == "UV" else head

    def training(self) -> Training:
        """The descent."""
        return Training(
            self.task(),
            self.L,
            batch=self.batch,
            rate=self.rate,
            loss_factor=self.loss_factor,
            seed=self.data_seed,
            optimiser=optimiser_named(self.optimiser),
        )

    def trainer(self) -> AbstractTrainer:
        """The engine that runs it."""
        if not is_float64():
            raise ValueError("training runs in float64; call largeprompt.use_float64() first")
        from largeprompt.engine import trainer_for  # imports a compiler, which settings do not need

        if self.heads > 1:  # the risk of several heads is an average over prompts
            refuse_beyond_memory(held_tokens(self.layers(), self.task(), self.L), self.dim)
        return trainer_for(self.training(), self.layers(), self.engine)

    @functools.cached_property
    def resolved(self) -> "Run":
        """The same run with its engine named: another engine draws other random numbers."""
        return self if self.engine != "auto" else dataclasses.replace(self, engine=cast(Any, self.trainer().name))

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain data, ready for JSON, with `inf` as text."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        settings["record"] = dict(vars(self.record))
        if self.optimiser == "sgd":  # runs had no other once, and keep their keys
            del settings["optimiser"]
        if isinstance(self.start, tuple):
            settings["start"] = dict(self.start)
        if math.inf == self.L:
            settings["L"] = "inf"
        return settings

    @functools.cached_property
    def canonical(self) -> str:
        """The settings with the engine named, as JSON in one fixed spelling: the key is a hash of this text."""
        settings = {"format": FORMAT, **self.resolved.as_dict()}
        return json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @functools.cached_property
    def key(self) -> str:
        """The SHA-256 of the canonical settings: equal settings have equal keys, on every machine."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The title with the first letters of the key, which no other run of a sweep shares."""
        return f"{self.key[:8]} {self.title}"

    @property
    def title(self) -> str:
        """A few words for a progress bar."""
        covariance = self.sigma if isinstance(self.sigma, str) else "given Σ"
        optimiser = "" if self.optimiser == "sgd" else f"{self.optimiser}, "
        return f"{self.attention}, {covariance}, L = {self.L:g}, {optimiser}seed {self.weight_seed}"


def twin(run: Run, **settings: Any) -> Run:
    """The same run with other seeds, or with its engine named: nothing that would have to be checked again."""
    other = object.__new__(Run)
    for name in _FIELDS:  # one by one, so that a million of them share their keys
        object.__setattr__(other, name, settings[name] if name in settings else getattr(run, name))
    return other


_FIELDS = tuple(field.name for field in dataclasses.fields(Run))


@cached(maxsize=4096)  # the runs of a sweep share few, and checking a covariance takes long
def _task(sigma: Any, noise: float, omega: Any, query_sigma: Any, d: int) -> LinearRegression:
    of_weights = np.eye(d) / d if omega is None else _covariance("omega", omega, d)
    query = None if query_sigma is None else _covariance("query_sigma", query_sigma, d)
    return LinearRegression(_covariance("sigma", sigma, d), noise, of_weights, query)


def _structured(run: Run, alpha: float, Theta: Any) -> AbstractLayer:
    with warnings.catch_warnings():  # the range of α is the theorem's, and not needed: see the errata
        warnings.filterwarnings("ignore", message="alpha is")
        return structured_start(run.task(), alpha, Theta)


def _covariance(name: str, value: str | Numbers, d: int) -> Any:
    if not isinstance(value, str):
        return checks.covariance(name, value, d)
    try:
        return covariance_named(value, d)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _agreed(name: str, asked: int | None, found: int) -> int:
    if asked not in (None, found):
        raise ValueError(f"{name} is {asked}; the arrays of the start make it {found}")
    return found


def as_toml(run: Run) -> str:
    """A file that makes this run."""
    settings = run.as_dict()
    tables = {name: settings.pop(name) for name in ("record", "start") if isinstance(settings[name], dict)}
    lines = toml_lines(settings)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *toml_lines(table)]
    return "\n".join(lines) + "\n"


def record_from(settings: Any) -> Record:
    """The record that a table describes."""
    if isinstance(settings, Record):
        return settings
    names = tuple(field.name for field in dataclasses.fields(Record))
    if not isinstance(settings, Mapping):
        raise ValueError(f"record is {settings!r}; it must be a table with {', '.join(names)}")
    Table("record", settings).holds(*names)
    return Record(**settings)


def _validated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run in their own types, the dimension filled in."""
    table = Table("", settings)
    found: dict[str, Any] = {
        **settings,
        "L": length_from(settings["L"]),
        "attention": table.choice("attention", [*known_kinds(), "pair"]),
        "parameters": table.choice("parameters", FORMS),
        "engine": table.choice("engine", ENGINES),
        "noise": table.number("noise", at_least=0),
        "start": _start(settings["start"]),
        "optimiser": str(optimiser_named(settings["optimiser"])),
    }
    found |= {name: table.number(name, above=0) for name in ("score_scale", "rate", "loss_factor")}
    found |= {name: table.count(name) for name in ("heads", "batch")}
    found |= {name: table.count(name) for name in ("d", "head_dim", "outputs") if settings[name] is not None}
    found |= {name: table.count(name, at_least=0) for name in ("weight_seed", "data_seed")}
    found |= {"steps": table.count("steps", at_least=0, below=2**32)}
    found |= {name: _matrix_or_name(name, settings[name]) for name in COVARIANCES}
    if not isinstance(settings["record"], Record):
        raise ValueError(f"record is {settings['record']!r}; it must be a Record")
    if found["d"] is None:
        found["d"] = 5 if isinstance(found["sigma"], str) else len(found["sigma"])
    _refuse_contradictions(found)
    return found


def _matrix_or_name(name: str, value: Any) -> Any:
    if isinstance(value, str) or (value is None and name != "sigma"):
        return value
    matrix = _as_nested(name, value)
    if np.ndim(matrix) != 2:
        raise ValueError(f"{name} is {value!r}; it must be a name such as kms:0.5, or a matrix")
    return matrix


def _as_nested(name: str, value: Any) -> Any:
    """An array as nested tuples of numbers, which compare, hash and print as what they are."""
    try:
        shape = np.shape(value)
    except ValueError:
        raise ValueError(f"{name} is not an array: its rows differ in length") from None
    checks.array(name, value, shape)  # what it returns is rounded where JAX computes in float32
    return _tuples(np.asarray(value, float).tolist())


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _start(value: Any) -> str | tuple[tuple[str, Any], ...]:
    wanted = "it must be pytorch, structured:ALPHA, or arrays in a table, an .npz or an .npy file"
    if isinstance(value, Mapping | tuple):
        arrays = dict(value)
        if "alpha" in arrays and not set(arrays) <= {"alpha", "Theta"}:
            raise ValueError(f"start has the keys {', '.join(sorted(arrays))}; beside alpha it may have Theta only")
        return tuple((key, _as_nested(f"start.{key}", arrays[key])) for key in sorted(arrays))
    if value == "pytorch":
        return value
    kind, _, text = value.partition(":") if isinstance(value, str) else ("", "", "")
    try:
        alpha = float(text or 0.3)
    except ValueError:
        alpha = math.nan
    if kind != "structured" or not math.isfinite(alpha):
        raise ValueError(f"start is {value!r}; {wanted}")
    return f"structured:{alpha!r}"


def _refuse_contradictions(found: dict[str, Any]) -> None:
    start, dim, parameters = found["start"], found["d"] + 1, found["parameters"]
    if found["outputs"] not in (None, 1, dim):
        raise ValueError(f"outputs is {found['outputs']}; it must be 1, or {dim} of which the last counts")
    if parameters == "UV" and found["heads"] > 1:
        raise ValueError(f"heads is {found['heads']}; with parameters = 'UV' it must be 1")
    if parameters == "UV" and found["score_scale"] != 1:
        raise ValueError(
            f"score_scale is {found['score_scale']:g}; with parameters = 'UV' U holds it, and it must be 1"
        )
    structured = start.startswith("structured") if isinstance(start, str) else "alpha" in dict(start)
    if structured and parameters != "UV":
        raise ValueError(f"parameters is {parameters!r}; the start of Assumption 5.1 needs parameters = 'UV'")
