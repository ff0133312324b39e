"""The page on an inspection, as files and in a real browser."""

import csv
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
import xarray as xr

from largeprompt.models import AttentionCall, inspect_calls
from largeprompt.models.report import FILES, regime, write_report
from largeprompt.models.report.regime import LARGE, REFUSED, SINGLE, label

NASTY = "</script><img src=x onerror='window.broken=1'><!-- & \" %{x} =1"
TOKENS = 64


def call(name, heads, seed, scale):
    """Heads that attend ever more sharply; the last of a causal call."""
    rng = np.random.default_rng(seed)
    queries, keys, values = (rng.normal(size=(heads, n, 4)) for n in (16, TOKENS, TOKENS))
    keys *= np.geomspace(0.1, 6, heads)[:, None, None]
    places = np.arange(TOKENS - 16, TOKENS)
    hidden = np.where(np.arange(TOKENS) > places[:, None], -np.inf, 0.0)[None]
    return AttentionCall(name, queries, keys, values, scale, hidden, places)


@pytest.fixture(scope="module")
def inspection():
    calls = [call("layers.0", 4, 0, 0.5), call(NASTY, 4, 1, 1.0), call("layers.2", 3, 2, 1.0)]
    other = [call("layers.0", 4, 3, 0.5), call(NASTY, 4, 4, 1.0), call("layers.2", 3, 5, 1.0)]
    with np.errstate(invalid="ignore"):
        found = inspect_calls(calls, unseen=other, model=NASTY, queries=16, seconds=61.0)
    return dataclasses.replace(found, tokens=[NASTY if i % 2 else f" w{i}\n" for i in range(TOKENS)])


