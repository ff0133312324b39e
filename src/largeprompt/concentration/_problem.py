"""What is compared: a layer on prompts of some law, at some queries, in some quantities; checked here, once."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from largeprompt import _checks as checks
from largeprompt._typing import Numbers
from largeprompt.attention import AbstractAttention, AbstractLayer, MultiHead, heads_of
from largeprompt.icl import AbstractTask, as_predictor
from largeprompt.measures import AbstractMeasure, Empirical, as_measure

from ._squares import OF_LAYER, heads_squares, layer_squares

OF_RISK = ("risk", "risk-gradient")
QUANTITIES = (*OF_LAYER, *OF_RISK)
Tokens = AbstractMeasure | AbstractTask
Queries = AbstractMeasure | Numbers | None
Several = list[str] | tuple[str, ...]
Result = TypeVar("Result")


class NotPredictedError(ValueError):
    """What is asked for is measured only: no law of finite lengths is known for it."""


@dataclass(frozen=True)
class AbstractProblem:
    """Quantities of a layer to compare at some prompt lengths; `one` where a single name was given for them."""

    layer: AbstractLayer
    quantities: tuple[str, ...]
    lengths: tuple[int, ...]
    query_in_prompt: bool
    one: bool

    @functools.cached_property
    def heads(self) -> tuple[AbstractAttention, ...] | None:
        """The heads whose outputs the layer adds up, in their (U, V) form; None for a layer that is no sum of heads."""
        return heads_of(self.layer)

    def answer(self, found: dict[str, Result]) -> Result | dict[str, Result]:
        """The results as they were asked for: that of the single quantity, or all by name."""
        return found[self.quantities[0]] if self.one else found


@dataclass(frozen=True)
class Problem(AbstractProblem):
    """The difference between prompts of tokens of `mu` and `mu` itself, at queries of the law `nu`."""

    mu: AbstractMeasure
    nu: AbstractMeasure

    @functools.cached_property
    def squares(self) -> dict[str, Any]:
        """The squared norm of each quantity's difference: a `HeadsSquare`, or of other layers a `LayerSquare`."""
        if self.heads is None:
            return layer_squares(self.layer, self.mu, self.quantities)
        parts = self.layer.heads if isinstance(self.layer, MultiHead) else (self.layer,)
        return heads_squares(parts, self.heads, self.quantities)

    @property
    def slopes(self) -> bool:
        """Whether some quantity takes the slopes of what is read, or Jacobians."""
        return any(square.slopes for square in self.squares.values())


@dataclass(frozen=True)
class RiskProblem(AbstractProblem):
    """The difference between the risks of a task, or their gradients, on finite prompts and on infinite ones."""

    task: AbstractTask


def problem_of(
    layer: AbstractLayer, mu: object, nu: object, Ls: object, quantity: object, query_in_prompt: bool = False
) -> Problem | RiskProblem:
    """The problem that these inputs state, each of them checked."""
    names = _chosen(quantity)
    own = (layer, names, _lengths(Ls), query_in_prompt, isinstance(quantity, str))
    if names[0] in OF_RISK:
        return RiskProblem(*own, _task(layer, mu, nu))
    return Problem(*own, *_laws(layer, mu, nu))


def _chosen(quantity: Any) -> tuple[str, ...]:
    """The quantities asked for, each once."""
    names = (quantity,) if isinstance(quantity, str) or not hasattr(quantity, "__iter__") else tuple(quantity)
    if not names or any(name not in QUANTITIES for name in names):
        wrong = next((repr(name) for name in names if name not in QUANTITIES), "empty")
        raise ValueError(f"quantity is {wrong}; it must be one of {', '.join(QUANTITIES)}")
    if len({name in OF_RISK for name in names}) > 1:
        raise ValueError(f"quantity is {names}; risks are of a task, the others of a law of tokens: ask for one kind")
    return tuple(dict.fromkeys(names))


def _lengths(Ls: Any) -> tuple[int, ...]:
    """Finite prompt lengths, at least one."""
    several = isinstance(Ls, Iterable) and not isinstance(Ls, str | bytes) and getattr(Ls, "ndim", 1) > 0
    found = []
    for L in list(Ls) if several else [Ls]:
        try:
            found.append(checks.count("L", L))
        except ValueError:
            raise ValueError(f"Ls has {L!r}; prompt lengths are finite whole numbers of at least 1") from None
        checks.prompt_length(found[-1])
    if not found:
        raise ValueError("Ls is empty; it must be prompt lengths, at least one")
    return tuple(found)


def _laws(layer: AbstractLayer, mu: object, nu: object) -> tuple[AbstractMeasure, AbstractMeasure]:
    """The law of a layer's tokens and that of its queries, by default the same."""
    if not isinstance(layer, AbstractLayer):
        raise ValueError(f"the layer is of type {type(layer).__name__}; it must be an attention layer")
    if isinstance(mu, AbstractTask):
        raise ValueError("mu is a task; of a task the quantity must be 'risk' or 'risk-gradient'")
    tokens = as_measure("mu", mu, layer.dim)
    if nu is None:
        return tokens, tokens
    if not isinstance(nu, AbstractMeasure):  # one query or several, each as likely as the others
        rows: Any = [nu] if len(_shape(nu)) == 1 else nu
        nu = Empirical(checks.matrix("nu", rows, None, layer.dim))
    return tokens, as_measure("nu", nu, layer.dim)


def _task(layer: AbstractLayer, mu: object, nu: object) -> AbstractTask:
    """The task whose risks are compared, given in place of a law of tokens; the layer must predict it."""
    if not isinstance(mu, AbstractTask):
        raise ValueError(f"mu is of type {type(mu).__name__}; for risks it must be a task, such as LinearRegression")
    if nu is not None:
        raise ValueError(f"nu is of type {type(nu).__name__}; for risks it must be None: a task has its own queries")
    as_predictor(layer, mu)
    return mu


def _shape(x: Any) -> tuple[int, ...]:
    """() for what is no array at all."""
    try:
        return np.shape(x)
    except ValueError:
        return ()
