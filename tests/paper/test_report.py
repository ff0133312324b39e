"""The report, as text and in a real browser."""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterator

import numpy as np
import pytest
import xarray as xr

from largeprompt.paper import report
from largeprompt.paper.claims import PENDING
from largeprompt.paper.report.words import check, number, prose
from largeprompt.paper.reproduction import read
from largeprompt.paper.unfinished import HowFar
from report_catalogue import CHOICE, FIGURES, GAP, LENGTHS, NASTY, RISK, reproduction


def write(folder):
    """The report of a folder, from what is in it."""
    return report.write(read(folder, FIGURES), FIGURES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = reproduction(tmp_path_factory.mktemp("report") / "results")
    assert write(folder) == [folder / "report" / "index.html", folder / "report" / "report.md"]
    return folder


class Tab:
    """The page in a tab, with what it complained of and what it asked for."""

    def __init__(self, browser, address):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
        self.page = self.context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        for key in FIGURES:
            self.page.wait_for_selector(f"#figure-{key}[data-drawn]")
        self.first = self.looks()

    def looks(self):
        """All that a reader can change."""
        state = "all => all.map(it => ['pressed', 'expanded', 'sort'].map(name => it.getAttribute('aria-' + name)))"
        pressed = self.page.locator("button, th").evaluate_all(state)
        return [pressed, keys(self.page), self.page.viewport_size, self.page.locator("details[open]").count()]


@pytest.fixture(scope="module")
def tabs(browser, folder) -> Iterator:
    """The tab last used; it takes a second to open one."""
    tabs = [Tab(browser, (folder / "report" / "index.html").as_uri())]
    yield tabs
    tabs[-1].context.close()


@pytest.fixture
def tab(browser, tabs):
    """A tab as just opened: the last one if it is as it was, or a new one."""
    if tabs[-1].looks() != tabs[-1].first:
        tabs[-1].context.close()
        tabs.append(Tab(browser, tabs[0].requests[0]))
    yield tabs[-1]
    assert tabs[-1].complaints == []


@pytest.fixture
def page(tab):
    return tab.page


def drawn(page, key):
    """The traces and axes of each panel of a figure."""
    script = "plots => plots.map(p => ({data: p.data, x: p.layout.xaxis, y: p.layout.yaxis}))"
    return page.locator(f"#figure-{key} .plot").evaluate_all(script)


def names(page, key):
    return [[trace.get("name") for trace in panel["data"]] for panel in drawn(page, key)]


def keys(page):
    return page.locator(".claims tbody:visible button.key").all_inner_texts()


def test_the_page_opens_from_a_file_and_asks_for_nothing_else(tab, page, folder):
    assert page.title() == "largeprompt: the paper, executed"
    assert tab.requests == [(folder / "report" / "index.html").as_uri()]
    outside = page.locator("[src], link[href]").count()
    assert outside == 0
    files = page.locator("#figure-1a .links a[href^='../']").evaluate_all("links => links.map(link => link.href)")
    assert files == [(folder / "figures" / f"figure-1a.{form}").as_uri() for form in ("svg", "pdf", "csv", "nc")]


def test_every_figure_shows_its_points(page):
    for panel in drawn(page, "1a"):
        measured = next(trace for trace in panel["data"] if trace["name"] == "T<sub>soft</sub>")
        assert measured["x"] == LENGTHS.tolist()
        assert measured["y"] == [1e-2, None, 1e-4]
        np.testing.assert_allclose(measured["error_y"]["array"][0], 1e-3)
        np.testing.assert_allclose(measured["customdata"][2], [0.9e-4, 1.1e-4])
    first, second = drawn(page, "1a")
    assert first["y"]["range"] == second["y"]["range"]
    band, noise, line = sorted(drawn(page, "9")[0]["data"], key=lambda trace: len(trace["x"]) % 7)
    assert line["y"] == RISK.tolist()
    assert noise["y"] == [0.05, 0.05]
    # the band dips below zero, which a logarithm cannot show: it ends below all that is in sight
    np.testing.assert_allclose(band["y"][:6], [0.6, 0.2, 0.16, 1e-300, 1e-300, 0.4])
    assert page.locator("#figure-9 .plot path.point, #figure-9 .plot path.js-line").count() > 0


def test_heat_maps_have_common_colours_and_no_switches(page):
    first, second = (panel["data"][0] for panel in drawn(page, "maps"))
    assert first["z"] == [[0, 1], [None, 2]]
    assert first["text"] == [["1.00", "10"], ["–", "∞"]]
    assert (first["zmin"], first["zmax"]) == (second["zmin"], second["zmax"]) == (0, 2)
    assert page.locator("#figure-maps .switches").count() == 0
    assert page.locator("#figure-maps .plot .hm image").count() == 2
    assert page.evaluate("() => window.broken") is None


def test_switches_show_and_hide_what_they_say(page):
    figure = page.locator("#figure-1a")
    everything = ["each seed", "1/L", "T<sub>soft</sub>"]
    assert names(page, "1a") == [everything, everything]
    assert page.locator("#figure-9 [data-role='seed'], #figure-9 [data-role='bound']").count() == 0
    below = drawn(page, "1a")[0]["y"]["range"][1]
    figure.get_by_role("button", name="bound").click()
    assert names(page, "1a")[0] == ["Proposition 3.1", *everything]
    assert drawn(page, "1a")[0]["y"]["range"][1] > below + 5
    for name, left in (("bound", everything), ("seeds", everything[1:]), ("theory", everything[2:])):
        figure.get_by_role("button", name=name).click()
        assert names(page, "1a") == [left, left]
    figure.locator(".legend button", has_text="Tsoft").click()
    assert names(page, "1a") == [[], []]
    figure.locator(".legend button", has_text="Tsoft").click()
    for name in ("seeds", "theory"):
        figure.get_by_role("button", name=name).click()
    assert names(page, "1a") == [everything, everything]


def test_the_axes_switch_between_logarithm_and_line(page):
    types = [(panel["x"]["type"], panel["y"]["type"]) for key in FIGURES for panel in drawn(page, key)]
    assert types == [("log", "log"), ("log", "log"), ("linear", "log"), *[("category", "category")] * 2]
    for x, y, least in (("log", "linear", -0.04), ("linear", "log", -1.3)):
        page.locator("#figure-9").get_by_role("button", name="log x").click()
        page.locator("#figure-9").get_by_role("button", name="log y").click()
        panel = drawn(page, "9")[0]
        assert (panel["x"]["type"], panel["y"]["type"]) == (x, y)
        assert panel["y"]["range"][0] < least


def test_a_zoom_has_its_own_ticks_and_a_double_click_ends_it(page):
    plot, whole = page.locator("#figure-1a .plot").first, ["10", "100", "1,000"]
    assert drawn(page, "1a")[0]["x"]["ticktext"] == whole
    plot.evaluate("plot => Plotly.relayout(plot, {'xaxis.range': [1.2, 2.1]})")
    assert drawn(page, "1a")[0]["x"]["ticktext"] == ["20", "50", "100"]
    plot.dblclick()
    assert drawn(page, "1a")[0]["x"]["ticktext"] == whole


def test_the_ledger_sorts_both_ways_by_mouse_and_keyboard(page):
    assert keys(page) == ["C1", "C2", "C10", "T1"]
    head = page.locator("th[data-column='key']")
    head.get_by_role("button").click()
    assert keys(page) == ["T1", "C10", "C2", "C1"]
    assert head.get_attribute("aria-sort") == "descending"
    page.locator("th[data-column='verdict']").get_by_role("button").press("Space")
    assert keys(page) == ["C10", "T1", "C1", "C2"]
    assert head.get_attribute("aria-sort") == "none"
    head.get_by_role("button").press("Enter")
    assert keys(page) == ["C1", "C2", "C10", "T1"]
    assert head.get_attribute("aria-sort") == "ascending"


def test_verdicts_filter_the_ledger_and_links_open_a_claim(page):
    page.locator(".count.holds").click()
    assert keys(page) == ["C10"]  # T1 holds too, and is no test of the paper
    filters = page.locator(".filters")
    filters.get_by_role("button", name="does not hold").click()
    assert keys(page) == ["C2"]
    filters.get_by_role("button", name="all").click()
    assert len(keys(page)) == 4
    filters.get_by_role("button", name="identity").click()
    assert keys(page) == ["T1"]
    details = page.locator("#claim-C10 .details")
    assert not details.is_visible()
    page.locator("#figure-1a .links a", has_text="C10").click()
    details.wait_for(state="visible")
    assert len(keys(page)) == 4
    assert "0.9123 ± 0.012" in details.inner_text()
    page.locator("#claim-C10 button.key").click()
    assert not details.is_visible()


def test_dark_paper_is_dark_for_the_page_and_its_charts(page):
    colours = "() => [getComputedStyle(document.body), document.querySelector('.plot').layout].map((it, i) => " + (
        "i ? it.font.color : it.backgroundColor)"
    )
    light = page.evaluate(colours)
    page.get_by_role("button", name="Dark").click()
    dark = page.evaluate(colours)
    brightness = [[sum(map(int, rgb[4:-1].split(", "))) for rgb in pair] for pair in (light, dark)]
    assert brightness[0][0] > 700 > 400 > brightness[0][1]
    assert brightness[1][0] < 100 < 400 < brightness[1][1]
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(colours) == light


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(page, width):
    page.set_viewport_size({"width": width, "height": 844})
    page.get_by_role("button", name="Open all").click()
    page.locator("#errata details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    left = page.locator("#figure-1a .panel").evaluate_all("all => all.map(it => it.getBoundingClientRect().left)")
    assert (left[0] == left[1]) == (width == 390)
    page.get_by_role("button", name="Close all").click()
    page.locator("#errata details").evaluate_all("all => all.forEach(one => { one.open = false; })")
    page.set_viewport_size({"width": 1280, "height": 900})


def test_no_text_breaks_out_of_its_place(page):
    assert page.evaluate("() => window.broken") is None
    assert page.locator("img").count() == 0
    assert NASTY.partition("%")[0] in page.locator("#figure-9 h3").inner_text()
    assert NASTY.partition("%")[0] in page.locator("#claim-C2 td.statement").inner_text()
    page.locator("#figure-9 .plot").evaluate("plot => Plotly.Fx.hover(plot, [{curveNumber: 2, pointNumber: 1}])")
    hover = page.locator("#figure-9 .hovertext").text_content()
    assert hover.count(NASTY) == 3
    assert "20,000" in hover
    assert "from 0 to 0.2" in hover
    assert page.evaluate("() => window.broken") is None
    assert page.locator("script").count() == 3


def test_paper_shows_everything(page):
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#claim-T1 .details").is_visible()
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert not page.locator("#claim-T1 .details").is_visible()


def test_the_text_says_the_same(folder):
    text = (folder / "report" / "report.md").read_text()
    assert "took 1 h 6 min" in text
    times = "times by the clock, added up, though several go on at once"
    assert f"\n1 training run (30 s) and 2 computations (1 min 30 s); {times}.\n" in text
    assert "Not the paper's conventions: factor of the scores: 0.5." in text
    assert "- ✕ does not hold: 1" in text
    assert "![Figure 1a: The gap](../figures/figure-1a.svg)" in text
    assert "- At L = 10 it is 0.01." in text
    assert "```sh\nlargeprompt figure 1a --preset quick\n```" in text
    assert "| C10 | test | It falls. | Section 6 | slope: 0.9123 ± 0.012 &gt; 0.5 | ✓ holds | 1a |" in text
    assert "Of 3 tests of the paper:\n\n- ✓ holds: 1\n" in text
    assert "- 1 identities and bounds with room, which check this software: 1 holds" in text
    assert "- C1: It falls. Too few seeds." in text
    assert "| starts | identity × 100 × 16 |" in text
    assert "<script" not in text
    rows = [line for line in text.splitlines() if line.startswith("| E1")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 6


def test_a_ledger_of_an_earlier_version_gets_the_roles_of_its_claims(tmp_path):
    folder = reproduction(tmp_path / "results")
    ledger = json.loads((folder / "ledger.json").read_text())
    for claim in ledger["claims"]:
        del claim["role"]
    (folder / "ledger.json").write_text(json.dumps(ledger))
    text = write(folder)[1].read_text()
    assert "| T1 | identity |" in text
    assert "| C10 | test |" in text
    ledger["claims"][0]["role"] = "proof"
    (folder / "ledger.json").write_text(json.dumps(ledger))
    with pytest.raises(
        ValueError, match="the role of C10 is 'proof'; it must be one of test, identity, bound, own, context"
    ):
        write(folder)


def test_what_a_gpu_did_is_said_apart(tmp_path):
    folder = reproduction(tmp_path / "results")
    run = json.loads((folder / "run.json").read_text())
    run["machine"]["gpu"], run["runs"] = "Card 7", {"count": 2, "core_seconds": 0.0, "gpu_seconds": 61.0}
    for cores, expected in ((0.0, "1 min 1 s of a GPU"), (30.0, "1 min 1 s of a GPU and 30 s on the processor")):
        run["runs"]["core_seconds"] = cores
        (folder / "run.json").write_text(json.dumps(run))
        page, text = (path.read_text() for path in write(folder))
        for form in (page, text):
            assert f"2 training runs ({expected})" in form
            assert "Card 7, " in form


def test_an_unfinished_reproduction_is_refused_in_a_line(tmp_path):
    folder = reproduction(tmp_path / "results")

    def refused(kind, message):
        with pytest.raises(kind) as problem:
            write(folder)
        assert "\n" not in str(problem.value)
        assert message in str(problem.value)

    figure = folder / "figures" / "figure-9.nc"
    good = figure.read_bytes()
    for at in range(8, 300, 12):  # sizes, names and types: each damaged one raises something else
        figure.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with contextlib.suppress(ValueError):
            read(folder, FIGURES)
    figure.write_text("no data")
    refused(ValueError, "`largeprompt figure 9 --preset quick` makes it again")
    (folder / "figures" / "figure-1a.pdf").unlink()
    refused(FileNotFoundError, "figure-1a.pdf is missing; `largeprompt figure 1a --preset quick` makes it")
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"runs": {}}))
    refused(ValueError, "run.json has no 'runs.count'; `largeprompt reproduce --out")
    (folder / "run.json").write_text(json.dumps({"choice": CHOICE, "finished": False}))
    refused(ValueError, "run.json is of a job that is not finished; `largeprompt reproduce --resume --out")
    (folder / "run.json").write_text(json.dumps(run | {"figures": ["12"]}))
    refused(ValueError, "unknown figure '12'; known are 1a, 9, maps")
    (folder / "ledger.json").write_text('{"rule": ""}')
    refused(ValueError, "ledger.json has no 'claims'; `largeprompt reproduce --out")
    (folder / "ledger.json").unlink()
    refused(FileNotFoundError, "ledger.json is missing; `largeprompt reproduce --out")
    (folder / "run.json").write_text("{")
    refused(ValueError, "run.json is damaged: it is not JSON")
    assert not (folder / "report").exists()


