"""`largeprompt rows` as a user meets it: a small random network as checkpoint, files, and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest

from drawn_tables import drawn_table, save, small_network
from model_prompts import strict

NAMES = ("ash", "elm", "</script><b>oak")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save(small_network(), tmp_path_factory.mktemp("network") / "small.cpkt"))


@pytest.fixture
def table(command):
    """A table in the folder of the test."""
    values, labels, _ = drawn_table()
    lines = [",".join([*(f"{x:g}" for x in row), NAMES[c]]) for row, c in zip(values, labels, strict=True)]
    lines[4] = lines[4].rpartition(",")[0] + ","
    Path("trees.csv").write_text("\n".join(["a,b,c,d,e,f,g,tree", *lines]))
    return "trees.csv"


WIDE = ",".join(f"x{i}" for i in range(101)) + ",tree\n" + ("1," * 101 + "a\n" + "2," * 101 + "b\n") * 20
SMALL = ("--target", "tree", "--rows", "32", "--held-out", "5", "--draws", "16", "--members", "2")


def test_predictions_come_with_intervals_rows_and_a_page(command, table, checkpoint):
    code, out, err = command("rows", table, *SMALL, "--checkpoint", checkpoint, "--json")
    assert code == 0
    assert err == "largeprompt: 1 of 60 rows have no tree; they are left out\n"
    numbers = strict(out)
    assert numbers["files"] == ["results/rows.html", "results/rows.json"]
    kept = strict(Path("results/rows.json").read_text())
    assert {part: numbers[part] for part in kept} == kept
    assert numbers["settings"]["rows"] == 32
    assert numbers["settings"]["classes"] == sorted(NAMES)
    rows = numbers["rows"]
    assert len(rows) == 5
    labels = dict(enumerate(Path(table).read_text().splitlines()[1:], 2))
    for row in rows:
        assert labels[row["line"]].endswith(f",{row['true']}")
        assert 0 < row["low"] < row["probability"] < row["high"] < 1
        for each in row["influential"]:
            assert labels[each["line"]].endswith(f",{each['class']}")
    sizes = [point["rows"] for point in numbers["learning_curve"]["points"]]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 32


def test_the_terminal_shows_a_summary_and_a_table(command, table, checkpoint):
    code, out, _ = command("rows", table, *SMALL, "--checkpoint", checkpoint)
    assert code == 0
    assert "From 32 labelled rows" in out
    assert "carried by lines" in out
    assert out.rstrip().endswith("written: results/rows.html, results/rows.json")


def test_the_page_draws_without_a_network_and_shows_text_as_text(command, table, checkpoint, browser):
    problems = []
    # with derivatives the rows needed are known; with partitions of this table they are not, and not drawn
    for scheme, method, needed in (("light", "influence", True), ("dark", "partitions", False)):
        assert command("rows", table, *SMALL, "--checkpoint", checkpoint, "--method", method, "--json")[0] == 0
        rows = json.loads(Path("results/rows.json").read_text())["rows"]
        page = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme=scheme).new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        page.goto(Path("results/rows.html").resolve().as_uri())
        for chart in ("intervals", "curve", *["needed"] * needed):
            assert page.locator(f"#chart-{chart} svg.main-svg").count() >= 1
        assert page.locator("#chart-needed").count() == needed
        page.select_option("#row", "2")
        assert page.locator("#name").inner_text() == f"The row on line {rows[2]['line']}"
        assert page.locator("#influential tr").count() == len(rows[2]["influential"])
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert problems == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "bad.csv is empty"),
        ("x,y\n1,a\n2,b\n", "no column 'tree' for --target"),
        ("x,tree\n1,a\n2\n", "line 3 has 1 cells"),
        ("x,tree\n1,a\n2,b\n", "the table has 2 rows; with 16 held out it must have 32 or more"),
        ("x,tree\n" + "1,a\n" * 40, "all 24 labelled rows have the tree 'a'"),
        (
            "x,tree\n" + "".join(f"{i},{i}\n" for i in range(40)),
            "the target tree has 40 classes; TabPFN reads at most 10",
        ),
        ("x,tree\n1e300,a\n2,b\n", "x is 1e300 in row 1"),
        (WIDE, "the table has 101 columns; TabPFN reads at most 100"),
    ],
)
def test_bad_tables_are_refused_in_one_line(command, checkpoint, text, said):
    Path("bad.csv").write_text(text)
    code, out, err = command("rows", "bad.csv", "--target", "tree", "--checkpoint", checkpoint)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not Path("results").exists() or not list(Path("results").iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--checkpoint", "absent"), "absent is no file"),
        (("--rows", "58"), "58 labelled rows and 16 held out of 59"),
        (("--rows", "8"), "give 16 to 43 labelled rows"),
        (("--held-out", "0"), "held_out is 0; it must be at least 1"),
        (("--method", "magic"), "method is 'magic'; it must be one of auto"),
        (("--level", "90"), "level is 90.0; it must lie between 0 and 1"),
        (("--error", "-1"), "error is -1; it must be a positive standard error"),
        (("--members", "0"), "members is 0; it must be at least 1"),
        (("--draws", "1"), "draws is 1; it must be at least 2"),
        (("--checkpoint", "trees.csv"), "trees.csv is no checkpoint of TabPFN v1"),
    ],
)
def test_bad_options_are_refused_in_one_line(command, table, checkpoint, options, said):
    given = () if "--checkpoint" in options else ("--checkpoint", checkpoint)
    code, out, err = command("rows", table, "--target", "tree", *options, *given)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_without_a_checkpoint_it_says_where_one_is_found(command, table, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = command("rows", table, "--target", "tree")
    assert code == 2
    assert "the checkpoint of TabPFN v1 is not here; ask for it to be fetched" in err.splitlines()[-1]
    assert np.all([word in err for word in ("--fetch", "pip install pfns==0.3.0")])
