"""Estimators of what each sentence of a context adds to an answer, within a budget of forward passes."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float

from ._ablations import BACKWARD, ablations, slopes
from ._evidence import Fit, combined
from ._lasso import lasso
from ._prompt import ContextPrompt
from ._readings import attention_weights, gradient_times_input

Method = Literal[
    "auto", "gradient", "path", "random gradients", "leave-one-out", "lasso", "attention", "gradient times input"
]
METHODS: tuple[Method, ...] = get_args(Method)
GRADIENT = 1 + BACKWARD  # forward passes that a gradient costs
LEAST = GRADIENT  # of a budget

# logarithms of equal weights, by how many gradients are taken, and the length that each stands for, both chosen on the
# pairs of the development; beyond three gradients, ablations say more for the same passes
_NODES = {1: ((-3.0,), 2.0), 2: ((0.0, -3.0), 1.2), 3: ((0.0, -3.0, -6.0), 1.2)}
MOST_NODES = max(_NODES)
_FEWEST = 6  # ablations: fewer move what gradients say by more than they know
_LEAST_WEIGHT = 1e-3


def estimate(prompt: ContextPrompt, method: Method, budget: int, *, seed: int, batch: int, advance: Any) -> Fit:
    """Coefficients of all sentences by one method."""
    ways: dict[str, Callable[[], Fit]] = {
        "auto": lambda: _auto(prompt, budget, np.random.default_rng(seed), run),
        "gradient": lambda: _plain(run.slopes(np.ones((1, prompt.groups)))[1][0]),
        "path": lambda: _path(prompt, budget // GRADIENT, run),
        "random gradients": lambda: _random(prompt, budget // GRADIENT, np.random.default_rng(seed), run),
        "leave-one-out": lambda: _one_by_one(prompt, run),
        "lasso": lambda: _sparse(prompt, budget, np.random.default_rng(seed), run),
        "attention": lambda: _plain(attention_weights(prompt)),
        "gradient times input": lambda: _plain(gradient_times_input(prompt)),
    }
    run = _Run(prompt, batch, advance)
    return ways[method]()


class _Run:
    """Runs ablations and gradients of one prompt."""

    def __init__(self, prompt: ContextPrompt, batch: int, advance: Any):
        self._prompt, self._options = prompt, {"batch": batch, "advance": advance}

    def ablations(self, subsets: Bool[np.ndarray, "n g"]) -> Float[np.ndarray, " n"]:
        return ablations(self._prompt, subsets, **self._options)

    def slopes(self, weights: Float[np.ndarray, "n g"]) -> tuple[np.ndarray, np.ndarray]:
        return slopes(self._prompt, weights, **self._options)


def shares(budget: int) -> tuple[int, int]:
    """How many gradients and how many ablations a budget is spent on; no ablations where they would be too few."""
    most = min(MOST_NODES, budget // GRADIENT)
    for points in range(most, 0, -1):
        others = budget - GRADIENT * points
        if others == 0 or others >= _FEWEST:
            return points, others
    return most, 0


def nodes(points: int) -> Float[np.ndarray, " k"]:
    """Logarithms of the equal weights at which so many gradients are taken."""
    return np.array(_NODES[points][0])


def expected_parts(gradients: Float[np.ndarray, "k g"]) -> Float[np.ndarray, "k g"]:
    r"""Parts of a sum over `nodes` for $\int\partial f/\partial\log a_i\,d\ell$ along $a=e^\ell(1,\dots,1)$.

    In logarithms, since a sentence that is looked up has nearly all of its slope at small weights.
    """
    return gradients * _NODES[len(gradients)][1]


def _auto(prompt: ContextPrompt, budget: int, rng: np.random.Generator, run: _Run) -> Fit:
    """Gradients along the path of equal weights and ablations at random halves, weighed by `combined`."""
    points, others = shares(budget)
    weights = np.repeat(np.exp(nodes(points))[:, None], prompt.groups, 1)
    expected = expected_parts(run.slopes(weights)[1])
    subsets = designed(rng, others, prompt.groups)
    return combined(subsets, run.ablations(subsets) if others else np.zeros(0), expected)


def designed(rng: np.random.Generator, count: int, groups: int) -> Bool[np.ndarray, "n g"]:
    """Random halves that say most of main effects, in blocks, the first of which are those of a smaller count.

    In a whole block each sentence is there in half of the subsets and each pair of sentences in a quarter, exactly:
    columns of a Hadamard matrix, drawn and flipped at random. Unless there are fewer subsets than sentences, each is
    followed by its complement: differences of the two have no part of even order.
    """
    order = 1 << groups.bit_length()  # the least power of 2 above the number of sentences
    blocks, paired = [np.zeros((0, groups), bool)], count >= groups
    while sum(map(len, blocks)) < count:
        rows, columns = rng.permutation(order), rng.permutation(order - 1)[:groups] + 1
        odd = np.bitwise_count(rows[:, None] & columns).astype(int) % 2
        first = (odd + rng.integers(2, size=groups)) % 2 == 1
        blocks.append(np.stack([first, ~first], 1).reshape(-1, groups) if paired else first)
    return np.concatenate(blocks)[:count]


def _path(prompt: ContextPrompt, points: int, run: _Run) -> Fit:
    """The mean of the derivatives in the weights along equal weights from 0 to 1, by midpoints."""
    at = (np.arange(points) + 0.5)[:, None] / points
    return _plain((run.slopes(np.repeat(at, prompt.groups, 1))[1] / at).mean(0))


def _random(prompt: ContextPrompt, count: int, rng: np.random.Generator, run: _Run) -> Fit:
    """The mean of the derivatives in the log-weights at weights drawn uniformly."""
    found = run.slopes(rng.uniform(_LEAST_WEIGHT, 1, (count, prompt.groups)))[1]
    error = found.std(0, ddof=1) / np.sqrt(count) if count > 1 else np.full(prompt.groups, np.nan)
    return Fit(2 * found.mean(0), 2 * error, float("nan"))


def _one_by_one(prompt: ContextPrompt, run: _Run) -> Fit:
    everything = np.ones((1, prompt.groups), bool)
    values = run.ablations(np.concatenate([everything, ~np.eye(prompt.groups, dtype=bool)]))
    return _plain(values[0] - values[1:])


def _sparse(prompt: ContextPrompt, count: int, rng: np.random.Generator, run: _Run) -> Fit:
    subsets = rng.random((count, prompt.groups)) < 0.5
    return _plain(lasso(subsets, run.ablations(subsets)))


def _plain(coefficients: np.ndarray) -> Fit:
    """Coefficients about whose errors nothing is known."""
    return Fit(coefficients, np.full(len(coefficients), np.nan), float("nan"))
