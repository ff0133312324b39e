"""Results as tables and lines for a terminal."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from rich import box
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from largeprompt.lab import VERDICTS as ENDS
from largeprompt.paper.claims import ROLES, VERDICTS, counted, role_in_words
from largeprompt.paper.report.words import check


def number_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of numbers."""
    columns = (Column(heading, justify="right", no_wrap=True) for heading in headings)
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    return table


def rows_as_dataset(rows: Sequence[dict[str, Any]]) -> xr.Dataset:
    """The rows of a summary as columns, for NetCDF and CSV: whole numbers past 32 bits as floats."""

    def kept(value: Any) -> Any:
        return float(value) if isinstance(value, int) and abs(value) >= 2**31 else value

    return xr.Dataset({name: ("row", [kept(row[name]) for row in rows]) for name in rows[0]})


def training_tables(rows: Sequence[dict[str, Any]]) -> Iterator[Table | str]:
    """A table for each covariance, one line for each other setting and attention; then what became of the rest."""
    settings = [name for name in rows[0] if name not in _SHOWN]
    headings = [name.replace("_", " ") for name in (*settings, *_HEADINGS)]
    for sigma in dict.fromkeys(row["sigma"] for row in rows):
        own = (_training_row(row, settings) for row in rows if row["sigma"] == sigma)
        yield number_table(f"{sigma}: final risk ½E(ŷ−y)² of the good runs", headings, own)
    runs = sum(row["runs"] for row in rows)
    unfinished, settled = (sum(row[name] for row in rows) for name in ("unfinished", "settled"))
    if unfinished:
        yield f"{unfinished} of {runs} were not finished: more steps would help, or a lower rate where the risk rises"
    if settled:
        yield f"{settled} of {runs} have settled, and whether at the optimum is not known"
    for row in rows:
        if row["trapped"]:
            where = ", ".join(f"{name} = {in_text(row[name])}" for name in ("sigma", *settings))
            yield f"trapped ({where}): {row['trapped']} end at a mean risk of {row['trapped_risk']:.5f}"


def _training_row(row: dict[str, Any], settings: Sequence[str]) -> list[str]:
    error = row["risk_stderr"]
    risk = "–" if math.isnan(row["risk"]) else f"{row['risk']:.5f}"
    risk += "" if math.isnan(error) else f" ± {error:.0e}"
    least = (*(_least(row, kind) for kind in ("linear", "softmax")), f"{row['Bayes']:.5f}")
    shares = (_share(row, name) for name in ("trapped", "diverged"))
    return [*(in_text(row[name]) for name in settings), str(row["runs"]), risk, *least, *shares]


_HEADINGS = ("runs", "final risk", "best linear", "best softmax", "Bayes", "trapped", "diverged")
_SHOWN = {"sigma", "runs", *ENDS, "risk", "risk_stderr", "trapped_risk", "Bayes"}
_SHOWN |= {f"{name}_{what}" for name in ("trapped", "diverged") for what in ("share", "low", "high")}
_SHOWN |= {f"{name}_{what}" for name in ("linear", "softmax") for what in ("optimum", "attainable")}


def _least(row: dict[str, Any], kind: str) -> str:
    """The least risk, or what it is at most."""
    optimum, attainable = row[f"{kind}_optimum"], row[f"{kind}_attainable"]
    if math.isnan(attainable):
        return "–"
    return f"≤ {attainable:.5f}" if math.isnan(optimum) else f"{optimum:.5f}"


def _share(row: dict[str, Any], name: str) -> str:
    low, high = (round(100 * row[f"{name}_{end}"]) for end in ("low", "high"))
    return f"{100 * row[f'{name}_share']:.0f}% [{low}, {high}]"


def in_text(value: Any) -> str:
    """A setting as text."""
    if isinstance(value, float):
        return "∞" if math.inf == value else f"{value:g}"
    return str(value)


NAMES = {
    "output": "output T",
    **{name: f"gradient in {name}" for name in "VUKQO"},
    "gradient": "gradient in all weights",
    "risk": "risk",
    "risk-gradient": "gradient of the risk",
}
_DIFFERENCES = {"risk": "R_L − R_∞, R_∞ that of the infinite prompt", "risk-gradient": "‖∇R_L − ∇R_∞‖"}


