r"""One attention call of a network as the library sees it: prompts in head space.

After all that a model does to them (biases, norms, rotations, shared heads) a head has keys $k_i$, values $v_i$, a
query $q$, a scale $s$ and what is added to its scores, $b_i$ (a mask or a bias by position). With tokens
$z_i = (k_i, v_i)$ of weights $\propto e^{b_i}$ and $\theta = (sq, 0)$ its output is the value part of
$\mathrm{mean}(\mu_\theta)$: nothing else of the model's conventions matters.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from largeprompt import _checks as checks
from largeprompt.attention import SoftmaxAttention
from largeprompt.measures import Empirical, Gaussian, Mixture

from ._mixture import fitted


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What one attention call of a network reads: every key and value, and some of the queries.

    Heads are the first axis; several may share keys and values, then these have fewer. `log_weights` is what is added
    to the scores of each query, −∞ where a token is hidden; its first axis is 1 where it is the same for all heads.
    `positions` are the places of the queries in the prompt, `outputs` what the model itself made of them.
    `projections` send a head's output to the residual stream.
    """

    name: str
    queries: Float[np.ndarray, "H n k"]
    keys: Float[np.ndarray, "G L k"]
    values: Float[np.ndarray, "G L v"]
    scale: float
    log_weights: Float[np.ndarray, "B n L"] | None = None
    positions: Int[np.ndarray, " n"] | None = None
    outputs: Float[np.ndarray, "H n v"] | None = None
    projections: Float[np.ndarray, "H v r"] | None = None

    def __post_init__(self):
        for name, axes in (("queries", 3), ("keys", 3), ("values", 3)):
            array = getattr(self, name)
            if np.ndim(array) != axes:
                raise ValueError(
                    f"{name} of {self.name} have shape {np.shape(array)}; they must be (heads, tokens, dimension)"
                )
            if not np.isfinite(array).all():
                raise ValueError(f"{name} of {self.name} are not all finite; run the model in float32 or bfloat16")
        (H, n, k), (G, L, of_keys), (of_values, tokens, _) = self.queries.shape, self.keys.shape, self.values.shape
        if (of_keys, of_values, tokens) != (k, G, L):
            raise ValueError(
                f"keys of {self.name} have shape {self.keys.shape} and values {self.values.shape}, queries "
                f"{self.queries.shape}; keys must have the heads and tokens of values and the dimension of queries"
            )
        if H % G:
            raise ValueError(f"{self.name} has {H} heads of queries and {G} of keys; these must divide those")
        if self.log_weights is not None:
            if self.log_weights.shape[1:] != (n, L) or self.log_weights.shape[0] not in (1, H):
                raise ValueError(
                    f"log_weights of {self.name} have shape {self.log_weights.shape}; they must be (1 or {H}, {n}, {L})"
                )
            hidden = ~np.isfinite(self.log_weights).any(axis=-1)
            if hidden.any():
                raise ValueError(
                    f"the mask of {self.name} hides every token from query {int(np.argwhere(hidden)[0][1])}"
                )

    @property
    def heads(self) -> int:
        """How many heads have queries of their own."""
        return self.queries.shape[0]

    @property
    def tokens(self) -> int:
        """The length of the prompt."""
        return self.keys.shape[1]

    def head(self, h: int) -> "HeadCall":
        """One of its heads."""
        if not 0 <= h < self.heads:
            raise ValueError(f"head is {h}; {self.name} has heads 0 to {self.heads - 1}")
        group = h * self.keys.shape[0] // self.heads
        weights = None if self.log_weights is None else self.log_weights[h if len(self.log_weights) > 1 else 0]
        projection = None if self.projections is None else self.projections[h]
        return HeadCall(self.queries[h], self.keys[group], self.values[group], self.scale, weights, projection)


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """One head of a call: queries, keys, values, scale, what is added to scores, and the way to the residual stream."""

    queries: Float[np.ndarray, "n k"]
    keys: Float[np.ndarray, "L k"]
    values: Float[np.ndarray, "L v"]
    scale: float
    log_weights: Float[np.ndarray, "n L"] | None
    projection: Float[np.ndarray, "v r"] | None

    def prompt(self, query: int = -1) -> Empirical:
        """What one query sees: its tokens (k, v), with the weights that a mask or a bias gives them."""
        points, masses = self._seen(query)
        return Empirical(points, None if np.ptp(masses) == 0 else masses)

    def law(self, query: int = -1, sinks: Sequence[int] = (), components: int = 1) -> Gaussian | Mixture:
        """The Gaussian law with the moments of what one query sees; sinks, where there are any, are atoms beside it.

        With several `components` it is a mixture of so many Gaussians, fitted by EM; its moments stay the tokens' own.
        """
        atoms = np.zeros(len(self.keys), bool)
        atoms[list(sinks)] = True
        points, masses = self._seen(query)
        if self.log_weights is not None:
            atoms = atoms[np.isfinite(self.log_weights[query])]
        components, others = checks.count("components", components), int(np.sum(~atoms))
        if components > others:
            raise ValueError(f"components is {components}; it must be at most {others}, the tokens that are no sinks")
        fit = fitted(points[~atoms], masses[~atoms] / masses[~atoms].sum(), components)
        gaussians = [Gaussian(mean, cov) for mean, cov in zip(fit.means, fit.covariances, strict=True)]
        if not atoms.any():
            return gaussians[0] if len(gaussians) == 1 else Mixture(fit.weights, gaussians)
        beside = masses[atoms].sum()
        weights = [beside, *(1 - beside) * fit.weights]
        return Mixture(weights, [Empirical(points[atoms], masses[atoms] / beside), *gaussians])

    def _seen(self, query: int) -> tuple[Float[np.ndarray, "l D"], Float[np.ndarray, " l"]]:
        """The tokens that a query sees, and their weights, which add up to 1."""
        points = np.concatenate([self.keys, self.values], axis=1).astype(float)
        logs = np.zeros(len(points)) if self.log_weights is None else self.log_weights[query].astype(float)
        seen = np.isfinite(logs)
        masses = np.exp(logs[seen] - logs[seen].max())
        return points[seen], masses / masses.sum()

    @property
    def layer(self) -> SoftmaxAttention:
        """The head as a layer on tokens (k, v): it reads (q, 0), scores by s⟨q, k⟩ and returns the mean of v."""
        k, v = self.keys.shape[1], self.values.shape[1]
        U = np.zeros((k + v, k + v))
        U[:k, :k] = self.scale * np.eye(k)
        return SoftmaxAttention(U, np.concatenate([np.zeros((v, k)), np.eye(v)], axis=1))

    def query(self, i: int = -1) -> Float[np.ndarray, " D"]:
        """A query as a token, (q, 0)."""
        return np.concatenate([self.queries[i], np.zeros(self.values.shape[1])])


def chosen_queries(seen: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, " m"]:
    """So many queries, evenly spaced among those that see at least half of the tokens that any sees."""
    able = np.flatnonzero(2 * seen >= seen.max(initial=0))
    return able[np.unique(np.linspace(0, len(able) - 1, min(count, len(able))).round().astype(int))]
