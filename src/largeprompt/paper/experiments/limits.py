"""Claims T1, T2, T5 and T6: what are attentions on infinite prompts, by quadrature and on samples?"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Float
from numpy.polynomial.hermite_e import hermegauss
from numpy.polynomial.legendre import leggauss
from scipy.stats import kstest

from largeprompt.attention import LinearAttention, SoftmaxAttention, pushforward
from largeprompt.concentration import RateFit, deviation, fit_power_law
from largeprompt.concentration.bounds import MomentConstants, moment_constants
from largeprompt.lab import Progress
from largeprompt.measures import AbstractMeasure, Cube, Empirical, Gaussian, Mixture
from largeprompt.paper.claims import Check, Finding, claim, equal
from largeprompt.paper.experiment import Computation, Measurement

QUERIES = {"smoke": 5000, "quick": 100_000, "paper": 500_000}
PROMPTS = {"smoke": 2000, "quick": 7000, "paper": 21_000}
"""By preset: queries at which outputs are computed, and prompts sampled for each length."""
LENGTHS = (100, 1000, 10_000)
_DIM = 2
_MEAN = np.array([0.6, -0.4])


def _weights(rng: np.random.Generator) -> tuple[Float[np.ndarray, "D D"], Float[np.ndarray, "D D"]]:
    """U and V of a layer whose scores are of order 1: U of norm 1 and V a rotation."""
    U = rng.normal(size=(_DIM, _DIM))
    return U / np.linalg.norm(U), _root(rng, _DIM, 0.0)


def _root(rng: np.random.Generator, rank: int, spread: float = 0.4) -> Float[np.ndarray, "D r"]:
    """A root C of a covariance CCᵀ of any rank, in directions drawn at random."""
    return np.linalg.qr(rng.normal(size=(_DIM, rank)))[0] * np.linspace(1 - spread, 1 + spread, rank)


def gauss_hermite(mean: Float[np.ndarray, " D"], root: Float[np.ndarray, "D r"], nodes: int) -> Empirical:
    """N(m, CCᵀ) as a prompt of weighted tokens, `nodes` for each column of C: integrals over it are quadratures."""
    points, masses = _grid(*hermegauss(nodes), root.shape[1])
    return Empirical(mean + points @ root.T, masses)


def gauss_legendre(nodes: int) -> Empirical:
    """The uniform law on the cube [−1, 1]^D in the same way."""
    return Empirical(*_grid(*leggauss(nodes), _DIM))


def _grid(
    points: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], dim: int
) -> tuple[Float[np.ndarray, "m r"], Float[np.ndarray, " m"]]:
    """A rule on the line as one on a space."""
    masses = np.prod(list(itertools.product(weights, repeat=dim)), axis=1)
    return np.array(list(itertools.product(points, repeat=dim))), masses / masses.sum()


def _relative(found: Float[np.ndarray, "n p"], wanted: Float[np.ndarray, "n p"]) -> float:
    """Root mean square of the difference over that of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@dataclasses.dataclass(frozen=True)
class GaussianLimit(Computation):
    """Softmax attention on Gaussian measures of full and of lower rank, by quadrature over tokens at sampled queries.

    `deviation` is how far the outputs are from the lemma's affine map, relative to their size. Of their law over
    queries, `mean` and `cov` are the differences from the lemma's in units of its standard deviations, and `kolmogorov`
    is the distance of each coordinate from its normal law, times √n.
    """

    words: ClassVar[str] = "attention on Gaussian measures"

    queries: int
    nodes: int = 40
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 2 + 1e-8 * self.queries * self.nodes**_DIM

    def _compute(self, progress: Progress) -> xr.Dataset:
        rng = np.random.default_rng(self.seed)
        U, V = _weights(rng)
        ranks = (_DIM, _DIM - 1)
        parts = [self._of_rank(SoftmaxAttention(U, V), _root(rng, rank), rank) for rank in ranks]
        return xr.concat(parts, xr.DataArray(list(ranks), dims="rank", name="rank"))

    def _of_rank(self, layer: SoftmaxAttention, root: Float[np.ndarray, "D r"], rank: int) -> xr.Dataset:
        mu = Gaussian.from_root(_MEAN, root)
        z = mu.sample(jax.random.key(self.seed + rank), self.queries)
        outputs = np.asarray(layer.map(gauss_hermite(_MEAN, root, self.nodes), z))
        law = pushforward(layer, mu)
        mean, cov = np.asarray(law.mean()), np.asarray(law.cov())
        deviations = np.sqrt(np.diag(cov))
        centred = (outputs - mean) / deviations
        products = centred[:, :, None] * centred[:, None, :] - cov / np.outer(deviations, deviations)
        distances = [kstest(column, "norm").statistic for column in centred.T]
        return xr.Dataset(
            {
                "deviation": _relative(outputs, np.asarray(layer.map(mu, z))),
                "mean": ("output", centred.mean(axis=0)),
                "mean_stderr": ("output", centred.std(axis=0) / math.sqrt(self.queries)),
                "cov": (("output", "other"), products.mean(axis=0)),
                "cov_stderr": (("output", "other"), products.std(axis=0) / math.sqrt(self.queries)),
                "kolmogorov": ("output", math.sqrt(self.queries) * np.array(distances)),
            }
        )


