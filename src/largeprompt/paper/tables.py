"""Least risks, flows, and risks at other lengths on a terminal."""

import math
from collections.abc import Iterator

import xarray as xr
from rich import box
from rich.table import Table


def optima_tables(data: xr.Dataset) -> Iterator[Table]:
    """A table a covariance: the least risks by length."""
    for covariance in data.covariance.values:
        title = f"{covariance}, d = {data.d}, noise {data.noise:g}: least risk ½E(ŷ−y)², floor {float(data.floor):g}"
        table = _table(title, "L")
        for name in ("Bayes", "linear attention", "softmax attention"):
            table.add_column(name, justify="right")
        for L in data.L.values:
            point = data.sel(covariance=covariance, L=L)
            table.add_row(f"{int(L)}", *(f"{float(point[name]):.6f}" for name in ("Bayes", "linear", "softmax")))
        yield table


def flow_tables(data: xr.Dataset) -> Iterator[Table]:
    """A table a covariance: where each flow ends and how far from the infinite one it has been."""
    for covariance in data.covariance.values:
        curves = data.sel(covariance=covariance)
        end = float(data.t[-1])
        title = f"{covariance}: softmax flows from Assumption 5.1 with alpha = {data.alpha:g}, to t = {end:g}"
        table = _table(title, "L")
        early = float(data.t.sel(t=end / 100, method="nearest"))
        for name in ("final risk", "above ∞", f"distance at t = {early:.3g}", f"at t = {end:g}"):
            table.add_column(name, justify="right")
        limit = float(curves.infinite[-1])
        for L in data.L.values:
            point = curves.sel(L=L)
            risk, distance = float(point.risk[-1]), point.distance
            cells = (
                f"{risk:.6f}",
                f"{risk - limit:.2e}",
                f"{float(distance.sel(t=early)):.2e}",
                f"{float(distance[-1]):.2e}",
            )
            table.add_row(f"{int(L)}", *cells)
        table.add_row("∞", f"{limit:.6f}", "", "", "")
        yield table


def length_table(data: xr.Dataset) -> Table:
    """The risk of what a run has trained at each length, beside the optima there; the length of training is marked."""
    at = "" if data.step == data.steps else f" at step {data.step} of {data.steps}"
    table = _table(f"{data.run}{at}: risk ½E(ŷ−y)² by prompt length", "L")
    best = "best" if data.heads == 1 else "best head"
    for member in data.member.values:
        table.add_column(str(member), justify="right")
        table.add_column(f"{best} {member}", justify="right")
    table.add_column("Bayes", justify="right")
    for i in range(data.sizes["L"]):
        row = data.isel(L=i)
        cells = []
        for member in data.member.values:
            one = row.sel(member=member)
            error = f" ± {float(one.risk_stderr):.0e}" if one.risk_stderr > 0 else ""
            cells += [f"{float(one.risk):.6f}{error}", f"{float(one.optimum):.6f}"]
        length = "∞" if math.inf == row.L else f"{int(row.L)}"
        table.add_row(f"trained at {length}" if row.trained else length, *cells, f"{float(row.Bayes):.6f}")
    return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column(first, justify="right")
    return table
