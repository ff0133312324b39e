import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import Numbers
from largeprompt.measures import AbstractMeasure, Empirical
from largeprompt.measures._perturbed import Perturbed

from ._layer import AbstractLayer

_BATCH = 1024  # tokens whose influences are held at once
_ATOMS = 2**14  # tokens of a prompt that are all gone through
# what follows from a reading, and is not inherited by a class that reads something else
_FROM_READING = (
    "reading_slope",
    "influence",
    "slope_influence",
    "error_covariance",
    "slope_error",
    "reading_bias",
    "errors_are_exact",
)
_KINDS: dict[str, Callable[..., "AbstractAttention"]] = {}


class Jacobian(AbstractShown):
    """Derivatives of the output: `U[i]` is ∂T_i/∂U, `V[i]` is ∂T_i/∂V, `z[i]` is ∂T_i/∂z."""

    U: Float[Array, "p D D"]
    V: Float[Array, "p p D"]
    z: Float[Array, "p D"]


def _square(U: Numbers) -> Array:
    U = checks.matrix("U", U)
    if U.shape[0] != U.shape[1]:
        raise ValueError(f"U has shape {tuple(U.shape)}; it must be square, of the tokens' dimension")
    return U


def _matrix(V: Numbers) -> Array:
    return checks.matrix("V", V)