@dataclasses.dataclass(frozen=True)
class LinearLimit(Computation):
    """Linear attention on long prompts, and how far softmax attention is from it at infinite length, for some laws.

    `mean_square` is the mean of ‖T_lin[μ̂_L](z) − V E[zzᵀ]Uz‖², `difference` that between the attentions on the law
    itself, relative to the linear output, and `quadrature` the same on a quadrature of the centred Gaussian.
    """

    words: ClassVar[str] = "linear attention on long prompts"

    lengths: tuple[int, ...]
    prompts: int
    queries: int = 2000
    nodes: int = 40
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 2 + 2e-8 * self.prompts * sum(self.lengths)

    def _compute(self, progress: Progress) -> xr.Dataset:
        rng = np.random.default_rng(self.seed)
        U, V = _weights(rng)
        root = _root(rng, _DIM)
        linear, softmax = LinearAttention(U, V), SoftmaxAttention(U, V)
        centred = Gaussian.from_root(np.zeros(_DIM), root)
        laws: dict[str, AbstractMeasure] = {
            "centred Gaussian": centred,
            "Gaussian of mean m": Gaussian.from_root(_MEAN, root),
            "centred mixture of two Gaussians": Mixture(
                [0.5, 0.5], [Gaussian.from_root(sign * 2 * _MEAN, root / 2) for sign in (1, -1)]
            ),
            "cube": Cube(np.full(_DIM, math.sqrt(3))),
        }
        of_prompts, of_queries = jax.random.split(jax.random.key(self.seed))
        measured = deviation(linear, centred, None, list(self.lengths), "output", of_prompts, replicates=self.prompts)
        z = centred.sample(of_queries, self.queries)

        def difference(mu: AbstractMeasure) -> float:
            return _relative(np.asarray(softmax.map(mu, z)), np.asarray(linear.map(mu, z)))

        return xr.Dataset(
            {
                "mean_square": ("L", measured.mean_square),
                "mean_square_stderr": ("L", measured.stderr),
                "difference": ("law", [difference(mu) for mu in laws.values()]),
                "quadrature": difference(gauss_hermite(np.zeros(_DIM), root, self.nodes)),
            },
            {"L": list(self.lengths), "law": list(laws)},
        )


@dataclasses.dataclass(frozen=True)
class QueryInPrompt(Computation):
    """The mean squared output deviation with the query left out of the prompt and put into it, on the line.

    Tokens are N(0, `tokens`), queries N(0, `queries`), U = `U` and V = 1.
    """

    words: ClassVar[str] = "the query in the prompt, tokens N(0, {tokens:g}), queries N(0, {queries:g})"

    tokens: float
    queries: float
    U: float
    lengths: tuple[int, ...]
    prompts: int
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 2 + 4e-8 * self.prompts * sum(self.lengths)

    def _compute(self, progress: Progress) -> xr.Dataset:
        layer = SoftmaxAttention([[self.U]], [[1.0]])
        mu, nu = (Gaussian([0.0], [[variance]]) for variance in (self.tokens, self.queries))
        key, Ls = jax.random.key(self.seed), list(self.lengths)
        found = [
            deviation(layer, mu, nu, Ls, "output", key, replicates=self.prompts, query_in_prompt=inside)
            for inside in (False, True)
        ]
        return xr.Dataset(
            {
                "mean_square": (("prompt", "L"), np.array([measured.mean_square for measured in found])),
                "mean_square_stderr": (("prompt", "L"), np.array([measured.stderr for measured in found])),
            },
            {"L": Ls, "prompt": ["without the query", "with the query"]},
        )


