"""The report as text, for terminals and repositories."""

import re

from largeprompt.lab import duration
from largeprompt.paper.claims import ROLES, VERDICTS, counted, role_in_words
from largeprompt.paper.report._finished import Drawn, Finished
from largeprompt.paper.report._summary import ADDRESS, PAPER, SIGNS
from largeprompt.paper.report._words import check, comparison, conventions_of, flat, machine_of, moment, plural, work_of


def markdown(found: Finished) -> str:
    """The whole page."""
    parts = [_summary(found), *(_figure(drawn) for drawn in found.figures), _ledger(found)]
    parts += [_errata(found)] if found.errata else []
    return "\n\n".join([*parts, _settings(found)]) + "\n"


def _summary(found: Finished) -> str:
    run = found.run
    counts = [f"- {SIGNS[name]} {name}: {len(found.judged(name, 'test'))}" for name in VERDICTS]
    besides = [f"- {line}" for line in counted(found.claims, VERDICTS)]
    facts = [
        f"`{run['command']}`, begun {moment(run['began'])}, took {duration(run['seconds'])} on "
        f"{_text(machine_of(run['machine']))}.",
        f"{work_of(run['runs'], 'training run')} and {work_of(run['pieces'], 'measurement')}.",
    ]
    differ = conventions_of(run["settings"])
    facts += [f"Not the paper's conventions: {_text(differ)}."] if differ else []
    facts += [f"Expected: {_text(run['cost'])}"] if run.get("cost") else []
    opening = f"# largeprompt: the paper, executed\n\n[{PAPER}]({ADDRESS}) (Boursier and Boyer, arXiv 2512.11784)."
    tests = sum(claim["role"] == "test" for claim in found.claims)
    judged = f"Of {plural(tests, 'test')} of the paper:"
    named = [
        f"{heading}:\n\n"
        + "\n".join(f"- {_text(c['key'])}: {_text(c['statement'])} {_text(c['remark'])}".rstrip() for c in claims)
        for name, heading in (
            ("does not hold", "What does not hold"),
            ("not settled at this preset", f"What the preset {_text(run['preset'])} cannot settle"),
        )
        if (claims := found.judged(name))
    ]
    all_roles = f"Of all {plural(len(found.claims), 'claim')}:"
    return "\n\n".join([opening, *facts, judged, "\n".join(counts), all_roles, "\n".join(besides), *named])


def _figure(drawn: Drawn) -> str:
    parts = [
        f"## {_text(drawn.name)}: {_text(drawn.title)}",
        f"*What to look for.* {_text(drawn.look)}",
        f"![{_text(drawn.name)}: {_text(drawn.title)}]({drawn.file('svg')})",
        "\n".join(f"- {_text(line)}" for line in drawn.told),
        f"Bears on {', '.join(map(_text, drawn.claims))}." if drawn.claims else "",
        f"```sh\n{drawn.command}\n```",
    ]
    return "\n\n".join(part for part in parts if part)


def _ledger(found: Finished) -> str:
    rows = [
        (
            claim["key"],
            role_in_words(claim),
            claim["statement"],
            claim["place"],
            "; ".join(map(check, claim["checks"])) or "–",
            f"{SIGNS[claim['verdict']]} {claim['verdict']}",
            ", ".join(claim["figures"]),
        )
        for claim in found.claims
    ]
    table = _table(("key", "role", "statement", "place", "measured", "verdict", "figures"), rows)
    roles = "\n".join(f"- *{name}*: {_text(meaning)}" for name, meaning in ROLES.items())
    return f"## Ledger\n\n{_text(found.ledger['rule'])}\n\n{roles}\n\n{table}"


def _errata(found: Finished) -> str:
    rows = [
        (
            f"{erratum['key']} ({erratum['kind']})",
            erratum["place"],
            f"{erratum['printed']} → {erratum['correction']}",
            "; ".join(map(comparison, [*erratum["against"], *erratum["repair"]])),
            "yes" if erratum["confirmed"] else "no",
        )
        for erratum in found.errata
    ]
    return "## Errata\n\n" + _table(("key", "place", "printed → correction", "evidence", "confirmed"), rows)


def _settings(found: Finished) -> str:
    settings = _table(("setting", "value"), list(flat(found.run["settings"]).items()))
    return f"## Settings\n\n{settings}\n\n" + _table(("package", "version"), list(flat(found.run["versions"]).items()))


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *(tuple(map(_text, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """Text on one line in which nothing is markup: no HTML, no cells, no emphasis, no links."""
    flat_text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", flat_text)