class AbstractAttention(AbstractLayer[Jacobian]):
    r"""Attention in its (U, V) form: $T[\mu](z) = V\,m$, where the layer reads $m$ off the prompt along $u = Uz$.

    With $H = \partial m/\partial u$: $\partial T_i/\partial U = (H^\top V_i)z^\top$, $\partial T_i/\partial V = e_i
    m^\top$, $\partial T/\partial z = V H U$. A kind of your own says what its `reading` is; all else follows from it
    by automatic differentiation and averages over tokens, and a kind that knows better forms overrides them. A class
    with a `kind` of its own is known by that name to `Head` and `attention_of`.

    Paper: Section 3 (the (U, V) parametrisation), Proposition 3.4 for the gradients in U and V.
    """

    U: Float[Array, "D D"] = eqx.field(converter=_square)
    V: Float[Array, "p D"] = eqx.field(converter=_matrix)
    kind: ClassVar[str] = ""
    # whether weights grow like e^s: then errors have the tails of tilts, and the 1/L law holds in a regime only
    exponential: ClassVar[bool] = False

    def __check_init__(self):
        checks.matrix("V", self.V, None, self.dim)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "reading" in cls.__dict__:
            for name in _FROM_READING:
                if name not in cls.__dict__:
                    setattr(cls, name, AbstractAttention.__dict__[name])
        if "kind" in cls.__dict__:
            register(cls.kind, cls)

    @abc.abstractmethod
    def reading(self, mu: AbstractMeasure, u: Float[Array, " D"]) -> Float[Array, " D"]:
        """What the layer reads off the prompt, m."""

    def reading_slope(self, mu: AbstractMeasure, u: Float[Array, " D"]) -> Float[Array, "D D"]:
        """The derivative of the reading in u, H[i, j] = ∂m_i/∂u_j; it need not be symmetric."""
        return jax.jacfwd(lambda u: self.reading(mu, u))(u)

    def influence(self, mu: AbstractMeasure, u: Float[Array, " D"], tokens: Float[Array, "n D"]) -> Float[Array, "n D"]:
        r"""The influence of tokens on the reading: its derivative in the direction $\delta_{z'} - \mu$ at μ."""
        return _influence(lambda nu: self.reading(nu, u), mu, tokens)

    def slope_influence(
        self, mu: AbstractMeasure, u: Float[Array, " D"], tokens: Float[Array, "n D"]
    ) -> Float[Array, "n D D"]:
        """The influence of tokens on H."""
        return _influence(lambda nu: self.reading_slope(nu, u), mu, tokens)

    def error_covariance(
        self,
        mu: AbstractMeasure,
        u: Float[Array, " D"],
        other: "AbstractAttention",
        v: Float[Array, " D"],
        tokens: Float[Array, "n D"] | None = None,
    ) -> Float[Array, "D D"]:
        r"""$\lim_L L\,\mathrm{Cov}(m_L(u), m'_L(v))$ of two heads on one prompt, the mean product of their influences.

        For the covariance of a head with itself give the head and `u` again, the same objects: some kinds are exact
        there. Without `tokens` over the atoms of a prompt or a fixed sample of a law, unless a kind has a closed form.
        """
        tokens, weights = _tokens(mu, tokens)
        one, two = self.influence(mu, u, tokens), other.influence(mu, v, tokens)
        return (weights[:, None] * one).T @ two

    def slope_error(
        self,
        mu: AbstractMeasure,
        u: Float[Array, " D"],
        A: Float[Array, "D D"],
        B: Float[Array, "D D"],
        tokens: Float[Array, "n D"] | None = None,
    ) -> Float[Array, ""]:
        r"""$\lim_L L\,E\,\mathrm{tr}(\Delta H^\top A\,\Delta H B)$ for symmetric A and B."""
        tokens, weights = _tokens(mu, tokens)

        def form(token: Float[Array, " D"]) -> Float[Array, ""]:
            dH = self.slope_influence(mu, u, token[None])[0]
            return jnp.sum((A @ dH) * (dH @ B))

        return weights @ jax.lax.map(form, tokens, batch_size=_BATCH)

    def reading_bias(
        self, mu: AbstractMeasure, u: Float[Array, " D"], tokens: Float[Array, "n D"] | None = None
    ) -> Float[Array, " D"]:
        r"""$\lim_L L\,(E\,m_L - m)$, half the mean second derivative of the reading towards a token."""
        tokens, weights = _tokens(mu, tokens)

        def curvature(token: Float[Array, " D"]) -> Float[Array, " D"]:
            def slope(weight):
                return _derivative(lambda w: self.reading(Perturbed(mu, token, w), u), weight)

            return _derivative(slope, jnp.zeros((), token.dtype))

        return weights @ jax.lax.map(curvature, tokens, batch_size=_BATCH) / 2

    def errors_are_exact(self, mu: AbstractMeasure, other: "AbstractAttention | None" = None) -> bool:
        """Whether the errors above are exact on this measure, those in common with another head included."""
        return _all_are_gone_through(mu)

    @property
    def dim(self) -> int:
        return self.U.shape[0]

    @property
    def outputs(self) -> int:
        return self.V.shape[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """The matrices of the layer by name."""
        return {"U": self.U, "V": self.V}

    def with_parameters(self, matrices: Mapping[str, Any]) -> "AbstractAttention":
        """The same layer with other matrices, by name; nothing is checked."""
        return eqx.tree_at(lambda layer: (layer.U, layer.V), self, (matrices["U"], matrices["V"]))

    def with_kind(self, kind: str) -> "AbstractAttention":
        """The same matrices in another kind of attention."""
        return known_kinds()[kind](self.U, self.V)

    def _output(self, mu, z):
        return self.V @ self.reading(mu, self.U @ z)

    def _jacobian(self, mu, z) -> Jacobian:
        u = self.U @ z
        return _chain_rule(self.U, self.V, z, self.reading(mu, u), self.reading_slope(mu, u))


@jax.jit  # one program, not ten
def _chain_rule(
    U: Float[Array, "D D"], V: Float[Array, "p D"], z: Float[Array, " D"], m: Float[Array, " D"], H: Float[Array, "D D"]
) -> Jacobian:
    VH = V @ H
    of_V = jnp.einsum("ij,k->ijk", jnp.eye(len(V), dtype=m.dtype), m)
    return Jacobian(U=jnp.einsum("ij,k->ijk", VH, z), V=of_V, z=VH @ U)


def register(name: str, constructor: Callable[..., AbstractAttention]) -> None:
    """Let `Head` and `attention_of` find a kind by its name; a name of another kind is refused."""
    known = _KINDS.get(name)
    if known is not None and _place(known) != _place(constructor):
        raise ValueError(f"kind {name!r} is {_place(known)}; {_place(constructor)} must have another name")
    _KINDS[name] = constructor


def known_kinds() -> dict[str, Callable[..., AbstractAttention]]:
    """Every kind that has a name, with what makes its (U, V) form."""
    return dict(_KINDS)


def _place(constructor: Any) -> str:
    found = getattr(constructor, "func", constructor)
    return f"{found.__module__}.{found.__qualname__}"


def _derivative(f: Callable[[Array], Array], at: Float[Array, ""]) -> Array:
    return jax.jvp(f, (at,), (jnp.ones_like(at),))[1]


def _influence(
    read: Callable[[AbstractMeasure], Array], mu: AbstractMeasure, tokens: Float[Array, "n D"]
) -> Float[Array, "n ..."]:
    def of_one(token):
        return _derivative(lambda weight: read(Perturbed(mu, token, weight)), jnp.zeros((), token.dtype))

    return jax.lax.map(of_one, tokens, batch_size=_BATCH)


def _all_are_gone_through(mu: AbstractMeasure) -> bool:
    return isinstance(mu, Empirical) and mu.size <= _ATOMS


def _tokens(mu: AbstractMeasure, tokens: Float[Array, "n D"] | None) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
    """Tokens and weights of an average: those given, the atoms of a prompt, or a fixed sample of a law."""
    if tokens is None and isinstance(mu, Empirical) and mu.size <= _ATOMS:
        return mu.points, jnp.exp(mu.log_masses())
    tokens = mu._fixed_sample() if tokens is None else tokens
    return tokens, jnp.full(len(tokens), 1 / len(tokens), tokens.dtype)