def concentration_tables(data: xr.Dataset) -> Iterator[Table | Text]:
    """A table a quantity: the measurement by length beside its prediction and its bound; then what they amount to."""
    for name in data.quantity.values:
        curve = data.sel(quantity=name)
        yield _concentration_table(str(name), curve)
        yield from map(Text, _remarks(curve, int(data.replicates)))
        yield Text()
    if "layer" in data.attrs:
        yield Text(f"layer: {data.layer}")
    yield Text(
        f"{data.replicates} prompts a length, seed {data.seed}, {data.seconds:.0f} s; "
        "slopes and mean ratios over the longer half of the lengths"
    )


def _concentration_table(name: str, curve: xr.Dataset) -> Table:
    difference = _DIFFERENCES.get(name, "mean squared deviation from the infinite prompt")
    predicted = "asymptote" if is_asymptote(curve) else "predicted"
    headings = ("L", "measured", predicted, "ratio", "bound/measured", "effective")
    return number_table(f"{NAMES.get(name, name)}: {difference}", headings, map(_at_length, points(curve)))


def _at_length(point: dict[str, float]) -> tuple[str, ...]:
    length = f"{'' if point['trusted'] else '*'}{point['L']:.0f}"
    predicted = f"{point['predicted']:.3e}" if math.isfinite(point["predicted"]) else "–"
    decades = decades_above(point)
    excess = "–" if math.isnan(decades) else f"10^{decades:.1f}"
    return length, _with_error(point), predicted, _ratio(point), excess, f"{point['effective']:.0f}"


def points(curve: xr.Dataset) -> list[dict[str, float]]:
    """The numbers at each length, by name; of risks the difference in place of its square: it is what is bounded."""
    names = [str(name) for name, values in curve.items() if values.dims == ("L",)]
    return [_compared({name: float(curve[name][i]) for name in ("L", *names)}) for i in range(curve.sizes["L"])]


def _compared(point: dict[str, float]) -> dict[str, float]:
    if math.isnan(point.get("gap", math.nan)):
        return point
    predicted = math.sqrt(point["predicted"]) if point["predicted"] >= 0 else math.nan
    error = point["predicted_stderr"] / (2 * predicted) if predicted > 0 else math.nan
    own = {"measured": point["gap"], "stderr": point["gap_stderr"], "high": math.sqrt(point["high"])}
    return {**point, **own, "predicted": predicted, "predicted_stderr": error}


def has_gap(curve: xr.Dataset) -> bool:
    return "gap" in curve and bool(np.isfinite(curve.gap).any())


def asymptote_of(curve: xr.Dataset) -> np.ndarray:
    return float(curve.constant) * curve.L.values.astype(float) ** -float(curve.exponent)


def is_asymptote(curve: xr.Dataset) -> bool:
    """Whether the prediction is no more than the law at large lengths."""
    return not bool(curve.exact) and np.allclose(asymptote_of(curve), curve.predicted.values, rtol=1e-6, atol=0)


def _with_error(point: dict[str, float]) -> str:
    if point["measured"] == 0 < point["high"]:
        return f"below {point['high']:.1e}"
    return f"{point['measured']:.3e} ± {point['stderr']:.0e}"


def _ratio(point: dict[str, float]) -> str:
    measured, predicted = abs(point["measured"]), point["predicted"]
    if not predicted > 0 or math.isinf(predicted) or measured == 0:
        return "–"
    ratio = measured / predicted
    error = math.hypot(point["stderr"], ratio * point["predicted_stderr"]) / predicted
    return _uncertain(ratio, error)


def _uncertain(ratio: float, error: float) -> str:
    return f"{ratio:.3f} ± {error:.3f}" if 0.05 <= ratio < 100 else f"{ratio:.2e} ± {error:.0e}"


def decades_above(point: dict[str, float]) -> float:
    """By how many powers of ten the bound exceeds what it bounds."""
    measured = abs(point["measured"])
    return point["bound_log10"] - math.log10(measured) if measured > 0 else math.nan


