"""The page on a table's rows: one file that needs no network, with its numbers beside it."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from largeprompt.lab import replacing
from largeprompt.models.tables._study import RowsStudy
from largeprompt.paper.files import write_json
from largeprompt.paper.page import embedded, environment
from largeprompt.paper.report.words import number

FILES = ("rows.html", "rows.json")
_SHOWN = 6  # columns of a row that are written out beside it
_NAMES = {"rows": "Labelled rows", "held_out": "Held out", "members": "Members of the ensemble", "draws": "Draws"}


def write_report(study: RowsStudy, out: Path, title: str) -> list[Path]:
    """Write the page and, beside it, all numbers as JSON; give their paths."""
    page, data = (out / name for name in FILES)
    text = _page(study, title)
    out.mkdir(parents=True, exist_ok=True)
    write_json(data, as_json(study))
    with replacing(page) as path:
        path.write_text(text, encoding="utf-8", newline="\n")
    return [page, data]


def as_json(study: RowsStudy) -> dict[str, Any]:
    """Summary, settings, remarks, rows and the learning curve, as plain data."""
    curve = study.curve.to_dataset()
    return {
        "summary": study.summary,
        "settings": study.settings | {"target": study.table.target, "classes": list(study.table.classes)},
        "remarks": list(study.table.remarks),
        "columns": list(study.table.columns),
        "rows": study.rows(),
        "learning_curve": {
            "fit": {name: float(curve.attrs[name]) for name in ("a", "b", "c")},
            "points": curve.to_dataframe().reset_index().to_dict(orient="records"),
        },
    }


def _page(study: RowsStudy, title: str) -> str:
    table = study.table
    size = {"Target": table.target, "Classes": str(len(table.classes)), "Columns": str(len(table.columns))}
    facts = size | {name: number(study.settings[key]) for key, name in _NAMES.items()}
    return (
        environment(__name__, html=True)
        .get_template("rows.html.jinja")
        .render(
            title=title,
            command="rows",
            sections={"summary": "Summary", "predictions": "Predictions", "one": "One row", "curve": "More rows"},
            summary=[*study.summary, *(f"{remark[0].upper()}{remark[1:]}." for remark in table.remarks)],
            facts=facts,
            level=f"{100 * study.bars.level:g}",
            error=f"{study.needed.error:g}",
            now=len(study.labelled),
            known=bool(np.isfinite(study.needed.rows).any()),
            files=FILES[1:],
            **embedded(__name__, "rows.css", "rows.js", _data(study)),
        )
    )


def _data(study: RowsStudy) -> dict[str, Any]:
    """What the script draws from."""
    n, first = len(study.labelled), int(study.curve.rows[0])
    band = study.curve.at(np.geomspace(first, 8 * n, 60).tolist())
    by_line = {int(line): place for place, line in enumerate(study.table.lines)}
    rows = []
    for row, probabilities in zip(study.rows(), study.probabilities, strict=True):
        row["cells"] = _cells(study, by_line[row["line"]])
        row["probabilities"] = [_number(value) for value in probabilities]
        for each in row["influential"]:
            each["cells"] = _cells(study, by_line[each["line"]])
        rows.append({name: _number(value) if isinstance(value, float) else value for name, value in row.items()})
    return {
        "rows": rows,
        "classes": list(study.table.classes),
        "now": n,
        "curve": {
            "rows": study.curve.rows.tolist(),
            "score": [_number(value) for value in study.curve.score],
            "spread": [_number(value) for value in study.curve.spread],
        },
        "band": {name: [_number(value) for value in getattr(band, name)] for name in band._fields},
    }


def _cells(study: RowsStudy, place: int) -> str:
    """The first cells of a row, as name and value."""
    table = study.table
    shown = []
    for name, value in zip(table.columns[:_SHOWN], table.values[place], strict=False):
        known = table.categories.get(name)
        text = "–" if math.isnan(value) else known[int(value)] if known else f"{value:g}"
        shown.append(f"{name} {text}")
    return ", ".join(shown) + (" …" if len(table.columns) > _SHOWN else "")


def _number(value: float) -> float | None:
    """As JSON has it: a few digits, and nothing where there is no number."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
