"""Where gradient flows end and what they keep: Remark 5.3, Appendix F.3, Assumption 5.1, and risks that fall."""

import math
from collections.abc import Callable

import xarray as xr

from largeprompt.paper.pieces.flow_limits import Descents, FlowLimits, Parameters
from largeprompt.paper.settings import COVARIANCES, Settings

from ._claim import Check, Claim, Finding, Results

_NOISE = (0.0, 0.1)
_SINGULAR = ("spiked:-1", "diagonal:2,1,0.5,0,0", "kms:1")
_CLOSE = 1e-5  # relative distance within which a flow counts as having reached its limit
_KEPT = 1e-9  # relative size up to which an entry counts as 0
_RISE = 1e-7  # of the first risk: the solver's tolerance
_LONGEST = 100.0


# the risk over few nodes has valleys of its own, which flows in K, Q, V, O can follow out of bounds
_NODES: dict[Parameters, int] = {"UV": 512, "KQVO": 2**12}


def _regular(settings: Settings) -> FlowLimits:
    return FlowLimits(COVARIANCES, _NOISE)


def _singular(settings: Settings) -> FlowLimits:
    return FlowLimits(_SINGULAR, (0.0,))


def _descents(settings: Settings, parameters: tuple[Parameters, ...]) -> tuple[Descents, ...]:
    return tuple(
        Descents(
            attention=attention,
            parameters=own,
            covariances=COVARIANCES,
            lengths=settings.ladder[:2],
            infinite=attention == "linear",  # where softmax has the same risk
            seeds=settings.flow_seeds,
            time=min(settings.flow_time, _LONGEST),
            draws=_NODES[own],
        )
        for own in parameters
        for attention in ("linear", "softmax")
    )


def _own(settings: Settings) -> tuple[Parameters, ...]:
    """The parameters that flows move."""
    return settings.flow_parameters


def _over(data: xr.Dataset, of_flows: Callable[[xr.Dataset], xr.DataArray]) -> float:
    """The largest over flows, unless one of them could not be followed to the end."""
    return float(of_flows(data).max()) if bool((data["completed"] == 1).all()) else math.nan


def _distance(data: xr.Dataset) -> xr.DataArray:
    return data["distance"].isel(time=-1)


def _t10(settings: Settings, results: Results) -> Finding:
    data = results[_regular(settings)]
    checks = []
    for noise in _NOISE:
        part = data.isel(flow=data["noise"].values == noise)
        label = f"largest relative distance of (U, V) from the limit, noise variance {noise:g}"
        checks.append(Check(label, _over(part, _distance), "=", 0.0, tolerance=_CLOSE))
        off = _over(part, lambda part: abs(part["risk"].isel(time=-1) - part["noise"] / 2))
        checks.append(Check(f"risk less {noise / 2:g}, noise variance {noise:g}", off, "=", 0.0, tolerance=_KEPT))
    return Finding(
        tuple(checks),
        "Noise leaves the limits of the parameters where they are; the risk, a half mean square, tends to half the "
        "noise variance (erratum T16).",
    )


def _t11(settings: Settings, results: Results) -> Finding:
    data = results[_singular(settings)]
    checks = tuple(
        Check(
            f"relative distance of (U, V) from the limit, Σ = {covariance}",
            _over(data.isel(flow=data["covariance"].values == covariance), _distance),
            "=",
            0.0,
            tolerance=_CLOSE,
        )
        for covariance in _SINGULAR
    )
    return Finding(checks, "The constant of the Polyak-Łojasiewicz inequality printed there is wrong (erratum E15).")


def _t12(settings: Settings, results: Results) -> Finding:
    checks = []
    for piece in _descents(settings, ("UV",)):
        data = results[piece]
        data = data.isel(flow=data["start"].values == "structured")
        for infinite in (False, True) if piece.infinite else (False,):
            part = data.isel(flow=(data["L"].values == math.inf) == infinite)
            where = "both attentions, infinite length" if infinite else f"{piece.attention}, finite length"
            off = _over(part, lambda part: part["off_structure"])
            checks.append(Check(f"largest entry outside the blocks, relative, {where}", off, "<", _KEPT))
    return Finding(tuple(checks))


def _largest_rise(data: xr.Dataset) -> xr.DataArray:
    return data["risk"].diff("time").max("time") / data["risk"].isel(time=0)


def _t13(settings: Settings, results: Results) -> Finding:
    checks = []
    for piece in _descents(settings, _own(settings)):
        data = results[piece]
        for start in sorted(set(data["start"].values.tolist())):
            rise = _over(data.isel(flow=data["start"].values == start), _largest_rise)
            moved = ", ".join(piece.parameters)
            label = f"largest rise of the risk, relative, {piece.attention}, {start} starts, flow in {moved}"
            checks.append(Check(label, rise, "<", _RISE))
    return Finding(tuple(checks))


CLAIMS = (
    Claim(
        key="T10",
        place="Remark 5.3",
        statement="From Assumption 5.1 the infinite-prompt flow tends to U = tr(Σ⁻²)^{−1/4} diag(Σ⁻¹, 0) and V = "
        "tr(Σ⁻²)^{1/4}(0, 1), with risk 0 without label noise; label noise changes nothing but the law of tokens.",
        measured="Parameters and risk of the flow at t = 500, d = 5, w ~ N(0, I), a random Θ, both covariances, "
        "without noise and with variance 0.1, against the limit in closed form.",
        needs=lambda settings: (_regular(settings),),
        judge=_t10,
        role="identity",
    ),
    Claim(
        key="T11",
        place="Appendix F.3",
        statement="For a singular Σ the flow tends to U = diag(γΣ† + αP(ΘΘᵀ), 0) and V = (0, 1/γ), with the γ that "
        "balance fixes.",
        measured="The same for covariances of rank 4, 3 and 1 of 5, and a Θ that Σ does not see all of.",
        needs=lambda settings: (_singular(settings),),
        judge=_t11,
        role="identity",
    ),
    Claim(
        key="T12",
        place="Section 5, after Assumption 5.1",
        statement="The block structure of Assumption 5.1 is preserved through training.",
        measured="The largest entry outside the blocks along gradient flows that are free to leave them, relative to "
        "the largest inside: a start within 1e-13 of the structure, followed by the field that holds for all layers.",
        needs=lambda settings: _descents(settings, ("UV",)),
        judge=_t12,
        role="identity",
    ),
    Claim(
        key="T13",
        place="Section 4, Equations (7) and (10)",
        statement="Gradient flow never raises the risk that it descends.",
        measured="The largest rise of the risk between recorded times, relative to the first risk, from Assumption 5.1 "
        "and from default random matrices, both covariances, both attentions at finite length and linear attention at "
        "infinite length, where softmax has the same risk.",
        needs=lambda settings: _descents(settings, _own(settings)),
        judge=_t13,
        role="identity",
    ),
)
