"""Figures 1 and 5, claims C1 and C2: how near are softmax and linear attention with the same weights, untrained?"""

import dataclasses
import itertools
import math

import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt.paper.chart import BLUE, GREY, INK, Chart, Panel, Series, over_seeds
from largeprompt.paper.choice import ANISOTROPIC, Choice, covariates
from largeprompt.paper.claims import Check, Finding, claim, not_settled, widened, worst
from largeprompt.paper.experiment import Experiment, Needed, Results
from largeprompt.paper.experiments._gaps import Gaps, standard_error


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Lengths, draws of the weights, and prompts sampled for each of them."""

    short_to_long: tuple[int, ...]
    heads: int
    prompts: int


SIZES = {
    "smoke": Sizes((10, 40), 2, 200),
    "quick": Sizes((10, 30, 100, 300, 1000, 3000, 10_000), 8, 4000),
    "paper": Sizes((10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000), 32, 20_000),
}
PRECISE = 0.1  # relative standard error up to which a measured gap counts in the comparison with the exact one

Values = Float[np.ndarray, "h L"]

_WORDS = {
    "output": ("outputs", "E(T_softmax − T_linear)²", "1/L"),
    "risk-gradient": ("gradients of the risks", "‖∇R_softmax − ∇R_linear‖²", "1/L²"),
}


@dataclasses.dataclass(frozen=True)
class Gap(Experiment):
    """A gap between the two attentions at the weights that training starts from: one of `QUANTITIES`."""

    quantity: str = "output"

    @property
    def title(self) -> str:
        what, _, _ = _WORDS[self.quantity]
        return f"Softmax against linear attention before training, {what}: {covariates(self.covariance)}"

    @property
    def look(self) -> str:
        what, _, power = _WORDS[self.quantity]
        return (
            f"The gap between the {what} falls along the whole range, more slowly than the {power} that "
            "bounded scores would give: there are always queries and coefficients too large for a prompt. Points "
            "measured on sampled prompts lie on the exact line, but where the mean is carried by queries too rare "
            "for so few prompts; the paper's bound lies many decades above both."
        )

    def needs(self, choice: Choice) -> tuple[Needed, ...]:
        return (gaps(choice, self.covariance),)

    def dataset(self, choice: Choice, results: Results) -> xr.Dataset:
        data = results[gaps(choice, self.covariance)].sel(quantity=self.quantity, drop=True)
        read = data.isel(head=slice(int(data.attrs["measured_heads"])))
        _, low, high = over_seeds(data.exact.values)
        largest = read.bound_log10.max("head")
        return data.assign(
            exact_mean=read.exact.mean("head"),
            exact_low=("L", low),
            exact_high=("L", high),
            bound_mean_log10=largest + np.log10((10 ** (read.bound_log10 - largest)).mean("head")),
        ).assign_attrs(data.attrs, quantity=self.quantity)

    def chart(self, data: xr.Dataset) -> Chart:
        L, heads = data.L.values, int(data.attrs["measured_heads"])
        mean, error = data.measured_mean.values, data.measured_mean_stderr.values
        # on a logarithmic axis a bar that reaches below 0 ends below all else
        low = np.minimum(mean, np.maximum(mean - error, data.exact.values.min() / 2))
        seeds = [
            Series("each draw of the weights", L, row, "seed", GREY, width=0.6, in_legend=i == 0)
            for i, row in enumerate(data.exact.values)
        ]
        exact = Series(
            f"exact, mean of {heads} draws (band: range of {len(seeds)})",
            L,
            data.exact_mean.values,
            "theory",
            BLUE,
            data.exact_low.values,
            data.exact_high.values,
        )
        positive = np.where(mean > 0, mean, np.nan)
        points = Series(
            "measured on sampled prompts", L, positive, "measured", INK, low, mean + error, line=False, mark="o"
        )
        log_bound = data.bound_mean_log10.values
        with np.errstate(over="ignore"):
            bound = Series("the paper's bound", L, 10**log_bound, "bound", GREY, dash="dash")
        lost = [f"{length}" for length, value in zip(L, mean, strict=True) if value <= 0]
        remarks = (f"measured below 0, so not drawn: L = {', '.join(lost)}",) if lost else ()
        if np.isfinite(log_bound[-1]):
            above = log_bound[-1] - math.log10(data.exact_mean.values[-1])
            remarks = (*remarks, f"bound at L = {L[-1]}: {above:.0f} decades above")
        series = (*seeds, exact, points, bound)
        return Chart(
            (Panel(covariates(self.covariance), "prompt length L", _WORDS[self.quantity][1], series, remarks=remarks),),
            columns=1,
        )

    def summary(self, data: xr.Dataset) -> list[str]:
        exact, L = data.exact.values, data.L.values
        n = len(exact)
        ends = [f"{exact[:, i].mean():.3g} ± {standard_error(exact[:, i]):.1g} at L = {L[i]}" for i in (0, -1)]
        lines = [f"Mean gap over {n} draws of the weights: {ends[0]}, {ends[1]}."]
        steps = [f"{slope:.2f} ± {error:.2f}" for slope, error in zip(*local_slopes(exact, L), strict=True)]
        lines.append(f"Log-log slopes between successive lengths (mean ± error over draws): {', '.join(steps)}.")
        ratio, error = agreement(data)
        if math.isfinite(ratio):
            line = f"Measured over exact: {ratio:.3f} ± {error:.3f}, at lengths where the error is below a tenth."
            lines.append(line)
        if self.quantity == "risk-gradient":
            share = exact.mean(axis=0) / data["size"].values.mean(axis=0)
            line = f"Relative to the squared gradient of linear attention: {share[0]:.2g} to {share[-1]:.2g}."
            lines.append(line)
        above = data.bound_mean_log10.values - np.log10(data.exact_mean.values)
        if np.isfinite(above).all():
            lines.append(f"The paper's bound lies {above.min():.1f} to {above.max():.1f} decades above.")
        else:
            lines.append(f"The paper's bound does not apply: {data.attrs['bound_refusal']}.")
        return lines


def gaps(choice: Choice, covariance: str) -> Gaps:
    """What these figures and their claims are made from."""
    sizes = SIZES[choice.preset]
    return Gaps(covariance, sizes.short_to_long, sizes.heads, sizes.prompts, choice.conventions)


def local_slopes(values: Values, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-log slopes between successive lengths: the mean over heads and its standard error."""
    steps = np.diff(_logs(values), axis=1) / np.diff(np.log(L))
    return steps.mean(axis=0), standard_error(steps)