@dataclasses.dataclass(frozen=True)
class TiltedMoments(Computation):
    """The moments E‖Z₁‖ᵖ‖Z‖^{p'} of Assumption 3.3 by quadrature over queries and tokens, and the library's constants.

    Z is Gaussian and Z₁ has the law of tokens under the tilt of Z. `exact` is 1 where the constant is the moment itself
    and 0 where it is a bound.
    """

    words: ClassVar[str] = "moments of tilted laws"

    nodes: int = 40
    seed: int = 0

    def _compute(self, progress: Progress) -> xr.Dataset:
        rng = np.random.default_rng(self.seed)
        U, V = _weights(rng)
        layer, zero = SoftmaxAttention(U, V), np.zeros(_DIM)
        of_queries, full, singular = (_root(rng, rank) for rank in (_DIM, _DIM, _DIM - 1))
        points = rng.normal(size=(5, _DIM))
        tokens = Empirical(points - points.mean(axis=0))
        laws: dict[str, tuple[AbstractMeasure, Empirical]] = {
            "Gaussian": (Gaussian.from_root(zero, full), gauss_hermite(zero, full, self.nodes)),
            "singular Gaussian": (Gaussian.from_root(zero, singular), gauss_hermite(zero, singular, self.nodes)),
            "cube": (Cube(np.ones(_DIM)), gauss_legendre(self.nodes)),
            "five tokens": (tokens, tokens),
        }
        queries = gauss_hermite(zero, of_queries, self.nodes)
        nu = Gaussian.from_root(zero, of_queries)
        parts = [self._of_law(moment_constants(layer, mu, nu), layer, atoms, queries) for mu, atoms in laws.values()]
        return xr.concat(parts, xr.DataArray(list(laws), dims="law", name="law"))

    def _of_law(
        self, known: MomentConstants, layer: SoftmaxAttention, tokens: Empirical, queries: Empirical
    ) -> xr.Dataset:
        masses = jnp.exp(jax.vmap(lambda z: tokens.tilt(layer.U @ z).log_masses())(queries.points))
        of_queries = jnp.exp(queries.log_masses())
        sizes, lengths = (np.asarray(jnp.linalg.norm(atoms.points, axis=1)) for atoms in (tokens, queries))
        powers = sorted({p for p, _ in known.moments})

        def table(value: Callable[[int, int], Any]) -> tuple[tuple[str, str], Float[np.ndarray, "p q"]]:
            return ("p", "q"), np.array([[float(value(p, q)) for q in powers] for p in powers])

        return xr.Dataset(
            {
                "moment": table(lambda p, q: (of_queries * lengths**q) @ (masses @ sizes**p)),
                "constant": table(lambda p, q: known.moments[p, q]),
                "exact": int(known.kind == "exact"),
            },
            {"p": powers, "q": powers},
        )


_ROUNDING = 1e-9  # two computations of one number in float64 agree to this
_NORMAL = 1.95  # √n times a Kolmogorov distance that a sample of the law itself exceeds once in a thousand

AFFINE = Measurement("affine", computation=lambda choice: GaussianLimit(QUERIES[choice.preset]))
LINEAR = Measurement("linear", computation=lambda choice: LinearLimit(LENGTHS, PROMPTS[choice.preset]))
MOMENTS = Measurement("moments", computation=lambda choice: TiltedMoments())
ALIKE, WIDER = (
    Measurement(
        f"query in the prompt, tokens {tokens:g}",
        computation=lambda choice, tokens=tokens, U=U: QueryInPrompt(tokens, 1.0, U, LENGTHS, PROMPTS[choice.preset]),
    )
    for tokens, U in ((1.0, 0.3), (0.01, math.sqrt(10)))
)


def _worst(values: xr.DataArray, errors: xr.DataArray) -> tuple[float, float]:
    """The value that is farthest from 0, and its error."""
    worst = int(np.abs(values.values).argmax())
    return float(values.values.flat[worst]), float(errors.values.flat[worst])