@pytest.fixture(scope="module")
def folder(inspection, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "deep" / "er"
    assert write_report(inspection, folder) == folder / "inspection.html"
    assert {path.name for path in folder.iterdir()} == set(FILES)
    return folder


def test_all_numbers_lie_beside_the_page(inspection, folder):
    data = xr.load_dataset(folder / "inspection.nc", engine="scipy")
    for name, values in inspection.data.items():
        np.testing.assert_array_equal(data[name], values)
        assert data[name].attrs["long_name"] == values.attrs["long_name"]
    numbers = json.loads((folder / "inspection.json").read_text(), parse_constant=pytest.fail)
    table = list(csv.DictReader((folder / "inspection.csv").read_text().splitlines()))
    assert len(numbers["rows"]) == len(table) == 11  # the last layer has no fourth head
    assert numbers["summary"] == inspection.summary
    assert numbers["settings"]["tokens"] == TOKENS
    for row, line in zip(numbers["rows"], table, strict=True):
        assert row["trusted"] == float(line["trusted"])
        assert (row["relative_error"] is None) == (line["relative_error"] == "") == (row["trusted"] == 0)
    assert {row["regime"] for row in numbers["rows"]} > {REFUSED}


def test_a_page_that_cannot_be_written_leaves_no_part_of_it(inspection, tmp_path):
    (tmp_path / "inspection.html").mkdir()
    with pytest.raises(OSError, match=r"inspection\.html"):
        write_report(inspection, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


ROW = {
    "seen": 100.0,
    "effective": 20.0,
    "sinks": 0.0,
    "first": 0.0,
    "score_variance": 1.0,
    "score_threshold": 1 / math.log(100),
    "tail": 0.3,
    "trusted": 1.0,
    "relative_error": 0.2,
    "length": 400.0,
    "linear_beside_sinks": 0.5,
    "position": 0.1,
}


@pytest.mark.parametrize(
    ("changes", "expected", "sentence"),
    [
        ({}, LARGE, "its output varies by 20 % of its size; for 10 % it needs about 400 tokens"),
        ({"score_variance": 9.2, "score_threshold": 2.0}, SINGLE, "One token decides: the variance of its scores, 9"),
        ({"tail": 1.25, "trusted": 0.0}, REFUSED, "Refused: the tail index k̂ of its weights is 1.25, above 0.7."),
        ({"tail": math.nan, "trusted": 0.0}, REFUSED, "too few tokens are left beside its sinks"),
        ({"sinks": 0.8, "first": 0.79}, LARGE, "Sinks take 80 % of its weight (the first token)"),
        ({"sinks": 0.8, "first": 0.1}, LARGE, "(tokens that every query reads)"),
        ({"linear_beside_sinks": 0.034}, LARGE, "It is within 3.4 % of linear attention."),
        ({"position": 0.75}, LARGE, "Position alone explains 75 % of the variance of its scores."),
        ({"measured_over_predicted": 1.256}, LARGE, "On unseen text its error is 1.26 times the one predicted."),
        ({"position": math.nan, "measured_over_predicted": math.nan}, LARGE, "It weighs 20 of the 100 tokens"),
    ],
)  # fmt: skip
def test_a_regime_is_said_in_sentences(changes, expected, sentence):
    row = ROW | changes
    assert label(row) == expected
    assert sentence in regime(row)
    assert "nan" not in regime(row)
    assert ("within" in regime(row)) == (row["linear_beside_sinks"] < 0.1)


@pytest.fixture
def page(browser, folder) -> Iterator:
    """A fresh tab, which has nothing to complain of and asks for nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page, complaints, requests = context.new_page(), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((folder / "inspection.html").as_uri())
    page.wait_for_selector("#one[data-drawn]")
    yield page
    assert complaints == []
    assert [url for url in requests if not url.startswith("blob:")] == [(folder / "inspection.html").as_uri()]
    assert page.evaluate("() => window.broken") is None
    assert page.locator("img").count() == 0
    context.close()


def test_every_number_has_its_map_and_refused_heads_are_grey(page, inspection):
    names = page.locator("#number option").all_inner_texts()
    assert names[0] == "regime"
    assert "residual" not in " ".join(names)  # without projections there is none
    for k, name in enumerate(names[1:]):
        page.select_option("#number", str(k))
        traces = page.evaluate("() => document.getElementById('chart-map').data")
        known, absent = (np.array(trace["z"], float) for trace in traces)
        number = next(key for key, each in inspection.data.items() if each.attrs["long_name"] == name)
        values = inspection.data[number].values
        np.testing.assert_array_equal(np.isfinite(known) | np.isfinite(absent), np.isfinite(inspection.data["seen"]))
        if number == "relative_error":
            np.testing.assert_allclose(known, np.log10(values), atol=1e-5)
            assert "refused" in page.locator("#legend").inner_text()
            assert np.isfinite(absent).sum() == (inspection.data["trusted"] == 0).sum()
        if number == "tail":
            np.testing.assert_allclose(known, values, atol=1e-5)


def test_a_click_on_the_map_shows_the_head(page, inspection):
    assert page.locator("#title").inner_text() == "Layer 0, head 0"
    page.evaluate("() => document.getElementById('chart-map').emit('plotly_click', {points: [{x: 2, y: 1}]})")
    page.wait_for_selector("#one[data-drawn='1-2']")
    assert page.locator("#title").inner_text() == "Layer 1, head 2"
    assert page.locator("#module").inner_text() == NASTY
    details = inspection.details[1, 2]
    assert page.locator("#carriers .place").all_inner_texts() == [str(place) for place in details.carriers]
    marked = [mark.strip() for mark in page.locator("#carriers mark").all_inner_texts()]
    assert marked == [NASTY if place % 2 else f"w{place}↵" for place in details.carriers]
    measured = page.evaluate("() => document.getElementById('chart-error').data[1].y")
    np.testing.assert_allclose(np.array(measured, float), details.measured, rtol=1e-3)
    weights = page.evaluate("() => document.getElementById('chart-weights').data[1]")
    np.testing.assert_array_equal(weights["customdata"], details.places)  # counted from 0, as the tokens beside it
    np.testing.assert_allclose(np.array(weights["y"], float), details.weights, rtol=1e-3)
    labels = page.locator("#chart-weights .xtick text").all_text_contents()
    assert labels == ["0", "1", "10"]
    effective = float(inspection.data.effective[1, 2])
    assert f"{effective:.3g}" == page.locator("#values td").first.inner_text()
    page.get_by_role("button", name="next ›").click()
    assert page.locator("#title").inner_text() == "Layer 1, head 3"
    page.select_option("#layer", "2")  # which has no head 3
    assert page.locator("#title").inner_text() == "Layer 2, head 0"
    page.select_option("#head", "2")
    assert page.locator("#title").inner_text() == "Layer 2, head 2"
    assert page.get_by_role("button", name="next ›").is_disabled()


def test_a_mouse_on_the_map_finds_its_head(page):
    box = page.locator("#chart-map .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.5)
    page.wait_for_selector("#chart-map .hovertext")
    hover = page.locator("#chart-map .hovertext").text_content()
    assert "layer 1, head 3" in hover
    assert "<img" in hover
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("#one[data-drawn='1-3']")


def test_the_table_sorts_and_leaves_what_is_no_number_last(page, inspection):
    def column(name):
        page.locator(".heads th[data-column] button", has_text=re.compile(f"^{name}$")).click()
        place = page.locator(".heads th[aria-sort='ascending'], .heads th[aria-sort='descending']").get_attribute(
            "data-column"
        )
        return page.locator(f".heads tbody tr > :nth-child({int(place) + 1})").all_inner_texts()

    refused = int((inspection.data["trusted"] == 0).sum())
    for up in (True, False):
        shown = column("error")
        assert shown[-refused:] == ["–"] * refused
        numbers = [float(text) for text in shown[:-refused]]
        assert numbers == sorted(numbers, reverse=not up)
    assert column("head")[:2] == ["0.0", "0.1"]
    page.locator(".heads a", has_text="2.1").click()
    page.wait_for_selector("#one[data-drawn='2-1']")


def test_the_table_is_downloaded_as_csv(page, inspection, tmp_path):
    with page.expect_download() as started:
        page.get_by_role("button", name="Download as CSV").click()
    started.value.save_as(tmp_path / "heads.csv")
    rows = list(csv.DictReader((tmp_path / "heads.csv").read_text().splitlines()))
    assert len(rows) == 11
    for row in rows:
        place = {"layer": int(row["layer"]), "head": int(row["head"])}
        np.testing.assert_allclose(float(row["effective"]), inspection.data.effective.sel(place), rtol=1e-5)
        assert (row["relative_error"] == "") == (row["regime"] == REFUSED)


def test_nothing_is_wider_than_the_screen_on_light_and_dark_paper(page):
    for width, scheme in itertools.product((1400, 390), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(200)
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        back = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        ink = page.evaluate("() => document.getElementById('chart-error').layout.font.color")
        dark, light = (sum(map(int, re.findall(r"\d+", colour))) for colour in (back, ink))
        assert (dark < light) == (scheme == "dark")
        assert page.evaluate("() => document.getElementById('chart-error').layout.width") <= width
