"""Gradient flows for Remark 5.3, Appendix F.3 and Assumption 5.1: where they end, what they keep, how risks fall."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.attention import AbstractAttention, AbstractLayer, Head, Kind, merged_form
from largeprompt.dynamics import Trajectory, flow_limit, gradient_flow, structured_start
from largeprompt.icl import LinearRegression, blocks, covariance_named, norm

from ._piece import AbstractPiece, Done

Parameters = Literal["UV", "KQVO"]
_D = 5
_NUDGE = 1e-13  # added to a structured start, so that it is followed by the field that holds for every layer
_RTOL, _ATOL = 1e-7, 1e-9


def _theta(seed: int) -> Float[np.ndarray, "d d"]:
    """A matrix Θ with ‖ΘΘᵀ‖_F = 1, drawn at random."""
    Theta = np.random.default_rng(seed).normal(size=(_D, _D))
    return Theta / math.sqrt(np.linalg.norm(Theta @ Theta.T))


def _times(end: float, points: int) -> Float[np.ndarray, " t"]:
    """0, and times that grow by one factor up to the last."""
    return np.concatenate([[0.0], np.geomspace(end / 1000, end, points - 1)])


def _nudged(layer: AbstractAttention) -> AbstractAttention:
    return jax.tree.map(lambda leaf: leaf + _NUDGE, layer)


@dataclasses.dataclass(frozen=True)
class FlowLimits(AbstractPiece):
    """Flows at infinite length from Assumption 5.1, where both attentions have one risk, and how far from their limits.

    `distance` is that of (U, V) from `flow_limit`, relative to its norm; `noise` are variances of the labels' noise.
    """

    covariances: tuple[str, ...]
    noise: tuple[float, ...]
    alpha: float = 0.15
    time: float = 500.0
    points: int = 31
    seed: int = 0

    @property
    def title(self) -> str:
        return f"limits of flows, {', '.join(self.covariances)}"

    @property
    def seconds(self) -> float:
        return 6 + 0.3 * len(self.covariances) * len(self.noise)

    def _compute(self, done: Done) -> xr.Dataset:
        times = _times(self.time, self.points)
        rows = [self._flow(covariance, noise, times) for covariance in self.covariances for noise in self.noise]
        names = [(covariance, noise) for covariance in self.covariances for noise in self.noise]
        return xr.concat(rows, "flow").assign_coords(
            time=times,
            covariance=("flow", [covariance for covariance, _ in names]),
            noise=("flow", [noise for _, noise in names]),
        )

    def _flow(self, covariance: str, noise: float, times: Float[np.ndarray, " t"]) -> xr.Dataset:
        task = LinearRegression(covariance_named(covariance, _D), noise)
        start = structured_start(task, self.alpha, _theta(self.seed), "linear")
        limit = flow_limit(task, start)
        flow = gradient_flow(_nudged(start), task, math.inf, times, rtol=_RTOL, atol=_ATOL)
        far = jax.vmap(lambda layer: norm(jax.tree.map(jnp.subtract, layer, limit)))(flow.layers)
        distance, risk = (_padded(row, len(times)) for row in (far / norm(limit), flow.risk))
        return xr.Dataset(
            {"distance": ("time", distance), "risk": ("time", risk), "completed": int(flow.ending == "completed")}
        )


@dataclasses.dataclass(frozen=True)
class Descents(AbstractPiece):
    """Flows of one attention, recorded: from Assumption 5.1 (in (U, V) only) and from default random matrices.

    `off_structure` is the largest entry outside the blocks of Assumption 5.1, relative to the largest inside, and
    `infinite` adds infinite length, in closed form. Softmax attention at finite length is exact over prompts and
    averaged over `draws` fixed nodes of (W, x): the risk is that average, and the flow is its own.
    """

    attention: Kind
    parameters: Parameters
    covariances: tuple[str, ...]
    lengths: tuple[int, ...]
    infinite: bool
    seeds: int
    time: float
    alpha: float = 0.3
    points: int = 31
    draws: int = 512

    @property
    def title(self) -> str:
        return f"flows of {self.attention} attention in {', '.join(self.parameters)}"

    @property
    def seconds(self) -> float:
        flows = len(self.covariances) * (len(self.lengths) + self.infinite) * (self.seeds + (self.parameters == "UV"))
        return (8 + 0.012 * self.time * flows) if self.attention == "softmax" else 6 + 0.1 * flows

    def _compute(self, done: Done) -> xr.Dataset:
        lengths = (*self.lengths, *((math.inf,) if self.infinite else ()))
        starts = (("structured", 0),) if self.parameters == "UV" else ()
        starts += tuple(("default", seed) for seed in range(self.seeds))
        names = [(covariance, L, *start) for covariance in self.covariances for L in lengths for start in starts]
        rows = [self._flow(*name) for name in names]
        columns = zip(("covariance", "L", "start", "seed"), zip(*names, strict=True), strict=True)
        coordinates = {name: ("flow", list(column)) for name, column in columns}
        return xr.concat(rows, "flow").assign_coords({"time": _times(self.time, self.points), **coordinates})

    def _flow(self, covariance: str, L: float, start: str, seed: int) -> xr.Dataset:
        task = LinearRegression.experiment(covariance_named(covariance, _D))
        layer = self._start(task, start, seed)
        times = _times(self.time, self.points)
        L = L if math.isinf(L) else int(L)
        flow = gradient_flow(layer, task, L, times, draws=self.draws, rtol=_RTOL, atol=_ATOL)
        rows = {"risk": flow.risk, "risk_stderr": flow.risk_stderr, "off_structure": _off_structure(flow, task)}
        data = {name: ("time", _padded(row, len(times))) for name, row in rows.items()}
        return xr.Dataset(data | {"completed": int(flow.ending == "completed")})

    def _start(self, task: LinearRegression, start: str, seed: int) -> AbstractLayer:
        if start == "structured":
            return _nudged(structured_start(task, self.alpha, kind=self.attention))
        head = Head.pytorch_default(jax.random.key(seed), task.dim, outputs=task.targets, kind=self.attention)
        return head.merged() if self.parameters == "UV" else head


def _off_structure(flow: Trajectory, task: LinearRegression) -> Float[np.ndarray, " t"]:
    """The largest entry of (P, C) over that of (A, R), along a flow."""
    parts = jax.vmap(lambda layer: blocks(merged_form(layer), task))(flow.layers)
    A, C, P, R = (np.abs(part).max(axis=(1, 2)) for part in parts)
    return np.maximum(C, P) / np.maximum(A, R)


def _padded(row, size: int) -> Float[np.ndarray, " t"]:
    """A row of a flow that ended early, with its last value to the end."""
    values = np.asarray(row, float)
    return np.concatenate([values, np.full(size - len(values), values[-1])])
