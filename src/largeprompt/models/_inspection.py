"""What a network's heads do with their prompts: one number of each kind for each head, and what stands behind it."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from largeprompt._display import axes
from largeprompt._progress import Progress
from largeprompt.measures._worth import tail_indices

from ._call import AttentionCall, HeadCall
from ._redraws import redrawn_errors
from ._statistics import (
    FEWEST,
    HEAVIEST,
    Attended,
    Lags,
    QueryStatistics,
    attended,
    explained_by_position,
    lags,
    largest_weights,
    product,
    query_statistics,
    sinks_of,
)

EPSILON = 0.1  # relative error whose prompt length is named

# name: what it is, in the words of tables and maps
MEANINGS = {
    "seen": "tokens that a query sees",
    "effective": "effective tokens, 1/Σw²",
    "entropy": "entropy of the weights",
    "largest": "largest weight",
    "first": "weight of the first token",
    "sinks": "weight of all sinks",
    "score_variance": "variance ν of the scores, sinks apart",
    "score_threshold": "ν over ln L: past 1 single tokens decide",
    "trusted": "whether k̂ is at most 0.7, so that errors can be predicted",
    "tail": "tail index k̂ of the weights, sinks apart",
    "relative_error": "error of the output over redraws of the prompt, relative",
    "residual_error": "the same in the residual stream",
    "length": f"prompt length for a relative error of {EPSILON:g}",
    "linear": "distance from the Gaussian (linear) limit, relative",
    "linear_beside_sinks": "the same with sinks kept as atoms",
    "position": "share of the scores' variance that position explains",
    "rebuilt": "largest difference from the model's own output, relative",
    "measured_over_predicted": "error measured on unseen text over that predicted",
}


class Details(NamedTuple):
    """What a page on one head shows."""

    places: Int[np.ndarray, " p"]  # of tokens, and the mean weight there
    weights: Float[np.ndarray, " p"]
    carriers: Int[np.ndarray, " c"]  # tokens that carry the output, and each one's share of its error
    shares: Float[np.ndarray, " c"]
    lengths: Float[np.ndarray, " l"]
    predicted: Float[np.ndarray, " l"]
    measured: Float[np.ndarray, " l"] | None
    sinks: Int[np.ndarray, " s"]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The heads of a network on one prompt: `data` has a number of each kind for each layer and head.

    A number that rests on the law of large prompts is NaN where the tail index of the weights is above 0.7: it would
    not be true there. `details` has what stands behind each head's numbers, by (layer, head).
    """

    data: xr.Dataset
    details: dict[tuple[int, int], Details]
    tokens: Sequence[str] | None = None

    def to_dataset(self) -> xr.Dataset:
        """All numbers, with their meanings as attributes."""
        return self.data

    @property
    def summary(self) -> list[str]:
        """What a person should know, in a few sentences."""
        return summary(self.data)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}: {value}" for name, value in self.data.attrs.items() if value != "")
        return "\n".join([f"Inspection ({facts})", *self.summary])

    def _repr_html_(self) -> str:
        import html

        table = self.data.to_dataframe().reset_index().to_html(float_format="{:.3g}".format, index=False, max_rows=20)
        return "".join(f"<p>{html.escape(line)}</p>" for line in self.summary) + table

    def plot(self, name: str = "effective", ax: Any = None) -> Any:
        """Draw a map of one number over layers and heads."""
        if name not in self.data:
            raise ValueError(f"there is no number {name!r}; there are {', '.join(map(str, self.data))}")
        ax = axes(ax)
        values = self.data[name].astype(float)
        image = ax.pcolormesh(self.data["head"], self.data["layer"], values, cmap="viridis")
        ax.set(xlabel="head", ylabel="layer", title=MEANINGS.get(name, name))
        ax.invert_yaxis()
        ax.figure.colorbar(image, ax=ax)
        return ax