@claim("T1", "Lemma 2.1", AFFINE, role="identity")
def _affine_and_gaussian(data: xr.Dataset) -> Finding:
    """On a Gaussian measure, singular or not, softmax attention is affine in the query, T[μ](z) = Vm + VΓUz, and sends
    the measure to a Gaussian one, whose mean and covariance follow.

    Outputs on a quadrature of the measure, at queries drawn from it, against the affine map; their mean, covariance and
    marginals against the lemma's law.
    """
    checks = []
    for rank, part in ((int(rank), data.sel(rank=rank)) for rank in data["rank"]):
        of = f"rank {rank} of {data.sizes['output']}"
        checks.append(equal(f"distance from the affine map, {of}", float(part["deviation"]), 0.0, _ROUNDING))
        for name, what in (("mean", "mean"), ("cov", "covariance")):
            value, error = _worst(part[name], part[f"{name}_stderr"])
            label = f"{what} of the outputs less the lemma's, worst entry, in its deviations, {of}"
            checks.append(equal(label, value, 0.0, 0.1, error))
        distance = float(part["kolmogorov"].max())
        checks.append(Check(f"√n × Kolmogorov distance from the lemma's normal law, {of}", distance, "<", _NORMAL))
    return Finding(tuple(checks))


@claim("T2", "Appendix B.2", LINEAR, role="identity")
def _linear_in_the_limit(data: xr.Dataset) -> Finding:
    """Normalised linear attention on L tokens tends to V E[zzᵀ]Uz, which is what softmax attention gives on the measure
    itself if that is a centred Gaussian; for other laws the two differ.

    Mean squared distance of linear attention on sampled prompts from its limit, by length; root mean square over
    queries of the difference between the two limits, relative to the linear one.
    """
    fit = rate(data)
    checks = [
        equal("slope of log E‖T_lin[μ̂_L] − V E[zzᵀ]Uz‖² in log L", fit.slope, -1.0, 0.1, fit.stderr),
        equal("softmax less linear, centred Gaussian by quadrature", float(data["quadrature"]), 0.0, _ROUNDING),
    ]
    for law in data["law"].values[1:]:
        label = f"softmax less linear, relative, {law}"
        checks.append(Check(label, float(data["difference"].sel(law=law)), ">", 0.05))
    return Finding(
        tuple(checks), "On a Gaussian of mean m the difference is Vm(1 − mᵀUz): the equality needs m = 0 and Gaussians."
    )


def rate(data: xr.Dataset) -> RateFit:
    """The power of L by which the mean square falls."""
    return fit_power_law(data["L"].values, data["mean_square"].values, data["mean_square_stderr"].values)


@claim("T5", "Remark 3.2", WIDER, ALIKE)
def _query_in_the_prompt(wider: xr.Dataset, alike: xr.Dataset) -> Finding:
    """Putting the query into the prompt changes nothing: both conventions converge at the same rate.

    Exponents of the mean squared output deviation in the prompt length, with the query in the prompt and without it, on
    the line, queries N(0, 1): tokens N(0, 1) with U = 0.3, N(0, 0.01) with U = √10.
    """
    checks = []
    for data, queries in ((wider, "wider than tokens"), (alike, "distributed like tokens")):
        without, within = (rate(data.isel(prompt=i)) for i in (0, 1))
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


@claim("T6", "Assumption 3.3", MOMENTS, role="identity")
def _moments_are_finite(data: xr.Dataset) -> Finding:
    """The moments of tilted tokens that Assumption 3.3 asks for are finite for Gaussian and for bounded laws.

    E‖Z₁‖^p‖Z‖^p' for p, p' in {0, 4, 8}, by quadrature over Gaussian queries and tilted tokens, against the closed form
    for Gaussians and the bound for laws of bounded support.
    """
    ratio = data["moment"] / data["constant"]
    checks = []
    for law in data["law"].values:
        of_law = ratio.sel(law=law)
        if int(data["exact"].sel(law=law)):
            worst = float(1 + _worst(of_law - 1, of_law)[0])
            checks.append(equal(f"moment over its closed form, worst, {law}", worst, 1.0, 1e-7))
        else:
            worst = float(of_law.sel(p=slice(1, None)).max())
            checks.append(Check(f"moment over radius^p E‖Z‖^p', largest for p > 0, {law}", worst, "<", 1.0))
    return Finding(tuple(checks))
