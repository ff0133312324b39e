"""Claims T10 to T13: where do gradient flows end, what do they keep, and do their risks ever rise?"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.attention import AbstractAttention, AbstractLayer, Head, Kind, merged_form
from largeprompt.dynamics import Trajectory, flow_limit, gradient_flow, structured_start
from largeprompt.icl import LinearRegression, blocks, covariance_named, norm
from largeprompt.lab import Progress
from largeprompt.paper.choice import COVARIANCES, Choice
from largeprompt.paper.claims import Check, Finding, claim, equal
from largeprompt.paper.experiment import Computation, Experiment, Measurement, Needed, Results
from largeprompt.paper.experiments import flows

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
class FlowLimits(Computation):
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

    def _compute(self, progress: Progress) -> xr.Dataset:
        times = _times(self.time, self.points)
        names = list(itertools.product(self.covariances, self.noise))
        covariances, noise = (("flow", list(column)) for column in zip(*names, strict=True))
        rows = xr.concat([self._flow(*name, times) for name in names], "flow")
        return rows.assign_coords(time=times, covariance=covariances, noise=noise)

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
class Descents(Computation):
    """Flows of one attention, recorded: from Assumption 5.1 (in (U, V) only) and from default random matrices.

    `off_structure` is the largest entry outside the blocks of Assumption 5.1, relative to the largest inside, and
    `infinite` adds infinite length, in closed form. Softmax attention at finite length is exact over prompts and
    averaged over `draws` fixed nodes of (W, x): the risk is that average, and the flow is its own.
    """

    words: ClassVar[str] = "flows of {attention} attention in {parameters}"

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
    def seconds(self) -> float:
        flows = len(self.covariances) * (len(self.lengths) + self.infinite) * (self.seeds + (self.parameters == "UV"))
        return (8 + 0.012 * self.time * flows) if self.attention == "softmax" else 6 + 0.1 * flows

    def _compute(self, progress: Progress) -> xr.Dataset:
        lengths = (*self.lengths, *((math.inf,) if self.infinite else ()))
        starts: tuple[tuple[str, int], ...] = (("structured", 0),) if self.parameters == "UV" else ()
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
    return np.pad(np.asarray(row, float), (0, size - len(row)), mode="edge")


_NOISE = (0.0, 0.1)
_SINGULAR = ("spiked:-1", "diagonal:2,1,0.5,0,0", "kms:1")
_CLOSE = 1e-5  # relative distance within which a flow counts as having reached its limit
_KEPT = 1e-9  # relative size up to which an entry counts as 0
_RISE = 1e-7  # of the first risk: the solver's tolerance
_LONGEST = 100.0


# the risk over few nodes has valleys of its own, which flows in K, Q, V, O can follow out of bounds
_NODES: dict[Parameters, int] = {"UV": 512, "KQVO": 2**12}


FLOW_PARAMETERS: dict[str, tuple[Parameters, ...]] = {"smoke": ("UV",), "quick": ("UV",), "paper": ("UV", "KQVO")}
"""The parameters in which risks must not rise, by preset."""


@dataclasses.dataclass(frozen=True)
class Descending(Experiment):
    """Flows of both attentions from structured and default starts, in (U, V) or in `all_parameters` of the preset."""

    drawn: ClassVar[bool] = False
    all_parameters: bool = True

    def descents(self, choice: Choice) -> list[Descents]:
        """The flows of each attention in each kind of parameters."""
        sizes = flows.SIZES[choice.preset]
        return [
            Descents(
                attention=attention,
                parameters=own,
                covariances=COVARIANCES,
                lengths=sizes.ladder[:2],
                infinite=attention == "linear",  # where softmax has the same risk
                seeds=choice.protocol.flow_seeds,
                time=min(sizes.flow_time, _LONGEST),
                draws=_NODES[own],
            )
            for own in (FLOW_PARAMETERS[choice.preset] if self.all_parameters else ("UV",))
            for attention in ("linear", "softmax")
        ]

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return tuple(self.descents(choice))

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        parts: list[xr.Dataset] = []
        for one in self.descents(choice):
            n = results[one].sizes["flow"]
            labels = {"attention": ("flow", [one.attention] * n), "parameters": ("flow", [one.parameters] * n)}
            parts.append(results[one].assign_coords(labels))
        return xr.concat(parts, "flow", combine_attrs="drop")


REGULAR = Measurement("limits of flows", computation=lambda choice: FlowLimits(COVARIANCES, _NOISE))
SINGULAR = Measurement("limits of flows, singular", computation=lambda choice: FlowLimits(_SINGULAR, (0.0,)))
STRUCTURED, ALL_DESCENTS = Descending("flows in (U, V)", all_parameters=False), Descending("flows that descend")


def _where(data: xr.Dataset, **values: str | float) -> xr.Dataset:
    """The flows whose coordinates have these values."""
    return data.isel(flow=np.all([data[name].values == value for name, value in values.items()], axis=0))


def _over(data: xr.Dataset, of_flows: Callable[[xr.Dataset], xr.DataArray]) -> float:
    """The largest over flows, unless one of them could not be followed to the end."""
    return float(of_flows(data).max()) if bool((data["completed"] == 1).all()) else math.nan


def _distance(data: xr.Dataset) -> xr.DataArray:
    return data["distance"].isel(time=-1)


@claim("T10", "Remark 5.3", REGULAR, role="identity")
def _limit_of_the_flow(data: xr.Dataset) -> Finding:
    """From Assumption 5.1 the infinite-prompt flow tends to U = tr(Σ⁻²)^{−1/4} diag(Σ⁻¹, 0) and V = tr(Σ⁻²)^{1/4}(0,
    1), with risk 0 without label noise; label noise changes nothing but the law of tokens.

    Parameters and risk of the flow at t = 500, d = 5, w ~ N(0, I), a random Θ, both covariances, without noise and with
    variance 0.1, against the limit in closed form.
    """
    checks = []
    for noise in _NOISE:
        part = _where(data, noise=noise)
        label = f"largest relative distance of (U, V) from the limit, noise variance {noise:g}"
        checks.append(equal(label, _over(part, _distance), 0.0, _CLOSE))
        off = _over(part, lambda part: abs(part["risk"].isel(time=-1) - part["noise"] / 2))
        checks.append(equal(f"risk less {noise / 2:g}, noise variance {noise:g}", off, 0.0, _KEPT))
    return Finding(
        tuple(checks),
        "Noise leaves the limits of the parameters where they are; the risk, a half mean square, tends to half the "
        "noise variance (erratum T16).",
    )


@claim("T11", "Appendix F.3", SINGULAR, role="identity")
def _limit_with_singular_covariance(data: xr.Dataset) -> Finding:
    """For a singular Σ the flow tends to U = diag(γΣ† + αP(ΘΘᵀ), 0) and V = (0, 1/γ), with the γ that balance fixes.

    The same for covariances of rank 4, 3 and 1 of 5, and a Θ that Σ does not see all of.
    """
    checks = tuple(
        equal(
            f"relative distance of (U, V) from the limit, Σ = {covariance}",
            _over(_where(data, covariance=covariance), _distance),
            0.0,
            _CLOSE,
        )
        for covariance in _SINGULAR
    )
    return Finding(checks, "The constant of the Polyak-Łojasiewicz inequality printed there is wrong (erratum E15).")


@claim("T12", "Section 5, after Assumption 5.1", STRUCTURED, role="identity")
def _structure_is_kept(data: xr.Dataset) -> Finding:
    """The block structure of Assumption 5.1 is preserved through training.

    The largest entry outside the blocks along gradient flows that are free to leave them, relative to the largest
    inside: a start within 1e-13 of the structure, followed by the field that holds for all layers.
    """
    structured = _where(data, start="structured")
    finite = structured.isel(flow=np.isfinite(structured["L"].values))
    parts = {
        "linear, finite length": _where(finite, attention="linear"),
        "both attentions, infinite length": _where(structured, L=math.inf),
        "softmax, finite length": _where(finite, attention="softmax"),
    }
    return Finding(
        tuple(
            Check(
                f"largest entry outside the blocks, relative, {where}",
                _over(part, lambda part: part["off_structure"]),
                "<",
                _KEPT,
            )
            for where, part in parts.items()
        )
    )


def _largest_rise(data: xr.Dataset) -> xr.DataArray:
    return data["risk"].diff("time").max("time") / data["risk"].isel(time=0)


@claim("T13", "Section 4, Equations (7) and (10)", ALL_DESCENTS, role="identity")
def _risk_never_rises(data: xr.Dataset) -> Finding:
    """Gradient flow never raises the risk that it descends.

    The largest rise of the risk between recorded times, relative to the first risk, from Assumption 5.1 and from
    default random matrices, both covariances, both attentions at finite length and linear attention at infinite length,
    where softmax has the same risk.
    """
    checks = []
    for own in dict.fromkeys(data["parameters"].values.tolist()):
        for attention in ("linear", "softmax"):
            part = _where(data, parameters=own, attention=attention)
            for start in sorted(set(part["start"].values.tolist())):
                rise = _over(_where(part, start=start), _largest_rise)
                label = f"largest rise of the risk, relative, {attention}, {start} starts, flow in {', '.join(own)}"
                checks.append(Check(label, rise, "<", _RISE))
    return Finding(tuple(checks))
