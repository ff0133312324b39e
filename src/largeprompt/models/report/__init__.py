"""The page on an inspection: one file that needs no network, with its numbers beside it."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from largeprompt.lab import duration, replacing
from largeprompt.models._inspection import MEANINGS, Details, Inspection
from largeprompt.paper.files import write_json
from largeprompt.paper.page import embedded, environment
from largeprompt.paper.report.words import number

from .regime import LABELS, label
from .regime import regime as regime

FILES = ("inspection.html", "inspection.csv", "inspection.nc", "inspection.json")
# name: the head of its column, and whether its map has a logarithmic scale
COLUMNS = {
    "effective": ("effective tokens", True),
    "entropy": ("entropy", False),
    "largest": ("largest weight", False),
    "first": ("first token", False),
    "sinks": ("sinks", False),
    "score_variance": ("ν", True),
    "score_threshold": ("ν / ln L", False),
    "tail": ("k̂", False),
    "relative_error": ("error", True),
    "residual_error": ("residual error", True),
    "length": ("length for 10 %", True),
    "linear": ("linear", True),
    "linear_beside_sinks": ("linear beside sinks", True),
    "position": ("position", False),
    "measured_over_predicted": ("measured / predicted", True),
    "seen": ("seen", False),
    "rebuilt": ("rebuilt", True),
}
_STYLES = dict(zip(LABELS, ("large", "single", "refused"), strict=True))


def write_report(inspection: Inspection, out: Path, title: str = "") -> Path:
    """Write the page and, beside it, all numbers as CSV, NetCDF and JSON; give the page's path."""
    page, table, numbers, plain = (out / name for name in FILES)
    found = rows(inspection)
    text = _page(inspection, found, title or f"The heads of {inspection.data.attrs.get('model', 'a network')}")
    out.mkdir(parents=True, exist_ok=True)
    with replacing(table) as path:
        inspection.data.to_dataframe().dropna(subset=["seen"]).to_csv(path)
    with replacing(numbers) as path:
        inspection.data.to_netcdf(path, engine="scipy")
    write_json(plain, as_json(inspection))
    with replacing(page) as path:
        path.write_text(text, encoding="utf-8", newline="\n")
    return page


def rows(inspection: Inspection) -> list[dict[str, Any]]:
    """All numbers of each head that there is, with its layer, the name of its call and its regime."""
    table: Any = inspection.data.to_dataframe().reset_index().to_dict(orient="records")
    return [{**row, "regime": label(row)} for row in table if not math.isnan(row["seen"])]


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Summary, settings, meanings and rows, as plain data."""
    meanings = {name: values.attrs["long_name"] for name, values in inspection.data.items()}
    settings = dict(inspection.data.attrs)
    return {"summary": inspection.summary, "settings": settings, "meanings": meanings, "rows": rows(inspection)}


def _page(inspection: Inspection, found: list[dict[str, Any]], title: str) -> str:
    columns = {name: column for name, column in COLUMNS.items() if any(_there(row.get(name)) for row in found)}
    filled = environment(__name__, html=True)
    filled.filters |= {"number": _cell, "unbroken": _unbroken}
    return filled.get_template("inspection.html.jinja").render(
        title=title,
        command="inspect",
        sections={"summary": "Summary", "map": "Map", "one": "One head", "all": "All heads"},
        summary=inspection.summary,
        facts=_facts(inspection),
        rows=found,
        columns={name: head for name, (head, _) in columns.items()},
        meanings=MEANINGS,
        labels=LABELS,
        counts={name: sum(row["regime"] == name for row in found) for name in LABELS},
        styles=_STYLES,
        files=FILES[1:],
        **embedded(__name__, "inspection.css", "inspection.js", _data(inspection, found, columns)),
    )


def _facts(inspection: Inspection) -> dict[str, str]:
    """The line under the title: what was inspected, and what that took."""
    known = inspection.data.attrs
    names = sorted(known, key=lambda name: name != "model")  # the model first, the others as they are
    facts = {
        name.capitalize(): number(known[name]) if isinstance(known[name], int | float) else str(known[name])
        for name in names
        if name != "seconds" and known[name] != ""
    }
    size = f"{inspection.data.sizes['layer']} × {inspection.data.sizes['head']}"
    took = {"Took": duration(known["seconds"])} if "seconds" in known else {}
    return {**facts, "Layers × heads": size, **took}


def _data(inspection: Inspection, found: list[dict[str, Any]], columns: dict[str, tuple[str, bool]]) -> dict[str, Any]:
    """What the script draws from."""
    return {
        "columns": [
            {"name": name, "head": head, "meaning": MEANINGS[name], "log": log} for name, (head, log) in columns.items()
        ],
        "labels": [{"name": name, "style": style} for name, style in _STYLES.items()],
        "layers": [str(name) for name in inspection.data["name"].values],
        "heads": inspection.data.sizes["head"],
        "words": None if inspection.tokens is None else [str(word) for word in inspection.tokens],
        "rows": [
            {
                "layer": row["layer"],
                "head": row["head"],
                "regime": row["regime"],
                "text": _unbroken(regime(row)),
                "numbers": [_number(row[name]) for name in columns],
                "details": _details(inspection.details[row["layer"], row["head"]]),
            }
            for row in found
        ],
    }


def _details(details: Details) -> dict[str, Any]:
    def numbers(values: np.ndarray | None) -> list[float | None] | None:
        return None if values is None else [_number(value, 4) for value in values]

    return {
        "places": details.places.tolist(),
        "weights": numbers(details.weights),
        "carriers": details.carriers.tolist(),
        "shares": numbers(details.shares),
        "lengths": numbers(details.lengths),
        "predicted": numbers(details.predicted),
        "measured": numbers(details.measured),
        "sinks": details.sinks.tolist(),
    }


def _cell(value: float) -> str:
    """In three digits, or whole."""
    return number(round(value) if 100 <= value < 1e6 else value, 3)


def _unbroken(text: str) -> str:
    """With 1/√L and 20 % on one line: browsers break after a slash and at a space."""
    return text.replace("1/√L", "1/\u2060√L").replace(" %", "\u00a0%")


def _there(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _number(value: float, digits: int = 6) -> float | None:
    """As JSON has it: a few digits, and nothing where there is no number."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
