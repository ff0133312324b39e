"""The tables that benchmarks/tables.py prints from its rows of JSON."""

from typing import Any

KINDS = ("logits", "log-odds")


def show(rows: list[dict[str, Any]]) -> None:
    """Print every table of which there are rows."""
    for what, table in (("redraws", _redraws), ("intervals", _intervals), ("rows", _needed), ("leaving out", _left)):
        chosen = [row for row in rows if row["what"] == what]
        if chosen:
            print(f"\n{what}")
            table(chosen)


def _print(head: list[str], rows: list[list[Any]]) -> None:
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row) + " |")


def _redraws(rows: list[dict[str, Any]]) -> None:
    head = ["table", "pool", "columns", "classes", "n", "accuracy", "deviation of logits", "of log-odds", "ms a redraw"]
    _print(
        head,
        [
            [row[name] for name in ("table", "pool", "columns", "classes", "n", "accuracy")]
            + [row["deviation"][kind] for kind in KINDS]
            + [row["ms a redraw"]]
            for row in rows
        ],
    )


def _intervals(rows: list[dict[str, Any]]) -> None:
    head = [
        "table",
        "n",
        "method",
        "of",
        "coverage",
        "±",
        "of trusted",
        "trusted",
        "est./meas. variance",
        "log error",
        "s",
    ]
    found = []
    for row in rows:
        for kind in KINDS:
            each = row[kind]
            names = ("coverage", "coverage error", "coverage of trusted", "trusted", "variance ratio", "log error")
            found.append([row["table"], row["n"], row["method"], kind, *(each[name] for name in names), row["seconds"]])
    _print(head, found)


def _needed(rows: list[dict[str, Any]]) -> None:
    found = [
        [row["table"], row["n"], row["at"], kind, *row[kind]["quartiles"], row[kind]["coverage"]]
        for row in rows
        for kind in KINDS
        if kind in row
    ]
    _print(["table", "from n", "to n", "of", "rows predicted / rows: 25 %", "50 %", "75 %", "coverage"], found)


def _left(rows: list[dict[str, Any]]) -> None:
    names = ("rank correlation", "permuted", "log error of the jackknife")
    found = [
        [
            row["table"],
            row["n"],
            kind,
            *(row[kind][name] for name in names),
            row["seconds"],
            row["plain seconds a draw"],
        ]
        for row in rows
        for kind in KINDS
    ]
    _print(["table", "n", "of", *names, "s to leave each row out", "s a plain bootstrap draw"], found)