def test_parts_made_with_other_settings_are_refused_in_a_line(tmp_path):
    folder = reproduction(tmp_path / "results")
    run, ledger = (json.loads((folder / name).read_text()) for name in ("run.json", "ledger.json"))
    figure = folder / "figures" / "figure-9.nc"

    def refused(name):
        command = f"largeprompt reproduce --resume --out {folder}"
        with pytest.raises(ValueError, match=f"{name} was made with other settings than run.json; `{command}` makes"):
            write(folder)

    for other in ({"seeds": 4}, {"preset": "smoke"}, {"conventions": {"score_scale": 1.0, "query_sigma": None}}):
        (folder / "ledger.json").write_text(json.dumps(ledger | {"choice": CHOICE | other}))
        refused("ledger.json")
    (folder / "ledger.json").write_text(json.dumps(ledger))
    for attrs in ({"choice": json.dumps(CHOICE | {"seeds": 4})}, {}):
        xr.Dataset({"gap": ("L", GAP)}, {"L": LENGTHS}, attrs).to_netcdf(figure, engine="scipy")
        refused("figures/figure-9.nc")
    del run["choice"]
    (folder / "run.json").write_text(json.dumps(run))
    assert len(write(folder)) == 2


def write_unfinished(folder, keys=("1a",), stopped=False):
    """The page of a job that has made these figures, and has judged all claims but C1."""
    made = read(folder, FIGURES)
    claims = [claim | ({"verdict": PENDING} if claim["key"] == "C1" else {}) for claim in made.ledger["claims"]]
    so_far = dataclasses.replace(
        made, ledger={**made.ledger, "claims": claims, "errata": []}, datasets={key: made.datasets[key] for key in keys}
    )
    how_far = HowFar(datetime.datetime.now(datetime.UTC).isoformat(), 0.4, 150.0, stopped)
    return report.write_unfinished(so_far, how_far, list(FIGURES.values()), errata=True)


