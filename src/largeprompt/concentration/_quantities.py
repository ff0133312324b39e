r"""What is compared between a finite prompt and its limit, as quadratic forms of two differences.

A layer reads $m$ off a prompt and its slope $H = \partial m/\partial u$; with $\Delta m$, $\Delta H$ their differences
from the limit, the squared norm of every quantity's difference is
$$\Delta m^\top M\,\Delta m + \sum_k \mathrm{tr}(B_k\,\Delta H\,A_k\,\Delta H)\;z^\top N_kz,$$
because $\partial T_i/\partial V = e_im^\top$, $\partial T_i/\partial U = (HV_i)z^\top$, and the chain rule to K and Q
multiplies the latter by Q and K.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import Numbers
from largeprompt.attention import AbstractAttention, AbstractLayer, Head, merged_form
from largeprompt.icl import AbstractTask, as_predictor
from largeprompt.measures import AbstractMeasure, Empirical, FromSampler, as_measure

OF_LAYER = ("output", "V", "U", "K", "Q", "O", "gradient")
OF_RISK = ("risk", "risk-gradient")
QUANTITIES = (*OF_LAYER, *OF_RISK)

Tokens = AbstractMeasure | AbstractTask
Queries = AbstractMeasure | Numbers | None
Several = list[str] | tuple[str, ...]


class Slope(NamedTuple):
    """One of the forms in ΔH: tr(B ΔH A ΔH) · zᵀNz."""

    A: Float[Array, "D D"]
    B: Float[Array, "D D"]
    N: Float[Array, "D D"]


class Form(eqx.Module):
    """The squared norm of a quantity's difference as a function of Δm, ΔH and the query."""

    M: Float[Array, "D D"]
    slopes: tuple[Slope, ...]

    def __add__(self, other: "Form") -> "Form":
        return Form(self.M + other.M, (*self.slopes, *other.slopes))

    def __call__(
        self, dm: Float[Array, " D"], dH: Float[Array, "D D"] | None, z: Float[Array, " D"]
    ) -> Float[Array, ""]:
        square = dm @ self.M @ dm
        if dH is not None:
            for A, B, N in self.slopes:
                square = square + jnp.sum((B @ dH) * (dH @ A)) * (z @ N @ z)
        return square


def forms(layer: AbstractLayer, quantities: Sequence[str]) -> dict[str, Form]:
    """The form of each quantity of a layer with one head."""
    attention = merged_form(layer)
    V, eye = attention.V, jnp.eye(attention.dim, dtype=attention.U.dtype)
    none, VV = jnp.zeros_like(eye), attention.V.T @ attention.V
    known = {"output": Form(VV, ()), "U": Form(none, (Slope(eye, VV, eye),))}
    if isinstance(layer, Head):
        K, Q, s = layer.K, layer.Q, layer.scale**2
        known |= {
            "K": Form(none, (Slope(eye, VV, s * Q.T @ Q),)),
            "Q": Form(none, (Slope(s * K.T @ K, VV, eye),)),
            "V": Form(eye * (layer.outputs if layer.O is None else jnp.sum(layer.O**2)), ()),
        }
        if layer.O is not None:
            known["O"] = Form(layer.outputs * layer.V.T @ layer.V, ())
        own = [name for name in ("K", "Q", "V", "O") if name in known]
    else:
        known["V"] = Form(V.shape[0] * eye, ())
        own = ["U", "V"]
    total = known[own[0]]
    for name in own[1:]:
        total = total + known[name]
    known["gradient"] = total
    for name in quantities:
        if name not in known:
            what = f"this layer has {', '.join(known)}" if name in QUANTITIES else f"it must be one of {known_names()}"
            raise ValueError(f"quantity is {name!r}; {what}")
    return {name: known[name] for name in quantities}


def known_names() -> str:
    """All quantities, for messages."""
    return ", ".join(QUANTITIES)


def chosen(quantity: Any) -> tuple[str, ...]:
    """The quantities asked for, each once."""
    names = (quantity,) if isinstance(quantity, str) or not hasattr(quantity, "__iter__") else tuple(quantity)
    if not names or any(name not in QUANTITIES for name in names):
        wrong = next((repr(name) for name in names if name not in QUANTITIES), "empty")
        raise ValueError(f"quantity is {wrong}; it must be one of {known_names()}")
    if len({name in OF_RISK for name in names}) > 1:
        raise ValueError(f"quantity is {names}; risks are of a task, the others of a law of tokens: ask for one kind")
    return tuple(dict.fromkeys(names))


def lengths(Ls: Any) -> tuple[int, ...]:
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


def laws(layer: AbstractLayer, mu: object, nu: object) -> tuple[AbstractAttention, AbstractMeasure, AbstractMeasure]:
    """The (U, V) form of a layer, the law of its tokens and that of its queries, by default the same."""
    attention = merged_form(layer)
    if isinstance(mu, AbstractTask):
        raise ValueError("mu is a task; of a task the quantity must be 'risk' or 'risk-gradient'")
    tokens = as_measure("mu", mu, attention.dim)
    if nu is None:
        return attention, tokens, tokens
    if not isinstance(nu, AbstractMeasure):  # one query or several, each as likely as the others
        rows: Any = [nu] if len(_shape(nu)) == 1 else nu
        nu = Empirical(checks.matrix("nu", rows, None, attention.dim))
    return attention, tokens, as_measure("nu", nu, attention.dim)


def task_of(layer: AbstractLayer, mu: object, nu: object) -> AbstractTask:
    """The task whose risks are compared, given in place of a law of tokens; a layer with one head must predict it."""
    if not isinstance(mu, AbstractTask):
        raise ValueError(f"mu is of type {type(mu).__name__}; for risks it must be a task, such as LinearRegression")
    if nu is not None:
        raise ValueError(f"nu is of type {type(nu).__name__}; for risks it must be None: a task has its own queries")
    merged_form(as_predictor(layer, mu))
    return mu


def _shape(x: Any) -> tuple[int, ...]:
    """() for what is no array at all."""
    try:
        return np.shape(x)
    except ValueError:
        return ()


def stand_in_size(mu: AbstractMeasure) -> int | None:
    """How many tokens stand in for the law, where it is known by its sampler only: then the limit is off by as many."""
    return mu.stand_in.size if isinstance(mu, FromSampler) else None
