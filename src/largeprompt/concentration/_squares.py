r"""Squared norms of what differs between a finite prompt and its limit.

A head reads $m$ off a prompt, with the slope $H = \partial m/\partial u$. With $\Delta m$, $\Delta H$ their differences
from the limit, the squared norm of every quantity's difference is
$$\Delta m^\top M\,\Delta m + \sum_k \mathrm{tr}(\Delta H^\top A_k\,\Delta H\,B_k)\;z^\top N_kz,$$
because $\partial T_i/\partial V = e_im^\top$, $\partial T_i/\partial U = (H^\top V_i)z^\top$, and the chain rule to K
and Q multiplies the latter by Q and K. A layer that is no sum of heads is asked for its output and its Jacobian.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt.attention import AbstractAttention, AbstractLayer, Head
from largeprompt.measures import AbstractMeasure

OF_LAYER = ("output", "V", "U", "K", "Q", "O", "gradient")


class Reading(NamedTuple):
    """What a head reads off a prompt, and the slope of that where it is asked for; a first axis is that of queries."""

    mean: Float[Array, "*q D"]
    slope: Float[Array, "*q D D"] | None


class Slope(NamedTuple):
    """One of the forms in ΔH: tr(ΔHᵀ A ΔH B) · zᵀNz, with A and B symmetric."""

    A: Float[Array, "D D"]
    B: Float[Array, "D D"]
    N: Float[Array, "D D"]


class QuadraticForm(eqx.Module):
    """The squared norm of the difference of a quantity of one head, as a function of Δm, ΔH and the query."""

    M: Float[Array, "D D"]
    slopes: tuple[Slope, ...]

    def __add__(self, other: "QuadraticForm") -> "QuadraticForm":
        return QuadraticForm(self.M + other.M, (*self.slopes, *other.slopes))

    def __call__(self, off: Reading, z: Float[Array, " D"]) -> Float[Array, ""]:
        square = off.mean @ self.M @ off.mean
        if off.slope is not None:
            for A, B, N in self.slopes:
                square = square + jnp.sum((A @ off.slope) * (off.slope @ B)) * (z @ N @ z)
        return square


class HeadsSquare(eqx.Module):
    r"""The squared norm of the difference of a quantity of a sum of heads: a form of each head's own differences.

    For the output the heads' differences add up first, $\|\sum_hV_h\Delta m_h\|^2$; then `values` has the $V_h$.
    """

    each: tuple[QuadraticForm, ...]
    values: tuple[Float[Array, "p D"], ...] | None

    @property
    def slopes(self) -> bool:
        """Whether it takes the slopes of the readings."""
        return any(form.slopes for form in self.each)

    @property
    def is_crossed(self) -> bool:
        """Whether the differences of several heads add up before they are squared."""
        return self.values is not None and len(self.each) > 1

    def __call__(self, off: tuple[Reading, ...], z: Float[Array, " D"]) -> Float[Array, ""]:
        if self.values is not None:
            error = jnp.stack([V @ part.mean for V, part in zip(self.values, off, strict=True)]).sum(axis=0)
            return error @ error
        return jnp.stack([form(part, z) for form, part in zip(self.each, off, strict=True)]).sum()


class LayerSquare(eqx.Module):
    """The squared norm of the difference of an output, or of the parts of a Jacobian with a given name."""

    quantity: str = eqx.field(static=True)

    @property
    def slopes(self) -> bool:
        """Whether it takes a Jacobian."""
        return self.quantity != "output"

    def __call__(self, off: tuple[Array, Any], z: Float[Array, " D"]) -> Float[Array, ""]:
        output, jacobian = off
        parts = [output] if self.quantity == "output" else _parts(jacobian, self.quantity)
        return jnp.stack([jnp.sum(part**2) for part in parts]).sum()


def forms(part: AbstractLayer, merged: AbstractAttention, quantities: Sequence[str]) -> dict[str, QuadraticForm]:
    """The form of each quantity of one head, in its own parametrisation; `merged` is its (U, V) form."""
    identity, VV = np.eye(merged.dim, dtype=merged.U.dtype), merged.V.T @ merged.V
    eye, none = (jnp.asarray(matrix, matrix.dtype) for matrix in (identity, 0 * identity))
    known = {"output": QuadraticForm(VV, ()), "U": QuadraticForm(none, (Slope(VV, eye, eye),))}
    if isinstance(part, Head):  # which has parameters K, Q, V, O; all else has U and V
        K, Q, s = part.K, part.Q, part.scale**2
        known |= {
            "K": QuadraticForm(none, (Slope(VV, eye, s * Q.T @ Q),)),
            "Q": QuadraticForm(none, (Slope(VV, s * K.T @ K, eye),)),
            "V": QuadraticForm(eye * (part.outputs if part.O is None else jnp.sum(part.O**2)), ()),
        }
        if part.O is not None:
            known["O"] = QuadraticForm(part.outputs * part.V.T @ part.V, ())
        own = [name for name in ("K", "Q", "V", "O") if name in known]
    else:
        known["V"] = QuadraticForm(jnp.asarray(merged.outputs * identity, eye.dtype), ())
        own = ["U", "V"]
    _refuse_unknown(quantities, (*known, "gradient"))
    if "gradient" in quantities:
        known["gradient"] = functools.reduce(operator.add, (known[name] for name in own))
    return {name: known[name] for name in quantities}


def heads_squares(
    parts: Sequence[AbstractLayer], heads: Sequence[AbstractAttention], quantities: Sequence[str]
) -> dict[str, HeadsSquare]:
    """The square of each quantity of a sum of heads; a Jacobian is that in the matrices of all of them.

    `parts` are the heads as they are parametrised, `heads` their (U, V) forms.
    """
    each = [forms(part, merged, quantities) for part, merged in zip(parts, heads, strict=True)]
    values = {"output": tuple(head.V for head in heads)}
    return {name: HeadsSquare(tuple(known[name] for known in each), values.get(name)) for name in quantities}


def layer_squares(layer: AbstractLayer, mu: AbstractMeasure, quantities: Sequence[str]) -> dict[str, LayerSquare]:
    """The square of each quantity of any other layer."""
    if any(name != "output" for name in quantities):
        try:
            jacobian = jax.eval_shape(layer._jacobian, mu, jax.ShapeDtypeStruct((layer.dim,), float))
        except Exception as error:  # whatever a user's own code raises
            first = (str(error) or type(error).__name__).splitlines()[0]
            kind = type(layer).__name__
            raise ValueError(f"the Jacobian of a layer of type {kind} is not to be had: {first}") from None
        _refuse_unknown(quantities, ["output", *(name for name in OF_LAYER[1:] if _parts(jacobian, name))])
    return {name: LayerSquare(name) for name in quantities}


def _refuse_unknown(quantities: Sequence[str], known: Sequence[str]) -> None:
    for name in quantities:
        if name not in known:
            raise ValueError(f"quantity is {name!r}; this layer has {', '.join(known)}")


def _parts(jacobian: Any, quantity: str) -> list[Any]:
    """The parts of a Jacobian by the name of their field; for "gradient" all but those in the query, z."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jacobian)
    named = [(getattr(path[-1], "name", ""), leaf) for path, leaf in leaves]
    return [leaf for name, leaf in named if (name != "z" if quantity == "gradient" else name == quantity)]
