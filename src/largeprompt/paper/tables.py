"""How each dataset is told on a terminal, and its numbers for `--json`."""

import math
from collections.abc import Iterator

import xarray as xr
from rich import box
from rich.table import Table

from largeprompt.paper.convergence import MORE, UNSCALED

NAMES = {"output": "output", "V": "∇_V", "U": "∇_U"}


def convergence_tables(data: xr.Dataset) -> Iterator[Table | str]:
    """A table a quantity, a line a law: slopes, measured over predicted, and how far above the bound lies."""
    longest = data.isel(L=-1)
    for quantity in data.quantity.values:
        title = f"{NAMES[str(quantity)]}: mean squared deviation from the infinite prompt"
        table = _table(title, "tokens")
        for name in (f"at L = {int(longest.L)}", "slope", "predicted", "measured / predicted", "bound / measured"):
            table.add_column(name, justify="right")
        for law in data.law.values:
            line, end = data.sel(law=law, quantity=quantity), longest.sel(law=law, quantity=quantity)
            orders = float(end.bound_log10) - math.log10(float(end.measured))
            table.add_row(
                str(law),
                f"{float(end.measured):.2e}±{float(end.stderr):.0e}",
                _known(float(line.slope), f"{{:.3f}}±{float(line.slope_stderr):.3f}"),
                _known(float(line.predicted_slope), "{:.3f}"),
                _known(float(line.ratio), f"{{:.3f}}±{float(line.ratio_stderr):.3f}"),
                f"10^{orders:.1f}",
            )
        yield table
    for law in data.law.values:
        yield f"{law}: {data.regime.sel(law=law, quantity=data.quantity[0]).item()}"
    distrusted = int(data.trusted.size - data.trusted.sum())
    told = data.attrs
    yield (
        f"{told['replicates']} prompts a length ({UNSCALED}: {MORE} times as many), token dimension {told['dim']}, "
        f"seed {told['seed']}, {told['seconds']:.0f} s; slopes and ratios over the longer half of the lengths; "
        f"{distrusted} of {data.trusted.size} points have tails too heavy for their error bars"
    )


def _known(value: float, form: str) -> str:
    return "–" if math.isnan(value) else form.format(value)


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
