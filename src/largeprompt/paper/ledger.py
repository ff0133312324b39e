"""The ledger on a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from largeprompt.paper.claims import ROLES, VERDICTS, counted, role_in_words

_STYLES: dict[str, str] = dict(zip(VERDICTS, ("green", "cyan", "yellow", "bold red"), strict=True))


def ledger_table(ledger: Mapping[str, Any]) -> Iterator[Table | Text]:
    """A line for each claim with its deciding number; then counts by role, the errata, and what is not settled."""
    table = Table(title=f"The claims of the paper ({ledger['preset']})", box=box.SIMPLE_HEAD)
    for name in ("", "role", "claim", "number", "verdict"):
        table.add_column(name, overflow="fold", no_wrap=name == "", max_width=10 if name == "role" else None)
    for entry in ledger["claims"]:
        number = told(entry["checks"][0]) if entry["checks"] else "–"
        role = Text(role_in_words(entry))
        table.add_row(entry["key"], role, entry["statement"], Text(number), _verdict(entry["verdict"]))
    yield table
    yield from map(Text, counted(ledger["claims"], VERDICTS))
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
        for check in entry["checks"]:
            yield Text.assemble(f"  – {told(check)}: ", (check["verdict"], _STYLES[check["verdict"]]))
        if entry["remark"]:
            yield Text(f"  {entry['remark']}")
        yield Text()


def told(check: Mapping[str, Any]) -> str:
    """A check in a line: what was measured with its error, and what it is held against."""
    measured = "not known" if check["measured"] is None else f"{check['measured']:.5g}"
    error = " ± unknown" if check["error"] is None else f" ± {check['error']:.2g}" if check["error"] else ""
    tolerance = f" within {check['tolerance']:g}" if check["relation"] == "=" else ""
    return f"{check['label']}: {measured}{error} {check['relation']} {check['target']:g}{tolerance}"


def _verdict(verdict: str) -> Text:
    return Text(verdict, _STYLES[verdict])
