"""The top of the page: what ran, what was found, what could not be settled."""

from largeprompt.lab import duration
from largeprompt.paper.claims import VERDICTS, counted
from largeprompt.paper.report._finished import Finished
from largeprompt.paper.report._markup import Html, code, element, prose
from largeprompt.paper.report._words import conventions_of, machine_of, moment, plural, work_of

PAPER = "Softmax as Linear Attention in the Large-Prompt Regime"
ADDRESS = "https://arxiv.org/abs/2512.11784"
# A sign besides the colour and the words.
SIGNS: dict[str, str] = dict(zip(VERDICTS, "✓≈?✕", strict=True))
STYLES: dict[str, str] = dict(zip(VERDICTS, ("holds", "within", "open", "fails"), strict=True))


def verdict(name: str) -> Html:
    """A verdict as a coloured word."""
    return element("span", element("span", SIGNS[name], aria_hidden="true"), " ", name, class_=f"chip {STYLES[name]}")


def summary(found: Finished) -> Html:
    """The section."""
    run = found.run
    lede = f"{plural(len(found.figures), 'figure')}, {plural(len(found.claims), 'claim')} judged by one rule"
    return element(
        "section",
        element("h1", "The paper, executed"),
        element(
            "p",
            element("cite", element("a", PAPER, href=ADDRESS)),
            f" (Boursier and Boyer, arXiv 2512.11784): {lede}",
            f", {plural(len(found.errata), 'erratum').replace('erratums', 'errata')} with evidence."
            if found.errata
            else ".",
            class_="lede",
        ),
        element(
            "div",
            [_count(found, name) for name in VERDICTS],
            class_="counts",
            role="group",
            aria_label="Verdicts on the tests of the paper",
        ),
        element("ul", [element("li", line) for line in counted(found.claims, VERDICTS)], class_="roles"),
        _facts(found),
        _named(found, "does not hold", "What does not hold"),
        _named(found, "not settled at this preset", f"What the preset {run['preset']} cannot settle"),
        id="summary",
    )


def _count(found: Finished, name: str) -> Html:
    count = len(found.judged(name, "test"))
    words = (
        element("span", element("span", SIGNS[name], aria_hidden="true"), class_="sign"),
        element("span", str(count), class_="number"),
        element("span", name, class_="name"),
    )
    return element(
        "a",
        *words,
        href="#ledger",
        class_=f"count {STYLES[name]}",
        data_verdict=name,
        data_role="test",
        aria_label=f"{count} tests of the paper: {name}",
    )


def _facts(found: Finished) -> Html:
    run = found.run
    work = [work_of(run[name], noun) for name, noun in (("runs", "training run"), ("pieces", "measurement"))]
    facts = {
        "Command": code(run["command"]),
        "Not the paper's": conventions_of(run["settings"]),
        "Began": moment(run["began"]),
        "Took": duration(run["seconds"]),
        "Computed": "; ".join(work),
        "Machine": machine_of(run["machine"]),
        "Expected": run.get("cost", ""),
    }
    lines = [element("div", element("dt", name), element("dd", value)) for name, value in facts.items() if value]
    return element("dl", lines, class_="facts")


def _named(found: Finished, name: str, heading: str) -> Html | None:
    claims = found.judged(name)
    if not claims:
        return None
    lines = [
        element(
            "li",
            element("a", claim["key"], href=f"#claim-{claim['key']}", class_="key"),
            element("span", prose(claim["statement"]), " ", element("span", prose(claim["remark"]), class_="remark")),
        )
        for claim in claims
    ]
    return element("div", element("h3", heading), element("ul", lines, class_="named"), class_=f"named-{STYLES[name]}")
