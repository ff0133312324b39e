"""Every example of the documentation runs as it stands and prints what the page shows.

Run as a script, this file writes what the examples of the pages given print: `python tests/test_examples.py PAGE …`.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STEP = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.S)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.A)


def words(text: str) -> list[str]:
    # brackets of arrays stand apart: how wide NumPy prints a column depends on the digits
    return re.sub(r"([][(),])", r" \1 ", NUMBER.sub(" # ", text)).split()


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


def printed(code: str, page: Path, namespace: dict) -> str:
    """What a step prints, after the steps before it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(page), "exec"), namespace)
    return out.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if STEP.search(page.read_text())], ids=lambda page: page.stem)
def test_the_examples_of_a_page_print_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code, shown in STEP.findall(page.read_text()):
        found = printed(code, page, namespace)
        assert words(found) == words(shown), code
        # the last of three digits may fall the other way on another machine, and a zero by rounding
        assert numbers(found) == pytest.approx(numbers(shown), rel=0.01, abs=1e-12), code


def write(page: Path) -> None:
    namespace = {}

    def step(match: re.Match[str]) -> str:
        found = printed(match[1], page, namespace)
        return f"```python\n{match[1]}```\n" + (f"\n```text\n{found}```\n" if found else "")

    page.write_text(STEP.sub(step, page.read_text()))


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    os.chdir(tempfile.mkdtemp())
    for page in pages:
        write(page)
