"""The house style of figures, and how each dataset is drawn."""

from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4,
}
TITLES = {
    "output": r"output  $T[\hat\mu_L]$",
    **{name: rf"gradient  $\nabla_{name} T[\hat\mu_L]$" for name in "VUKQO"},
    "gradient": r"gradient  $\nabla_\theta T[\hat\mu_L]$ in all weights",
    "risk": r"risk  $R_L$",
    "risk-gradient": r"gradient of the risk  $\nabla_\theta R_L$",
}


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path; the same data give the same file."""
    options: dict[str, Any] = {".svg": {"metadata": {"Date": None}}, ".pdf": {"metadata": {"CreationDate": None}}}
    with matplotlib.rc_context({"svg.hashsalt": "largeprompt"}):
        figure.savefig(path, **options.get(path.suffix, {"dpi": 200}))


def convergence(data: xr.Dataset) -> Figure:
    """One panel a quantity: measured points with error bars on the predicted lines, which are not fitted."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        panels = np.atleast_1d(figure.subplots(1, data.sizes["quantity"]))
        for panel, quantity in zip(panels, data.quantity.values, strict=True):
            for law, colour, marker in zip(data.law.values, COLOURS, MARKERS, strict=False):
                curve = data.sel(law=law, quantity=quantity)
                panel.plot(data.L, curve.predicted, color=colour, linewidth=1)
                panel.errorbar(
                    data.L,
                    curve.measured,
                    yerr=2 * curve.stderr,
                    fmt=marker,
                    color=colour,
                    elinewidth=0.8,
                    markerfacecolor="white",
                    label=str(law),
                )
            panel.set(xscale="log", yscale="log", xlabel="prompt length $L$", title=TITLES[str(quantity)])
            panel.grid(True, which="major", linewidth=0.3, alpha=0.5)
        panels[0].set_ylabel("mean squared deviation\nfrom the infinite prompt")
        handles, labels = panels[0].get_legend_handles_labels()
        handles.append(Line2D([], [], color="0.3", linewidth=1))
        figure.legend(
            handles, [*labels, "predicted"], loc="outside lower center", ncols=len(labels) // 2 + 1, frameon=False
        )
    return figure


NAMES = {"identity": r"$\Sigma = I$"}


def _title(covariance: str) -> str:
    kind, _, argument = covariance.partition(":")
    return NAMES.get(covariance, rf"$\Sigma_{{ij}} = {argument or 0.5}^{{|i-j|}}$" if kind == "kms" else covariance)


def optima(data: xr.Dataset) -> Figure:
    """One panel a covariance: the least risks of softmax and linear attention, the Bayes risk and the noise floor."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        panels = np.atleast_1d(figure.subplots(1, data.sizes["covariance"], sharey=True))
        for panel, covariance in zip(panels, data.covariance.values, strict=True):
            curves = data.sel(covariance=covariance)
            for name, colour, marker in zip(("softmax", "linear", "Bayes"), COLOURS, MARKERS, strict=False):
                label = {"Bayes": "Bayes (ridge)"}.get(name, f"best {name} attention")
                panel.plot(data.L, curves[name], color=colour, marker=marker, markerfacecolor="white", label=label)
            panel.axhline(float(data.floor), color="0.4", linestyle=":", linewidth=1, label="noise floor $s^2/2$")
            panel.set(xscale="log", yscale="log", xlabel="prompt length $L$", title=_title(str(covariance)))
            panel.grid(True, which="major", linewidth=0.3, alpha=0.5)
        panels[0].set_ylabel(r"least risk  $\frac{1}{2}E(\hat y - y)^2$")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def ladder(data: xr.Dataset) -> Figure:
    """For each covariance, over time: the distance of each finite flow to the infinite one, and the risks of all."""
    with matplotlib.rc_context(STYLE):
        rows = data.sizes["covariance"]
        figure = Figure(figsize=(7.2, 0.6 + 2.3 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, 2, squeeze=False, sharex=True)
        for (left, right), covariance in zip(panels, data.covariance.values, strict=True):
            curves = data.sel(covariance=covariance)
            for L, colour in zip(data.L.values, cycle(COLOURS), strict=False):
                left.plot(data.t, curves.distance.sel(L=L), color=colour, label=f"$L = {L}$")
                right.plot(data.t, curves.risk.sel(L=L), color=colour)
            right.plot(data.t, curves.infinite, color="black", linestyle="--", linewidth=1, label=r"$L = \infty$")
            right.axhline(float(data.floor), color="0.4", linestyle=":", linewidth=1, label="noise floor $s^2/2$")
            left.set(xscale="log", yscale="log", title=f"{_title(str(covariance))}: distance to the infinite flow")
            right.set(xscale="log", yscale="log", title=f"{_title(str(covariance))}: risk along the flow")
            for panel in (left, right):
                panel.grid(True, which="major", linewidth=0.3, alpha=0.5)
            left.set_ylabel(r"$\|\theta_L(t) - \theta_\infty(t)\|$")
            right.set_ylabel(r"$R_L(\theta_L(t))$")
        for panel in panels[-1]:
            panel.set_xlabel("time $t$ of the gradient flow")
        shown = [panel.get_legend_handles_labels() for panel in panels[0]]
        handles, labels = ([item for pair in shown for item in pair[i]] for i in (0, 1))
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure
