"""A figure on the page: what to look for, the chart with its switches, its numbers, files, claims and command."""

from largeprompt.paper.chart import Chart, Panel, Series
from largeprompt.paper.report import _plots
from largeprompt.paper.report._finished import FORMATS, Drawn
from largeprompt.paper.report._markup import Html, code, element, prose

_DASHES = {"solid": None, "dash": "5 3", "dot": "1.5 2.5"}
_MARKS = {
    "o": "M16 7m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
    "s": "M13 4h6v6h-6z",
    "D": "M16 3.2l3.8 3.8l-3.8 3.8l-3.8 -3.8z",
    "^": "M16 3.5l3.5 6.5h-7z",
    "v": "M16 10.5l3.5 -6.5h-7z",
    "x": "M13 4l6 6M19 4l-6 6",
    "+": "M16 3.2v7.6M12.2 7h7.6",
    "_": "M11.5 7h9",
    "1": "M16 7v4M16 7l-3.5 -3M16 7l3.5 -3",
    ".": "M16 7m-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0",
}
_SWITCHES = {"seed": "seeds", "theory": "theory", "bound": "bound"}


def figure(drawn: Drawn) -> Html:
    """The article of a figure."""
    return element(
        "article",
        element("h3", element("span", drawn.name, class_="key"), " ", prose(drawn.title), id=f"{drawn.anchor}-title"),
        element("p", element("b", "What to look for. "), prose(drawn.look), class_="look"),
        _switches(drawn.chart),
        _grid(drawn),
        _legend(drawn.chart),
        element("ul", [element("li", prose(line)) for line in drawn.told], class_="told") if drawn.told else None,
        _links(drawn),
        element("h4", "How to re-run this figure"),
        code(drawn.command),
        id=drawn.anchor,
        class_="figure",
        aria_labelledby=f"{drawn.anchor}-title",
        data_figure=drawn.key,
    )


def _switches(chart: Chart) -> Html:
    def switch(text: str, on: bool, **data: str) -> Html:
        return element("button", text, type="button", aria_pressed="true" if on else "false", **data)

    axes = [
        switch(f"log {axis}", any(getattr(panel, f"{axis}_log") for panel in chart.panels), data_log=axis)
        for axis in "xy"
    ]
    # A bound may lie many orders of magnitude above all else, and would flatten it.
    shown = [switch(_SWITCHES[r], r != "bound", data_role=r) for r in _plots.roles(chart) if r in _SWITCHES]
    return element("div", axes, shown, class_="switches", role="group", aria_label="What the chart shows")


def _grid(drawn: Drawn) -> Html:
    panels = [_panel(panel, f"{drawn.name}, {panel.title or drawn.title}") for panel in drawn.chart.panels]
    columns = max(1, min(drawn.chart.columns, len(panels)))
    return element("div", panels, class_="grid", data_columns=min(columns, 3), style=f"--columns: {columns}")


def _panel(panel: Panel, label: str) -> Html:
    """Its words stand outside the drawing: there they wrap on narrow screens and never lie on a curve."""
    remarks = element("span", prose("; ".join(panel.remarks)), class_="remarks") if panel.remarks else None
    return element(
        "figure",
        element(
            "figcaption",
            element("b", prose(panel.title)) if panel.title else None,
            element("span", prose(panel.y_label)),
            remarks,
        ),
        element("div", class_="plot", role="img", aria_label=label),
        element("p", prose(panel.x_label), class_="across"),
        class_="panel",
    )


def _legend(chart: Chart) -> Html | None:
    entries = [
        element(
            "button",
            _swatch(series),
            element("span", prose(series.label)),
            type="button",
            aria_pressed="true",
            data_label=series.label,
            data_of=series.role,
            hidden=series.role == "bound",
        )
        for series in _plots.legend(chart)
    ]
    return element("div", entries, class_="legend", role="group", aria_label="Legend") if entries else None


def _swatch(series: Series) -> Html:
    line = (
        element("path", d="M1 7h30", stroke_dasharray=_DASHES[series.dash], stroke_width="2") if series.line else None
    )
    mark = (
        element("path", d=_MARKS[series.mark], fill="var(--paper)", stroke_width="1.5")
        if series.mark in _MARKS
        else None
    )
    faint = "0.5" if series.role == "seed" else None
    return element(
        "svg",
        line,
        mark,
        viewBox="0 0 32 14",
        data_colour=series.colour,
        fill="none",
        opacity=faint,
        aria_hidden="true",
    )


def _links(drawn: Drawn) -> Html:
    files = [element("a", form.upper(), href=drawn.file(form)) for form in FORMATS]
    claims = [element("a", key, href=f"#claim-{key}") for key in drawn.claims]
    bears = (element("span", "Bears on"), " ", _spaced(claims)) if claims else None
    return element(
        "p",
        element("span", element("span", "Files"), " ", _spaced(files), class_="group"),
        element("span", bears, class_="group") if bears else None,
        class_="links",
    )


def _spaced(links: list[Html]) -> list[str]:
    return [part for link in links for part in (link, Html(" "))]