def _remarks(curve: xr.Dataset, replicates: int) -> Iterator[str]:
    doubtful = curve.isel(L=np.flatnonzero(~curve.trusted.values.astype(bool)))
    within = doubtful.isel(L=np.flatnonzero(np.isfinite(doubtful.needed.values)))
    beyond = doubtful.isel(L=np.flatnonzero(~np.isfinite(doubtful.needed.values)))
    if within.sizes["L"]:
        enough = f"about {_count(float(within.needed.max()))} would do"
        yield f"* not to be trusted: {replicates} prompts are too few at L = {_listed(within)}; {enough}"
    if beyond.sizes["L"]:
        yield f"* not to be trusted: no number of prompts would do at L = {_listed(beyond)}, the tail is too heavy"
    square, exponent = " of the square" if has_gap(curve) else "", float(curve.exponent)
    if math.isfinite(float(curve.slope)):
        here = float(curve.predicted_slope)
        at_these = [f"{here:.3f} at these L"] if math.isfinite(here) and not abs(here + exponent) < 0.005 else []
        at_large = [f"{-exponent:.3g} for large L"] if math.isfinite(exponent) else []
        predicted = ", ".join(at_these + at_large) or "none"
        yield f"slope{square} {float(curve.slope):.3f} ± {float(curve.slope_stderr):.3f}, predicted {predicted}"
    if math.isfinite(float(curve.ratio)):
        line = "the asymptote" if is_asymptote(curve) else "predicted"
        yield f"measured over {line}{square} {_uncertain(float(curve.ratio), float(curve.ratio_stderr))}"
    if math.isfinite(float(curve.constant)):
        onset, power = float(curve.onset), "" if exponent == 1 else f"^{exponent:.3g}"
        begins = f", within 10 % from L = {_count(onset)} on" if math.isfinite(onset) else ""
        yield f"asymptote{square} {float(curve.constant):.4g}/L{power}{begins}"
    named = {name: str(curve[name].values) for name in ("regime", "method", "note", "bound_name", "bound_refusal")}
    some = " at some lengths" if named["bound_name"] else ""
    said = ("law: ", "prediction: ", "but ", "bound: ", f"no bound{some}: ")
    yield from (f"{what}{text}" for what, text in zip(said, named.values(), strict=True) if text)


def _listed(curve: xr.Dataset) -> str:
    lengths = [str(int(L)) for L in curve.L.values]
    return ", ".join(lengths) if len(lengths) <= 6 else f"{lengths[0]}, {lengths[1]}, ..., {lengths[-1]}"


def _count(number: float, large: float = 1e6) -> str:
    return f"{number:.0f}" if number < large else f"{number:.1e}".replace("e+0", "e").replace("e+", "e")


def prompt_length_lines(found: Any, notes: Sequence[str] = (), layer: str = "") -> Iterator[Text]:
    """The prompt length that an error asks for, how it is known, and what the paper's bound would ask for."""
    kind = {"risk": "difference of risks", "risk-gradient": "difference of gradients"}.get(found.quantity)
    error = f"a {kind or 'root mean square error'} of {found.epsilon:g}"
    length = f"L = {_count(found.L, 1e12)} tokens a prompt" if math.isfinite(found.L) else "no length up to 1e60"
    yield Text(f"{length} for {error}")
    if found.lasting > found.L:
        later = f"from L = {_count(found.lasting, 1e12)} on" if math.isfinite(found.lasting) else "at no length on"
        yield Text(f"{later} every longer prompt does too: in between the {kind or 'error'} is larger again")
    yield Text("; ".join(part for part in (found.method, found.regime.sentence) if part))
    yield from (Text(f"but {note}") for note in notes)
    if found.checked and found.measured > 0:
        root = math.sqrt(found.measured)
        yield Text(f"measured at that length: {root:.4g} ± {found.measured_stderr / (2 * root):.1g}")
    elif not found.checked:
        yield Text(f"not measured: {found.unchecked_reason}")
    if found.bound_refusal:
        yield Text(f"the paper's bound does not serve: {found.bound_refusal}")
    else:
        yield Text(f"the paper's bound asks for L = 10^{found.bound_log10_L:.1f}")
    if layer:
        yield Text(f"layer: {layer}")


