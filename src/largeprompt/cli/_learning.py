"""The least risks and the flows of one task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._app import Dimension, Json, Lengths, Noise, Out, Sigma, app
from ._output import name_files, print_json, progress, records, show

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
    from largeprompt.paper import drawing, learning, tables
    from largeprompt.paper.files import write

    settings = learning.Settings(covariances=(sigma,), d=d, noise=noise, lengths=_whole_numbers("--L", lengths))
    out.mkdir(parents=True, exist_ok=True)
    data = _optima(settings)
    files = write(out, "optima", drawing.draw(learning.optima_chart(data)), data)
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
    from largeprompt.paper import drawing, learning, tables
    from largeprompt.paper.figures.flows import chart
    from largeprompt.paper.files import write

    ladder = _whole_numbers("--L", lengths)
    settings = learning.Settings(covariances=(sigma,), d=d, noise=noise, ladder=ladder, time=time, alpha=alpha)
    out.mkdir(parents=True, exist_ok=True)
    data = _flows(settings)
    files = write(out, "flows", drawing.draw(chart(data)), data)
    if as_json:
        print_json(files, {"flows": records(data)})
    else:
        show(tables.flow_tables(data))
        name_files(files)


def _whole_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be whole numbers separated by commas") from None


def _optima(settings) -> "xr.Dataset":
    from largeprompt.paper import learning

    with progress("least risks", len(settings.covariances) * len(settings.lengths)) as done:
        return learning.optima(settings, done)


def _flows(settings) -> "xr.Dataset":
    from largeprompt.paper import learning

    with progress("following flows", len(settings.covariances) * (len(settings.ladder) + 1)) as done:
        return learning.ladder(settings, done)
