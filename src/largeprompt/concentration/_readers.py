"""What is compared between a prompt and its limit, for each sort of layer, and how prompts are drawn for it.

Softmax and linear heads, and sums of them, are known by what they read: tokens stream, and memory does not grow with
the prompt. Any other layer is asked for its output and its Jacobian on whole prompts.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from largeprompt._device import DeviceName
from largeprompt.attention import AbstractLayer, MultiHead, known_heads
from largeprompt.measures import AbstractMeasure, Empirical

from ._crossed import Heads
from ._prompts import Reading, batch_for, chunk_for, limit, numbers_held, reading, side_by_side
from ._quantities import OF_LAYER, Form, forms

_WHOLE = 2**26  # numbers of one prompt that is held whole


class HeadsForm(eqx.Module):
    r"""The squared norm of a quantity's difference for a sum of heads: a form of each head's own differences.

    For the output the heads' differences add up first, $\|\sum_hV_h\Delta m_h\|^2$; then `values` has the $V_h$.
    """

    each: tuple[Form, ...]
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
        squares = [form(part.mean, part.slope, z) for form, part in zip(self.each, off, strict=True)]
        return jnp.stack(squares).sum()


def heads_forms(layer: AbstractLayer, heads: Heads, quantities: Sequence[str]) -> dict[str, HeadsForm]:
    """The form of each quantity of a layer with known heads; a Jacobian is that in the matrices of all of them."""
    parts = layer.heads if isinstance(layer, MultiHead) else (layer,)
    each = [forms(part, quantities) for part in parts]
    values = {"output": tuple(head.V for head in heads)}
    return {name: HeadsForm(tuple(known[name] for known in each), values.get(name)) for name in quantities}


class SummedHeads(eqx.Module):
    """Softmax and linear heads whose outputs add up, all on the same tokens as they are drawn."""

    heads: Heads
    slopes: bool = eqx.field(static=True)

    def finite(
        self,
        mu: AbstractMeasure,
        key: PRNGKeyArray,
        queries: Float[Array, "q D"],
        L: Int[Array, ""],
        chunk: int,
        query_in_prompt: bool,
    ) -> tuple[Reading, ...]:
        """What each head reads off one prompt of L tokens; the same key draws the same tokens for all of them."""
        options = (queries, L, chunk, self.slopes, query_in_prompt)
        return tuple(reading(head, mu, key, *options) for head in self.heads)

    def limit(self, mu: AbstractMeasure, queries: Float[Array, "q D"]) -> tuple[Reading, ...]:
        """The same readings for the infinite prompt."""
        return tuple(limit(head, mu, queries, self.slopes) for head in self.heads)

    def sizes(self, L: int, queries: int, dim: int, place: DeviceName) -> tuple[int, int]:
        """How many tokens are drawn at once, and how many prompts side by side."""
        queries = queries * len(self.heads)
        chunk = chunk_for(L, queries, dim, self.slopes)
        return chunk, batch_for(chunk, queries, dim, self.slopes, place)

    def numbers_held(self, L: int, queries: int, dim: int) -> int:
        """How many numbers the least batch takes."""
        return numbers_held(L, queries * len(self.heads), dim, self.slopes)


class LayerForm(eqx.Module):
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


class WholePrompts(eqx.Module):
    """Any layer, asked for its output and its Jacobian: prompts are held whole."""

    layer: AbstractLayer
    slopes: bool = eqx.field(static=True)

    def finite(self, mu, key, queries, L, chunk: int, query_in_prompt: bool) -> tuple[Array, Any]:
        """Outputs and Jacobians on one prompt of `chunk` = L tokens."""
        tokens = mu._sample(key, chunk)

        def one(z):
            return self._of(Empirical(jnp.concatenate([tokens, z[None]]) if query_in_prompt else tokens), z)

        return jax.vmap(one)(queries)

    def limit(self, mu: AbstractMeasure, queries: Float[Array, "q D"]) -> tuple[Array, Any]:
        """The same for the infinite prompt."""
        return jax.vmap(lambda z: self._of(mu, z))(queries)

    def _of(self, mu, z):
        return self.layer._output(mu, z), self.layer._jacobian(mu, z) if self.slopes else None

    def sizes(self, L: int, queries: int, dim: int, place: DeviceName) -> tuple[int, int]:
        """How many tokens are drawn at once, all of a prompt, and how many prompts side by side."""
        if L * dim > _WHOLE:
            raise ValueError(
                f"L is {L}; prompts of a layer of type {type(self.layer).__name__} are held whole, which goes up to "
                f"L = {_WHOLE // dim} in dimension {dim}"
            )
        return L, side_by_side(self.numbers_held(L, queries, dim), place)

    def numbers_held(self, L: int, queries: int, dim: int) -> int:
        """How many numbers one prompt takes with what is computed from it."""
        parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(self.layer, eqx.is_inexact_array)))
        return L * (3 * dim + 3 * queries) + (queries * self.layer.outputs * parameters if self.slopes else 0)


def reader_of(
    layer: AbstractLayer, mu: AbstractMeasure, quantities: Sequence[str]
) -> tuple[SummedHeads | WholePrompts, dict[str, Any]]:
    """How a layer is compared, and the form of each quantity."""
    heads = known_heads(layer)
    if heads is not None:
        known = heads_forms(layer, heads, quantities)
        return SummedHeads(heads, any(form.slopes for form in known.values())), known
    other = {name: LayerForm(name) for name in quantities}
    slopes = any(form.slopes for form in other.values())
    if slopes:
        _refuse_unknown_parts(layer, mu, quantities)
    return WholePrompts(layer, slopes), other


def _parts(jacobian: Any, quantity: str) -> list[Any]:
    """The parts of a Jacobian by the name of their field; for "gradient" all but those in the query, z."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jacobian)
    named = [(getattr(path[-1], "name", ""), leaf) for path, leaf in leaves]
    return [leaf for name, leaf in named if (name != "z" if quantity == "gradient" else name == quantity)]


def _refuse_unknown_parts(layer: AbstractLayer, mu: AbstractMeasure, quantities: Sequence[str]) -> None:
    try:
        jacobian = jax.eval_shape(layer._jacobian, mu, jax.ShapeDtypeStruct((layer.dim,), float))
    except Exception as error:  # whatever a user's own code raises
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"the Jacobian of a layer of type {type(layer).__name__} is not to be had: {first}") from None
    for name in quantities:
        if name != "output" and not _parts(jacobian, name):
            known = ["output", *(known for known in OF_LAYER[1:] if _parts(jacobian, known))]
            raise ValueError(f"quantity is {name!r}; this layer has {', '.join(known)}")
