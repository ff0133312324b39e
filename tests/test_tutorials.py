"""The tutorials run as they stand, step after step, and print what they say they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.md"))
STEP = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.S)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.A)


def words(text: str) -> list[str]:
    return NUMBER.sub(" # ", text).split()


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code, shown in STEP.findall(page.read_text()):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        assert words(printed.getvalue()) == words(shown), code
        # the last of three digits may fall the other way on another machine
        assert numbers(printed.getvalue()) == pytest.approx(numbers(shown), rel=0.01), code
