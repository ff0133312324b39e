"""The tables of claims and of errata on the page."""

from typing import Any

from largeprompt.paper.claims import ROLES, VERDICTS, role_in_words
from largeprompt.paper.errata import Erratum
from largeprompt.paper.report._finished import Finished
from largeprompt.paper.report._markup import Html, element, join, prose
from largeprompt.paper.report._summary import STYLES, verdict
from largeprompt.paper.report._words import check, comparison, demand, number, reading

_COLUMNS = ("key", "role", "statement", "place", "measured", "verdict", "figures")


def claims(found: Finished) -> Html:
    """The ledger: a line for each claim, which opens to all that was measured for it."""
    heads = [
        element(
            "th",
            element("button", name, element("span", class_="arrow", aria_hidden="true"), type="button"),
            scope="col",
            class_=name,
            aria_sort="ascending" if name == "key" else "none",
            data_column=name,
        )
        for name in _COLUMNS
    ]
    filters = [
        element("button", "all", " ", element("span", str(len(found.claims))), type="button", aria_pressed="true"),
        *(
            element(
                "button",
                name,
                " ",
                element("span", str(len(found.judged(name)))),
                type="button",
                aria_pressed="false",
                data_verdict=name,
                class_=STYLES[name],
            )
            for name in VERDICTS
        ),
        *(
            element(
                "button",
                name,
                " ",
                element("span", str(sum(claim["role"] == name for claim in found.claims))),
                type="button",
                aria_pressed="false",
                data_role=name,
                title=meaning,
            )
            for name, meaning in ROLES.items()
        ),
    ]
    there = {drawn.key: drawn.anchor for drawn in found.figures}
    return element(
        "section",
        element("h2", "Ledger"),
        element("p", element("b", "The rule. "), prose(found.ledger["rule"]), class_="rule"),
        element(
            "dl",
            [element("div", element("dt", name), element("dd", words)) for name, words in ROLES.items()],
            class_="facts rule",
        ),
        element(
            "div",
            element("div", filters, class_="filters", role="group", aria_label="Show claims by verdict and role"),
            element("button", "Open all", type="button", id="open-all", aria_pressed="false"),
            class_="tools",
        ),
        element("p", role="status", class_="status", id="shown"),
        element(
            "table",
            element("caption", "Claims of the paper and what became of them"),
            element("thead", element("tr", heads)),
            [_claim(claim, there) for claim in found.claims],
            class_="claims",
        ),
        id="ledger",
    )


def _claim(claim: dict[str, Any], there: dict[str, str]) -> Html:
    key, more = claim["key"], f"claim-{claim['key']}-more"
    first = claim["checks"][0] if claim["checks"] else None
    figures = [
        (element("a", name, href=f"#{there[name]}") if name in there else name, " ") for name in claim["figures"]
    ]
    toggle = element(
        "button",
        element("span", class_="chevron", aria_hidden="true"),
        key,
        type="button",
        class_="key",
        aria_expanded="false",
        aria_controls=more,
    )
    order = {
        "key": key,
        "role": claim["role"],
        "statement": claim["statement"],
        "place": claim["place"],
        "measured": check(first) if first else "",
    }
    order |= {"verdict": str(VERDICTS.index(claim["verdict"])), "figures": " ".join(claim["figures"])}
    cells = (
        toggle,
        role_in_words(claim),
        prose(claim["statement"]),
        prose(claim["place"]),
        _check(first),
        verdict(claim["verdict"]),
        figures,
    )
    row = [
        element(
            "th" if name == "key" else "td",
            cell,
            class_=name,
            scope="row" if name == "key" else None,
            data_sort=order[name],
        )
        for name, cell in zip(_COLUMNS, cells, strict=True)
    ]
    return element(
        "tbody",
        element("tr", row),
        element(
            "tr",
            element("td", element("div", _details(claim), id=more, hidden="until-found"), colspan=len(_COLUMNS)),
            class_="more",
        ),
        id=f"claim-{key}",
        data_verdict=claim["verdict"],
        data_role=claim["role"],
    )


def _check(entry: dict[str, Any] | None) -> Html:
    if entry is None:
        return join("–")
    numbers = [(" ", element("span", part, class_="value")) for part in (reading(entry), demand(entry))]
    return join(prose(entry["label"]), ":", numbers)


def _details(claim: dict[str, Any]) -> Html:
    rows = [
        element(
            "tr",
            element("td", prose(entry["label"])),
            element("td", reading(entry), class_="value"),
            element("td", demand(entry), class_="value"),
            element("td", verdict(entry["verdict"])),
        )
        for entry in claim["checks"]
    ]
    heads = [element("th", name, scope="col") for name in ("check", "measured", "asked", "verdict")]
    return element(
        "div",
        element("p", element("b", "Measured. "), prose(claim["measured"])),
        element("p", element("b", "Remark. "), prose(claim["remark"])) if claim["remark"] else None,
        element("table", element("thead", element("tr", heads)), element("tbody", rows), class_="checks")
        if rows
        else None,
        class_="details",
    )


def errata(found: Finished) -> Html:
    """Places of the paper that are not right as printed, each with its evidence."""
    confirmed = sum(erratum["confirmed"] for erratum in found.errata)
    heads = [
        element("th", "printed → correction" if name == "change" else name, scope="col", class_=name)
        for name in ("key", "place", "change", "evidence", "confirmed")
    ]
    return element(
        "section",
        element("h2", "Errata"),
        element(
            "p",
            "Places of the paper that are not right or not complete as printed. "
            f"{confirmed} of {len(found.errata)} are confirmed by numbers, that is, every comparison against what is "
            "printed (of a gap: that something is missing) and for what should stand there holds.",
            class_="rule",
        ),
        element(
            "table",
            element("caption", "Errata with their evidence"),
            element("thead", element("tr", heads)),
            element("tbody", [_erratum(erratum) for erratum in found.errata]),
            class_="errata",
        ),
        id="errata",
    )


def _erratum(erratum: dict[str, Any]) -> Html:
    count = len(erratum["against"]) + len(erratum["repair"])
    reason, *titles = Erratum.HEADINGS[erratum["kind"]]
    evidence = element(
        "details",
        element("summary", f"{number(count)} comparisons"),
        element("p", prose(erratum["setting"])),
        [
            _comparisons(title.capitalize(), erratum[name])
            for title, name in zip(titles, ("against", "repair"), strict=True)
        ],
    )
    confirmed = erratum["confirmed"]
    mark = element(
        "span", "✓ confirmed" if confirmed else "✕ not confirmed", class_=f"chip {'holds' if confirmed else 'fails'}"
    )
    return element(
        "tr",
        element("th", erratum["key"], element("span", erratum["kind"], class_="kind"), scope="row", class_="key"),
        element("td", prose(erratum["place"]), class_="place"),
        element(
            "td",
            element("p", prose(erratum["summary"]), class_="what"),
            element("p", element("b", "Printed. "), prose(erratum["printed"]), class_="said"),
            element("p", element("b", "→ Right. "), prose(erratum["correction"])),
            element("details", element("summary", reason), element("p", prose(erratum["why"]))),
            class_="change",
        ),
        element("td", evidence, class_="evidence"),
        element("td", mark, class_="confirmed"),
        id=f"erratum-{erratum['key']}",
    )


def _comparisons(title: str, entries: list[dict[str, Any]]) -> Html:
    lines = [element("li", "✓ " if entry["holds"] else "✕ ", prose(comparison(entry))) for entry in entries]
    return element("div", element("b", title), element("ul", lines))