def test_an_unfinished_page_loads_itself_again_where_the_reader_is_until_it_is_finished(browser, tmp_path):
    folder = reproduction(tmp_path / "results")
    context = browser.new_context(viewport={"width": 1280, "height": 700})
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.clock.install()
    page.goto(write_unfinished(folder, keys=()).as_uri())
    assert page.locator("#figures article.pending").count() == len(FIGURES)
    text = page.locator(".unfinished").inner_text()
    assert f"Unfinished. 0 of {len(FIGURES)} figures and 3 of 4 claims are here; the others are grey." in text
    assert "About 2 min 30 s left." in text
    assert f"this command goes on from here:\n\nlargeprompt reproduce --resume --out {folder}\n" in text
    grey, ink = (
        page.locator(f"#claim-{key} td.statement").evaluate("it => getComputedStyle(it).color") for key in ("C1", "C10")
    )
    assert grey != ink
    page.locator(".filters").get_by_role("button", name=PENDING).click()
    assert keys(page) == ["C1"]
    page.locator(".filters").get_by_role("button", name="all").click()
    page.locator("#claim-C10 button.key").click()
    page.evaluate(
        "() => { document.getElementById('claim-C10').scrollIntoView({behavior: 'instant'}); window.same = true; }"
    )
    place = "() => document.getElementById('claim-C10').getBoundingClientRect().top"
    top = page.evaluate(place)

    write_unfinished(folder)  # a figure more, above what is in sight
    page.clock.fast_forward(12_000)
    page.wait_for_selector("#figure-1a[data-drawn]")
    page.wait_for_function(f"() => Math.abs(({place})() - {top}) < 3")
    assert page.evaluate("() => window.same") is None
    page.wait_for_timeout(500)  # in which a browser would go to another place, smoothly
    assert page.evaluate(place) == pytest.approx(top, abs=3)
    assert page.locator("#claim-C10 .details").is_visible()
    assert page.locator("#errata.pending").count() == 1

    page.evaluate("() => { window.same = true; }")
    write(folder)
    page.clock.fast_forward(12_000)
    page.wait_for_selector("#figure-9[data-drawn]")
    assert page.locator(".unfinished, .pending").count() == 0
    assert page.locator("#claim-C10 .details").is_visible()
    page.wait_for_timeout(500)
    assert page.evaluate(place) == pytest.approx(top, abs=3)
    page.evaluate("() => { window.same = true; }")
    page.clock.fast_forward(60_000)
    assert page.evaluate("() => window.same")
    page.reload()
    page.wait_for_function("() => scrollY > 500")
    assert complaints == []
    context.close()