def optima_tables(data: xr.Dataset) -> Iterator[Table]:
    """A table a covariance: the least risks by length."""
    for covariance in data.covariance.values:
        title = f"{covariance}, d = {data.d}, noise {data.noise:g}: least risk ½E(ŷ−y)², floor {float(data.floor):g}"
        risks = data.sel(covariance=covariance, drop=True)[["Bayes", "linear", "softmax"]].to_dataframe()
        rows = ((str(L), *(f"{value:.6f}" for value in row)) for L, *row in risks.itertuples())
        yield number_table(title, ("L", "Bayes", "linear attention", "softmax attention"), rows)


def flow_tables(data: xr.Dataset) -> Iterator[Table]:
    """A table a covariance: where each flow ends and how far from the infinite one it has been."""
    for covariance in data.covariance.values:
        curves = data.sel(covariance=covariance)
        end = float(data.t[-1])
        title = f"{covariance}: softmax flows from Assumption 5.1 with alpha = {data.alpha:g}, to t = {end:g}"
        early = float(data.t.sel(t=end / 100, method="nearest"))
        headings = ("L", "final risk", "above ∞", f"distance at t = {early:.3g}", f"at t = {end:g}")
        limit, columns = float(curves.infinite[-1]), (curves.L, curves.risk.sel(t=end))
        columns += (curves.distance.sel(t=early), curves.distance.sel(t=end))
        rows = [
            (f"{L}", f"{risk:.6f}", f"{risk - limit:.2e}", f"{first:.2e}", f"{last:.2e}")
            for L, risk, first, last in zip(*(column.values for column in columns), strict=True)
        ]
        yield number_table(title, headings, [*rows, ("∞", f"{limit:.6f}", "", "", "")])


def length_table(data: xr.Dataset) -> Table:
    """The risk of what a run has trained at each length, beside the optima there; the length of training is marked."""
    at = "" if data.step == data.steps else f" at step {data.step} of {data.steps}"
    best = "best" if data.heads == 1 else "best head"
    members = [name for member in data.member.values for name in (str(member), f"{best} {member}")]
    rows = (_at_test_length(data.isel(L=i)) for i in range(data.sizes["L"]))
    return number_table(f"{data.run}{at}: risk ½E(ŷ−y)² by prompt length", ("L", *members, "Bayes"), rows)


def _at_test_length(row: xr.Dataset) -> list[str]:
    cells = []
    for member in row.member.values:
        one = row.sel(member=member)
        error = f" ± {float(one.risk_stderr):.0e}" if one.risk_stderr > 0 else ""
        cells += [f"{float(one.risk):.6f}{error}", f"{float(one.optimum):.6f}"]
    length = "∞" if math.inf == row.L else f"{int(row.L)}"
    return [f"trained at {length}" if row.trained else length, *cells, f"{float(row.Bayes):.6f}"]


_STYLES: dict[str, str] = dict(zip(VERDICTS, ("green", "cyan", "yellow", "bold red"), strict=True))


def ledger_table(ledger: Mapping[str, Any]) -> Iterator[Table | Text]:
    """A line for each claim with its deciding number; then counts by role, the errata, and what is not settled."""
    table = Table(title=f"The claims of the paper ({ledger['preset']})", box=box.SIMPLE_HEAD)
    for name in ("", "role", "claim", "number", "verdict"):
        table.add_column(name, overflow="fold", no_wrap=name == "", max_width=10 if name == "role" else None)
    for entry in ledger["claims"]:
        number = check(entry["checks"][0]) if entry["checks"] else "–"
        role, verdict = Text(role_in_words(entry)), Text(entry["verdict"], _STYLES[entry["verdict"]])
        table.add_row(entry["key"], role, entry["statement"], Text(number), verdict)
    yield table
    yield from map(Text, counted(ledger["claims"]))
    if ledger["errata"]:
        confirmed = sum(erratum["confirmed"] for erratum in ledger["errata"])
        yield Text(f"{len(ledger['errata'])} errata: {confirmed} confirmed by their numbers, recomputed")
    left = [entry["key"] for entry in ledger["claims"] if entry["verdict"] == VERDICTS[2]]
    if left:
        yield Text(f"not settled at the preset {ledger['preset']}: {', '.join(left)}")


