"""Tables of `contexts.py`, from what it has recorded."""

from typing import Any


def show(rows: list[dict[str, Any]], pairs: dict[str, dict[str, Any]]) -> None:
    """Print the score of every estimator by budget."""
