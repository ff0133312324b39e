"""The least risks and the flows of one task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._app import Dimension, Json, Lengths, Noise, Out, Sigma, app, errors
from ._output import name_files, print_json, progress, ready, records, show, written

if TYPE_CHECKING:
    import xarray as xr


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
    from largeprompt.paper import drawing, learning, tables

    settings = learning.Settings(covariances=(sigma,), d=d, noise=noise, lengths=lab.lengths_from(lengths, "--L"))
    ready(out, "optima")
    if settings.remark:
        errors.print(f"largeprompt: {settings.remark}", highlight=False, soft_wrap=True, markup=False)
    data = _optima(settings)
    files = written(out, "optima", drawing.draw(learning.optima_chart(data)), data)
    if as_json:
        print_json(files, {"optima": records(data)})
    else:
        show(tables.optima_tables(data))
        name_files(files)


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
    from largeprompt.paper import drawing, learning, tables
    from largeprompt.paper.figures.flows import chart

    ladder = lab.lengths_from(lengths, "--L")
    settings = learning.Settings(covariances=(sigma,), d=d, noise=noise, ladder=ladder, time=time, alpha=alpha)
    ready(out, "flows")
    data = _flows(settings)
    files = written(out, "flows", drawing.draw(chart(data)), data)
    if as_json:
        print_json(files, {"flows": records(data)})
    else:
        show(tables.flow_tables(data))
        name_files(files)


def _optima(settings) -> "xr.Dataset":
    from largeprompt.paper import learning

    with progress("least risks", len(settings.covariances) * len(settings.lengths)) as done:
        return learning.optima(settings, done)


def _flows(settings) -> "xr.Dataset":
    from largeprompt.paper import learning

    with progress("following flows", len(settings.covariances) * (len(settings.ladder) + 1)) as done:
        return learning.ladder(settings, done)