def claim_lines(ledger: Mapping[str, Any]) -> Iterator[Text]:
    """All that is known of each claim."""
    for entry in ledger["claims"]:
        yield Text.assemble((f"{entry['key']}  ", "bold"), (entry["verdict"], _STYLES[entry["verdict"]]))
        yield Text(f"  {entry['statement']} [{entry['place']}]")
        yield Text(f"  {role_in_words(entry)}: {ROLES[entry['role']]}")
        yield Text(f"  measured: {entry['measured']}")
        for each in entry["checks"]:
            yield Text.assemble(f"  – {check(each)}: ", (each["verdict"], _STYLES[each["verdict"]]))
        if entry["remark"]:
            yield Text(f"  {entry['remark']}")
        yield Text()


def inspection_table(data: xr.Dataset) -> Table:
    """A line for each layer of a network: medians over its heads, and how many are in which regime."""
    middle = data.median("head", skipna=True)
    trusted, below = data["trusted"] == 1, data["score_threshold"] < 1
    heads = data["seen"].notnull().sum("head")
    counts = ((trusted & below).sum("head"), (trusted & ~below).sum("head"), heads - trusted.sum("head"))
    names = ("effective", "sinks", "score_threshold", "tail", "relative_error", "length", "linear_beside_sinks")

    def cells(layer: int) -> list[str]:
        values = {name: float(middle[name][layer]) for name in names}
        forms = {"effective": ",.1f", "length": ",.0f"}
        shown = ("–" if math.isnan(value) else format(value, forms.get(name, ".2f")) for name, value in values.items())
        return [str(layer), *shown, *(str(int(count[layer])) for count in counts)]

    headings = ("layer", "tokens", "sinks", "ν/ln L", "k̂", "error", "length", "linear")
    regimes = ("large prompt", "one token", "refused")
    return number_table(
        "Medians over heads, and heads in each regime", (*headings, *regimes), map(cells, data["layer"].values)
    )


def compression_table(data: xr.Dataset) -> Table:
    """A line for each layer that is compressed: tokens kept, and the predicted relative errors of its heads."""
    length = data.attrs["length"]
    columns = (data[name].values for name in ("layer", "atoms", "atoms_of_head", "median_error", "largest_error"))
    rows = (
        [
            str(layer),
            f"{atoms:,.1f}",
            f"{heads.min():,.0f} – {heads.max():,.0f}",
            f"{100 * atoms / length:.1f} %",
            f"{median:.2g}",
            f"{largest:.2g}",
        ]
        for layer, atoms, heads, median, largest in zip(*columns, strict=True)
    )
    headings = ("layer", f"kept of {length:,}", "by head", "share", "median error", "largest error")
    return number_table("Tokens kept, and predicted relative errors of heads", headings, rows)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The held-out rows of a table: predictions with intervals, rows needed, and the labelled rows that carry them."""
    headings = ("line", "true", "predicted", "probability", "interval", "rows needed", "carried by lines")
    cells = (
        (
            str(row["line"]),
            row["true"],
            row["predicted"],
            f"{row['probability']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}{'' if row['trusted'] else ' *'}",
            "–" if math.isnan(row["rows_needed"]) else f"{row['rows_needed']:,.0f}",
            ", ".join(str(each["line"]) for each in row["influential"]),
        )
        for row in rows
    )
    doubted = "" if all(row["trusted"] for row in rows) else " (* not to be trusted)"
    return number_table(f"held-out rows{doubted}", headings, cells)


def attribution_table(unit: str, rows: Iterable[Iterable[str]]) -> Table:
    """A line for each of the parts of a context that carry most: score, error and how it begins."""
    table = number_table(f"The {unit} that carry most", ("part", "nats", "± error"), ())
    table.add_column("text", justify="left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table