class Inspector:
    """Takes attention calls one by one and keeps numbers only; `pool` has the calls on unseen text, for a check."""

    def __init__(self, pool: Sequence[AttentionCall] | None = None, progress: Progress | None = None, total: int = 0):
        self._pool, self._progress, self._total = pool, progress or Progress(), total
        self._rows: list[dict[str, np.ndarray]] = []
        self._tokens = 0
        self._names: list[str] = []
        self._details: dict[tuple[int, int], Details] = {}

    def __call__(self, call: AttentionCall) -> None:
        """Take one more call."""
        layer, by_lag = len(self._rows), lags(call.positions, call.tokens)
        self._tokens = max(self._tokens, call.tokens)
        found = []
        for h in range(call.heads):
            found.append(_of_head(call.head(h), by_lag, None if call.outputs is None else call.outputs[h]))
        rows = _rows(found)
        all_details = [_details(one, seen) for one, seen in zip(found, rows["seen"].tolist(), strict=True)]
        if self._pool is not None:
            for h, details in enumerate(all_details):
                shares = details.lengths / details.lengths[-1]
                pool = self._pool[layer].head(h)
                measured = redrawn_errors(call.head(h), pool, details.sinks, shares, 1000 * layer + h)
                all_details[h] = details._replace(measured=measured)
            measured, predicted = (
                np.array([getattr(one, name)[-1] for one in all_details]) for name in ("measured", "predicted")
            )
            known = (rows["trusted"] == 1) & (predicted > 0)
            rows["measured_over_predicted"] = np.where(known, measured / np.where(known, predicted, 1), np.nan)
        self._details |= {(layer, h): details for h, details in enumerate(all_details)}
        self._names.append(call.name)
        self._rows.append(rows)
        if self._total:
            self._progress.step("inspecting", layer + 1, f"layer {layer + 1} of {self._total}")

    def finished(self, tokens: Sequence[str] | None = None, **facts: Any) -> Inspection:
        """All that was found."""
        if not self._rows:
            raise ValueError("the model made no attention call; inspect needs one that has attention layers")
        heads = max(len(row["seen"]) for row in self._rows)

        def table(name: str) -> np.ndarray:
            rows = [row[name] for row in self._rows]
            return np.stack([np.pad(row, (0, heads - len(row)), constant_values=np.nan) for row in rows])

        variables = {
            name: (("layer", "head"), table(name), {"long_name": MEANINGS.get(name, name)}) for name in self._rows[0]
        }
        coordinates = {
            "layer": np.arange(len(self._rows)),
            "head": np.arange(heads),
            "name": ("layer", _distinct(self._names)),
        }
        return Inspection(xr.Dataset(variables, coordinates, {"tokens": self._tokens, **facts}), self._details, tokens)


