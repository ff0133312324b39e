"""What the experiment on several heads computes: least risks by length, and heads that SGD has trained."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import xarray as xr
from jaxtyping import Float

from largeprompt._precision import cached
from largeprompt.attention import AbstractAttention, Head, LinearAttention, MultiHead
from largeprompt.icl import bayes_risk, optimal_heads, optimal_linear
from largeprompt.lab import Progress, Run
from largeprompt.paper.experiment import Computation

RATE, BATCH = 0.03, 64
_PROMPTS = 2**14
_LEAST = 0.1  # of what all heads do: less of one sign is no pair


class Least(NamedTuple):
    """The best layers at one length, as lists of (U, V) heads, and their risks: one softmax head, two, linear."""

    layers: tuple[tuple[AbstractAttention, ...], ...]
    risks: Float[np.ndarray, " 3"]


@cached(maxsize=64)  # curves and trained runs ask for the same lengths
def _least(L: int) -> Least:
    task = Run(L=L).task()
    one, pair, linear = optimal_heads(task, L, 1), optimal_heads(task, L, 2), optimal_linear(task, L)
    layers = (_merged(one.attention), _merged(pair.attention), (linear.attention,))
    return Least(layers, np.asarray([float(best.risk.value) for best in (one, pair, linear)]))


def _merged(layer: Head | MultiHead) -> tuple[AbstractAttention, ...]:
    return tuple(head.merged() for head in (layer.heads if isinstance(layer, MultiHead) else (layer,)))


@dataclasses.dataclass(frozen=True)
class LeastRisks(Computation):
    """The least risks of one softmax head, of two and of linear attention, also with a token less, and Bayes' risk."""

    words: ClassVar[str] = "least risks of one and two softmax heads"

    lengths: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return 2.0 + 1.3 * len(self.lengths)

    def _compute(self, progress: Progress) -> xr.Dataset:
        rows: dict[str, list[float]] = {}
        with progress.task("lengths", len(self.lengths)) as advance:
            for L in self.lengths:
                task, (layers, (one, pair, linear)) = Run(L=L).task(), _least(L)
                shorter = float(optimal_linear(task, L - 1).risk.value)
                head = layers[1][0]
                found = {"one": one, "pair": pair, "linear": linear, "linear_shorter": shorter}
                found |= {"Bayes": float(bayes_risk(task, L).value), "noise": float(task.noise) / 2}
                found |= {"best_scale": float(head.U[0, 0]), "best_value": float(head.V[-1, -1])}
                for name, number in found.items():
                    rows.setdefault(name, []).append(number)
                advance(1, f"L = {L}")
        return xr.Dataset({name: ("L", row) for name, row in rows.items()}, {"L": np.asarray(self.lengths)})


@dataclasses.dataclass(frozen=True)
class TrainedHeads(Computation):
    r"""What SGD from default starts makes of several softmax heads: of every head A ≈ aI and r, and the risk.

    `scale` is $a = \mathrm{tr}A/d$ of the scores $x_l\cdot Ax$, `value` the factor r of labels, `uneven` is
    $\|A-aI\|/\|A\|$, and `covariates` the share of the values' norm that is not r.
    """

    words: ClassVar[str] = "training of several heads ({heads}) at L = {L}, {seeds} seeds"

    heads: int
    L: int
    seeds: int
    steps: int
    rate: float = RATE
    batch: int = BATCH

    @property
    def seconds(self) -> float:
        tokens = self.batch * self.L * self.steps * self.seeds
        return 0.5 + 5e-9 * tokens * self.heads ** (1.5 if self.heads > 1 else 1)

    def _compute(self, progress: Progress) -> xr.Dataset:
        layers = []
        with progress.task(self.title, self.seeds) as advance:
            for seed in range(self.seeds):
                trainer = self._run(seed).trainer()
                layers.append(_merged(cast(Any, trainer.advance(trainer.start(), self.steps).layers[0])))
                advance(1, f"seed {seed}")
        rows = np.asarray([[_reading(head) for head in layer] for layer in layers])
        names = ("scale", "value", "uneven", "covariates")
        data = {name: (("seed", "head"), part) for name, part in zip(names, np.moveaxis(rows, -1, 0), strict=True)}
        risks, errors = sampled_risks(layers, self.L)
        return xr.Dataset(data | {"risk": ("seed", risks), "risk_stderr": ("seed", errors)})

    def _run(self, seed: int) -> Run:
        """Heads as wide as a token, as theirs are."""
        given: Any = {"steps": self.steps, "rate": self.rate, "batch": self.batch}
        given |= {"weight_seed": seed, "data_seed": seed, "attention": "softmax", "outputs": 1}
        run = Run(L=self.L, heads=self.heads, **given)
        return dataclasses.replace(run, head_dim=run.dim)


