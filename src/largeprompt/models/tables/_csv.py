"""Tables from CSV files: numbers, categories in alphabetical order as 0, 1, 2 …, missing values."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from largeprompt.models._load import read_text

MISSING = {"", "na", "n/a", "nan", "null", "none", "?", "."}  # in any case
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Table:
    """The columns and the target of a table: values with NaN where one is missing, labels as places in `classes`.

    `categories` has the categories of each column that is not of numbers, in the order of their codes; `remarks` says
    in sentences what was left out.
    """

    columns: tuple[str, ...]
    values: np.ndarray
    target: str
    classes: tuple[str, ...]
    labels: np.ndarray
    categories: dict[str, tuple[str, ...]]
    lines: np.ndarray
    remarks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


def read_table(path: str | Path, target: str) -> Table:
    """A CSV file with a header as a table whose column `target` is to be predicted."""
    path = Path(path)
    header, rows, lines = _cells(path)
    if target not in header:
        known = ", ".join(header[:12]) + (", …" if len(header) > 12 else "")
        raise ValueError(f"{path} has no column {target!r} for --target; its columns are {known}")
    remarks = []
    goal = [row[header.index(target)] for row in rows]
    there = [not _missing(cell) for cell in goal]
    if not all(there):
        remarks.append(f"{there.count(False)} of {len(there)} rows have no {target}; they are left out")
    kept = [place for place, known in enumerate(there) if known]
    goal, rows, lines = [goal[i] for i in kept], [rows[i] for i in kept], [lines[i] for i in kept]
    if not rows:
        raise ValueError(f"{path} has no row with a {target}; the target must be known in some")
    names, columns, categories = [], [], {}
    for place, name in enumerate(header):
        if name == target:
            continue
        cells = [row[place] for row in rows]
        if all(_missing(cell) for cell in cells):
            remarks.append(f"the column {name} has no values; it is left out")
        elif name == "" and place == 0 and _counted(cells):
            remarks.append("the first column has no name and counts the rows; it is left out")
        else:
            column, found = _column(path, name, cells)
            names.append(name)
            columns.append(column)
            if found:
                categories[name] = found
    if not names:
        raise ValueError(f"{path} has no column with values beside {target}; there must be one to predict from")
    classes = _sorted(set(goal))
    codes = {name: code for code, name in enumerate(classes)}
    labels = np.array([codes[each] for each in goal])
    return Table(
        tuple(names), np.stack(columns, axis=1), target, classes, labels, categories, np.array(lines), tuple(remarks)
    )


def _cells(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows and their lines in the file."""
    text = read_text(path).removeprefix("\ufeff")
    first = text.split("\n", 1)[0]
    if not first.strip():
        raise ValueError(f"{path} is empty or begins with an empty line; its first line must name the columns")
    reader = csv.reader(text.splitlines(keepends=True), delimiter=max(",;\t", key=first.count))
    try:
        header = [name.strip() for name in next(reader)]
        rows, lines = [], []
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"{path}, line {reader.line_num} has {len(row)} cells; the header has {len(header)}")
            rows.append([cell.strip() for cell in row])
            lines.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file: {error}") from None
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path} has {header.count(twice)} columns {twice!r}; their names must differ")
    if len(rows) < 2:
        raise ValueError(f"{path} has {len(rows)} rows below its header; there must be several")
    return header, rows, lines


def _column(path: Path, name: str, cells: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """A column as numbers, and its categories if its cells are not numbers themselves."""
    numbers = [math.nan if _missing(cell) else _number(cell) for cell in cells]
    if None not in numbers:
        column = np.array(numbers, dtype=float)
        wrong = np.flatnonzero(np.abs(column) > LARGEST)
        if len(wrong):
            raise ValueError(f"{path}: {name} is {cells[wrong[0]]} in row {wrong[0] + 1}; numbers are at most 3e38")
        return column, ()
    found = _sorted({cell for cell in cells if not _missing(cell)})
    codes = {category: float(code) for code, category in enumerate(found)}
    return np.array([codes.get(cell, math.nan) for cell in cells]), found


def _sorted(names: set[str]) -> tuple[str, ...]:
    """In the order of their numbers if all are numbers, else of the alphabet."""
    numbers = {name: _number(name) for name in names}
    if None in numbers.values():
        return tuple(sorted(names))
    return tuple(sorted(names, key=lambda name: (numbers[name], name)))


def _counted(cells: list[str]) -> bool:
    """Whether cells are whole numbers that grow from row to row."""
    return all(cell.isdecimal() for cell in cells) and bool(np.all(np.diff([float(cell) for cell in cells]) > 0))


def _missing(cell: str) -> bool:
    return cell.lower() in MISSING


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