def test_only_the_page_of_a_running_job_loads_itself_again(tmp_path):
    folder = reproduction(tmp_path / "results")
    running = write_unfinished(folder).read_text("utf-8")
    stopped = write_unfinished(folder, stopped=True).read_text("utf-8")
    finished = write(folder)[0].read_text("utf-8")
    assert [text.count("location.reload") for text in (running, stopped, finished)] == [1, 0, 0]
    assert f"Stopped before the end.</b> 1 of {len(FIGURES)} figures and 3 of 4 claims are here" in stopped
    for trace in ("unfinished", PENDING):
        assert trace not in finished.partition("<script type")[0]  # Plotly's own words do not count


def test_numbers_are_said_as_one_reads_them():
    said = [number(x) for x in (0.5, 1e-7, -2.34567e-5, 100_000, float("nan"), None, float("inf"))]
    assert said == ["0.5", "1×10⁻⁷", "−2.346×10⁻⁵", "100,000", "–", "–", "∞"]
    entry = {"label": "x", "measured": 1.0, "error": 0.1, "relation": "=", "target": 1.2, "tolerance": 0.3}
    assert check(entry) == "x: 1 ± 0.1 = 1.2 within 0.3"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("T_soft − T_lin", "T<sub>soft</sub> − T<sub>lin</sub>"),
        ("wᵀx_kx_kᵀ", "wᵀx<sub>k</sub>x<sub>k</sub>ᵀ"),
        ("E_{μ_z} ≤ L^{−1/2}", "E<sub>μ<sub>z</sub></sub> ≤ L<sup>−1/2</sup>"),
        ("Γ\u0302_{L,w}", "Γ\u0302<sub>L,w</sub>"),
        ("short_to_long, ‖w‖_Σ²", "short_to_long, ‖w‖<sub>Σ</sub>²"),
        ("x_<b>^<i>", "x_&lt;b&gt;^&lt;i&gt;"),
        ("a^{<b>}", "a<sup>&lt;b&gt;</sup>"),
        ("L^−0.97, 10^7.0.", "L<sup>−0.97</sup>, 10<sup>7.0</sup>."),
        ("about 10^9. At 10^−2.", "about 10<sup>9</sup>. At 10<sup>−2</sup>."),
    ],
)
def test_plain_mathematics_gets_its_scripts(text, html):
    assert prose(text) == html
