"""Layers of one prompt length and task on prompts of another, exactly."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._app import Dimension, Json, Noise, Out, Sigma, app, value
from ._output import print_result, ready, records, written
from ._train import Folder
from ._view import View

if TYPE_CHECKING:
    import xarray as xr

    from largeprompt.icl._generalisation import Layers

_SAME = "that of the training"

Trained = Annotated[str, typer.Option("--L", help="Lengths of training: 10,1e3,inf or 10:1000:log.")]
Tested = Annotated[
    str | None, typer.Option("--test-L", help="Lengths of the test.", show_default="those of the training, and inf")
]
Attention = Annotated[str, typer.Option(help="Of the best layers: softmax, linear, or both.")]
RunKeys = Annotated[
    list[str] | None,
    typer.Option("--run", help="Layers of this stored run instead of the best ones; more than one may be given."),
]
TestSigma = Annotated[str | None, typer.Option(help="Covariance of covariates and queries.", show_default=_SAME)]
TestQuery = Annotated[str | None, typer.Option(help="Covariance of the queries alone.", show_default=_SAME)]
TestOmega = Annotated[str | None, typer.Option(help="Covariance of the coefficients.", show_default=_SAME)]
TestNoise = Annotated[str | None, typer.Option(help="Variance of the label noise.", show_default=_SAME)]


@app.command()
def generalise(
    lengths: Trained = "10,30,100,300,1000",
    test_lengths: Tested = None,
    attention: Attention = "softmax,linear",
    sigma: Sigma = "identity",
    d: Dimension = 5,
    noise: Noise = 0.1,
    test_sigma: TestSigma = None,
    test_query_sigma: TestQuery = None,
    test_omega: TestOmega = None,
    test_noise: TestNoise = None,
    run: RunKeys = None,
    store: Folder = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """The risk of layers trained at some prompt lengths at others, and on tasks with other noise and covariances."""
    from largeprompt import lab
    from largeprompt.icl import generalisation, mismatch_rate, optimal_layers
    from largeprompt.paper import drawing
    from largeprompt.paper.chart import Chart
    from largeprompt.paper.experiments.generalise import heat_map

    layers, settings = _stored(run, store) if run else ({}, {"sigma": sigma, "d": d, "noise": noise})
    trained = sorted({L for given in layers.values() for L in given}) or lab.listed_lengths(lengths, "--L")
    tested = [*trained, math.inf] if test_lengths is None else lab.listed_lengths(test_lengths, "--test-L")
    options = {"sigma": test_sigma, "query_sigma": test_query_sigma, "omega": test_omega, "noise": test_noise}
    changed = {name: value(text) for name, text in options.items() if text is not None}
    task, test = (lab.Run(**lab.with_files(table)).task() for table in (settings, settings | changed))
    ready(out, "generalise")
    with View() as view:
        kinds: Any = list(dict.fromkeys(kind.strip() for kind in attention.split(",")))
        found = generalisation(layers or optimal_layers(task, trained, kinds), test, tested, progress=view)
    data = found.to_dataset().isel(test=0, drop=True)
    if not layers and not changed:
        data["mismatch_rate"] = "attention", [float(mismatch_rate(task, kind)) for kind in kinds]
    data.attrs |= {name: _plain(known) for name, known in settings.items() if known is not None}
    data.attrs["test"] = ", ".join(
        f"{name} {_plain(known)}".replace("query_", "query ") for name, known in changed.items()
    )
    title = f", test with {data.test}" if data.test else ""
    maps = tuple(heat_map(f"{name}{title}", data.sel(attention=name)) for name in data.attention.values)
    files = written(out, "generalise", drawing.draw(Chart(maps, columns=2)), data)
    width = 16 + 10 * data.sizes["tested_at"]
    numbers = records(data)
    for row in numbers["rows"]:
        row |= {name: int(row[name]) for name in ("trained_at", "tested_at") if math.inf > row[name]}
    print_result(as_json, {"generalise": numbers}, _tables(data), files, width=width)


def _plain(setting: Any) -> Any:
    return "a matrix" if isinstance(setting, tuple) else setting


def _tables(data: "xr.Dataset") -> Iterator[Any]:
    """A table for each attention: risks over the least one by lengths of training and test; the least ones below."""
    import numpy as np
    from rich.text import Text

    from largeprompt._display import length_text

    from ._tables import number_table

    tested = [length_text(L) for L in data.tested_at.values]
    where = f"{data.sigma}, d = {data.d}, noise {data.noise:g}" + (f"; test with {data.test}" if data.test else "")
    for name in data.attention.values:
        here = data.sel(attention=name)
        known = bool(np.isfinite(here.optimum).all())
        shown = here.ratio if known else here.risk
        rows = [
            [length_text(L), *("∞" if math.inf == one else f"{one:.4f}" for one in shown.sel(trained_at=L).values)]
            for L in data.trained_at.values
            if bool(np.isfinite(here.risk.sel(trained_at=L)).all())
        ]
        rows += [["least risk", *(f"{value:.5f}" for value in here.optimum.values)]] if known else []
        what = "risk over the least risk of the test" if known else "risk"
        yield number_table(f"{name}, {where}: {what}", ("trained at", *tested), rows)
        if "mismatch_rate" in data:
            yield Text(
                f"for long prompts the risk is {float(here.mismatch_rate):.4g} (1/L₁ − 1/L₂)² above the least one,\n"
                "L₁ and L₂ the lengths of training and test\n"
            )


def _stored(keys: list[str], store: str | None) -> "tuple[Layers, dict[str, Any]]":
    """The layers of stored runs, by attention and length, and the settings of the task that all of them have."""
    from largeprompt import lab
    from largeprompt.attention import kind_of

    folder = lab.store_at(store)
    folder.check_readable()
    layers: dict[str, dict[Any, Any]] = {}
    settings: dict[str, Any] = {}
    for prefix in keys:
        found = lab.trained(folder, folder.find(prefix))
        own = {name: getattr(found.run, name) for name in ("sigma", "d", "omega", "noise", "query_sigma")}
        if settings and own != settings:
            raise ValueError(f"run {prefix} has another task than run {keys[0]}; give runs of one task")
        settings = own
        for member, layer in found.layers.items():
            if kind_of(layer) is None:
                raise ValueError(
                    f"run {prefix} is of {found.run.heads} heads of {member} attention; exact risks are known for one "
                    "head of softmax or linear attention, and largeprompt runs risk samples those of others"
                )
            if found.run.L in layers.setdefault(member, {}):
                raise ValueError(f"two of the runs trained {member} attention at L = {found.run.L}; give one of them")
            layers[member][found.run.L] = layer
    return layers, settings