def _distinct(names: list[str]) -> list[str]:
    """Names of calls; where layers share a module, with a count."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(f"{name} ({seen[name]})" if names.count(name) > 1 else name)
    return found


class _Found(NamedTuple):
    """What is known of one head from its scores."""

    sinks: Int[np.ndarray, " s"]
    queries: QueryStatistics
    largest_weights: tuple[np.ndarray, np.ndarray]
    position: float
    rebuilt: float
    mean_weights: Float[np.ndarray, " L"]
    carried: Float[np.ndarray, " L"]


def _of_head(head: HeadCall, by_lag: Lags | None, output: np.ndarray | None) -> _Found:
    found = attended(head)
    sinks = sinks_of(found.weights)
    return _Found(
        sinks,
        query_statistics(head, found, sinks),
        largest_weights(found, sinks),
        explained_by_position(found, by_lag),
        math.nan if output is None else _largest(found.output - output) / max(_largest(output), 1e-300),
        found.weights.mean(axis=0),
        _carried(head, found),
    )


def _rows(heads: list[_Found]) -> dict[str, Float[np.ndarray, " h"]]:
    """One number of each kind for each head: medians over queries, errors as root mean squares."""
    q = QueryStatistics(*np.stack([np.stack(head.queries) for head in heads], axis=1))
    middle = dict(zip(q._fields, np.median(np.stack(q), axis=2), strict=True))
    weights, drawn = (np.concatenate(parts) for parts in zip(*(head.largest_weights for head in heads), strict=True))
    tail = np.median(tail_indices(weights, drawn).reshape(len(heads), -1), axis=1)
    trusted = (tail <= HEAVIEST) & (middle["seen"] >= FEWEST)
    output, error, residual_output, residual_error = (
        _rms(values) for values in (q.output, q.error, q.residual_output, q.residual_error)
    )
    believed = {
        "relative_error": error / output,
        "residual_error": residual_error / residual_output,
        "length": middle["seen"] * (error / output / EPSILON) ** 2,
    }
    return {
        **{name: middle[name] for name in ("seen", "effective", "entropy", "largest", "first", "sinks")},
        "score_variance": middle["score_variance"],
        "score_threshold": middle["score_variance"] / np.log(np.maximum(middle["seen"], 2.0)),
        "tail": tail,
        "trusted": trusted.astype(float),
        **{name: np.where(trusted, values, np.nan) for name, values in believed.items()},
        "linear": middle["linear"],
        "linear_beside_sinks": middle["linear_beside_sinks"],
        "position": np.array([head.position for head in heads]),
        "rebuilt": np.array([head.rebuilt for head in heads]),
    }


def _rms(values: Float[np.ndarray, "*h n"]) -> Any:
    return np.sqrt(np.mean(values**2, axis=-1))


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max())


def _carried(head: HeadCall, found: Attended) -> Float[np.ndarray, " L"]:
    """How much of the error of outputs each token carries, the mean of w‖v - o‖; distances in float32."""
    output = found.output.astype(np.float32)
    distances = product(-2 * output, head.values.T)
    distances += np.vecdot(head.values, head.values)
    distances += np.vecdot(output, output)[:, None]
    np.sqrt(np.maximum(distances, 0.0, out=distances), out=distances)
    return np.einsum("nl,nl->l", found.weights, distances)


def _details(head: _Found, seen: float) -> Details:
    mean, carried = head.mean_weights, head.carried
    places, lengths = _places(len(mean)), _lengths(seen)
    by_place = np.add.reduceat(mean, places) / np.diff(np.append(places, len(mean)))
    carriers = np.argsort(-carried)[:12]
    shares = carried[carriers] / max(float(carried.sum()), 1e-300)
    predicted = _rms(head.queries.error) * np.sqrt(seen / lengths)
    return Details(places, by_place, carriers, shares, lengths, predicted, None, head.sinks)


@functools.cache
def _places(tokens: int) -> Int[np.ndarray, " p"]:
    """Up to 96 places of a prompt, the first ones one by one."""
    return np.unique(np.geomspace(1, tokens, min(tokens, 96)).round().astype(int)) - 1


@functools.cache
def _lengths(seen: float) -> Float[np.ndarray, " l"]:
    """Lengths at which errors are predicted."""
    return np.unique(np.geomspace(max(seen / 16, 4.0), seen, 5).round())


def summary(data: xr.Dataset) -> list[str]:
    """An inspection in a few sentences."""
    count = int(np.isfinite(data["seen"]).sum())
    seen = float(np.nanmedian(data["seen"]))
    trusted = data["trusted"] == 1
    regime = int((trusted & (data["score_threshold"] < 1)).sum())
    half = int((data["first"] > 0.5).sum())
    found = [
        f"{regime} of {count} heads are in the large-prompt regime at L = {seen:.0f}: "
        "no single token decides, and their errors fall like 1/√L.",
        f"{half} put half of their weight or more on the first token; {int((data['sinks'] > 0).sum())} have sinks.",
        f"The median head weighs {float(np.nanmedian(data['effective'])):.3g} tokens; "
        f"position explains {100 * float(np.nanmedian(data['position'])):.0f} % of the variance of its scores."
        if np.isfinite(data["position"]).any()
        else f"The median head weighs {float(np.nanmedian(data['effective'])):.3g} tokens.",
        f"{int((data['linear_beside_sinks'] < 0.1).sum())} are within 10 % of linear attention, sinks kept as atoms.",
    ]
    if bool(trusted.any()):
        need = float(np.nanmedian(data["length"]))
        able = int(trusted.sum())
        found.append(f"Of the {able} whose tails allow it, the median needs {need:,.0f} tokens for an error of 10 %.")
    if "measured_over_predicted" in data:
        ratio = data["measured_over_predicted"].values
        ratio = ratio[np.isfinite(ratio)]
        near = int(np.sum(np.abs(np.log(ratio)) <= math.log(1.2)))
        found.append(f"On unseen text {near} of {len(ratio)} errors are within 20 % of their predictions.")
    return found
