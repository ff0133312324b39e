"""Small prompts with weights, as functions of log-weights: means, ratios, softmax heads, a random network."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from largeprompt.models.sensitivity import weighted


class Mean:
    """Weighted means of the columns of a table."""

    def __init__(self, rows: np.ndarray):
        self.rows = torch.as_tensor(rows)

    @property
    def groups(self) -> int:
        return len(self.rows)

    def __call__(self, log_weights: Tensor) -> Tensor:
        return log_weights.double().softmax(dim=-1) @ self.rows


class Growing(Mean):
    """Means times a power of the number of rows: their variance falls like the rows to the power of 2·power - 1."""

    def __init__(self, rows: np.ndarray, power: float = 0.5):
        super().__init__(rows)
        self.power = power

    def __call__(self, log_weights: Tensor) -> Tensor:
        return super().__call__(log_weights) * log_weights.exp().sum(dim=1, keepdim=True) ** self.power


class Ratio(Mean):
    """The mean of the first column over that of the second."""

    def __call__(self, log_weights: Tensor) -> Tensor:
        means = super().__call__(log_weights)
        return means[:, :1] / means[:, 1:]


class SoftmaxHead(Mean):
    """Attention of one query on rows that are keys and values."""

    def __init__(self, rows: np.ndarray, theta: np.ndarray):
        super().__init__(rows)
        self.scores = self.rows @ torch.as_tensor(theta)

    def __call__(self, log_weights: Tensor) -> Tensor:
        return super().__call__(log_weights.double() + self.scores)


class Network(Mean):
    """A random network of two layers without positions: rows read each other, and the query rows read them.

    `always` are tokens that have no weight of their own, as the words of a question are.
    """

    def __init__(self, rows: np.ndarray, queries: np.ndarray, always: np.ndarray | None = None, spread: float = 1.5):
        super().__init__(rows)
        self.queries = torch.as_tensor(queries)
        self.always = torch.zeros(0, rows.shape[1]).double() if always is None else torch.as_tensor(always)
        generator = torch.Generator().manual_seed(0)
        d = rows.shape[1]
        layers = (nn.TransformerEncoderLayer(d, 2, 2 * d, 0.0, "gelu", dtype=torch.float64) for _ in range(2))
        self.layers = nn.ModuleList(layers).eval().requires_grad_(False)
        for name, parameter in self.layers.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 2:
                scale = spread * parameter.shape[1] ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def __call__(self, log_weights: Tensor) -> Tensor:
        added = torch.zeros(len(log_weights), len(self.always), dtype=log_weights.dtype)
        given = torch.cat([self.rows, self.always]).expand(len(log_weights), -1, -1).transpose(0, 1)
        reading = self.queries.expand(len(log_weights), -1, -1).transpose(0, 1)
        with weighted(torch.cat([log_weights, added], dim=1)):
            for layer in self.layers:
                given, reading = (self._layer(layer, x, given) for x in (given, reading))
        return reading[..., 0].T

    @staticmethod
    def _layer(layer: Any, x: Tensor, given: Tensor) -> Tensor:
        x = layer.norm1(x + layer.self_attn(x, given, given, need_weights=False)[0])
        return layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))


def network(seed: int, n: int = 24, queries: int = 3, always: int = 0) -> Network:
    """A random network on rows drawn by a seed; queries and tokens outside of all groups are always the same."""
    rng = np.random.default_rng(1000)
    fixed, outside = rng.normal(size=(queries, 8)), rng.normal(size=(always, 8))
    return Network(np.random.default_rng(seed).normal(size=(n, 8)), fixed, outside)
