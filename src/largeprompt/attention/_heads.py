import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import Numbers

from ._attention import AbstractAttention
from ._kinds import attention_of
from ._layer import AbstractLayer


def chain_rule(
    dU: Float[Array, "p D D"], K: Float[Array, "k D"], Q: Float[Array, "k D"], scale: float = 1.0
) -> tuple[Float[Array, "p k D"], Float[Array, "p k D"]]:
    r"""From the derivatives in $U = s K^\top Q$ to those in $K$ and $Q$.

    $\nabla_K T_i = s\,Q(\nabla_U T_i)^\top$ and $\nabla_Q T_i = s\,K\nabla_U T_i$. Paper: end of Section 3.
    """
    return scale * jnp.einsum("ka,iba->ikb", Q, dU), scale * jnp.einsum("ka,iab->ikb", K, dU)


class HeadJacobian(AbstractShown):
    """Derivatives of a head's output, `K[i]` being ∂T_i/∂K and so on; `O` is None where the head has none."""

    K: Float[Array, "p k D"]
    Q: Float[Array, "p k D"]
    V: Float[Array, "p r D"]
    O: Float[Array, "p p r"] | None
    z: Float[Array, "p D"]


class Head(AbstractLayer[HeadJacobian]):
    r"""One attention head with its own matrices: $O\,T^{U,V}[\mu](z)$ with $U = s K^\top Q$.

    Without `O` the output is $V m$ itself. `scale` is $s$: 1 in the paper, $1/\sqrt{D}$ in common code. `kind` is the
    name of any kind of attention that has one, such as "softmax", "linear", "sigmoid" or "normalised-relu".
    Paper: Section 2 (K, Q, V) and Appendix A.1 (O).
    """

    K: Float[Array, "k D"]
    Q: Float[Array, "k D"]
    V: Float[Array, "r D"]
    O: Float[Array, "p r"] | None
    scale: float = eqx.field(static=True)
    kind: str = eqx.field(static=True)

    def __init__(
        self,
        K: Numbers,
        Q: Numbers,
        V: Numbers,
        O: Numbers | None = None,
        scale: float = 1.0,
        kind: str = "softmax",
    ):
        attention_of(kind)
        self.K = checks.matrix("K", K)
        self.Q = checks.matrix("Q", Q, *self.K.shape)
        self.V = checks.matrix("V", V, None, self.K.shape[1])
        self.O = None if O is None else checks.matrix("O", O, None, self.V.shape[0])
        self.scale = float(checks.number("scale", scale))
        self.kind = kind

    @classmethod
    def pytorch_default(
        cls,
        key: PRNGKeyArray,
        dim: int,
        *,
        head_dim: int | None = None,
        outputs: int | None = None,
        heads: int = 1,
        scale: float = 1.0,
        kind: str = "softmax",
    ) -> "Head":
        r"""Entries uniform on $\pm 1/\sqrt{\text{fan-in}}$, as `torch.nn.Linear` draws them. Paper: Appendix A.1.

        `heads` is how many heads share one output matrix, whose fan-in is `heads` times `head_dim`.
        """
        dim = checks.count("dim", dim)
        inner = dim if head_dim is None else checks.count("head_dim", head_dim)
        p = dim if outputs is None else checks.count("outputs", outputs)

        def linear(key, fan_out, fan_in, shared=1):
            bound = 1 / math.sqrt(fan_in * shared)
            return jax.random.uniform(key, (fan_out, fan_in), minval=-bound, maxval=bound)

        K, Q, V, O = jax.random.split(checks.key(key), 4)
        O = linear(O, p, inner, checks.count("heads", heads))
        return cls(linear(K, inner, dim), linear(Q, inner, dim), linear(V, inner, dim), O, scale, kind)

    @property
    def dim(self) -> int:
        return self.K.shape[1]

    @property
    def outputs(self) -> int:
        return (self.V if self.O is None else self.O).shape[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """The matrices of the head by name, without O where there is none."""
        return {name: matrix for name in "KQVO" if (matrix := getattr(self, name)) is not None}

    def with_parameters(self, matrices: Mapping[str, Any]) -> "Head":
        """The same head with other matrices, by name; nothing is checked."""
        names = list(self.parameters)
        return eqx.tree_at(lambda head: [getattr(head, n) for n in names], self, [matrices[n] for n in names])

    def with_kind(self, kind: str) -> "Head":
        """The same matrices in another kind of attention."""
        return Head(self.K, self.Q, self.V, self.O, self.scale, kind)

    def merged(self) -> AbstractAttention:
        """The same map in its (U, V) form, U = s KᵀQ and V ← OV."""
        V = self.V if self.O is None else self.O @ self.V
        return attention_of(self.kind)(self.scale * self.K.T @ self.Q, V)

    def _output(self, mu, z):
        return self.merged()._output(mu, z)

    def _jacobian(self, mu, z) -> HeadJacobian:
        merged = self.merged()
        d = merged._jacobian(mu, z)
        dK, dQ = chain_rule(d.U, self.K, self.Q, self.scale)
        m = merged.reading(mu, merged.U @ z)
        if self.O is None:
            return HeadJacobian(K=dK, Q=dQ, V=d.V, O=None, z=d.z)
        dO = jnp.einsum("ij,k->ijk", jnp.eye(self.outputs, dtype=m.dtype), self.V @ m)
        return HeadJacobian(K=dK, Q=dQ, V=jnp.einsum("ij,k->ijk", self.O, m), O=dO, z=d.z)


class MultiHeadJacobian(AbstractShown):
    """Derivatives of the summed output in each head's matrices and in the query."""

    heads: tuple[HeadJacobian, ...]
    z: Float[Array, "p D"]


class MultiHead(AbstractLayer[MultiHeadJacobian]):
    """Several heads on one prompt, their outputs added, as concatenation followed by one O amounts to."""

    heads: tuple[Head, ...]

    def __init__(self, heads: Sequence[Head]):
        if isinstance(heads, AbstractLayer):
            raise ValueError(f"heads is one {type(heads).__name__}; it must be a list of heads")
        self.heads = tuple(heads)
        for i, head in enumerate(self.heads):
            if not isinstance(head, Head):
                raise ValueError(f"heads[{i}] is of type {type(head).__name__}; it must be a Head")
        shapes = [(head.dim, head.outputs) for head in self.heads]
        if len(set(shapes)) != 1:
            raise ValueError(
                f"heads have (token, output) dimensions {shapes}; there must be at least one, all of one shape"
            )

    @classmethod
    def pytorch_default(
        cls, key: PRNGKeyArray, dim: int, heads: int, *, head_dim: int | None = None, **options
    ) -> "MultiHead":
        """Heads of `head_dim` (by default dim / heads), drawn as `torch.nn.Linear` draws K, Q, V and one O for all."""
        heads, dim = checks.count("heads", heads), checks.count("dim", dim)
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim is {dim} and heads is {heads}; dim must be a multiple, or give head_dim")
            head_dim = dim // heads
        keys = jax.random.split(checks.key(key), heads)
        return cls([Head.pytorch_default(k, dim, head_dim=head_dim, heads=heads, **options) for k in keys])

    @property
    def dim(self) -> int:
        return self.heads[0].dim

    @property
    def outputs(self) -> int:
        return self.heads[0].outputs

    @property
    def parameters(self) -> dict[str, Any]:
        """The matrices of all heads by name, stacked."""
        each = [head.parameters for head in self.heads]
        return {name: jnp.stack([one[name] for one in each]) for name in each[0]}

    def with_parameters(self, matrices: Mapping[str, Any]) -> "MultiHead":
        """The same heads with other matrices, stacked, by name; nothing is checked."""
        parts = [{name: stack[i] for name, stack in matrices.items()} for i in range(len(self.heads))]
        heads = tuple(head.with_parameters(part) for head, part in zip(self.heads, parts, strict=True))
        return eqx.tree_at(lambda layer: layer.heads, self, heads)

    def with_kind(self, kind: str) -> "MultiHead":
        """The same matrices in another kind of attention."""
        return MultiHead([head.with_kind(kind) for head in self.heads])

    def _output(self, mu, z):
        return jnp.stack([head._output(mu, z) for head in self.heads]).sum(axis=0)

    def _jacobian(self, mu, z) -> MultiHeadJacobian:
        parts = tuple(head._jacobian(mu, z) for head in self.heads)
        return MultiHeadJacobian(heads=parts, z=jnp.stack([part.z for part in parts]).sum(axis=0))
