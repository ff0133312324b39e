"""A finished reproduction, made up, with words that try to break out of their place."""

import json

import numpy as np
import xarray as xr

from largeprompt.paper.chart import BLUE, GREY, PURPLE, VERMILION, Chart, HeatMap, Panel, Series, level
from largeprompt.paper.claims import VERDICTS
from largeprompt.paper.experiment import Experiment

NASTY = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'> \"&amp;\" %{x} | `*_<!--"
LENGTHS = np.array([10.0, 100.0, 1000.0])
GAP = np.array([1e-2, np.nan, 1e-4])
STEPS = np.array([0.0, 2e4, 4e4])
RISK = np.array([0.5, 0.1, 0.06])
CHOICE = {"preset": "quick", "seeds": 3, "conventions": {"score_scale": 0.5, "query_sigma": None}}


class Gap(Experiment):
    """Points with error bars, seeds, theory, and a bound far above; two panels."""

    @property
    def title(self):
        return "The gap"

    @property
    def look(self):
        return "It falls."

    def chart(self, data):
        gap = data.gap.values
        series = (
            Series("T_soft", LENGTHS, gap, colour=BLUE, low=gap * 0.9, high=gap * 1.1, line=False, mark="o"),
            Series("each seed", LENGTHS, gap * 2, "seed", BLUE, in_legend=False),
            Series("1/L", LENGTHS, 0.1 / LENGTHS, "theory", dash="dash"),
            Series("Proposition 3.1", LENGTHS, 1e9 / LENGTHS, "bound", PURPLE, dash="dot"),
        )
        names = ("isotropic", "anisotropic")
        return Chart(tuple(Panel(name, "length L", "gap", series) for name in names), columns=2)

    def summary(self, data):
        return [f"At L = 10 it is {float(data.gap[0]):g}."]


class RiskAlongTraining(Experiment):
    """A band around a line that dips below zero, on a linear axis, with words that try to break out."""

    @property
    def title(self):
        return NASTY

    @property
    def look(self):
        return NASTY

    def chart(self, data):
        series = (
            Series(NASTY, STEPS, RISK, colour=VERMILION, low=RISK - 0.1, high=RISK + 0.1),
            level("noise", 0.05, STEPS, colour=GREY),
        )
        return Chart((Panel(NASTY, NASTY, NASTY, series, x_log=False, remarks=(NASTY,)),))

    def summary(self, data):
        return [NASTY]


class Maps(Experiment):
    """Two heat maps with common colours, a cell without a number, and names that try to break out."""

    @property
    def title(self):
        return "Maps"

    @property
    def look(self):
        return "It is darkest on the diagonal."

    def chart(self, data):
        maps = (np.array([[1.0, 10.0], [np.nan, np.inf]]), np.array([[100.0, 1.0], [2.0, 1.0]]))
        return Chart(tuple(HeatMap(NASTY, "test", NASTY, ("10", "∞"), ("10", NASTY), it, "ratio") for it in maps))

    def summary(self, data):
        return []


FIGURES = {"1a": Gap("1a"), "9": RiskAlongTraining("9"), "maps": Maps("maps")}


def claim(key, verdict, figures=(), statement="It falls.", checks=1):
    entry = {"label": "slope", "measured": 0.91234, "error": 0.0123, "relation": ">", "target": 0.5, "tolerance": 0.0}
    return {
        "key": key,
        "place": "Section 6",
        "role": "identity" if key.startswith("T") else "test",
        "statement": statement,
        "measured": "The slope.",
        "verdict": verdict,
        "remark": "Too few seeds." if verdict == VERDICTS[2] else "",
        "figures": list(figures),
        "checks": [entry | {"resolution": None, "verdict": verdict}] * checks,
    }


def reproduction(folder):
    """A finished reproduction, as small as there is."""
    (folder / "figures").mkdir(parents=True)
    for key in FIGURES:
        data = xr.Dataset({"gap": ("L", GAP)}, {"L": LENGTHS}, {"choice": json.dumps(CHOICE)})
        data.to_netcdf(folder / "figures" / f"figure-{key}.nc", engine="scipy")
        for form in ("svg", "pdf", "csv"):
            (folder / "figures" / f"figure-{key}.{form}").write_text("")
    claims = [
        claim("C10", VERDICTS[0], ["1a"]),
        claim("C2", VERDICTS[3], ["9", "1a"], NASTY),
        claim("C1", VERDICTS[2], checks=0),
        claim("T1", VERDICTS[0], ["5a"], checks=3),
    ]
    line = {"left": "x", "x": 2.0, "relation": ">", "y": 1.0, "right": "λ_max", "holds": True}
    texts = dict.fromkeys(("summary", "printed", "why", "correction", "setting", "place"), NASTY)
    erratum = {"key": "E1", "kind": "error", "against": [line], "repair": [line], "confirmed": True, **texts}
    ledger = {"rule": "Three standard errors.", "choice": CHOICE, "claims": claims, "errata": [erratum]}
    run = {
        "choice": CHOICE | {"figures": None, "store": None},
        "preset": "quick",
        "command": "largeprompt reproduce --preset quick",
        "options": ["--preset", "quick"],
        "began": "2026-03-01T09:30:00+00:00",
        "seconds": 4000.0,
        "machine": {"processor": NASTY, "cores": 2, "system": "Linux", "python": "3.11"},
        "versions": {"numpy": "2.0"},
        "settings": {"steps": 100_000, "starts": [["identity", 100, 16]], "conventions": CHOICE["conventions"]},
        "runs": {"count": 1, "core_seconds": 30.0},
        "pieces": {"count": 2, "core_seconds": 90.0},
        "figures": list(FIGURES),
        "cost": "about an hour",
    }
    (folder / "ledger.json").write_text(json.dumps(ledger))
    (folder / "run.json").write_text(json.dumps(run))
    return folder