def _reading(head: AbstractAttention) -> tuple[float, float, float, float]:
    """a, r, ‖A − aI‖/‖A‖ and the share of covariates of a (U, V) head."""
    U, v = np.asarray(head.U), np.asarray(head.V)[-1]
    A = U[:-1, :-1]
    a = float(np.trace(A)) / len(A)
    uneven = np.linalg.norm(A - a * np.eye(len(A))) / np.linalg.norm(A)
    return a, float(v[-1]), float(uneven), float(np.linalg.norm(v[:-1]) / np.linalg.norm(v))


def sampled_risks(
    layers: list[tuple[AbstractAttention, ...]], L: int, seed: int = 0
) -> tuple[Float[np.ndarray, " s"], Float[np.ndarray, " s"]]:
    """The risks of layers on common prompts, with standard errors.

    The losses of the best layers, whose risks are known exactly, are control variates: trained heads err as one of
    these does. The best single head is there with both signs, which have one risk and err on different prompts.
    """
    task, rng = Run(L=L).task(), np.random.default_rng(seed)
    X, x = rng.normal(size=(_PROMPTS, L, task.d)), rng.normal(size=(_PROMPTS, task.d))
    w = rng.normal(size=(_PROMPTS, task.d)) / math.sqrt(task.d)
    y = np.einsum("nld,nd->nl", X, w) + math.sqrt(task.noise) * rng.normal(size=(_PROMPTS, L))
    target = np.einsum("nd,nd->n", x, w) + math.sqrt(task.noise) * rng.normal(size=_PROMPTS)
    Z = np.concatenate([X, y[..., None]], axis=-1)

    def losses(heads: tuple[AbstractAttention, ...]) -> Float[np.ndarray, " n"]:
        answer = np.zeros(_PROMPTS)
        for head in heads:
            scores = np.matmul(Z, (x @ np.asarray(head.U)[:, :-1].T)[:, :, None])[..., 0]
            if isinstance(head, LinearAttention):
                weights = scores / L
            else:
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
            answer += np.matmul(weights[:, None, :], Z)[:, 0] @ np.asarray(head.V)[-1]
        return (answer - target) ** 2 / 2

    best = _least(L)
    (one,), *_ = best.layers
    known, exact = [(type(one)(-one.U, -one.V),), *best.layers], np.concatenate([best.risks[:1], best.risks])
    controls = np.stack([losses(heads) for heads in known], axis=1)
    centred = controls - controls.mean(axis=0)
    found = np.stack([losses(heads) for heads in layers], axis=1)
    slopes = np.linalg.lstsq(centred, found - found.mean(axis=0), rcond=None)[0]
    left = found - found.mean(axis=0) - centred @ slopes
    risks = found.mean(axis=0) + (exact - controls.mean(axis=0)) @ slopes
    return risks, left.std(axis=0, ddof=controls.shape[1] + 1) / math.sqrt(_PROMPTS)


def paired(data: xr.Dataset) -> Any:
    """Whether heads of both signs do a tenth or more of what all do: of Σ|a r| over heads with a r > 0."""
    does = (data.scale * data.value).clip(min=0.0)
    positive, negative = (does.where(sign * data.scale > 0, 0.0).sum("head") for sign in (1, -1))
    return np.minimum(positive, negative) > _LEAST * (positive + negative)


def imbalance(data: xr.Dataset) -> Any:
    """|Σ r| / Σ|r| over heads: 0 where values add up to zero, 1 where all have one sign."""
    return abs(data.value.sum("head")) / abs(data.value).sum("head")
