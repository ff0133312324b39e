"""How least risks and flows are told on a terminal."""

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


def _table(title: str, first: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column(first, justify="right")
    return table
