"""The report of a reproduction: a page that needs no network, also while it is unfinished, and the same as text."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from largeprompt.lab import duration, replacing
from largeprompt.paper.claims import PENDING, ROLES, VERDICTS, counted, role_in_words
from largeprompt.paper.errata import HEADINGS
from largeprompt.paper.experiment import Experiment
from largeprompt.paper.experiments import FIGURES
from largeprompt.paper.page import embedded, environment
from largeprompt.paper.reproduction import FORMATS, Reproduction
from largeprompt.paper.unfinished import HowFar

from . import plots, words

_CONSTANTS = {
    "paper": "Softmax as Linear Attention in the Large-Prompt Regime",
    "address": "https://arxiv.org/abs/2512.11784",
    "columns_of_claims": ("key", "role", "statement", "place", "measured", "verdict", "figures"),
    "verdicts": VERDICTS,
    "pending": PENDING,
    "signs": dict(zip((*VERDICTS, PENDING), "✓≈?✕…", strict=True)),  # besides the colour and the words
    "styles": dict(zip((*VERDICTS, PENDING), ("holds", "within", "open", "fails", "pending"), strict=True)),
    "roles": ROLES,
    "headings": HEADINGS,
    "formats": FORMATS,
    "switches": {"seed": "seeds", "theory": "theory", "bound": "bound"},
    "dashes": plots.DASHES,
    "marks": {mark: path for mark, (_, path) in plots.MARKS.items()},
}
_SCRIPTS = ("report.js", "place.js")
_IN_WORDS = (words.prose, words.one_line, words.reading, words.demand, words.check, words.comparison, words.plural)
_FILTERS = {function.__name__: function for function in (*_IN_WORDS, words.moment, words.flat, role_in_words)}


def write(made: Reproduction, figures: Mapping[str, Experiment] = FIGURES) -> list[Path]:
    """Write the report of a finished reproduction into its folder; give its files, the page and the same as text."""
    values = _values(made, figures)
    own = {"index.html": _page(values), "report.md": {}}
    return [_filled(made.folder / "report" / name, values | parts) for name, parts in own.items()]


def write_unfinished(
    made: Reproduction, how_far: HowFar, figures: Sequence[Experiment], *, errata: bool = False
) -> Path:
    """Write the page of a job under way: what is there, what is pending and the time left; it loads itself again.

    `errata`: whether they are among what is to come. The same as text is written at the end.
    """
    by_key = {figure.key: figure for figure in figures}
    values = _values(made, by_key)
    shown = {figure["key"]: figure for figure in values["figures"]}
    values["figures"] = [shown.get(key) or _pending_figure(made, figure) for key, figure in by_key.items()]
    del values["facts"]["Computed"]  # which counts all that is needed
    there = {"figures": len(shown), "claims": sum(claim["verdict"] != PENDING for claim in values["claims"])}
    stage = {**dataclasses.asdict(how_far), "there": there, "errata": errata, "time_left": duration(how_far.left)}
    scripts = _SCRIPTS if how_far.stopped else (*_SCRIPTS, "unfinished.js")
    page = _page(values, ("report.css", "unfinished.css"), scripts)
    return _filled(made.folder / "report" / "index.html", values | page | {"unfinished": stage})


def _filled(file: Path, values: dict[str, Any]) -> Path:
    """The template of a file, filled and written at once."""
    file.parent.mkdir(exist_ok=True)
    html = file.suffix == ".html"
    filled = environment(__name__, html=html)
    filled.filters |= _FILTERS
    text = filled.get_template("page.html.jinja" if html else "report.md.jinja").render(_CONSTANTS | values)
    with replacing(file) as path:
        path.write_text(text, encoding="utf-8", newline="\n")
    return file


def _values(made: Reproduction, figures: Mapping[str, Experiment]) -> dict[str, Any]:
    """What both forms of the report say."""
    run, claims = made.account, made.ledger["claims"]
    work = [words.work_of(run[name], noun) for name, noun in (("runs", "training run"), ("pieces", "computation"))]
    facts = {
        "Not the paper's": words.conventions_of(run["settings"]),
        "Began": words.moment(run["began"]),
        "Took" if run.get("finished", True) else "So far": duration(run["seconds"]),
        "Computed": f"{' and '.join(work)}; times by the clock, added up, though several go on at once",
        "Machine": words.machine_of(run["machine"]),
        "Expected": run.get("cost", ""),
    }
    shown = [_figure(made, figures[key], claims) for key in made.datasets]
    common = {"claims": claims, "errata": made.ledger["errata"], "counted": counted(claims), "facts": facts}
    return {"made": made, "run": run, "figures": shown, "unfinished": None, **common}


def _figure(made: Reproduction, figure: Experiment, claims: list[dict[str, Any]]) -> dict[str, Any]:
    data = made.datasets[figure.key]
    chart = figure.chart(data)
    return {
        **{name: getattr(figure, name) for name in ("key", "name", "title", "look")},
        "chart": chart,
        "roles": plots.roles(chart),
        "legend": plots.legend(chart),
        "summary": figure.summary(data),
        "command": made.command(figure.key),
        "claims": [claim["key"] for claim in claims if figure.key in claim["figures"]],
    }


def _pending_figure(made: Reproduction, figure: Experiment) -> dict[str, Any]:
    """What is known of a figure before its dataset is."""
    claims = [claim["key"] for claim in made.ledger["claims"] if figure.key in claim["figures"]]
    own = {name: getattr(figure, name) for name in ("key", "name", "title", "look")}
    return {**own, "chart": None, "claims": claims}


def _page(
    values: dict[str, Any], styles: Sequence[str] = ("report.css",), scripts: Sequence[str] = _SCRIPTS
) -> dict[str, Any]:
    """What the page alone holds: style, scripts, and the data of its charts."""
    charts = {figure["key"]: plots.panels(figure["chart"]) for figure in values["figures"] if figure["chart"]}
    settings = {words.MEANING.get(k, k): v for k, v in words.flat(values["run"]["settings"]).items()}
    return {"settings": settings, **embedded(__name__, styles, scripts, charts)}