def long_slope(values: Values, L: np.ndarray) -> tuple[float, float]:
    """The log-log slope over the longer half of the lengths, by least squares for each head; mean and error."""
    late = slice(len(L) // 2, None)
    x = np.log(L[late]) - np.log(L[late]).mean()
    slopes = _logs(values)[:, late] @ x / (x @ x)
    return float(slopes.mean()), float(standard_error(slopes))


def ratio_of_means(values: np.ndarray, to: np.ndarray) -> tuple[float, float]:
    """The ratio of two means over heads, and its standard error with the values paired by head."""
    ratio = float(values.mean() / to.mean())
    return ratio, float(standard_error(values - ratio * to) / to.mean())


def agreement(data: xr.Dataset) -> tuple[float, float]:
    """Measured over exact: the mean over lengths where the error is below a tenth, weighed by it, and its error."""
    exact = data.exact_mean.values
    heads = int(data.attrs["measured_heads"])
    of_exact = data.exact_stderr.values[:heads].mean(axis=0)  # at most: heads share their nodes
    ratio, error = data.measured_mean.values / exact, np.hypot(data.measured_mean_stderr.values, of_exact) / exact
    precise = error < PRECISE
    if not precise.any():
        return math.nan, math.nan
    weights = error[precise] ** -2.0
    return float(weights @ ratio[precise] / weights.sum()), float(weights.sum() ** -0.5)


def _logs(values: np.ndarray) -> np.ndarray:
    return np.log(np.where(values > 0, values, np.nan))


FIGURE_1A, FIGURE_5A = Gap("1a"), Gap("5a", ANISOTROPIC)
FIGURE_1B, FIGURE_5B = Gap("1b", quantity="risk-gradient"), Gap("5b", ANISOTROPIC, quantity="risk-gradient")
LENGTHS, HEADS, RANGE = 4, 4, 100  # at least so many lengths and heads, the longest prompt so many times the shortest
SLOPE, SHARE, TOLERANCE = -0.5, 0.05, 0.15
_RULE = (
    f"Exact over prompts at {HEADS} default initialisations or more: the mean gap at the longest prompts over that at "
    f"the shortest is below {SHARE}; between successive lengths it falls (every ratio is below 1); its log-log "
    f"slope over the longer half of the lengths is below {SLOPE}; and the gap measured on sampled prompts is the exact "
    f"one within {TOLERANCE:.0%}. Errors are over initialisations, paired. That both have the same limit is T1 and T2."
)


def judge(*figures: xr.Dataset) -> Finding:
    """With the same weights, at initialisation, the {what} of softmax and linear attention become increasingly close as
    L grows, and coincide in the limit.

    {rule}
    """
    sizes, L = figures[0].sizes, figures[0].L.values
    if sizes["L"] < LENGTHS or sizes["head"] < HEADS or L.max() < RANGE * L.min():
        return not_settled(
            f"{sizes['L']} lengths from {L.min()} to {L.max()} and {sizes['head']} initialisations; it "
            f"takes {LENGTHS} lengths over a range of {RANGE} and {HEADS} initialisations"
        )
    return Finding(tuple(check for each in zip(*map(_checks, figures), strict=True) for check in each))


def _checks(data: xr.Dataset) -> list[Check]:
    covariance = data.attrs["covariance"]
    exact, L = data.exact.values, data.L.values
    wider = widened(len(exact))
    share, share_error = ratio_of_means(exact[:, -1], exact[:, 0])
    steps = np.asarray([ratio_of_means(exact[:, i + 1], exact[:, i]) for i in range(len(L) - 1)])
    between = [f"L = {short} to {long}" for short, long in itertools.pairwise(L)]
    slope, slope_error = long_slope(exact, L)
    ratio, error = agreement(data)
    return [
        Check(f"{covariance}: gap at L = {L[-1]} over that at {L[0]}", share, "<", SHARE, wider * share_error),
        worst(f"{covariance}: ratio of successive gaps", steps[:, 0], wider * steps[:, 1], between, "<", 1.0),
        Check(f"{covariance}: log-log slope from L = {L[len(L) // 2]} on", slope, "<", SLOPE, wider * slope_error),
        Check(f"{covariance}: measured over exact", ratio, "=", 1.0, error, TOLERANCE, resolution=TOLERANCE / 3),
    ]


_PLACE = "Section 6, Figure {}; Appendix A.2.2, Figure {}"
C1 = claim("C1", _PLACE.format("1a", "5a"), FIGURE_1A, FIGURE_5A, what="outputs", rule=_RULE)(judge)
C2 = claim("C2", _PLACE.format("1b", "5b"), FIGURE_1B, FIGURE_5B, what="gradients of the risk", rule=_RULE)(judge)
