"""The house style of figures, and how a dataset of deviations is drawn."""

from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "D", "^", "v", "P")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4,
    "svg.hashsalt": "largeprompt",  # the same data give the same file
}
TITLES = {
    "output": r"output  $T[\hat\mu_L]$",
    "V": r"gradient  $\nabla_V T[\hat\mu_L]$",
    "U": r"gradient  $\nabla_U T[\hat\mu_L]$",
}


def convergence(data: xr.Dataset) -> Figure:
    """One panel a quantity: measured points with error bars beside the predicted 1/L lines, which are not fitted."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, data.sizes["quantity"])
        for panel, quantity in zip(np.atleast_1d(panels), data.quantity.values, strict=True):
            for law, colour, marker in zip(data.law.values, COLOURS, MARKERS, strict=False):
                curve = data.sel(law=law, quantity=quantity)
                panel.plot(data.L, curve.predicted, color=colour, linewidth=1, label=f"{law}, predicted $c/L$")
                panel.errorbar(
                    data.L,
                    curve.mean_square,
                    yerr=2 * curve.stderr,
                    fmt=marker,
                    color=colour,
                    elinewidth=0.8,
                    markerfacecolor="white",
                    label=f"{law}, measured (±2 s.e.)",
                )
            panel.set(xscale="log", yscale="log", xlabel="prompt length $L$", title=TITLES[str(quantity)])
            panel.grid(True, which="major", linewidth=0.3, alpha=0.5)
        np.atleast_1d(panels)[0].set_ylabel("mean squared deviation\nfrom the infinite prompt")
        handles, labels = np.atleast_1d(panels)[0].get_legend_handles_labels()
        order = np.argsort(["measured" in label for label in labels], kind="stable")
        columns = [i for pair in zip(order[: len(order) // 2], order[len(order) // 2 :], strict=True) for i in pair]
        figure.legend(
            [handles[i] for i in columns],
            [labels[i] for i in columns],
            loc="outside lower center",
            ncols=data.sizes["law"],
            frameon=False,
        )
    return figure
