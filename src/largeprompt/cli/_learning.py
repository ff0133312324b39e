"""The least risks and the flows of one task, without sampling a prompt. Paper: Sections 4 and 5, Appendix A."""

from pathlib import Path
from typing import Annotated

import typer

from ._app import Dimension, Json, Lengths, Noise, Out, Sigma, app
from ._output import print_result, ready, records, remark, written
from ._view import View


@app.command()
def optima(
    sigma: Sigma = "identity",
    d: Dimension = 5,
    noise: Noise = 0.1,
    lengths: Lengths = "5,10,20,50,100,200,500,1000",
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """The least in-context risk of softmax and linear attention beside the Bayes risk, by prompt length, exactly."""
    from largeprompt import lab
    from largeprompt.icl._bayes import EXACT_RANK
    from largeprompt.paper import drawing
    from largeprompt.paper.experiments.figure_2 import Levels

    from . import _charts, _tables

    levels = Levels(sigma, lab.lengths_from(lengths, "--L"), None, d, noise)
    _check(sigma, d, noise)
    ready(out, "optima")
    if d > EXACT_RANK:
        remark(f"d is {d}: beyond {EXACT_RANK} the Bayes risk is sampled, which may take minutes for each length")
    with View() as view:
        found = levels.compute(view)[["linear", "softmax", "Bayes"]]
    attributes = {"paper": "arXiv:2512.11784", "d": d, "noise": noise, "risk": "half the mean squared error"}
    data = found.expand_dims(covariance=[sigma]).assign(floor=noise / 2).drop_attrs().assign_attrs(attributes)
    files = written(out, "optima", drawing.draw(_charts.optima_chart(data)), data)
    print_result(as_json, {"optima": records(data)}, _tables.optima_tables(data), files)


@app.command()
def flows(
    sigma: Sigma = "identity",
    d: Dimension = 5,
    noise: Noise = 0.1,
    lengths: Lengths = "10,100,1000,10000",
    time: Annotated[float, typer.Option(help="Final time of the flows.")] = 1000.0,
    alpha: Annotated[float, typer.Option(help="Scale of the start of Assumption 5.1.")] = 0.3,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Gradient flows of softmax attention at finite lengths beside the infinite-prompt flow: distances and risks."""
    from largeprompt import lab
    from largeprompt.paper import drawing
    from largeprompt.paper.experiments.flows import Ladder, by_covariance, chart

    from . import _tables

    ladder = Ladder(sigma, lab.lengths_from(lengths, "--L"), time, alpha, d, noise)
    _check(sigma, d, noise)
    ready(out, "flows")
    with View() as view:
        data = by_covariance({sigma: ladder.compute(view)})
    files = written(out, "flows", drawing.draw(chart(data)), data)
    print_result(as_json, {"flows": records(data)}, _tables.flow_tables(data), files)


def _check(sigma: str, d: int, noise: float) -> None:
    """Refuse what makes no regression, before any work."""
    from largeprompt import _checks as checks
    from largeprompt.icl import LinearRegression, covariance_named

    checks.count("d", d)
    LinearRegression.experiment(covariance_named(sigma, d), noise)
