"""TabPFN v1 with the interface of scikit-learn, which is not needed, and with what its predictions rest on."""

import inspect
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from largeprompt import _checks as checks
from largeprompt._progress import Progress
from largeprompt.models.sensitivity import error_bars, influence

from ._intervals import InfluentialRows, Intervals
from ._members import members_of
from ._network import TabPFN
from ._prompt import Output, TablePrompt

_TOKENS = {"cpu": 8_000, "cuda": 200_000}  # rows of a table, times members, that are run at a time with derivatives
_ROWS = 1_000  # rows that are predicted at a time


class TabPFNClassifier:
    """TabPFN v1 as a classifier: the table is the prompt, and `fit` trains nothing.

    `members` are the published ways to see a table, over whose logits it averages. The weights come from a given
    `network` or from a `checkpoint` file, as `TabPFN.load` finds it. It fits where scikit-learn takes an estimator.
    """

    _estimator_type = "classifier"

    def __init__(
        self,
        members: int = 3,
        *,
        seed: int = 0,
        device: str = "cpu",
        checkpoint: str | Path | None = None,
        fetch: bool = False,
        network: TabPFN | None = None,
    ):
        self.members, self.seed, self.device = members, seed, device
        self.checkpoint, self.fetch, self.network = checkpoint, fetch, network

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> "TabPFNClassifier":
        """Change arguments of the constructor."""
        for name, value in params.items():
            if name not in self.get_params():
                raise ValueError(f"there is no parameter {name!r}; they are {', '.join(self.get_params())}")
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(allow_nan=True),
        )

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        own = {name: value for name, value in self.get_params().items() if value is not defaults[name].default}
        shown = {name: type(value).__name__ if name == "network" else repr(value) for name, value in own.items()}
        return f"TabPFNClassifier({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def fit(self, X: Any, y: Any) -> "TabPFNClassifier":
        """Keep the labelled rows: numbers (categories as codes, NaN where missing) and their classes."""
        checks.count("members", self.members)
        checks.count("seed", self.seed, at_least=0)
        self.network_ = self._network()
        values = _numbers("X", X)
        labels = np.asarray(y)
        if labels.shape != (len(values),):
            raise ValueError(f"y has shape {labels.shape}; it must be ({len(values)},), one class for each row of X")
        if labels.dtype.kind == "f" and not np.isfinite(labels).all():
            raise ValueError(f"y[{np.flatnonzero(~np.isfinite(labels))[0]}] is not a number; every row needs its class")
        try:
            self.classes_, codes = np.unique(labels, return_inverse=True)
        except TypeError:
            kinds = ", ".join(sorted({type(label).__name__ for label in labels.tolist()}))
            raise ValueError(f"y has classes of the types {kinds}; they must be of one, and none missing") from None
        self.n_features_in_ = values.shape[1]
        if len(self.classes_) < 2:
            raise ValueError(f"y has the one class {self.classes_[0]!r}; there must be at least two")
        for count, most, what in (
            (len(self.classes_), self.network_.classes, "y has {} classes"),
            (self.n_features_in_, self.network_.features, "X has {} columns"),
        ):
            if count > most:
                raise ValueError(f"{what.format(count)}; TabPFN reads at most {most}")
        self._table, self._codes = values, codes
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities of rows, in the order of `classes_`."""
        values = self._rows(X)
        found = []
        for part in np.split(values, range(_ROWS, len(values), _ROWS)):
            prompt = self._prompt(part)
            with torch.no_grad():
                logits = prompt.logits(torch.zeros(1, prompt.groups))[0]
            found.append(logits.double().softmax(dim=-1).cpu().numpy())
        return np.concatenate(found)

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each row."""
        likely = self.predict_proba(X).argmax(axis=1)
        return self.classes_[likely]

    def score(self, X: Any, y: Any) -> float:
        """The share of rows whose class is predicted."""
        predicted, true = self.predict(X), np.asarray(y)
        if predicted.shape != true.shape:
            raise ValueError(f"y has shape {true.shape}; it must be {predicted.shape}, one class for each row of X")
        return float(np.mean(predicted == true))

    def weighted_prompt(self, X: Any, *, of: Output = "logits", chosen: Any = None) -> TablePrompt:
        """Outputs for rows as a function of weights on the labelled rows: logits of all classes, row by row.

        `of="log-odds"` gives log p/(1 - p) instead; `chosen` takes some, as pairs (row, class) of places.
        """
        values = self._rows(X)
        pairs = None if chosen is None else np.asarray(chosen, dtype=int).reshape(-1, 2)
        if pairs is not None:
            most = np.array([len(values), len(self.classes_)])
            if not len(pairs) or pairs.min() < 0 or (pairs >= most).any():
                raise ValueError(f"chosen is {chosen}; pairs are (row, class), below ({most[0]}, {most[1]})")
        return self._prompt(values, of=of, chosen=pairs)

    def predict_interval(
        self,
        X: Any,
        level: float = 0.9,
        *,
        method: str = "auto",
        draws: int = 100,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Intervals:
        """Class probabilities of rows with intervals over redraws of the labelled rows, from these rows alone."""
        prompt = self.weighted_prompt(X, of="log-odds")
        options: Any = {"level": level, "method": method, "draws": draws, "seed": seed, "progress": progress}
        bars = error_bars(prompt, **options, batch=self.batch(prompt))
        return Intervals(bars, tuple(map(str, self.classes_)))

    def influential_rows(self, X: Any, k: int = 10, *, progress: Progress | None = None) -> InfluentialRows:
        """The k labelled rows that carry the prediction of each row, by the influence on its likeliest class."""
        k = min(checks.count("k", k), len(self._table) if self.__sklearn_is_fitted__() else 1)
        likely = self.predict_proba(X).argmax(axis=1)
        prompt = self.weighted_prompt(X, of="log-odds", chosen=list(enumerate(likely)))
        change = influence(prompt, batch=self.batch(prompt), progress=progress).left_out
        rows = np.argsort(-np.abs(change), axis=1, kind="stable")[:, :k]
        names = tuple(str(self.classes_[c]) for c in likely)
        return InfluentialRows(rows, np.take_along_axis(change, rows, axis=1), names)

    def batch(self, prompt: TablePrompt) -> int:
        """How many prompts are run at a time."""
        tokens = _TOKENS.get(torch.device(self.device).type, _TOKENS["cpu"])
        return max(1, min(64, tokens // (prompt.tokens * self.members)))

    def _network(self) -> TabPFN:
        try:
            torch.zeros(1, device=self.device)
        except (RuntimeError, AssertionError) as error:  # the second where PyTorch was built without it
            said = str(error).splitlines()[0][:120]
            raise ValueError(f"device is {self.device!r}, which PyTorch does not have here ({said})") from None
        network = self.network if self.network is not None else _loaded(self.checkpoint, self.fetch)
        return network.to(self.device)

    def _rows(self, X: Any) -> np.ndarray:
        if not self.__sklearn_is_fitted__():
            raise ValueError("the classifier has no labelled rows yet; call fit(X, y) first")
        values = _numbers("X", X)
        if values.shape[1] != self.n_features_in_:
            raise ValueError(f"X has {values.shape[1]} columns; the labelled rows have {self.n_features_in_}")
        return values

    def _prompt(self, values: np.ndarray, **options: Any) -> TablePrompt:
        classes = len(self.classes_)
        members = members_of(self.n_features_in_, classes, self.members, self.seed)
        return TablePrompt(self.network_, self._table, self._codes, values, members, classes=classes, **options)


@lru_cache(maxsize=1)
def _loaded(checkpoint: str | Path | None, fetch: bool) -> TabPFN:
    """One copy of the weights for all classifiers."""
    return TabPFN.load(checkpoint, fetch=fetch)


def _numbers(name: str, X: Any) -> np.ndarray:
    """A table of numbers, with NaN where one is missing."""
    try:
        if np.iscomplexobj(X):
            raise ValueError("its numbers are complex")
        values = np.asarray(X, dtype=float)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is no table of numbers ({error}); give categories as codes 0, 1, 2, …") from None
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"{name} has shape {values.shape}; it must be (rows, columns)")
    for place in _too_large(values):
        raise ValueError(f"{name}[{place[0]}, {place[1]}] is {values[place]:g}; numbers are at most 3e38, or NaN")
    return values


def _too_large(values: np.ndarray) -> Iterator[tuple[int, int]]:
    for row, column in np.argwhere(np.abs(values) > np.finfo(np.float32).max):
        yield int(row), int(column)
