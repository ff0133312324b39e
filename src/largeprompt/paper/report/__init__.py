"""The report of a finished reproduction: a page that needs no network, and the same as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from largeprompt.lab import duration, replacing
from largeprompt.paper.claims import ROLES, VERDICTS, counted, role_in_words
from largeprompt.paper.errata import HEADINGS
from largeprompt.paper.experiment import Experiment
from largeprompt.paper.experiments import FIGURES
from largeprompt.paper.page import embedded, environment
from largeprompt.paper.reproduction import FORMATS, Reproduction

from . import plots, words

_CONSTANTS = {
    "paper": "Softmax as Linear Attention in the Large-Prompt Regime",
    "address": "https://arxiv.org/abs/2512.11784",
    "columns_of_claims": ("key", "role", "statement", "place", "measured", "verdict", "figures"),
    "verdicts": VERDICTS,
    "signs": dict(zip(VERDICTS, "✓≈?✕", strict=True)),  # besides the colour and the words
    "styles": dict(zip(VERDICTS, ("holds", "within", "open", "fails"), strict=True)),
    "roles": ROLES,
    "headings": HEADINGS,
    "formats": FORMATS,
    "switches": {"seed": "seeds", "theory": "theory", "bound": "bound"},
    "dashes": plots.DASHES,
    "marks": {mark: path for mark, (_, path) in plots.MARKS.items()},
}
_IN_WORDS = (words.prose, words.one_line, words.reading, words.demand, words.check, words.comparison, words.plural)
_FILTERS = {function.__name__: function for function in (*_IN_WORDS, words.flat, role_in_words)}


def write(made: Reproduction, figures: Mapping[str, Experiment] = FIGURES) -> list[Path]:
    """Write the report of a finished reproduction into its folder; give its files, the page and the same as text."""
    values, home = _values(made, figures), made.folder / "report"
    home.mkdir(exist_ok=True)
    pages = {"index.html": ("page.html.jinja", _page(values)), "report.md": ("report.md.jinja", {})}
    for name, (template, own) in pages.items():
        filled = environment(__name__, html=name == "index.html")
        filled.filters |= _FILTERS
        text = filled.get_template(template).render(_CONSTANTS | values | own)
        with replacing(home / name) as path:
            path.write_text(text, encoding="utf-8", newline="\n")
    return [home / name for name in pages]


def _values(made: Reproduction, figures: Mapping[str, Experiment]) -> dict[str, Any]:
    """What both forms of the report say."""
    run, claims = made.account, made.ledger["claims"]
    work = [words.work_of(run[name], noun) for name, noun in (("runs", "training run"), ("pieces", "measurement"))]
    facts = {
        "Not the paper's": words.conventions_of(run["settings"]),
        "Began": words.moment(run["began"]),
        "Took": duration(run["seconds"]),
        "Computed": "; ".join(work),
        "Machine": words.machine_of(run["machine"]),
        "Expected": run.get("cost", ""),
    }
    shown = [_figure(made, figures[key], claims) for key in made.datasets]
    common = {"claims": claims, "errata": made.ledger["errata"], "counted": counted(claims), "facts": facts}
    return {"made": made, "run": run, "figures": shown, **common}


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


def _page(values: dict[str, Any]) -> dict[str, Any]:
    """What the page alone holds: style, scripts, and the data of its charts."""
    charts = {figure["key"]: plots.panels(figure["chart"]) for figure in values["figures"]}
    settings = {words.MEANING.get(k, k): v for k, v in words.flat(values["run"]["settings"]).items()}
    return {"settings": settings, **embedded(__name__, "report.css", "report.js", charts)}
