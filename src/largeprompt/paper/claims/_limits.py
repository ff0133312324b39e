"""What infinite prompts are said to be: Lemma 2.1, Appendix B.2, Remark 3.2 and Assumption 3.3."""

import math

import numpy as np
import xarray as xr

from largeprompt.concentration import RateFit, fit_power_law
from largeprompt.paper.pieces.limits import GaussianLimit, LinearLimit, QueryInPrompt, TiltedMoments
from largeprompt.paper.settings import Settings

from ._claim import Check, Claim, Finding, Results

_ROUNDING = 1e-9  # two computations of one number in float64 agree to this
_LENGTHS = (100, 1000, 10_000)
_NORMAL = 1.95  # √n times a Kolmogorov distance that a sample of the law itself exceeds once in a thousand


def _prompts(settings: Settings) -> int:
    return 1000 + 10 * settings.law_prompts


def _affine(settings: Settings) -> GaussianLimit:
    return GaussianLimit(queries=25 * settings.prompts)


def _linear(settings: Settings) -> LinearLimit:
    return LinearLimit(_LENGTHS, _prompts(settings))


def _alike(settings: Settings) -> QueryInPrompt:
    return QueryInPrompt(tokens=1.0, queries=1.0, U=0.3, lengths=_LENGTHS, prompts=_prompts(settings))


def _wider(settings: Settings) -> QueryInPrompt:
    return QueryInPrompt(tokens=0.01, queries=1.0, U=math.sqrt(10), lengths=_LENGTHS, prompts=_prompts(settings))


def _worst(values: xr.DataArray, errors: xr.DataArray) -> tuple[float, float]:
    """The value that is farthest from 0, and its error."""
    worst = int(np.abs(values.values).argmax())
    return float(values.values.flat[worst]), float(errors.values.flat[worst])


def _t1(settings: Settings, results: Results) -> Finding:
    data = results[_affine(settings)]
    checks = []
    for rank, part in ((int(rank), data.sel(rank=rank)) for rank in data["rank"]):
        of = f"rank {rank} of {data.sizes['output']}"
        checks.append(
            Check(f"distance from the affine map, {of}", float(part["deviation"]), "=", 0.0, tolerance=_ROUNDING)
        )
        for name, what in (("mean", "mean"), ("cov", "covariance")):
            value, error = _worst(part[name], part[f"{name}_stderr"])
            label = f"{what} of the outputs less the lemma's, worst entry, in its deviations, {of}"
            checks.append(Check(label, value, "=", 0.0, error, tolerance=0.1, resolution=0.1))
        distance = float(part["kolmogorov"].max())
        checks.append(Check(f"√n × Kolmogorov distance from the lemma's normal law, {of}", distance, "<", _NORMAL))
    return Finding(tuple(checks))


def _t2(settings: Settings, results: Results) -> Finding:
    data = results[_linear(settings)]
    fit = _rate(data)
    checks = [
        Check(
            "slope of log E‖T_lin[μ̂_L] − V E[zzᵀ]Uz‖² in log L",
            fit.slope,
            "=",
            -1.0,
            fit.stderr,
            tolerance=0.1,
            resolution=0.1,
        ),
        Check(
            "softmax less linear, centred Gaussian by quadrature",
            float(data["quadrature"]),
            "=",
            0.0,
            tolerance=_ROUNDING,
        ),
    ]
    for law in data["law"].values[1:]:
        label = f"softmax less linear, relative, {law}"
        checks.append(Check(label, float(data["difference"].sel(law=law)), ">", 0.05))
    return Finding(
        tuple(checks), "On a Gaussian of mean m the difference is Vm(1 − mᵀUz): the equality needs m = 0 and Gaussians."
    )


def _rate(data: xr.Dataset) -> RateFit:
    return fit_power_law(data["L"].values, data["mean_square"].values, data["mean_square_stderr"].values)


def _t5(settings: Settings, results: Results) -> Finding:
    checks = []
    for piece, queries in ((_wider(settings), "wider than tokens"), (_alike(settings), "distributed like tokens")):
        without, within = (_rate(results[piece].isel(prompt=i)) for i in (0, 1))
        checks.append(
            Check(
                f"slope of log E‖T_L − T_∞‖² in log L with the query less that without it, queries {queries}",
                within.slope - without.slope,
                "=",
                0.0,
                math.hypot(without.stderr, within.stderr),
                tolerance=0.1,
                resolution=0.2,
            )
        )
    return Finding(
        tuple(checks),
        "The rate is the same where queries are distributed like tokens; where they are wider the query outweighs the "
        "rest of the prompt (erratum G17).",
    )


def _t6(settings: Settings, results: Results) -> Finding:
    data = results[TiltedMoments()]
    ratio = data["moment"] / data["constant"]
    checks = []
    for law in data["law"].values:
        of_law = ratio.sel(law=law)
        if int(data["exact"].sel(law=law)):
            worst = float(1 + _worst(of_law - 1, of_law)[0])
            checks.append(Check(f"moment over its closed form, worst, {law}", worst, "=", 1.0, tolerance=1e-7))
        else:
            worst = float(of_law.sel(p=slice(1, None)).max())
            checks.append(Check(f"moment over radius^p E‖Z‖^p', largest for p > 0, {law}", worst, "<", 1.0))
    return Finding(tuple(checks))


CLAIMS = (
    Claim(
        key="T1",
        place="Lemma 2.1",
        statement="On a Gaussian measure, singular or not, softmax attention is affine in the query, T[μ](z) = Vm + "
        "VΓUz, and sends the measure to a Gaussian one, whose mean and covariance follow.",
        measured="Outputs on a quadrature of the measure, at queries drawn from it, against the affine map; their "
        "mean, covariance and marginals against the lemma's law.",
        needs=lambda settings: (_affine(settings),),
        judge=_t1,
        role="identity",
    ),
    Claim(
        key="T2",
        place="Appendix B.2",
        statement="Normalised linear attention on L tokens tends to V E[zzᵀ]Uz, which is what softmax attention gives "
        "on the measure itself if that is a centred Gaussian; for other laws the two differ.",
        measured="Mean squared distance of linear attention on sampled prompts from its limit, by length; root mean "
        "square over queries of the difference between the two limits, relative to the linear one.",
        needs=lambda settings: (_linear(settings),),
        judge=_t2,
        role="identity",
    ),
    Claim(
        key="T5",
        place="Remark 3.2",
        statement="Putting the query into the prompt changes nothing: both conventions converge at the same rate.",
        measured="Exponents of the mean squared output deviation in the prompt length, with the query in the prompt "
        "and without it, on the line, queries N(0, 1): tokens N(0, 1) with U = 0.3, N(0, 0.01) with U = √10.",
        needs=lambda settings: (_wider(settings), _alike(settings)),
        judge=_t5,
    ),
    Claim(
        key="T6",
        place="Assumption 3.3",
        statement="The moments of tilted tokens that Assumption 3.3 asks for are finite for Gaussian and for bounded "
        "laws.",
        measured="E‖Z₁‖^p‖Z‖^p' for p, p' in {0, 4, 8}, by quadrature over Gaussian queries and tilted tokens, against "
        "the closed form for Gaussians and the bound for laws of bounded support.",
        needs=lambda settings: (TiltedMoments(),),
        judge=_t6,
        role="identity",
    ),
)
