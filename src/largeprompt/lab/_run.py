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
from largeprompt.attention import AbstractLayer, Head, MultiHead, SoftmaxAttention
from largeprompt.dynamics import AbstractTrainer, Training, structured_start
from largeprompt.icl import LinearRegression, covariance_named, held_tokens, refuse_beyond_memory

from ._record import Record
from ._validity import ATTENTIONS, validated
from ._weights import given_layer, of_kind

# Part of every key: raised when the same settings come to mean another run, or an engine to draw other numbers.
FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run as data; without arguments, the paper's setting at L = 100. Paper: Appendix A.

    `sigma`, `omega` and `query_sigma` are names (`kms:0.5`) or matrices; `omega` is I/d by default. A `pair` trains
    softmax and linear attention from the same weights on the same tokens. `start` is `pytorch`, `structured:ALPHA`
    (Assumption 5.1) or arrays by name. Matrices and arrays are kept as nested tuples.
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
    loss_factor: float = 1.0
    steps: int = 500_000
    weight_seed: int = 0
    data_seed: int = 0
    engine: Literal["auto", "fused", "reference"] = "auto"
    record: Record = dataclasses.field(default_factory=Record)

    def __post_init__(self):
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in validated(settings).items():
            object.__setattr__(self, name, value)
        self.task()
        layer = self._shared_start(draw=False)
        if layer is not None:
            object.__setattr__(self, "outputs", _agreed("outputs", self.outputs, layer.outputs))
        if isinstance(layer, Head | MultiHead):
            head = layer if isinstance(layer, Head) else layer.heads[0]
            object.__setattr__(self, "head_dim", _agreed("head_dim", self.head_dim, head.K.shape[0]))
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
        """The attentions that are trained."""
        return ATTENTIONS[self.attention]

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
            self._layers[is_float64()] = tuple(of_kind(start, kind) for kind in self.members)
        return self._layers[is_float64()]

    @functools.cached_property
    def _layers(self) -> dict[bool, tuple[Any, ...]]:
        """By precision."""
        return {}

    def _shared_start(self, draw: bool = True) -> AbstractLayer | None:
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
        )

    def trainer(self) -> AbstractTrainer:
        """The engine that carries it out."""
        if not is_float64():
            raise ValueError("runs are carried out in float64; call largeprompt.use_float64() first")
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
        return f"{self.attention}, {covariance}, L = {self.L:g}, seed {self.weight_seed}"


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


def _structured(run: Run, alpha: float, Theta: Any) -> SoftmaxAttention:
    with warnings.catch_warnings():  # the range of α is the theorem's, and not needed: see the errata
        warnings.filterwarnings("ignore", message="alpha is")
        start = structured_start(run.task(), alpha, Theta)
    assert isinstance(start, SoftmaxAttention)
    return start


def _covariance(name: str, value: str | Numbers, d: int) -> Any:
    return covariance_named(value, d) if isinstance(value, str) else checks.covariance(name, value, d)


def _agreed(name: str, asked: int | None, found: int) -> int:
    if asked not in (None, found):
        raise ValueError(f"{name} is {asked}; the arrays of the start make it {found}")
    return found
