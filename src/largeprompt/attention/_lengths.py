import functools
import math

import equinox as eqx
import numpy as np
from jaxtyping import Float

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt._typing import Numbers

_NODES = 16  # of the Gauss rule that stands for all lengths between two powers of two: exact to rounding
_MOST = 10**6  # different lengths


class Lengths(AbstractShown):
    r"""A law of prompt lengths: $\ell$ tokens with probability $p_\ell$. The risk at such an `L` is an average,
    $\sum_\ell p_\ell R_\ell$.

    Language models are trained on every position of a prompt: with `Lengths.prefixes(L)` each of the $L$ positions is
    answered from the tokens before it, so that the length is uniform on $0, \dots, L-1$. An empty prompt is answered
    by 0, or by the query alone where it is in the prompt.
    """

    values: tuple[int, ...] = eqx.field(static=True)
    probabilities: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, values: Numbers, probabilities: Numbers | None = None):
        values = np.asarray(values)
        if values.ndim != 1 or not 1 <= values.size <= _MOST:
            raise ValueError(f"values has shape {values.shape}; it must hold from 1 to {_MOST} lengths")
        for value in values[~_is_length(values)].tolist():  # the first of them
            raise ValueError(f"a length is {value!r}; it must be a whole number from 0 to 1e18")
        lengths = values.astype(np.int64)
        if len(np.unique(lengths)) < len(lengths):
            raise ValueError("values holds a length twice; give it once, with the sum of its probabilities")
        order = np.argsort(lengths)
        shares = np.ones(values.size) if probabilities is None else np.asarray(probabilities, float)
        if shares.shape != values.shape or not np.isfinite(shares).all() or (shares < 0).any() or not shares.any():
            raise ValueError(
                f"probabilities has shape {shares.shape} and entries from {shares.min(initial=0):g}; it must hold "
                f"{values.size} numbers of at least 0, one for each length"
            )
        kept = order[shares[order] > 0]
        self.values = tuple(lengths[kept].tolist())
        self.probabilities = tuple((shares[kept] / shares.sum()).tolist())
        if self.longest == 0:
            raise ValueError("all prompts are empty; some length must be at least 1")

    @classmethod
    def prefixes(cls, L: int) -> "Lengths":
        """The tokens before each of `L` positions: 0 to L − 1, all equally likely."""
        return cls(np.arange(checks.count("L", L, at_least=2)))

    def __repr__(self) -> str:
        n = len(self.values)
        return f"Lengths({n} length{'s' * (n > 1)} from {self.values[0]} to {self.longest}, mean {self.mean:.4g})"

    def __hash__(self) -> int:
        return hash((self.values, self.probabilities))

    @property
    def longest(self) -> int:
        """The longest prompt."""
        return self.values[-1]

    @property
    def empty(self) -> float:
        """The probability of an empty prompt."""
        return self.probabilities[0] if self.values[0] == 0 else 0.0

    @property
    def mean(self) -> float:
        """The mean length."""
        return float(np.dot(self.values, self.probabilities))

    @property
    def harmonic_mean(self) -> float:
        r"""$1/E[1/\ell]$ over the prompts that are not empty: what linear attention sees of the law."""
        values, shares = self._arrays()
        return float(shares[values > 0].sum() / (shares[values > 0] / values[values > 0]).sum())

    def rule(self) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        r"""Few lengths, not all whole, and their probabilities, for averages of functions $\ell^je^{-x\ell}$, $x\ge0$.

        Lengths up to 31 are themselves; of those between two powers of two, 16 nodes of their Gauss rule remain.
        """
        return _rule(self)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.values, float), np.asarray(self.probabilities)


def _is_length(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "iuf":
        return np.zeros(values.shape, bool)
    return (values >= 0) & (values <= 1e18) & (np.floor(values) == values)


def length_or_law(L: object) -> int | float | Lengths:
    """A prompt length of at least 1, `math.inf`, or a law of lengths."""
    return L if isinstance(L, Lengths) else checks.prompt_length(L)


def longest(L: int | float | Lengths) -> int | float:
    """The longest prompt of a law of lengths, or the length itself."""
    return L.longest if isinstance(L, Lengths) else L


@functools.lru_cache(maxsize=64)
def _rule(lengths: Lengths) -> tuple[np.ndarray, np.ndarray]:
    values, shares = lengths._arrays()
    blocks = np.array([length.bit_length() for length in lengths.values])
    parts = [_gauss(values[blocks == block], shares[blocks == block]) for block in np.unique(blocks)]
    nodes, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
    return nodes, weights / weights.sum()


def _gauss(points: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The Gauss rule of a discrete measure, by Lanczos' recurrence, or the measure itself where it has few points."""
    if len(points) <= _NODES:
        return points, weights
    centre, half = (points[0] + points[-1]) / 2, (points[-1] - points[0]) / 2
    x, total = (points - centre) / half, weights.sum()
    basis, diagonal, beside = [np.sqrt(weights / total)], [], []
    for _ in range(_NODES):
        ahead = x * basis[-1]
        diagonal.append(float(ahead @ basis[-1]))
        for _ in range(2):  # once more: the recurrence alone loses orthogonality
            ahead = ahead - np.stack(basis).T @ (np.stack(basis) @ ahead)
        beside.append(math.sqrt(float(ahead @ ahead)))
        basis.append(ahead / beside[-1])
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    return centre + half * nodes, total * vectors[0] ** 2
