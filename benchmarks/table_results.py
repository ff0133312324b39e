"""The tables that benchmarks/tables.py prints from its rows of JSON."""

from collections.abc import Iterator
from typing import Any

KINDS = ("logits", "log-odds")
Row = dict[str, Any]


def show(rows: list[Row]) -> None:
    """Print every table of which there are rows."""
    for what, (head, cells) in _TABLES.items():
        chosen = [row for row in rows if row["what"] == what]
        if chosen:
            print(f"\n{what}\n| {' | '.join(head.split(', '))} |\n|{'---|' * len(head.split(', '))}")
            for row in chosen:
                for line in cells(row):
                    print("| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in line) + " |")
    print("\ncosts and accuracies, over those of the first method")
    print(f"| table | n | method | draws | seconds | log error |\n|{'---|' * 6}")
    for line in _costs(rows):
        print("| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in line) + " |")


def _redraws(row: Row) -> Iterator[list[Any]]:
    facts = [row[name] for name in ("table", "pool", "columns", "classes", "n", "accuracy")]
    yield [*facts, *(row["deviation"][kind] for kind in KINDS), row["ms a redraw"]]


def _intervals(row: Row) -> Iterator[list[Any]]:
    names = ("coverage", "coverage error", "coverage of trusted", "trusted", "variance ratio", "log error")
    for kind in KINDS:
        facts = [row["table"], row["n"], row["method"], row["draws"], kind]
        yield [*facts, *(row[kind][name] for name in names), row["seconds"]]


def _needed(row: Row) -> Iterator[list[Any]]:
    for kind in KINDS:
        if kind in row:
            found = row[kind]
            facts = [row["table"], row["n"], row["at"], kind]
            yield [*facts, *found["quartiles"], found["coverage"], found["answered"], row["exponent"]]


def _left(row: Row) -> Iterator[list[Any]]:
    for kind in KINDS:
        names = ("rank correlation", "permuted", "log error of the jackknife")
        costs = [row["seconds"], row["plain seconds a draw"]]
        yield [row["table"], row["n"], kind, *(row[kind][name] for name in names), *costs]


def _costs(rows: list[Row]) -> Iterator[list[Any]]:
    """Seconds and accuracy of each way to a standard error of log-odds, as ratios to the first way of the same cell."""
    for first in (row for row in rows if row["what"] == "intervals"):
        cell = [row for row in rows if (row["table"], row["n"]) == (first["table"], first["n"])]
        ways = [row for row in cell if row["what"] == "intervals"]
        if first is not ways[0]:
            continue
        seconds, error = first["seconds"], first["log-odds"]["log error"]
        for row in ways:
            ratios = [row["seconds"] / seconds, row["log-odds"]["log error"] / error]
            yield [first["table"], first["n"], row["method"], row["draws"], *ratios]
        for row in (row for row in cell if row["what"] == "leaving out"):
            ratio = row["log-odds"]["log error of the jackknife"] / error
            yield [first["table"], first["n"], "leaving each row out", first["n"], row["seconds"] / seconds, ratio]
            plain = row["plain seconds a draw"] * first["draws"] / seconds
            yield [
                first["table"],
                first["n"],
                "bootstrap, one draw at a time",
                first["draws"],
                plain,
                "as the bootstrap",
            ]


_TABLES = {
    "redraws": ("table, pool, columns, classes, n, accuracy, deviation of logits, of log-odds, ms a redraw", _redraws),
    "intervals": (
        "table, n, method, draws, of, coverage, ±, of trusted, trusted, est./meas. variance, log error, s",
        _intervals,
    ),
    "rows": (
        "table, from n, to n, of, predicted / rows: 25 %, 50 %, 75 %, coverage, answered, exponent",
        _needed,
    ),
    "leaving out": (
        "table, n, of, rank correlation, permuted, log error of the jackknife, s for all rows, s a plain draw",
        _left,
    ),
}
