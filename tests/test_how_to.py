"""How to add a thing is a file that runs: every template, and the facts that it prints."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TEMPLATES = sorted((DOCS / "how-to" / "templates").glob("*.py"))
NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?)"


def printed(run) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run()
    return out.getvalue()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_facts_that_a_template_prints_are_so(path, monkeypatch):
    """A line that ends with "x = y ± t" says that x and y are within t."""
    name = f"template_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    facts = re.findall(rf"{NUMBER} = {NUMBER} ± {NUMBER}$", printed(module.main), re.M)
    assert len(facts) >= 2
    for left, right, within in facts:
        assert abs(float(left) - float(right)) <= float(within), f"{left} = {right} ± {within}"


def test_every_template_has_its_page():
    for path in TEMPLATES:
        assert any(f"templates/{path.name}" in page.read_text() for page in (DOCS / "how-to").glob("*.md")), path.name
