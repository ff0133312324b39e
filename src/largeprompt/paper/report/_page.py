"""The report as one HTML page that holds all it needs: style, script, data, and Plotly's own script."""

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from plotly.offline import get_plotlyjs

from largeprompt.paper.report import _ledger, _plots
from largeprompt.paper.report._figures import figure
from largeprompt.paper.report._finished import Finished
from largeprompt.paper.report._markup import Html, element
from largeprompt.paper.report._summary import summary
from largeprompt.paper.report._words import MEANING, flat

TITLE = "largeprompt: the paper, executed"


def page(found: Finished) -> str:
    """The whole page."""
    plotly, script = get_plotlyjs(), _file("report.js")
    charts = {drawn.key: _plots.panels(drawn.chart) for drawn in found.figures}
    head = element(
        "head",
        element("meta", charset="utf-8"),
        # Nothing is fetched, and no script runs but these two.
        element("meta", http_equiv="Content-Security-Policy", content=_policy(plotly, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", TITLE),
        element("style", Html(_file("report.css"))),
    )
    body = element(
        "body",
        element("a", "Skip to the report", href="#main", class_="skip"),
        _top(),
        element(
            "div",
            _contents(found),
            element(
                "main",
                summary(found),
                element("section", element("h2", "Figures"), [figure(drawn) for drawn in found.figures], id="figures"),
                _ledger.claims(found),
                _ledger.errata(found) if found.errata else None,
                _settings(found.run),
                id="main",
            ),
            class_="frame",
        ),
        element("script", _data(charts), type="application/json", id="charts"),
        element("script", Html(plotly)),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _top() -> Html:
    switch = element("button", "Dark", type="button", id="theme", aria_pressed="false")
    return element("header", element("p", element("b", "largeprompt"), " the paper, executed"), switch, class_="top")


def _contents(found: Finished) -> Html:
    keys = element(
        "ul",
        [element("li", element("a", drawn.key, href=f"#{drawn.anchor}", title=drawn.title)) for drawn in found.figures],
    )
    parts = [("summary", "Summary"), ("figures", "Figures"), ("ledger", "Ledger"), ("errata", "Errata")]
    parts = [part for part in parts if part[0] != "errata" or found.errata] + [("settings", "Settings")]
    lines = [
        element("li", element("a", name, href=f"#{anchor}"), keys if anchor == "figures" else None)
        for anchor, name in parts
    ]
    return element("nav", element("ul", lines), aria_label="Contents")


def _settings(run: dict[str, Any]) -> Html:
    return element(
        "section",
        element("h2", "Settings"),
        element(
            "div",
            _definitions(
                "Settings of this reproduction", {MEANING.get(k, k): v for k, v in flat(run["settings"]).items()}
            ),
            _definitions("Versions", flat(run["versions"])),
            class_="pair",
        ),
        id="settings",
    )


def _definitions(caption: str, told: dict[str, str]) -> Html:
    rows = [element("tr", element("th", name, scope="row"), element("td", value)) for name, value in told.items()]
    return element("table", element("caption", caption), element("tbody", rows), class_="definitions")


def _data(charts: dict[str, Any]) -> Html:
    # A script element ends at the first "</", whatever the JSON around it means.
    text = json.dumps(charts, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("</", "<\\/").replace("<!--", "<\\u0021--"))


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


def _file(name: str) -> str:
    return resources.files("largeprompt.paper.report").joinpath(name).read_text(encoding="utf-8")
